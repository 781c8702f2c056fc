"""Sections of the network and the generator: config.model and config.generator.

"Release:" marks fields where the official ConvBERT code does something that a reader of the paper
would not expect; the `paper` variant of each config sets them to the behavior of that code.
"""

import dataclasses
import itertools
from typing import Annotated, Literal

from convbert_jax.config.fields import (
    Changeable,
    CountOrAll,
    CountOrModel,
    Epsilon,
    FractionBelow1,
    PositiveFraction,
    Range,
    RotaryBase,
    Size,
    SmallCount,
    Width,
)

# Implementations of ops -> required platform, "" for any. The tables in `ops/` have the same
# names; a test compares them.
ATTENTIONS = {"xla": "", "pallas_tpu": "tpu", "cudnn": "gpu", "splash": "tpu"}
CONVOLUTIONS = {"xla": "", "pallas_tpu": "tpu", "pallas_gpu": "gpu", "reference": ""}

CANONS = tuple("".join(part) for n in range(5) for part in itertools.combinations("ABCD", n))


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
    # (ConvBERT's), dynamic and light (DynamicConv, LightConv), dilated, separable, short (LFM2). Or
    # your own, PACKAGE.MODULE:CLASS, see config/mixers.py.
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
    # gelu (exact) | relu, or the activation of one dense layer times another (Shazeer 2020): geglu
    # (exact GELU: ModernBERT) | gated_gelu (tanh approximation: T5 1.1) | swiglu (SiLU: Llama)
    activation: Literal["gelu", "relu", "geglu", "gated_gelu", "swiglu"] = "gelu"
    # post: norm after each residual sum (BERT). pre: before each sublayer and after the last layer;
    # LightConv's language models need it ("not stable" otherwise).
    norm: Literal["post", "pre"] = "post"
    # layer (mean and variance, scale and bias) | rms (root mean square and scale only: T5)
    normalization: Literal["layer", "rms"] = "layer"
    # of dense layers and layer norms in layers and embeddings, and in the head for masked words;
    # convolutions and other heads keep theirs. T5 and ModernBERT have none
    biases: bool = True
    embedding_norm: bool = True  # of an encoder's embeddings (BERT). Generative models have none
    # RMS norm of the queries and keys of each attention head
    qk_norm: bool = False
    # mixer attention: heads of keys and values, each shared by heads / key_value_heads query heads;
    # 0: as many as heads
    key_value_heads: Annotated[int, Range(0, 1_024, note="0 is as many as heads")] = 0
    # Local attention sees this many positions on each side (half of ModernBERT's local_attention);
    # 0: all attention is global.
    window: CountOrAll = 0
    # with window: every n-th layer is global, the first included; 0: none (ModernBERT: 3)
    global_every: Annotated[int, Range(0, 1_024, note="0 is none")] = 3
    # Canon layers (Allen-Zhu 2025), added to any mixer: x + conv(x), a depthwise convolution of 4
    # taps, causal in decoders and centered in encoders. Positions, as ABCD: A before the mixer, B
    # on its queries, keys and values (attention, bottleneck, mixed), C before the feed-forward
    # block, D on its hidden units before the activation, also on those of the gate. "" is none.
    canon: Literal[*CANONS] = ""
    # groups of layers that differ, in order, as '[{"layers": 4, "mixer": "attention"}, {"layers":
    # 8}]'; fields as in StageSection. (): all layers are the same.
    stages: tuple[StageSection, ...] = ()
    # learned | sinusoidal (Vaswani et al. 2017) | rotary, in attention heads (Su et al. 2021) |
    # none, enough for convolutions (Tay et al. 2021). Positions restart in each packed document.
    position_embedding: Literal["learned", "sinusoidal", "rotary", "none"] = "learned"
    rotary_base: RotaryBase = 10_000.0  # of global attention; ModernBERT: 160,000
    local_rotary_base: RotaryBase = 10_000.0  # of local attention
    # rows of the learned position table; the longest input of an encoder
    positions: Size = 512
    types: Annotated[int, Range(0, 1_024)] = 2  # rows of the segment-type table; 0: no table
    dropout: FractionBelow1 = 0.1  # rounded to multiples of 1/256, as all dropout rates
    # of attention maps, and of the filters of dynamic and light
    attention_dropout: FractionBelow1 = 0.1
    activation_dropout: FractionBelow1 = 0.0  # inside feed-forward blocks; T5: as dropout
    last_dropout: FractionBelow1 = 0.0  # after the final norm of norm=pre; T5: as dropout
    # auto: the fastest per platform, which is logged; cudnn and splash do not support attention
    # dropout. A named implementation is never replaced by another. auto | xla | pallas_tpu | cudnn
    # (GPU) | splash (TPU)
    attention: Changeable[Literal["auto", *ATTENTIONS]] = "auto"
    # implementation of the convolutions of mixers and of canon, as for attention:
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
    # always unrolls all layers, because XLA confuses collectives in loops there. One CPU unrolls in
    # training only.
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
