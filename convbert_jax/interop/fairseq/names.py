"""Names and layouts of parameters in fairseq and in this package.

This package uses the path in a model of `models/sequences`; fairseq uses names such as
`encoder.layers.3.linear1.weight` in LightConvModel, TransformerModel and their language models.
Names of older fairseq versions are first converted to current ones.
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

PADDING = 1  # id of <pad>; the first position has row PADDING + 1 of a position table
# Buffers, not parameters: a version, sinusoids and their dtype. Also fused copies of weights for a
# faster path, which fairseq since 0.12 recomputes when it loads an encoder.
_NONE = re.compile(
    r"(encoder|decoder)\.(version|embed_positions\.(_float_tensor|weights))"
    r"|encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)"
)
# Transformers only: LightConv's encoder still numbers its norms.
_OLD_NORMS = {
    "encoder": ("self_attn_layer_norm", "final_layer_norm"),
    "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
}
_ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
# Module path in a layer -> fairseq name, for convolution and attention layers.
_CONVOLVES = {
    "mixer": "conv",  # parameters of the convolution
    "mixer/value": "linear1",  # the second half of fairseq's linear1 is the gate
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
# Modules outside of the layers.
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
    """Converts fairseq tensors to parameters of a model of `config`.

    Every tensor is used exactly once, except copies of tied ones, which must be equal.

    Args:
      tensors: the tensors of fairseq's `model` by name.

    Returns:
      a nested dict of float32 arrays.

    Raises:
      ConversionError: tensors are missing, unknown or of another shape, or tied tensors differ.
    """
    shapes = _shapes(config)
    places = _places(shapes)
    wanted = {name for names in places.values() for name in names}
    theirs = _without_copies(_modern(tensors, wanted), wanted)
    _check_all(wanted - theirs.keys(), "lacks")
    _check_all(theirs.keys() - wanted, "has the unknown tensors")
    flat = {}
    for path, names in places.items():
        leaf = path.rpartition("/")[2]
        arrays = [_turned(path, leaf, theirs[name]) for name in names]
        stacked = "/stages/" in path
        shape = shapes[path][1:] if stacked else shapes[path]
        for name, array in zip(names, arrays, strict=True):
            if array.shape != shape:
                raise ConversionError(
                    f"Tensor {name} gives {path} the shape {list(array.shape)}, but the args "
                    f"require {list(shape)}. The checkpoint is damaged or from a fork of fairseq.",
                    field=name,
                )
        flat[path] = np.stack(arrays) if stacked else arrays[0]
    return to_tree(flat)


def _shapes(config: EncoderDecoderConfig | LanguageModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter by path."""
    make = LanguageModel if isinstance(config, LanguageModelConfig) else EncoderDecoder
    model = nnx.eval_shape(lambda: make(config, nnx.Rngs(0)))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return {path: leaf.shape for path, leaf in flatten(params).items()}


def _places(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[str]]:
    """Returns path -> fairseq names: a single name, or one for each layer of a stage."""
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
    """Renames tensors to current fairseq names and splits fused ones."""
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
                    f"The model contains {shown(part)} under two names; the checkpoint is damaged.",
                    field=part,
                )
            modern[part] = value
    return modern


def _without_copies(tensors: Mapping[str, np.ndarray], wanted: set[str]) -> dict[str, np.ndarray]:
    """Returns the tensors without copies of tied ones."""
    table = "decoder.embed_tokens.weight"
    kept = dict(tensors)
    for copy in ("encoder.embed_tokens.weight", "decoder.output_projection.weight"):
        if copy in wanted or copy not in kept or table not in kept:
            continue
        if not np.array_equal(kept.pop(copy), kept[table]):
            raise ConversionError(
                f"The args tie {copy} to {table}, but the two differ; the checkpoint is damaged.",
                field=copy,
            )
    return kept


def _check_all(names: set[str], what: str) -> None:
    if names:
        some = ", ".join(shown(name) for name in sorted(names)[:3])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ConversionError(
            f"The model {what} {some}{more}. Its args describe another model, or it is from a fork "
            "of fairseq.",
            field=min(names),
        )


def _turned(path: str, leaf: str, array: np.ndarray) -> np.ndarray:
    """Converts an array from fairseq's layout to the layout of this package."""
    if leaf in ("kernel", "conv_kernel"):
        return np.ascontiguousarray(array.T)
    if leaf == "filters" and array.ndim == 3 and array.shape[1] == 1:
        return array[:, 0]  # [H, 1, K]; fairseq's GPU kernels store [H, K]
    if path.endswith("position/embedding"):
        return array[PADDING + 1 :]
    return array
