"""One run, whole, and what follows from its fields."""

import dataclasses
import math

from convbert_jax.config.changes import Changeable
from convbert_jax.config.finetuning import FinetuneSection, OutputsSection
from convbert_jax.config.network import (
    EmbeddingsConfig,
    EncoderConfig,
    GeneratorSizes,
    derive_encoder,
    derive_generator,
)
from convbert_jax.config.own_task import TaskSection
from convbert_jax.config.sections import (
    HELDOUT_METRICS,
    CheckpointSection,
    DataSection,
    DistillationSection,
    GeneratorSection,
    MeshSection,
    ModelSection,
    ObjectiveSection,
    OptimizerSection,
    TokenizerSection,
    TrainSection,
)
from convbert_jax.config.sequences.network import (
    EncoderDecoderConfig,
    LanguageModelConfig,
    derive_encoder_decoder,
    derive_language_model,
)
from convbert_jax.config.sequences.sections import (
    OF_CORPUS,
    OF_PAIRS,
    DecodingSection,
    ParallelSection,
    SequenceSection,
)

PLATFORMS = ("any", "cpu", "gpu", "tpu")
DTYPES = ("auto", "float32", "bfloat16")
RECIPES = ("replaced_token", "masked_lm", *OF_CORPUS, *OF_PAIRS, "finetune")


@dataclasses.dataclass(frozen=True)
class Config:
    """One run, whole."""

    name: str = "run"  # workdir defaults to runs/NAME
    # as given after the colon of --config: default, or what the config file offers, as paper or
    # bert, a size, a mixer
    variant: str = "default"
    # replaced_token (ELECTRA) | masked_lm (masked words alone) | finetune. Models that write text:
    # causal_lm (the next word) and span_corruption (T5) of a corpus; translation, summarization and
    # text_to_text of pairs, which differ in their scores
    recipe: str = "replaced_token"
    seed: int = 0
    # weights that a new run starts from: a run's folder, a Hugging Face folder or a TensorFlow 1
    # checkpoint; "" starts from random ones
    init_from: str = ""
    platform: Changeable[str] = "any"  # stop unless the run finds this: any | cpu | gpu | tpu
    # auto: bfloat16 on accelerators, float32 on a CPU, where bfloat16 is faster if it has a matrix
    # unit (Intel's AMX), slower if not. Parameters and optimizer stay float32. Release: float32.
    compute_dtype: Changeable[str] = "auto"
    model: ModelSection = dataclasses.field(default_factory=ModelSection)
    generator: GeneratorSection = dataclasses.field(default_factory=GeneratorSection)
    objective: ObjectiveSection = dataclasses.field(default_factory=ObjectiveSection)
    distillation: DistillationSection = dataclasses.field(default_factory=DistillationSection)
    sequence: SequenceSection = dataclasses.field(default_factory=SequenceSection)
    tokenizer: TokenizerSection = dataclasses.field(default_factory=TokenizerSection)
    data: DataSection = dataclasses.field(default_factory=DataSection)
    parallel: ParallelSection = dataclasses.field(default_factory=ParallelSection)
    decoding: DecodingSection = dataclasses.field(default_factory=DecodingSection)
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
        return self._embeddings(GeneratorSizes(self.model, self.generator).hidden_size)

    @property
    def encoder(self) -> EncoderConfig:
        """The encoder that is kept; ConfigError for a mixer that is unknown or cannot be."""
        return derive_encoder(self.model)

    @property
    def generator_encoder(self) -> EncoderConfig:
        """That of a separate generator; ConfigError as `encoder`."""
        return derive_generator(self.model, self.generator)

    @property
    def writes_text(self) -> bool:
        """Whether the model is one of `config.sequences`."""
        return self.recipe in (*OF_CORPUS, *OF_PAIRS)

    @property
    def reads_pairs(self) -> bool:
        """Whether it learns from config.parallel instead of config.data."""
        return self.recipe in OF_PAIRS

    @property
    def vocabularies(self) -> tuple[int, int]:
        """Words of the source's and the target's vocabulary of a model that writes text."""
        source = self.tokenizer.vocab_size
        if not self.reads_pairs or self.sequence.shared_vocabulary:
            return source, source
        return source, self.parallel.target_vocab_size or source

    @property
    def encoder_decoder(self) -> EncoderDecoderConfig:
        """That of span_corruption and of pairs; ConfigError as `derive_encoder_decoder`."""
        return derive_encoder_decoder(self.model, self.sequence, *self.vocabularies)

    @property
    def language_model(self) -> LanguageModelConfig:
        """That of causal_lm; ConfigError as `derive_language_model`."""
        return derive_language_model(self.model, self.sequence, self.tokenizer.vocab_size)

    @property
    def max_predictions(self) -> int:
        """Most positions masked in a row, as in the release: 19 of 128 at a fraction of 0.15."""
        return max(1, int((self.objective.mask_fraction + 0.005) * self.data.length))

    @property
    def prediction_slots(self) -> int:
        """Masked slots M of the static shape: `max_predictions`, rounded up for the hardware."""
        multiple = self.objective.prediction_multiple
        return math.ceil(self.max_predictions / multiple) * multiple

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Widths of the student and the teacher, of what is compared and differs in width."""
        d, m = self.distillation, self.model
        compared = {
            "hidden": (d.hidden_weight, m.hidden_size, d.teacher_hidden_size),
            "embeddings": (d.embeddings_weight, m.embedding_size, d.teacher_embedding_size),
        }
        return {
            name: (ours, theirs)
            for name, (weight, ours, theirs) in compared.items()
            if weight and theirs not in (0, ours)
        }

    @property
    def heldout_metrics(self) -> tuple[str, ...]:
        """What an evaluation measures, by name; none in fine-tuning, whose tasks have their own."""
        names = HELDOUT_METRICS.get(self.recipe, ())
        asked = {
            "release": self.objective.release_metrics,
            "pair": self.objective.sentence_pairs != "none",
            "encoder": self.objective.masked_lm_steps > 0,
            "word": self.tokenizer.kind != "wordpiece",  # begins one at each sign of punctuation
        }
        return tuple(name for name in names if asked.get(name.split("_")[0], True))

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
