"""What fairseq was told of a model (its `args` or `cfg`), as our sections; what has no counterpart
is refused by name.
"""

import argparse
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from convbert_jax.config import ModelSection
from convbert_jax.config.sequences import SequenceSection
from convbert_jax.interop.claims import LARGEST, shown
from convbert_jax.interop.networks import ConversionError
from convbert_jax.interop.pytorch import Foreign

LAST_NORM = "decoder.layer_norm.weight"
EPSILON = 1e-5  # of torch.nn.LayerNorm, which has no argument
_MOST_VALUES = 100_000
_DEEPEST = 30  # of containers in containers; omegaconf has three for each of its own
_MOST_LAYERS = 200
_LANGUAGE_MODELS = ("lightconv_lm", "transformer_lm")
_CONVOLUTIONS = {"dynamic": "dynamic", "lightweight": "light"}
# What must be off or absent: what it switches on has no counterpart here.
_OFF = (
    *("adaptive_softmax_cutoff", "adaptive_input", "tie_adaptive_weights", "tie_adaptive_proj"),
    *("character_embeddings", "char_inputs", "no_scale_embedding", "layernorm_embedding"),
    *("no_cross_attention", "cross_self_attention", "encoder_layers_to_keep"),
    *("decoder_layers_to_keep", "base_layers", "quant_noise_pq", "quant_noise_scalar"),
    *("merge_src_tgt_embed", "use_factorized_embedding", "embedding_only"),
    *("no_enc_token_positional_embeddings", "no_dec_token_positional_embeddings"),
    *("encoder_add_adapters", "decoder_add_adapters"),
)
# What must be as wide as the layers.
_WIDTHS = ("encoder_conv_dim", "decoder_conv_dim", "decoder_input_dim", "decoder_output_dim")
# Of encoder and decoder alike, and the field here that says both.
_BOTH = {
    "embed_dim": "config.model.hidden_size",
    "ffn_embed_dim": "config.model.ffn_size",
    "attention_heads": "config.model.heads",
    "normalize_before": "config.sequence.norm",
    "learned_pos": "config.sequence.positions",
}
# Of training alone: a model that is read computes the same without them.
_TRAINING = ("input_dropout", "weight_dropout", "encoder_layerdrop", "decoder_layerdrop")


@dataclasses.dataclass(frozen=True)
class Outline:
    """A model of fairseq in our words.

    Attributes:
      alone: a language model: `model` describes its decoder.
      languages: of source and target, as the names of dictionaries have them; () of one alone.
      left_out: arguments of training that have no counterpart, with their values.
    """

    model: ModelSection
    sequence: SequenceSection
    alone: bool
    languages: tuple[str, ...]
    left_out: Mapping[str, Any]


def find_arguments(content: Any) -> dict[str, Any]:
    """Name -> value, of the `args` of a checkpoint or of the model and the task in its `cfg`.

    Raises:
      ConversionError: there are none.
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
            "its args and cfg do not say what the model is; it is no checkpoint of fairseq's "
            "training, or none of a model."
        )
    return flat


def derive_outline(arguments: Mapping[str, Any], tensors: Collection[str]) -> Outline:
    """Our sections of a model.

    Args:
      tensors: names of its parameters.

    Raises:
      ConversionError: an argument is absent, no size, or asks for what there is not here.
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
                f"decoder_{name}", f"the encoder's {shown(values[0])}, as {field} says both"
            )
    most = min(_MOST_LAYERS, len(tensors))
    layers = {side: a.size(f"{side}_layers", most) for side in sides}
    mixers = {side: a.mixer(side) if convolves else "attention" for side in sides}
    gates = {side: a.gate(side) if convolves else () for side in sides}
    taps = {side: a.kernels(side, layers[side]) if convolves else () for side in sides}
    learned = a.flag(f"{first}_learned_pos")
    attention_dropout = a.rate("attention_dropout", 0.0)
    model = ModelSection(
        layers=layers[first],
        hidden_size=hidden,
        embedding_size=hidden,
        heads=a.heads(first, hidden),
        mixer=mixers[first],
        mixer_fields=gates[first],
        kernel_sizes=taps[first],
        ffn_size=a.size(f"{first}_ffn_embed_dim"),
        positions=a.positions(alone, learned),
        dropout=a.rate("dropout", 0.1),
        attention_dropout=attention_dropout,
        layer_norm_epsilon=EPSILON,
    )
    pre = a.flag(f"{first}_normalize_before") or arch.startswith("lightconv_lm")
    none = a.flag("no_token_positional_embeddings")
    shared = a.flag("share_all_embeddings")
    sequence = SequenceSection(
        norm="pre" if pre else "post",
        last_norm=LAST_NORM in tensors or not pre,
        activation=a.activation(convolves),
        activation_dropout=a.rate("activation_dropout", 0.0) or a.rate("relu_dropout", 0.0),
        positions="none" if none else "learned" if learned else "sinusoidal",
        # One table of places stands beside one of words, and fairseq has two.
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
    """Arguments that are read with a check of what they are."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = values

    def refuse(self, name: str, needed: str) -> ConversionError:
        value = self._values.get(name)
        value = shown(value) if isinstance(value, int | float | str | type(None)) else _list(value)
        return ConversionError(
            f"its argument {name}={value} has no counterpart here; it must be {needed}.",
            field=name,
            value=self._values.get(name),
        )

    def size(self, name: str, most: int = LARGEST) -> int:
        value = self._values.get(name)
        if type(value) is not int or not 1 <= value <= most:
            raise self.refuse(name, f"a whole number from 1 to {most:,}")
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
            raise self.refuse(name, "a word")
        return value

    def rate(self, name: str, default: float) -> float:
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise self.refuse(name, "a number from 0 up to 1")
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
        """Taps of each layer; of an encoder odd ones, see below."""
        name = f"{side}_kernel_size_list"
        found = self._values.get(name)
        if not isinstance(found, list | tuple) or len(found) not in (1, layers):
            raise self.refuse(name, f"one number for each of the {layers} layers")
        if any(type(taps) is not int or not 1 <= taps <= LARGEST for taps in found):
            raise self.refuse(name, "whole numbers")
        # Of an even number fairseq's encoder makes a pair of paddings, which no module of it takes.
        if side == "encoder" and any(taps % 2 == 0 for taps in found):
            raise self.refuse(name, "odd numbers, as fairseq's encoders can compute no others")
        return tuple(found) * (layers if len(found) == 1 else 1)

    def positions(self, alone: bool, learned: bool) -> int:
        """The longest row; a table of learned ones has as many rows."""
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
                f"the source's {sizes[0]}, as config.model.positions says both",
            )
        return max(sizes)

    def activation(self, convolves: bool) -> str:
        found = "relu" if convolves else self.word("activation_fn", "relu")
        if found not in ("relu", "gelu"):
            raise self.refuse("activation_fn", "relu or gelu")
        return found


def _list(value: Any) -> str:
    """A list of numbers for a sentence; of anything else its kind."""
    if isinstance(value, list | tuple) and all(isinstance(part, int) for part in value[:20]):
        return shown(list(value[:20]))
    return f"a {type(value).__name__}"


def _plain(value: Any, budget: list[int], depth: int = 0) -> Any:
    """Values in namespaces, omegaconf's containers and enums as what they stand for.

    Args:
      budget: [how many values may be looked at]: what is shared counts each time.
    """
    budget[0] -= 1
    if budget[0] < 0 or depth > _DEEPEST:
        raise ConversionError("its args are larger than those of any model; it is damaged.")
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
