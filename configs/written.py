"""Shared code of the configs of generative models.

The variant is SIZE,MIXER with any mixer of convbert_jax/config/mixers.py that has a causal form.
SIZE,attention is the Transformer baseline of that size.

LightConv sizes use the widths, depths, kernel sizes and dropout of Wu et al. 2019 and their code,
where a Transformer (mixer `attention`) has six encoder layers and convolutions have seven.
`t5_base` has the sizes of Tay et al. 2021 and T5 base.
"""

import dataclasses
from collections.abc import Callable

from convbert_jax.config import ModelSection, SequenceSection, to_config_dict
from convbert_jax.config.fields import check_choice
from convbert_jax.config.mixers import MIXERS

Sections = tuple[ModelSection, SequenceSection]

ENCODER_KERNELS = (3, 7, 15, 31, 31, 31, 31)
DECODER_KERNELS = (3, 7, 15, 31, 31, 31)
_SAME = ()  # kernel size 7 in all layers
_GATED = ("dynamic", "light", "dilated")


def tiny(mixer: str) -> Sections:
    """Returns a model for CPUs, about 2.2 million parameters with a shared vocabulary of 8,000.

    All layers have kernel size 7, as in `t5_base`, so encoder and decoder have one stage each;
    growing kernel sizes would need eight stages, each compiled for every batch shape. Pre-norm
    trains faster (benchmarks/notes/sequences.md), and unrolled layers run faster on a CPU
    (benchmarks/notes/cpu.md).
    """
    model = _model(mixer, 128, 256, 4, _SAME, layers=4, dropout=0.3)
    return dataclasses.replace(model, norm="pre", scan_unroll=4), SequenceSection()


def iwslt_de_en(mixer: str) -> Sections:
    """Returns LightConv's IWSLT model: no GLU, separate source, target and output tables."""
    model = _model(mixer, 512, 1024, 4, _encoder_kernels(mixer), dropout=0.3, glu=False)
    return model, SequenceSection(
        decoder_layers=6,
        decoder_kernel_sizes=_taps(mixer, DECODER_KERNELS),
        shared_vocabulary=False,
        tied_output=False,
    )


def wmt_en_de_big(mixer: str) -> Sections:
    model = _model(mixer, 1024, 4096, 16, _encoder_kernels(mixer), dropout=0.3)
    return model, SequenceSection(
        decoder_layers=6, decoder_kernel_sizes=_taps(mixer, DECODER_KERNELS)
    )


def lm(mixer: str) -> Sections:
    """Returns a pre-norm decoder-only model."""
    model = _model(mixer, 512, 2048, 8, DECODER_KERNELS, dropout=0.1)
    return dataclasses.replace(model, norm="pre"), SequenceSection()


def t5_base(mixer: str) -> Sections:
    """Returns a pre-norm model of the size of T5 base, with kernel size 7.

    Convolutions have no position embeddings; attention has sinusoidal ones instead of T5's relative
    position biases.
    """
    attends = mixer in ("attention", "bottleneck", "mixed")
    model = _model(mixer, 768, 3072, 12, _SAME, layers=12, dropout=0.1)
    positions = "sinusoidal" if attends else "none"
    return dataclasses.replace(model, norm="pre", position_embedding=positions), SequenceSection()


# name -> function that returns config.model and config.sequence
SIZES: dict[str, Callable[[str], Sections]] = {
    "tiny": tiny,
    "iwslt_de_en": iwslt_de_en,
    "wmt_en_de_big": wmt_en_de_big,
    "lm": lm,
    "t5_base": t5_base,
}


def _taps(mixer: str, kernels: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the kernel sizes; empty for mixers without convolution, so layers form one stage."""
    return () if mixer in ("attention", "bottleneck") else kernels


def _encoder_kernels(mixer: str) -> tuple[int, ...]:
    return ENCODER_KERNELS[1:] if mixer == "attention" else ENCODER_KERNELS


def _model(mixer, hidden, ffn, heads, kernels, *, dropout, layers=0, glu=True) -> ModelSection:
    return ModelSection(
        layers=layers or len(kernels),
        hidden_size=hidden,
        embedding_size=hidden,
        heads=heads,
        mixer=mixer,
        mixer_fields=() if glu or mixer not in _GATED else ("glu=false",),
        kernel_size=7,
        kernel_sizes=_taps(mixer, kernels),
        ffn_size=ffn,
        activation="relu",
        position_embedding="sinusoidal",
        dropout=dropout,
        attention_dropout=0.1,
        layer_norm_epsilon=1e-5,
    )


def start(recipe: str, variant: str, sizes: tuple[str, ...]):
    """Returns a ConfigDict with model and sequence sections of the variant, and its size.

    Raises:
      ConfigError: the size is not in `sizes`, or the mixer is unknown.
    """
    size, _, mixer = variant.partition(",")
    mixer = mixer or "dynamic"
    check_choice("variant", size, sizes)
    if ":" not in mixer:  # not a custom mixer
        check_choice("variant", mixer, tuple(MIXERS))
    config = to_config_dict()
    config.recipe = recipe
    config.name = f"{recipe.replace('_', '-')}-{size}-{mixer.rpartition(':')[2]}"
    config.variant = variant
    for section, values in zip(("model", "sequence"), SIZES[size](mixer), strict=True):
        config[section].update(dataclasses.asdict(values))
    return config, size
