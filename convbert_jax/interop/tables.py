"""Names and layouts of parameters in this package, in PyTorch and in TensorFlow 1.

This package uses the canonical path of a `Network`: the parameter path in a model, with one entry
for each layer, as in `layers/3/mixer/query/kernel`. LAYER, OUTSIDE and HEADS map modules, KINDS the
parameters of a module. MIXERS has the modules inside of a mixer.

TensorFlow names follow the official ConvBERT, ELECTRA and BERT code; PyTorch names follow the
ConvBert, Electra, Bert and ModernBert classes of Hugging Face.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from convbert_jax.config import LayerConfig
from convbert_jax.config.mixers import Mixer
from convbert_jax.models.mixers.attention import Attention
from convbert_jax.models.mixers.mixed import Mixed

FAMILIES = ("convbert", "electra", "bert", "modernbert")
READ_PADDING = ("convbert",)  # families whose PyTorch classes have an unmasked convolution


@dataclasses.dataclass(frozen=True)
class Layout:
    """Functions that convert an array to another layout and back, bit for bit."""

    write: Callable[[np.ndarray], np.ndarray]
    read: Callable[[np.ndarray], np.ndarray]


SAME = Layout(lambda x: x, lambda x: x)
TRANSPOSED = Layout(lambda x: x.T, lambda x: x.T)
COLUMN = Layout(lambda x: x[:, None], lambda x: x[:, 0])  # [O] <-> [O, 1]
TAPS_LAST = Layout(lambda x: x.T[:, None, :], lambda x: x[:, 0, :].T)  # [K, C] <-> [C, 1, K]
TAPS_FIRST = Layout(lambda x: x[:, :, None], lambda x: x[:, :, 0])  # [K, C] <-> [K, C, 1]
POINTWISE = Layout(lambda x: x.T[:, :, None], lambda x: x[:, :, 0].T)  # [I, O] <-> [O, I, 1]
ONE_TAP = Layout(lambda x: x[None], lambda x: x[0])  # [I, O] <-> [1, I, O]

# kind of module -> our leaf: (PyTorch's suffix, layout, TensorFlow's suffix, layout)
KINDS: Mapping[str, Mapping[str, tuple[str, Layout, str, Layout]]] = {
    "dense": {
        "kernel": (".weight", TRANSPOSED, "/kernel", SAME),
        "bias": (".bias", SAME, "/bias", SAME),
    },
    # [groups, inputs, outputs] in all three; PyTorch does not transpose these
    "grouped": {
        "kernel": (".weight", SAME, "/kernel", SAME),
        "bias": (".bias", SAME, "/bias", SAME),
    },
    "norm": {
        "scale": (".weight", SAME, "/gamma", SAME),
        "bias": (".bias", SAME, "/beta", SAME),
    },
    "table": {"embedding": (".weight", SAME, "", SAME)},
    "separable": {
        "depthwise": (".depthwise.weight", TAPS_LAST, "/depthwise_kernel", TAPS_FIRST),
        "pointwise": (".pointwise.weight", POINTWISE, "/pointwise_kernel", ONE_TAP),
        "bias": (".bias", COLUMN, "/bias", SAME),
    },
    "vector": {"": ("", SAME, "", SAME)},
    # the official BERT code multiplies by the transposed weights here
    "pair_output": {
        "kernel": (".weight", TRANSPOSED, "/output_weights", TRANSPOSED),
        "bias": (".bias", SAME, "/output_bias", SAME),
    },
}

# canonical path: (kind, Hugging Face, TensorFlow), relative to a layer. MIXERS has the paths below
# `mixer/`.
LAYER = {
    "mixer_norm": ("norm", "attention.output.LayerNorm", "attention/output/LayerNorm"),
    "feed_forward/intermediate": ("dense", "intermediate.dense", "intermediate/dense"),
    "feed_forward/output": ("dense", "output.dense", "output/dense"),
    "feed_forward_norm": ("norm", "output.LayerNorm", "output/LayerNorm"),
}
_ATTENTION = {
    "query": ("dense", "attention.self.query", "attention/self/query"),
    "key": ("dense", "attention.self.key", "attention/self/key"),
    "value": ("dense", "attention.self.value", "attention/self/value"),
    "output": ("dense", "attention.output.dense", "attention/output/dense"),
}
_CONVOLUTION = {
    "key_conv": (
        "separable",
        "attention.self.key_conv_attn_layer",
        "attention/self/conv_attn_key",
    ),
    "conv_kernel": (
        "dense",
        "attention.self.conv_kernel_layer",
        "attention/self/conv_attn_kernel",
    ),
    "conv_value": (
        "dense",
        "attention.self.conv_out_layer",
        "attention/self/conv_attn_point",
    ),
}
# Mixer class: (families with this mixer, most specific first; module below `mixer/` -> names as in
# LAYER). Other software has no other mixers.
MIXERS: Mapping[type[Mixer], tuple[tuple[str, ...], Mapping[str, tuple[str, str, str]]]] = {
    Attention: (("bert", "electra", "modernbert"), _ATTENTION),
    Mixed: (("convbert",), _ATTENTION | _CONVOLUTION),
}
# The feed-forward modules with more than one group.
GROUPED = {
    "feed_forward/intermediate": ("grouped", "intermediate.dense", "intermediate/g_dense"),
    "feed_forward/output": ("grouped", "output.dense", "output/g_dense"),
}
# Modules before the layers.
OUTSIDE = {
    "embeddings/word": ("table", "embeddings.word_embeddings", "embeddings/word_embeddings"),
    "embeddings/position": (
        "table",
        "embeddings.position_embeddings",
        "embeddings/position_embeddings",
    ),
    "embeddings/type": (
        "table",
        "embeddings.token_type_embeddings",
        "embeddings/token_type_embeddings",
    ),
    "embeddings/norm": ("norm", "embeddings.LayerNorm", "embeddings/LayerNorm"),
    "embeddings_project": ("dense", "embeddings_project", "embeddings_project"),
}
# ModernBERT's layers and modules before and after them; tensors of Wqkv and Wi are fused in files,
# see modernbert.py. The TensorFlow code has no such layers.
MODERN_LAYER = {
    "mixer_norm": ("norm", "attn_norm", None),
    "mixer/query": ("dense", "attn.Wqkv.query", None),
    "mixer/key": ("dense", "attn.Wqkv.key", None),
    "mixer/value": ("dense", "attn.Wqkv.value", None),
    "mixer/output": ("dense", "attn.Wo", None),
    "feed_forward/intermediate": ("dense", "mlp.Wi.input", None),
    "feed_forward/gate": ("dense", "mlp.Wi.gate", None),
    "feed_forward/output": ("dense", "mlp.Wo", None),
    "feed_forward_norm": ("norm", "mlp_norm", None),
}
MODERN_OUTSIDE = {
    "embeddings/word": ("table", "embeddings.tok_embeddings", None),
    "embeddings/norm": ("norm", "embeddings.norm", None),
    "norm": ("norm", "final_norm", None),
}
# Heads that no class has; transformers ignores these tensors.
_PAIR_HEAD = {
    "pair_head/dense": ("dense", "pair_predictions.dense", None),
    "pair_head/output": ("pair_output", "pair_predictions.out_proj", None),
}
_RTD_HEAD = {
    "rtd_head/dense": (
        "dense",
        "discriminator_predictions.dense",
        "discriminator_predictions/dense",
    ),
    "rtd_head/output": (
        "dense",
        "discriminator_predictions.dense_prediction",
        "discriminator_predictions/dense_1",
    ),
}
_ELECTRA_HEADS = {
    "mlm_head/dense": ("dense", "generator_predictions.dense", "generator_predictions/dense"),
    "mlm_head/norm": (
        "norm",
        "generator_predictions.LayerNorm",
        "generator_predictions/LayerNorm",
    ),
    "mlm_head/output_bias": (
        "vector",
        "generator_lm_head.bias",
        "generator_predictions/output_bias",
    ),
    **_RTD_HEAD,
    # Heads of fine-tuned models; the TensorFlow code names them after the task.
    "sequence_head/dense": ("dense", "classifier.dense", None),
    "sequence_head/output": ("dense", "classifier.out_proj", None),
    "token_head/output": ("dense", "classifier", None),
    "span_head/output": ("dense", "qa_outputs", None),
    **_PAIR_HEAD,
}
# family -> heads; their names do not begin with the prefix of the encoder.
HEADS = {
    "convbert": _ELECTRA_HEADS,
    "electra": _ELECTRA_HEADS,
    "bert": {
        "mlm_head/dense": (
            "dense",
            "cls.predictions.transform.dense",
            "cls/predictions/transform/dense",
        ),
        "mlm_head/norm": (
            "norm",
            "cls.predictions.transform.LayerNorm",
            "cls/predictions/transform/LayerNorm",
        ),
        "mlm_head/output_bias": ("vector", "cls.predictions.bias", "cls/predictions/output_bias"),
        "pair_head/dense": ("dense", "bert.pooler.dense", "bert/pooler/dense"),
        "pair_head/output": ("pair_output", "cls.seq_relationship", "cls/seq_relationship"),
        "token_head/output": ("dense", "classifier", None),
        "span_head/output": ("dense", "qa_outputs", None),
    },
    "modernbert": {
        "mlm_head/dense": ("dense", "head.dense", None),
        "mlm_head/norm": ("norm", "head.norm", None),
        "mlm_head/output_bias": ("vector", "decoder.bias", None),
        **_RTD_HEAD,
        **_PAIR_HEAD,
    },
}
# Prefix of the names outside of heads in classes with a head.
PREFIXES = {name: f"{name}." for name in FAMILIES} | {"modernbert": "model."}
# Copies of tied parameters that PyTorch files may contain: copy -> original.
TIED = {
    "convbert": {"generator_lm_head.weight": "embeddings.word_embeddings.weight"},
    "electra": {"generator_lm_head.weight": "embeddings.word_embeddings.weight"},
    "bert": {
        "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    "modernbert": {"decoder.weight": "embeddings.tok_embeddings.weight"},
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Name and layout of a parameter in a foreign file."""

    name: str
    layout: Layout


