"""What a checkpoint of Mesh TensorFlow holds, as our sections: sizes follow from the shapes of its
variables, and what no shape tells from the operative_config.gin that T5 writes beside it.

Names are those of the public code, `mesh_tensorflow/transformer/` with the layers of
`pretrained_conv/gin/` (google-research): LocalConvAttnBlock, EncDecAttention, DenseReluDense.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from absl import logging

from convbert_jax.config import ModelSection
from convbert_jax.config.sequences import SequenceSection
from convbert_jax.interop.claims import LARGEST, shown
from convbert_jax.interop.networks import ConversionError

Shapes = Mapping[str, tuple[int, ...]]

TABLE, PLACES = "shared/embedding", "shared/positional_embedding"
CONV, READ, FEED = "LocalConvAttnBlock", "EncDecAttention", "DenseReluDense"
TAPS = {"light": "lightwt_depthwise_dense_{}", "dynamic": "dyn_conv_depthwise_dense_{}"}
LOGITS = "decoder/logits/kernel"
# Class of each layer of a block.
LAYERS = {"encoder": (CONV, FEED), "decoder": (CONV, READ, FEED)}
# Of training: the step, and what Adafactor and Adam keep of a variable.
_TRAINING = re.compile(r"global_step|.*(_slot_(vr|vc|v|m)|/adam_[mv])")
GIN = "operative_config.gin"
EPSILON = 1e-6
_KEY_SIZE = 64
_POSITIONS = 512  # of a checkpoint without a table of them: the rows that it was trained with
_MOST_LAYERS = 200
_LARGEST_GIN = 1 << 20  # bytes
_SETTING = re.compile(r"^([\w./]+)\s*=\s*([^\s#\\]+)\s*$", re.MULTILINE)
# What computes something else where it is not so: last part of a name in the file -> values.
_NEEDED = {
    "unit_scaling_convention.value": ("False",),
    "VocabEmbedding.scale_variable_like_classifier_weights": ("False",),
    "Unitransformer.sinusoid_positional_embedding": ("False",),
    "Unitransformer.ensemble": ("None",),
    "EncDecAttention.shared_kv": ("False",),
    "EncDecAttention.num_memory_heads": ("0",),
    "Conv1DLocalAttn.num_unique_depth_filters": ("1",),  # LocalConvAttnBlock's own has no effect
    "LocalConvAttnBlock.activation": ("'linear'",),
    "sublayer_rms_norm.epsilon": ("1e-06",),
    "LayerStack.norm_epsilon": ("1e-06", "None"),
}


@dataclasses.dataclass(frozen=True)
class Outline:
    """A model in our words, and how its variables are called.

    Attributes:
      filters: "light" or "dynamic".
      taps: of a convolution, by side.
      norms: last part of the name of a layer's norm, and of the one behind a stack.
      gated: whether the feed-forward block has two first layers.
      positions, tied: whether there is a table of positions, and none of logits.
    """

    model: ModelSection
    sequence: SequenceSection
    words: int
    filters: str
    taps: Mapping[str, int]
    norms: tuple[str, str]
    gated: bool
    positions: bool
    tied: bool

    def depth(self, side: str) -> int:
        return self.model.layers if side == "encoder" else self.sequence.decoder_layers

    @property
    def key_size(self) -> int:
        return self.model.hidden_size // self.model.heads


def weights_of(names: set[str]) -> set[str]:
    """Without what only training needs."""
    return {name for name in names if not _TRAINING.fullmatch(name)}


def derive_outline(shapes: Shapes, gin: Mapping[str, str]) -> Outline:
    """Our sections.

    Args:
      shapes: of all variables but those of training.
      gin: as of `read_gin`.

    Raises:
      ConversionError: a variable is absent or of a shape that none has, or it is another model.
    """
    s = _Shapes(shapes)
    _check_kind(set(shapes))
    words, hidden = s.of(TABLE, 2)
    depth = {side: s.count(rf"{side}/block_(\d{{3,5}})/", side) for side in LAYERS}
    conv = {side: f"{side}/block_000/layer_000/{CONV}" for side in LAYERS}
    filters = next(
        (kind for kind, name in TAPS.items() if f"{conv['encoder']}/{name.format(0)}/kernel" in s),
        None,
    )
    if filters is None:
        raise ConversionError(
            f"it lacks {conv['encoder']}/{TAPS['light'].format(0)}/kernel and "
            f"{TAPS['dynamic'].format(0)}/kernel: its convolution is neither light nor dynamic."
        )
    tap = TAPS[filters].format(r"(\d{1,4})")
    taps = {side: s.count(f"{place}/{tap}/kernel", place) for side, place in conv.items()}
    if taps["encoder"] % 2 == 0:
        raise ConversionError(
            f"its encoder has {taps['encoder']} taps, of which no two sides are equal; here they "
            "must be an odd number."
        )
    feed = "encoder/block_000/layer_001/DenseReluDense"
    gated = f"{feed}/wi_0/kernel" in s
    _, inner = s.of(f"{feed}/{'wi_0' if gated else 'wi'}/kernel", 2)
    _, width = s.of(f"decoder/block_000/layer_001/{READ}/q", 2)
    positions, tied = PLACES in s, LOGITS not in s
    first = "encoder/block_000/layer_000"
    modern = f"{first}/rms_norm/scale" in s
    _check_gin(gin, taps)
    model = ModelSection(
        layers=depth["encoder"],
        hidden_size=hidden,
        embedding_size=hidden,
        heads=_heads(gin, width, hidden),
        mixer="gated_separable",
        mixer_fields=_fields(filters),
        kernel_size=taps["encoder"],
        ffn_size=inner,
        positions=s.of(PLACES, 2)[0] if positions else _POSITIONS,
        layer_norm_epsilon=EPSILON,
    )
    same = taps["decoder"] == taps["encoder"]
    sequence = SequenceSection(
        decoder_layers=depth["decoder"],
        decoder_mixer_fields=(*_fields(filters), "reads_begin=false"),
        decoder_kernel_sizes=() if same else (taps["decoder"],) * depth["decoder"],
        norm="pre",
        normalization="rms",
        activation="gated_gelu" if gated else "relu",
        biases=False,
        positions="learned" if positions else "none",
        tied_output=tied,
    )
    norms = ("rms_norm", "rms_norm") if modern else ("layer_norm", "final_layer_norm")
    return Outline(model, sequence, words, filters, taps, norms, gated, positions, tied)


def read_gin(path: Path) -> dict[str, str]:
    """Name -> value of each setting in one line of a gin file, {} where there is none.

    Raises:
      ConversionError: it cannot be read.
    """
    try:
        if not path.exists():
            return {}
        if not path.is_file() or path.stat().st_size > _LARGEST_GIN:
            raise ConversionError(f"{path} is no gin file; take it away, or copy it again.")
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"{path} cannot be read ({error}); copy it again.") from None
    return dict(_SETTING.findall(text))


def _fields(filters: str) -> tuple[str, ...]:
    return () if filters == "light" else (f"filters={filters}",)


def _check_kind(names: set[str]) -> None:
    """Refuses other models by what they are."""
    if not any(re.match(r"(encoder|decoder)/(block|layer)_\d+/", name) for name in names):
        some = ", ".join(sorted(names)[:3]) or "none"
        raise ConversionError(
            "it holds no encoder-decoder of Mesh TensorFlow: no variable begins with "
            f"encoder/block_; the first ones are {some}."
        )
    kinds = {
        match[1]
        for name in names
        if (match := re.match(r"(?:encoder|decoder)/(?:block_\d+/)?layer_\d+/([A-Z]\w+)/", name))
    }
    if "SelfAttention" in kinds:
        raise ConversionError(
            "its layers are SelfAttention: this is T5's Transformer, whose relative positions are "
            f"not here; only the convolutions of Tay et al. 2021 ({CONV}) are read."
        )
    if strange := sorted(kinds - {CONV, READ, FEED}):
        raise ConversionError(
            f"its layers are {', '.join(strange)}, of which there is no counterpart here; only the "
            f"convolutions of Tay et al. 2021 ({CONV}) are read."
        )


def _check_gin(gin: Mapping[str, str], taps: Mapping[str, int]) -> None:
    needed = dict(_NEEDED)
    for side, count in taps.items():
        last = count // 2 if side == "encoder" else 0
        needed |= {
            f"{side}/{CONV}.min_relative_pos": (str(last - count + 1),),
            f"{side}/{CONV}.max_relative_pos": (str(last),),
        }
    for name, value in gin.items():
        for end, wanted in needed.items():
            if name.endswith(end) and value not in wanted:
                raise ConversionError(
                    f"its {GIN} has {shown(name)} = {shown(value)}, which has no counterpart here; "
                    f"it must be {' or '.join(wanted)}."
                )


def _heads(gin: Mapping[str, str], width: int, hidden: int) -> int:
    """Those of the attention to the source, which no shape tells."""
    told = gin.get("d_kv", gin.get("decoder/EncDecAttention.key_value_size", ""))
    size = int(told) if told.isdecimal() and len(told) < 9 else _KEY_SIZE
    if not told.isdecimal():
        logging.info("No file tells how wide a head is; taking them %d channels wide.", size)
    if not size or width % size or width != hidden:
        raise ConversionError(
            f"its attention to the source is {width} wide, in heads of {size}; here heads fill the "
            f"{hidden} channels of {TABLE}."
        )
    return width // size


class _Shapes:
    """Shapes by name, with checks."""

    def __init__(self, shapes: Shapes):
        self._shapes = shapes

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def of(self, name: str, dimensions: int) -> tuple[int, ...]:
        if name not in self._shapes:
            raise ConversionError(f"it lacks the variable {name}; it is not complete.")
        found = self._shapes[name]
        if len(found) != dimensions or not 0 < min(found) <= max(found) <= LARGEST:
            raise ConversionError(f"its {name} has the shape {found}, which is none of its.")
        return found

    def count(self, pattern: str, place: str) -> int:
        """How many different numbers stand where the pattern has them: 0, 1, ... without a gap."""
        found = {int(match[1]) for name in self._shapes if (match := re.match(pattern, name))}
        if not found:
            raise ConversionError(f"it has nothing of {place}/; it is not complete.")
        if found != set(range(len(found))) or len(found) > _MOST_LAYERS:
            raise ConversionError(
                f"it has {len(found)} parts of {place}, up to number {max(found)}; it is not "
                "complete."
            )
        return len(found)
