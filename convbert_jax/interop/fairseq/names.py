"""How one parameter is called, and which way round it lies, in fairseq and here.

Ours is the path in a model of `models/sequences`, theirs the names of LightConvModel,
TransformerModel and their language models, `encoder.layers.3.linear1.weight`, of all versions: old
names are first written as new ones.
"""

import re
from collections.abc import Mapping

import numpy as np
from flax import nnx

from convbert_jax.config.sequences import EncoderDecoderConfig, LanguageModelConfig
from convbert_jax.interop.claims import shown
from convbert_jax.interop.networks import ConversionError, to_tree
from convbert_jax.models.sequences.networks import EncoderDecoder, LanguageModel
from convbert_jax.training.state import flatten

PADDING = 1  # id of <pad>; the first token has the row behind it in a table of places
# Numbers that are no parameters: a version, sinusoids or what keeps their type; and copies for a
# faster path, which since 0.12 fairseq's encoders make anew when they read, whatever is in them.
_NONE = re.compile(
    r"(encoder|decoder)\.(version|embed_positions\.(_float_tensor|weights))"
    r"|encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)"
)
# Of Transformers; LightConv's encoder still calls its own by number.
_OLD_NORMS = {
    "encoder": ("self_attn_layer_norm", "final_layer_norm"),
    "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
}
_ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
# Module of a layer of ours -> theirs, by (side, whether it attends).
_CONVOLVES = {
    "mixer": "conv",  # its own parameters
    "mixer/value": "linear1",  # its second half is the gate
    "mixer/gate": "linear1.gate",
    "mixer/output": "linear2",
    "feed_forward/intermediate": "fc1",
    "feed_forward/output": "fc2",
}
_ATTENDS = {
    **{f"mixer/{ours}": f"self_attn.{theirs}" for ours, theirs in _ATTENTION.items()},
    "mixer_norm": "self_attn_layer_norm",
    "feed_forward/intermediate": "fc1",
    "feed_forward/output": "fc2",
    "feed_forward_norm": "final_layer_norm",
}
_READS = {
    **{f"source/{ours}": f"encoder_attn.{theirs}" for ours, theirs in _ATTENTION.items()},
    "source_norm": "encoder_attn_layer_norm",
}
_LAYERS = {
    ("encoder", False): _CONVOLVES
    | {"mixer_norm": "layer_norms.0", "feed_forward_norm": "layer_norms.1"},
    ("decoder", False): _CONVOLVES
    | _READS
    | {"mixer_norm": "conv_layer_norm", "feed_forward_norm": "final_layer_norm"},
    ("encoder", True): _ATTENDS,
    ("decoder", True): _ATTENDS | _READS,
}
# Outside of layers.
_OUTSIDE = {
    "source/word": "encoder.embed_tokens",
    "source/position": "encoder.embed_positions",
    "encoder/norm": "encoder.layer_norm",
    "target/word": "decoder.embed_tokens",
    "target/position": "decoder.embed_positions",
    "decoder/norm": "decoder.layer_norm",
    "output": "decoder.output_projection",
}
_LEAVES = {
    "kernel": "weight",
    "bias": "bias",
    "scale": "weight",
    "embedding": "weight",
    "filters": "weight",
    "conv_kernel": "weight_linear.weight",
}


def to_parameters(
    tensors: Mapping[str, np.ndarray], config: EncoderDecoderConfig | LanguageModelConfig
) -> dict:
    """Parameters of a model of `config`, a nested dict of float32 arrays.

    Every tensor is used once, but for copies of tied ones, which must be equal.

    Args:
      tensors: those of fairseq's `model`, by name.

    Raises:
      ConversionError: tensors are missing, left, of another shape, or tied ones differ.
    """
    shapes = _shapes(config)
    places = _places(shapes)
    wanted = {name for names in places.values() for name in names}
    theirs = _without_copies(_modern(tensors, wanted), wanted)
    _check_all(wanted - theirs.keys(), "lacks")
    _check_all(theirs.keys() - wanted, "has no place here for")
    flat = {}
    for path, names in places.items():
        leaf = path.rpartition("/")[2]
        arrays = [_turned(path, leaf, theirs[name]) for name in names]
        stacked = "/stages/" in path
        shape = shapes[path][1:] if stacked else shapes[path]
        for name, array in zip(names, arrays, strict=True):
            if array.shape != shape:
                raise ConversionError(
                    f"its tensor {name} makes {list(array.shape)} of {path}, which its args make "
                    f"{list(shape)}; it is damaged, or of a fork of fairseq.",
                    field=name,
                )
        flat[path] = np.stack(arrays) if stacked else arrays[0]
    return to_tree(flat)