def huggingface_places(
    paths: Iterable[str], family: str, layer: LayerConfig, *, prefix: str
) -> dict[str, Place]:
    """Returns name and layout in a PyTorch file by canonical path.

    Args:
      family: one of FAMILIES.
      layer: the config of every layer.
      prefix: prefix of all names except heads: one of PREFIXES, or "" for a bare encoder.

    Raises:
      KeyError: the family has no name for a path.
    """

    def place(path):
        folder = "layers.{}." if family == "modernbert" else "encoder.layer.{}."
        kind, (theirs, _), leaf, in_head = _find(path, family, layer, folder)
        suffix, layout, _, _ = KINDS[kind][leaf]
        return Place(f"{'' if in_head else prefix}{theirs}{suffix}", layout)

    return {path: place(path) for path in paths}


def tensorflow_places(
    paths: Iterable[str],
    family: str,
    layer: LayerConfig,
    *,
    scope: str,
    embeddings_scope: str,
) -> dict[str, Place]:
    """Returns variable name and layout in a TensorFlow 1 checkpoint by canonical path.

    Args:
      family, layer: as in `huggingface_places`.
      scope: scope of the network: "electra", "generator" or "bert".
      embeddings_scope: scope of the embeddings; "electra" if the generator shares them.

    Raises:
      KeyError: the family has no name for a path.
    """

    def place(path):
        kind, (_, theirs), leaf, in_head = _find(path, family, layer, "encoder/layer_{}/")
        if theirs is None:
            raise KeyError(path)
        _, _, suffix, layout = KINDS[kind][leaf]
        root = embeddings_scope if path.startswith("embeddings/") else scope
        return Place(f"{'' if in_head else root + '/'}{theirs}{suffix}", layout)

    return {path: place(path) for path in paths}


