"""Conversion of fairseq's model arguments (`args` or `cfg`) to config sections."""

import argparse
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from convbert_jax.config import ModelSection
from convbert_jax.config.sequences import SequenceSection
from convbert_jax.interop.networks import ConversionError
from convbert_jax.interop.weight_files import LARGEST, Foreign, shown

LAST_NORM = "decoder.layer_norm.weight"
EPSILON = 1e-5  # default of torch.nn.LayerNorm; fairseq has no argument for it
_MOST_VALUES = 100_000
_DEEPEST = 30  # nested containers; omegaconf nests three for each container
_MOST_LAYERS = 200
_LANGUAGE_MODELS = ("lightconv_lm", "transformer_lm")
_CONVOLUTIONS = {"dynamic": "dynamic", "lightweight": "light"}
# Arguments that must be off or missing, because their features are not supported.
_OFF = (
    *("adaptive_softmax_cutoff", "adaptive_input", "tie_adaptive_weights", "tie_adaptive_proj"),
    *("character_embeddings", "char_inputs", "no_scale_embedding", "layernorm_embedding"),
    *("no_cross_attention", "cross_self_attention", "encoder_layers_to_keep"),
    *("decoder_layers_to_keep", "base_layers", "quant_noise_pq", "quant_noise_scalar"),
    *("merge_src_tgt_embed", "use_factorized_embedding", "embedding_only"),
    *("no_enc_token_positional_embeddings", "no_dec_token_positional_embeddings"),
    *("encoder_add_adapters", "decoder_add_adapters"),
)
# Widths that must equal the width of the layers.
_WIDTHS = ("encoder_conv_dim", "decoder_conv_dim", "decoder_input_dim", "decoder_output_dim")
# Arguments that must be equal in encoder and decoder, and the field that sets both.
_BOTH = {
    "embed_dim": "config.model.hidden_size",
    "ffn_embed_dim": "config.model.ffn_size",
    "attention_heads": "config.model.heads",
    "normalize_before": "config.model.norm",
    "learned_pos": "config.model.position_embedding",
}
# Arguments that affect only training.
_TRAINING = ("input_dropout", "weight_dropout", "encoder_layerdrop", "decoder_layerdrop")


@dataclasses.dataclass(frozen=True)
class Outline:
    """Config sections of a fairseq model.

    Attributes:
      model, sequence: the sections.
      alone: whether it is a language model, whose decoder `model` describes.
      languages: source and target language in names of dictionaries; () for a language model.
      left_out: training arguments without an equivalent here, with their values.
    """

    model: ModelSection
    sequence: SequenceSection
    alone: bool
    languages: tuple[str, ...]
    left_out: Mapping[str, Any]


def find_arguments(content: Any) -> dict[str, Any]:
    """Returns the model arguments of a checkpoint: its `args`, or task and model of its `cfg`.

    Raises:
      ConversionError: the checkpoint has no arguments.
    """
    state = content if isinstance(content, dict) else {}
    budget = [_MOST_VALUES]
    flat = _plain(state.get("args"), budget)
    if not isinstance(flat, dict):
        config = _plain(state.get("cfg"), budget)
        config = config if isinstance(config, dict) else {}
        parts = [config.get(name) for name in ("task", "model")]
        flat = {
            name: value for part in parts if isinstance(part, dict) for name, value in part.items()
        }
        for side in ("encoder", "decoder", "quant_noise"):
            inner = flat.get(side)
            if isinstance(inner, dict):
                flat |= {f"{side}_{name}": value for name, value in inner.items()}
    if not flat:
        raise ConversionError(
            "Found no model description in args or cfg; this is not a model checkpoint of fairseq."
        )
    return flat


