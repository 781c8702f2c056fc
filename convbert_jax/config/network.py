"""What the model code is built from: derived in `run.py`, never written by a user."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """One encoder layer: a token mixer and a feed-forward block, both post-norm."""

    hidden_size: int
    mixer: str  # a key of models/mixers.py MIXERS; a bottleneck is an attention of fewer heads
    attention_heads: int  # self-attention heads; the mixed block adds as many convolution heads
    head_size: int
    kernel_size: int  # taps of the span-based dynamic convolution
    ffn_size: int
    ffn_groups: int  # contiguous channel groups in both feed-forward matmuls (ConvBERT §3.3)
    dropout: float
    attention_dropout: float
    attention: str
    convolution: str
    mask_convolution: bool
    layer_norm_epsilon: float
    initializers: str
    initializer_range: float


@dataclasses.dataclass(frozen=True)
class StageConfig:
    """`depth` identical layers, their parameters stacked and run by one `lax.scan`."""

    depth: int
    layer: LayerConfig


@dataclasses.dataclass(frozen=True)
class EmbeddingsConfig:
    """Word + position + segment-type tables and their layer norm, at `size` channels."""

    vocab_size: int
    size: int
    positions: int
    types: int
    dropout: float
    layer_norm_epsilon: float


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """After the embeddings: a projection if the sizes differ, then the stages in order."""

    embedding_size: int
    hidden_size: int
    stages: tuple[StageConfig, ...]
    remat: str
    scan_unroll: int
    initializers: str
    initializer_range: float

    @property
    def depth(self) -> int:
        return sum(stage.depth for stage in self.stages)