def _find(path: str, family: str, layer: LayerConfig, layer_folder: str):
    """Returns (kind, (Hugging Face name, TensorFlow name), leaf, whether it is in a head)."""
    if path.startswith("layers/"):
        _, index, inner = path.split("/", 2)
        folder, in_head = layer_folder.format(index), False
        if family == "modernbert":
            table = MODERN_LAYER
        else:
            _, names = MIXERS[type(layer.mixer)]
            table = LAYER | {f"mixer/{name}": row for name, row in names.items()}
            table |= GROUPED if layer.ffn_groups > 1 else {}
    else:
        inner, folder, in_head = path, "", path not in _outside_paths()
        table = HEADS[family] | (MODERN_OUTSIDE if family == "modernbert" else OUTSIDE)
    module, _, leaf = inner.rpartition("/")
    if module not in table:
        module, leaf = inner, ""
    if module not in table:
        raise KeyError(path)
    kind, theirs, tensorflow = table[module]
    return kind, (folder + theirs, tensorflow and folder + tensorflow), leaf, in_head


@functools.cache
def _outside_paths() -> set[str]:
    modules = OUTSIDE | MODERN_OUTSIDE
    return {f"{module}/{leaf}" for module, (kind, *_) in modules.items() for leaf in KINDS[kind]}


def export_error(mixer: Mixer, form: str, hidden_size: int) -> str:
    """Returns why a format cannot represent a mixer, and the fix; "" if it can.

    Args:
      form: "huggingface" (classes of transformers) or "tensorflow1" (the official code).
    """
    if type(mixer) not in MIXERS:
        return _no_equivalent(f"the mixer {type(mixer).__name__}")
    attended, size = mixer.attention_heads, mixer.head_size
    if isinstance(mixer, Attention):
        if form == "huggingface" and attended * size != hidden_size:
            return (
                f"{attended} attention heads of {size} channels do not add up to {hidden_size}: "
                "Hugging Face's classes do not support config.model.mixer=bottleneck; export with "
                "--format=tensorflow1 or stablehlo."
            )
        return ""
    convolved = mixer.convolution_heads
    if mixer.filters != "span_dynamic" or not mixer.own_value:
        value = "a separate value" if mixer.own_value else "a value shared with attention"
        return _no_equivalent(f"attention with {mixer.filters} convolution and {value}")
    if attended != convolved:
        return _no_equivalent(f"{attended} attention and {convolved} convolution heads")
    if mixer.kernel_size % 2 == 0:
        return (
            f"config.model.kernel_size={mixer.kernel_size} is even, which neither Hugging Face's "
            "ConvBERT nor the official code supports; train with an odd one, or export with "
            "--format=stablehlo."
        )
    if form == "huggingface" and (attended + convolved) * size != hidden_size:
        return (
            f"{attended} attention and {convolved} convolution heads of {size} channels do not add "
            f"up to {hidden_size}: Hugging Face's ConvBERT supports only config.model.head_ratio=2 "
            "and, in the official small generator, --config.generator.release_heads=false; train "
            "with these, or export with --format=tensorflow1 or stablehlo."
        )
    return ""


def _no_equivalent(what: str) -> str:
    return (
        f"neither Hugging Face's classes nor the official code support {what}; export it with "
        "--format=stablehlo."
    )