def derive_outline(arguments: Mapping[str, Any], tensors: Collection[str]) -> Outline:
    """Derives the config sections of a model.

    Args:
      arguments: arguments of the model by name.
      tensors: names of its parameters.

    Raises:
      ConversionError: an argument is missing, invalid, or requires an unsupported feature.
    """
    a = _Arguments(arguments)
    arch = a.word("arch", a.word("_name", ""))
    if not arch.startswith(("lightconv", "transformer")):
        raise a.refuse(
            "arch" if "arch" in arguments else "_name", "one of lightconv or transformer"
        )
    alone, convolves = arch.startswith(_LANGUAGE_MODELS), arch.startswith("lightconv")
    sides = ("decoder",) if alone else ("encoder", "decoder")
    for name in _OFF:
        if arguments.get(name) not in (None, False, 0, "", []):
            raise a.refuse(name, "none")
    if convolves and not a.flag("weight_softmax", True):
        raise a.refuse("weight_softmax", "True")
    first = sides[0]
    hidden = a.size(f"{first}_embed_dim")
    for name in _WIDTHS:
        if name.startswith(sides) and arguments.get(name) not in (None, hidden):
            raise a.refuse(name, f"the {hidden} of {first}_embed_dim")
    for name, field in _BOTH.items():
        values = [arguments.get(f"{side}_{name}") or False for side in sides]
        if values[0] != values[-1]:
            raise a.refuse(
                f"decoder_{name}", f"the encoder's {shown(values[0])}, because {field} sets both"
            )
    most = min(_MOST_LAYERS, len(tensors))
    layers = {side: a.size(f"{side}_layers", most) for side in sides}
    mixers = {side: a.mixer(side) if convolves else "attention" for side in sides}
    gates = {side: a.gate(side) if convolves else () for side in sides}
    taps = {side: a.kernels(side, layers[side]) if convolves else () for side in sides}
    learned = a.flag(f"{first}_learned_pos")
    attention_dropout = a.rate("attention_dropout", 0.0)
    pre = a.flag(f"{first}_normalize_before") or arch.startswith("lightconv_lm")
    none = a.flag("no_token_positional_embeddings")
    model = ModelSection(
        layers=layers[first],
        hidden_size=hidden,
        embedding_size=hidden,
        heads=a.heads(first, hidden),
        mixer=mixers[first],
        mixer_fields=gates[first],
        kernel_sizes=taps[first],
        ffn_size=a.size(f"{first}_ffn_embed_dim"),
        activation=a.activation(convolves),
        norm="pre" if pre else "post",
        position_embedding="none" if none else "learned" if learned else "sinusoidal",
        positions=a.positions(alone, learned),
        dropout=a.rate("dropout", 0.1),
        attention_dropout=attention_dropout,
        activation_dropout=a.rate("activation_dropout", 0.0) or a.rate("relu_dropout", 0.0),
        layer_norm_epsilon=EPSILON,
    )
    shared = a.flag("share_all_embeddings")
    sequence = SequenceSection(
        last_norm=LAST_NORM in tensors or not pre,
        # Shared vocabularies here also share learned position tables, but fairseq has two of them.
        shared_vocabulary=alone or (shared and (none or not learned)),
        tied_output=shared or a.flag("share_decoder_input_output_embed"),
    )
    if not alone:
        same = mixers["encoder"] == mixers["decoder"] and gates["encoder"] == gates["decoder"]
        sequence = dataclasses.replace(
            sequence,
            decoder_layers=layers["decoder"],
            decoder_mixer="" if same else mixers["decoder"],
            decoder_mixer_fields=() if same else gates["decoder"] or ("glu=true",),
            decoder_kernel_sizes=taps["decoder"],
        )
    names = ("source_lang", "target_lang")
    return Outline(
        model,
        sequence,
        alone,
        () if alone else tuple(a.word(name, "") for name in names),
        {
            name: arguments[name]
            for name in _TRAINING
            if isinstance(arguments.get(name), int | float)
            and arguments[name] != (attention_dropout if name == "weight_dropout" else 0)
        },
    )


