"""Sections of the network and the generator: config.model and config.generator.

"Release:" marks fields where the official ConvBERT code does something that a reader of the paper
would not expect; the `paper` variant of each config sets them to the behavior of that code.
"""

import dataclasses
from typing import Annotated, Literal

from convbert_jax.config.fields import (
    Changeable,
    CountOrModel,
    Epsilon,
    FractionBelow1,
    PositiveFraction,
    Range,
    Size,
    SmallCount,
    Width,
)

# Implementations of ops -> required platform, "" for any. The tables in `ops/` have the same
# names; a test compares them.
ATTENTIONS = {"xla": "", "pallas_tpu": "tpu", "cudnn": "gpu", "splash": "tpu"}
CONVOLUTIONS = {"xla": "", "pallas_tpu": "tpu", "pallas_gpu": "gpu", "reference": ""}


@dataclasses.dataclass(frozen=True)
class StageSection:
    """A group of identical layers, one element of config.model.stages.

    The fields mean the same as in `ModelSection`. A field that is missing, 0 or empty is taken from
    config.model; `mixer_fields` only if the mixer is the one of config.model. A stage that sets
    `mixer_fields` must set `mixer` too.
    """

    layers: SmallCount = 1
    heads: CountOrModel = 0
    head_ratio: CountOrModel = 0
    mixer: str = ""
    mixer_fields: tuple[str, ...] = ()
    kernel_size: CountOrModel = 0
    dilation: CountOrModel = 0
    ffn_size: Annotated[int, Range(0, 2**18, note="0 is the value of config.model")] = 0
    ffn_groups: CountOrModel = 0


@dataclasses.dataclass(frozen=True)
class ModelSection:
    """The main network: the discriminator, or the encoder of a masked language model."""

    layers: SmallCount = 12
    hidden_size: Width = 256
    embedding_size: Width = 128  # a dense projection follows if this differs from hidden_size
    heads: SmallCount = 4  # nominal heads; head width = hidden_size // heads
    # gamma in the paper; used by mixed and bottleneck. Other mixers use all heads and accept only
    # 1 and 2
    head_ratio: SmallCount = 2
    # mixed (ConvBERT): heads // head_ratio attention heads and as many convolution heads.
    # attention (BERT, ELECTRA): attention heads. bottleneck (an ablation of ConvBERT, "noconv" in
    # the official code): only heads // head_ratio attention heads. Convolution only: span_dynamic
    # (ConvBERT's), dynamic and light (DynamicConv, LightConv), dilated, separable. Or a custom
    # mixer, PACKAGE.MODULE:CLASS, see config/mixers.py.
    mixer: str = "mixed"
    # NAME=VALUE of mixer-specific fields. mixed: filters=span_dynamic | dynamic | light,
    # own_value=true (false: the paper's formula), convolution_share=0.5 of the heads. dynamic,
    # light, dilated: glu=true.
    mixer_fields: tuple[str, ...] = ()
    kernel_size: SmallCount = 9  # taps of the convolution
    dilation: SmallCount = 1  # positions between two taps of the mixer dilated
    # kernel_size and dilation of each layer, as 3,7,15,31 (LightConv) or 1,2,4,8 (dilated);
    # consecutive layers with equal numbers form a stage. (): all layers use the field above.
    kernel_sizes: Annotated[tuple[int, ...], Range(1, 1_024)] = ()
    dilations: Annotated[tuple[int, ...], Range(1, 1_024)] = ()
    ffn_size: Width = 1024
    ffn_groups: SmallCount = 1
    # groups of layers that differ, in order, as '[{"layers": 4, "mixer": "attention"}, {"layers":
    # 8}]'; fields as in StageSection. (): all layers are the same.
    stages: tuple[StageSection, ...] = ()
    positions: Size = 512  # rows of the learned position table, the longest input
    types: SmallCount = 2  # rows of the segment-type table
    dropout: FractionBelow1 = 0.1  # rounded to multiples of 1/256, as all dropout rates
    # of attention maps, and of the filters of dynamic and light
    attention_dropout: FractionBelow1 = 0.1
    # auto: the fastest per platform, which is logged; cudnn and splash do not support attention
    # dropout. A named implementation is never replaced by another. auto | xla | pallas_tpu | cudnn
    # (GPU) | splash (TPU)
    attention: Changeable[Literal["auto", *ATTENTIONS]] = "auto"
    # implementation of the span-based convolution and of its key convolution, as for attention:
    # auto | xla | pallas_tpu | pallas_gpu | reference
    convolution: Changeable[Literal["auto", *CONVOLUTIONS]] = "auto"
    layer_norm_epsilon: Epsilon = 1e-12
    # True: convolution taps do not read padding or other documents. Release: the convolution branch
    # ignores the mask, so outputs depend on the amount of padding; needed for parity with published
    # weights.
    mask_convolution: bool = True
    # release: truncated normal, depthwise 1/kernel_size, Glorot for the embedding projection and
    # the last dense layer of the discriminator head. huggingface: normal(initializer_range)
    # everywhere, which makes the initial key convolution 5 times smaller.
    initializers: Literal["release", "huggingface"] = "release"
    initializer_range: Annotated[float, Range(0.0, 10.0, with_low=False)] = 0.02
    # none | dots (keep matmul outputs) | full (keep layer inputs only): less memory, more compute
    remat: Changeable[Literal["none", "dots", "full"]] = "none"
    # layers per scan iteration: 1, or all layers, which compiles longer and runs faster; by the
    # cost model of the TPU compiler, values in between are slower than both. A mesh of several CPUs
    # always unrolls all layers, because XLA confuses collectives in loops there.
    scan_unroll: Changeable[SmallCount] = 1


@dataclasses.dataclass(frozen=True)
class GeneratorSection:
    """The small masked language model that proposes replacements (ELECTRA §3)."""

    # separate | shared (the encoder itself with an MLM head) | uniform (random tokens)
    kind: Literal["separate", "shared", "uniform"] = "separate"
    # width of hidden layer, feed-forward and heads relative to the encoder
    size: PositiveFraction = 0.25
    layers: PositiveFraction = 1.0  # depth relative to the encoder, of each stage of model.stages
    # share embeddings (words, positions, types, layer norm) between both networks
    tie_embeddings: bool = True
    # With tied embeddings: only the generator's MLM loss trains the shared table; the encoder adds
    # a table that starts at zero to the shared one without its gradient (DeBERTaV3 §3.3; here also
    # positions, types and layer norm). The sum is exported and fine-tuned.
    disentangle_embeddings: bool = False
    # Release: where fewer heads than head_ratio remain (the small generator: 1), it uses 1
    # attention + 1 convolution head of full width, so 128 channels are projected to a hidden size
    # of 64; Hugging Face's format cannot store this. False: both share the width.
    release_heads: bool = True
    # As config.model.scan_unroll, for the generator only. All layers: on a TPU the layers' outputs
    # for the backward pass need not be stacked, which saves a fifth of a step of `small` and 6% of
    # `base` by the compiler's cost model; compiling takes twice as long.
    scan_unroll: Changeable[SmallCount] = 1
