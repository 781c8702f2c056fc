"""One run, whole, and what follows from its fields."""

import dataclasses
import math

from convbert_jax.config.finetuning import FinetuneSection, OutputsSection
from convbert_jax.config.network import (
    EmbeddingsConfig,
    EncoderConfig,
    LayerConfig,
    StageConfig,
)
from convbert_jax.config.own_task import TaskSection
from convbert_jax.config.sections import (
    CheckpointSection,
    DataSection,
    GeneratorSection,
    MeshSection,
    ModelSection,
    ObjectiveSection,
    OptimizerSection,
    TokenizerSection,
    TrainSection,
)

PLATFORMS = ("any", "cpu", "gpu", "tpu")
DTYPES = ("auto", "float32", "bfloat16")
RECIPES = ("replaced_token", "masked_lm", "finetune")


@dataclasses.dataclass(frozen=True)
class Config:
    """One run, whole."""

    name: str = "run"  # workdir defaults to runs/NAME
    variant: str = "default"  # default | paper | bert, as given after the colon of --config
    # replaced_token (ELECTRA) | masked_lm (masked words alone) | finetune; see recipes/
    recipe: str = "replaced_token"
    seed: int = 0
    # weights that a new run starts from: a run's folder, a Hugging Face folder or a TensorFlow 1
    # checkpoint; "" starts from random ones
    init_from: str = ""
    platform: str = "any"  # stop unless the run finds this: any | cpu | gpu | tpu
    # auto: bfloat16 on accelerators, float32 on a CPU. Parameters and optimizer stay float32.
    # Release: float32.
    compute_dtype: str = "auto"
    model: ModelSection = dataclasses.field(default_factory=ModelSection)
    generator: GeneratorSection = dataclasses.field(default_factory=GeneratorSection)
    objective: ObjectiveSection = dataclasses.field(default_factory=ObjectiveSection)
    tokenizer: TokenizerSection = dataclasses.field(default_factory=TokenizerSection)
    data: DataSection = dataclasses.field(default_factory=DataSection)
    optimizer: OptimizerSection = dataclasses.field(default_factory=OptimizerSection)
    train: TrainSection = dataclasses.field(default_factory=TrainSection)
    checkpoint: CheckpointSection = dataclasses.field(default_factory=CheckpointSection)
    mesh: MeshSection = dataclasses.field(default_factory=MeshSection)
    finetune: FinetuneSection = dataclasses.field(default_factory=FinetuneSection)
    task: TaskSection = dataclasses.field(default_factory=TaskSection)
    outputs: OutputsSection = dataclasses.field(default_factory=OutputsSection)

    @property
    def embeddings(self) -> EmbeddingsConfig:
        """Embeddings of the encoder, shared with the generator unless it is untied."""
        return self._embeddings(self.model.embedding_size)

    @property
    def generator_embeddings(self) -> EmbeddingsConfig:
        """Embeddings of an untied generator, at its own hidden size as in the release."""
        return self._embeddings(self.generator_encoder.hidden_size)

    @property
    def encoder(self) -> EncoderConfig:
        m = self.model
        return self._encoder(
            embedding_size=m.embedding_size,
            hidden_size=m.hidden_size,
            layers=m.layers,
            ffn_size=m.ffn_size,
            heads=m.heads,
            head_size=m.hidden_size // m.heads,
            release_heads=True,
        )

    @property
    def generator_encoder(self) -> EncoderConfig:
        """The release's generator: width, feed-forward and number of heads cut by `size`."""
        m, g = self.model, self.generator
        hidden = round(m.hidden_size * g.size)
        heads = max(1, int(m.heads * g.size + 1e-9))
        return self._encoder(
            embedding_size=m.embedding_size if g.tie_embeddings else hidden,
            hidden_size=hidden,
            layers=max(1, round(m.layers * g.layers)),
            ffn_size=4 * hidden,
            heads=heads,
            head_size=hidden // heads,
            release_heads=g.release_heads,
        )

    @property
    def max_predictions(self) -> int:
        """Most positions masked in a row, as in the release: 19 of 128 at a fraction of 0.15."""
        return max(1, int((self.objective.mask_fraction + 0.005) * self.data.length))

    @property
    def prediction_slots(self) -> int:
        """Masked slots M of the static shape: `max_predictions`, rounded up for the hardware."""
        multiple = self.objective.prediction_multiple
        return math.ceil(self.max_predictions / multiple) * multiple

    def _embeddings(self, size: int) -> EmbeddingsConfig:
        m = self.model
        return EmbeddingsConfig(
            vocab_size=self.tokenizer.vocab_size,
            size=size,
            positions=m.positions,
            types=m.types,
            dropout=m.dropout,
            layer_norm_epsilon=m.layer_norm_epsilon,
        )

    def _encoder(
        self, *, embedding_size, hidden_size, layers, ffn_size, heads, head_size, release_heads
    ):
        m = self.model
        attention_heads = heads if m.mixer == "attention" else heads // m.head_ratio
        if attention_heads < 1:
            # The release: one head of each kind, as wide as the nominal one.
            attention_heads = 1
            if m.mixer == "mixed" and not release_heads:
                head_size //= 2
        layer = LayerConfig(
            hidden_size=hidden_size,
            mixer="mixed" if m.mixer == "mixed" else "attention",
            attention_heads=attention_heads,
            head_size=head_size,
            kernel_size=m.kernel_size,
            ffn_size=ffn_size,
            ffn_groups=m.ffn_groups,
            dropout=m.dropout,
            attention_dropout=m.attention_dropout,
            attention=m.attention,
            convolution=m.convolution,
            mask_convolution=m.mask_convolution,
            layer_norm_epsilon=m.layer_norm_epsilon,
            initializers=m.initializers,
            initializer_range=m.initializer_range,
        )
        return EncoderConfig(
            embedding_size=embedding_size,
            hidden_size=hidden_size,
            stages=(StageConfig(layers, layer),),
            remat=m.remat,
            scan_unroll=m.scan_unroll,
            initializers=m.initializers,
            initializer_range=m.initializer_range,
        )