class _Arguments:
    """Arguments with validation of types and ranges."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = values

    def refuse(self, name: str, needed: str) -> ConversionError:
        value = self._values.get(name)
        value = shown(value) if isinstance(value, int | float | str | type(None)) else _list(value)
        return ConversionError(
            f"The argument {name}={value} is not supported; it must be {needed}.",
            field=name,
            value=self._values.get(name),
        )

    def size(self, name: str, most: int = LARGEST) -> int:
        value = self._values.get(name)
        if type(value) is not int or not 1 <= value <= most:
            raise self.refuse(name, f"an integer from 1 to {most:,}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.refuse(name, "True or False")
        return value

    def word(self, name: str, default: str) -> str:
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.refuse(name, "a string")
        return value

    def rate(self, name: str, default: float) -> float:
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise self.refuse(name, "a number of at least 0 and less than 1")
        return float(value)

    def heads(self, side: str, hidden: int) -> int:
        name = f"{side}_attention_heads"
        heads = self.size(name)
        if hidden % heads:
            raise self.refuse(name, f"a divisor of {side}_embed_dim={hidden}")
        return heads

    def mixer(self, side: str) -> str:
        kind = self.word(f"{side}_conv_type", "dynamic")
        if kind not in _CONVOLUTIONS:
            raise self.refuse(f"{side}_conv_type", " or ".join(_CONVOLUTIONS))
        return _CONVOLUTIONS[kind]

    def gate(self, side: str) -> tuple[str, ...]:
        return () if self.flag(f"{side}_glu", True) else ("glu=false",)

    def kernels(self, side: str, layers: int) -> tuple[int, ...]:
        """Returns the kernel size of each layer; odd for encoders."""
        name = f"{side}_kernel_size_list"
        found = self._values.get(name)
        if not isinstance(found, list | tuple) or len(found) not in (1, layers):
            raise self.refuse(name, f"one number for each of the {layers} layers")
        if any(type(taps) is not int or not 1 <= taps <= LARGEST for taps in found):
            raise self.refuse(name, "positive integers")
        # For even sizes fairseq's encoder computes two paddings, which its modules do not accept.
        if side == "encoder" and any(taps % 2 == 0 for taps in found):
            raise self.refuse(name, "odd numbers, the only ones that fairseq's encoders support")
        return tuple(found) * (layers if len(found) == 1 else 1)

    def positions(self, alone: bool, learned: bool) -> int:
        """Returns the maximal length, which is also the number of learned positions."""
        names = (
            ("max_target_positions",) if alone else ("max_source_positions", "max_target_positions")
        )
        default = self._values.get("tokens_per_sample") if alone else None
        values = {**self._values}
        for name in names:
            values[name] = values.get(name) or default or 1024
        sizes = [_Arguments(values).size(name) for name in names]
        if learned and len(set(sizes)) > 1:
            raise self.refuse(
                "max_target_positions",
                f"the source's {sizes[0]}, because config.model.positions sets both",
            )
        return max(sizes)

    def activation(self, convolves: bool) -> str:
        found = "relu" if convolves else self.word("activation_fn", "relu")
        if found not in ("relu", "gelu"):
            raise self.refuse("activation_fn", "relu or gelu")
        return found


def _list(value: Any) -> str:
    """Returns a list of numbers, or the type of any other value, for a message."""
    if isinstance(value, list | tuple) and all(isinstance(part, int) for part in value[:20]):
        return shown(list(value[:20]))
    return f"a {type(value).__name__}"


def _plain(value: Any, budget: list[int], depth: int = 0) -> Any:
    """Converts namespaces, omegaconf containers and enums to plain values.

    Args:
      budget: [number of values that may still be visited]; shared values count each time.
    """
    budget[0] -= 1
    if budget[0] < 0 or depth > _DEEPEST:
        raise ConversionError("The args are too large for a model; the checkpoint is damaged.")
    if isinstance(value, argparse.Namespace):
        return _plain(vars(value), budget, depth + 1)
    if isinstance(value, Foreign):
        state = value.state if isinstance(value.state, dict) else {}
        for inner in ("_content", "_val"):
            if value.name.startswith("omegaconf.") and inner in state:
                return _plain(state[inner], budget, depth + 1)
        single = len(value.arguments) == 1 and value.name.startswith("fairseq.")
        return value.arguments[0] if single else None
    if isinstance(value, dict):
        return {
            name: _plain(inner, budget, depth + 1)
            for name, inner in value.items()
            if isinstance(name, str)
        }
    if isinstance(value, list | tuple):
        return [_plain(inner, budget, depth + 1) for inner in value]
    return value if isinstance(value, int | float | str | type(None)) else None