def _shapes(config: EncoderDecoderConfig | LanguageModelConfig) -> dict[str, tuple[int, ...]]:
    """Path -> shape of each parameter."""
    make = LanguageModel if isinstance(config, LanguageModelConfig) else EncoderDecoder
    model = nnx.eval_shape(lambda: make(config, nnx.Rngs(0)))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return {path: leaf.shape for path, leaf in flatten(params).items()}


def _places(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[str]]:
    """Path -> names of theirs: one, or one for each layer of a stage."""
    depths = {
        tuple(path.split("/")[:3:2]): shape[0]
        for path, shape in shapes.items()
        if "/stages/" in path
    }
    places = {}
    for path, shape in shapes.items():
        module, _, leaf = path.rpartition("/")
        if "/stages/" not in path:
            places[path] = [f"{_OUTSIDE[module]}.{_LEAVES[leaf]}"]
            continue
        side, _, stage, inner = module.split("/", 3)
        table = _LAYERS[side, f"{side}/stages/{stage}/mixer/query/kernel" in shapes]
        first = sum(depths[side, str(before)] for before in range(int(stage)))
        places[path] = [
            f"{side}.layers.{layer}.{table[inner]}.{_LEAVES[leaf]}"
            for layer in range(first, first + shape[0])
        ]
    return places


def _modern(tensors: Mapping[str, np.ndarray], wanted: set[str]) -> dict[str, np.ndarray]:
    """Tensors by the names of today, what is in one of theirs and in several of ours apart."""
    modern: dict[str, np.ndarray] = {}
    for old, array in tensors.items():
        if _NONE.fullmatch(old):
            continue
        name = "decoder.output_projection.weight" if old == "decoder.embed_out" else old
        match = re.fullmatch(r"(encoder|decoder)(\.layers\.\d+\.)layer_norms\.(\d)(\.\w+)", name)
        if match and name not in wanted:
            side, layer, number, leaf = match.groups()
            norms = _OLD_NORMS[side]
            name = f"{side}{layer}{norms[int(number) % len(norms)]}{leaf}"
        parts = {name: array}
        for whole, inside in (
            (r"(.*_attn\.)in_proj_(weight|bias)", ("q_proj", "k_proj", "v_proj")),
            (r"(.*\.)linear1\.(weight|bias)", ("linear1", "linear1.gate")),
        ):
            match = re.fullmatch(whole, name)
            named = match and [f"{match[1]}{part}.{match[2]}" for part in inside]
            if named and wanted.issuperset(named) and array.ndim and len(array) % len(named) == 0:
                parts = dict(zip(named, np.split(array, len(named)), strict=True))
        for part, value in parts.items():
            if part in modern:
                raise ConversionError(
                    f"its model has {shown(part)} by two names; it is damaged.", field=part
                )
            modern[part] = value
    return modern


def _without_copies(tensors: Mapping[str, np.ndarray], wanted: set[str]) -> dict[str, np.ndarray]:
    """The tensors without copies of tied ones."""
    table = "decoder.embed_tokens.weight"
    kept = dict(tensors)
    for copy in ("encoder.embed_tokens.weight", "decoder.output_projection.weight"):
        if copy in wanted or copy not in kept or table not in kept:
            continue
        if not np.array_equal(kept.pop(copy), kept[table]):
            raise ConversionError(
                f"its args say that {copy} is {table}, but its model has two; it is damaged.",
                field=copy,
            )
    return kept


def _check_all(names: set[str], what: str) -> None:
    if names:
        some = ", ".join(shown(name) for name in sorted(names)[:3])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ConversionError(
            f"its model {what} {some}{more}; its args tell of another model, or it is of a fork of "
            "fairseq.",
            field=min(names),
        )


def _turned(path: str, leaf: str, array: np.ndarray) -> np.ndarray:
    """Their array as ours lies."""
    if leaf in ("kernel", "conv_kernel"):
        return np.ascontiguousarray(array.T)
    if leaf == "filters" and array.ndim == 3 and array.shape[1] == 1:
        return array[:, 0]  # [H, 1, K], of the kernels for GPUs [H, K]
    if path.endswith("position/embedding"):
        return array[PADDING + 1 :]
    return array
