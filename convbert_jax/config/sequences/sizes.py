"""Named sizes of models that write text, each a function of the mixer.

Widths, depths, kernel sizes and dropout of LightConv's sizes are those of Wu et al. 2019 and of the
code published with it; a Transformer (mixer `attention`) has six layers in the encoder where
convolutions have seven, as there. `t5_base` is the shape of Tay et al. 2021, of T5's base model.
"""

import dataclasses
from collections.abc import Callable

from convbert_jax.config.sections import ModelSection
from convbert_jax.config.sequences.sections import SequenceSection

Sections = tuple[ModelSection, SequenceSection]

ENCODER_KERNELS = (3, 7, 15, 31, 31, 31, 31)
DECODER_KERNELS = (3, 7, 15, 31, 31, 31)
_SAME = ()  # windows of 7 in all layers
_GATED = ("dynamic", "light", "dilated")


def tiny(mixer: str) -> Sections:
    """For a CPU: with 8,000 words in one vocabulary about 2.2 million parameters. Windows of 7 in
    all layers, as in `t5_base`, so that encoder and decoder are a stage each: of growing windows
    they would be eight, each compiled for each shape of batches. Pre-norm, with which it learns
    sooner; layers one after the other in the program, which saves a CPU a tenth of a step
    (benchmarks/RESULTS.md, section 14).
    """
    model = _model(mixer, 128, 256, 4, _SAME, layers=4, dropout=0.3)
    return dataclasses.replace(model, scan_unroll=4), SequenceSection(norm="pre")


def iwslt_de_en(mixer: str) -> Sections:
    """Without the gate in the convolutional block; tables of source, target and output."""
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
    """A decoder alone, pre-norm."""
    return _model(mixer, 512, 2048, 8, DECODER_KERNELS, dropout=0.1), SequenceSection(norm="pre")


def t5_base(mixer: str) -> Sections:
    """Windows of 7, pre-norm; convolutions have no positions. T5's own are relative, in attention;
    here they are sinusoidal.
    """
    attends = mixer in ("attention", "bottleneck", "mixed")
    model = _model(mixer, 768, 3072, 12, _SAME, layers=12, dropout=0.1)
    return model, SequenceSection(
        norm="pre",
        positions="sinusoidal" if attends else "none",
    )


# name -> what config.model and config.sequence are
SIZES: dict[str, Callable[[str], Sections]] = {
    "tiny": tiny,
    "iwslt_de_en": iwslt_de_en,
    "wmt_en_de_big": wmt_en_de_big,
    "lm": lm,
    "t5_base": t5_base,
}


def _taps(mixer: str, kernels: tuple[int, ...]) -> tuple[int, ...]:
    """Empty where nothing convolves: layers are then one stage."""
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
        dropout=dropout,
        attention_dropout=0.1,
        layer_norm_epsilon=1e-5,
    )
