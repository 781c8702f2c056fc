"""`Config`: all sections of a run, and values derived from them."""

import dataclasses
import math
import operator
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from convbert_jax.config.data import DataSection, TaskSection, TokenizerSection
from convbert_jax.config.fields import Changeable, Range
from convbert_jax.config.finetuning import FinetuneSection, OutputsSection
from convbert_jax.config.model import GeneratorSection, ModelSection
from convbert_jax.config.network import (
    EmbeddingsConfig,
    EncoderConfig,
    EncoderDecoderConfig,
    GeneratorSizes,
    LanguageModelConfig,
    derive_encoder,
    derive_encoder_decoder,
    derive_generator,
    derive_language_model,
)
from convbert_jax.config.sequences import (
    OF_CORPUS,
    OF_PAIRS,
    DecodingSection,
    ParallelSection,
    SequenceSection,
)
from convbert_jax.config.training import (
    CheckpointSection,
    DistillationSection,
    MeshSection,
    ObjectiveSection,
    OptimizerSection,
    TrainSection,
)

Recipe = Literal["replaced_token", "masked_lm", *OF_CORPUS, *OF_PAIRS, "finetune"]
# Recipe -> metrics of an evaluation. release_* needs objective.release_metrics, pair_* needs
# objective.sentence_pairs, encoder_* needs objective.masked_lm_steps, word_* is not available with
# WordPiece.
_OF_MASKED_LM = ("mlm_loss", "mlm_accuracy", "loss")
_OF_WRITING = ("loss", "token_loss", "token_accuracy", "perplexity")
HELDOUT_METRICS = {
    "masked_lm": (*_OF_MASKED_LM, "pair_loss", "pair_accuracy"),
    "replaced_token": (
        *_OF_MASKED_LM,
        *("sampled_accuracy", "replaced_rate", "discriminator_loss", "discriminator_accuracy"),
        *("discriminator_precision", "discriminator_recall", "discriminator_auc"),
        *("release_discriminator_loss", "release_auc"),
        *("encoder_mlm_loss", "encoder_mlm_accuracy"),
    ),
    "causal_lm": (*_OF_WRITING, "word_perplexity"),
    **dict.fromkeys(
        ("span_corruption", "translation", "summarization", "text_to_text"), _OF_WRITING
    ),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run."""

    name: str = "run"  # workdir defaults to runs/NAME
    # name after the colon of --config: default, or a variant of the config file, as paper, bert, a
    # size or a mixer
    variant: str = "default"
    # replaced_token (ELECTRA) | masked_lm (MLM only) | finetune. Generative models: causal_lm (next
    # token) and span_corruption (T5) on a corpus; translation, summarization and text_to_text on
    # pairs, with different metrics
    recipe: Recipe = "replaced_token"
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    # initial weights of a new run: a run's folder, a Hugging Face folder or a TensorFlow 1
    # checkpoint; "" is random initialization
    init_from: str = ""
    # required platform, else stop: any | cpu | gpu | tpu
    platform: Changeable[Literal["any", "cpu", "gpu", "tpu"]] = "any"
    # auto: bfloat16 on accelerators, float32 on CPUs, where bfloat16 is faster only with matrix
    # instructions (Intel AMX). Parameters and optimizer stay float32. Release: float32.
    compute_dtype: Changeable[Literal["auto", "float32", "bfloat16"]] = "auto"
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
        """Embeddings of the encoder, shared with the generator if tied."""
        return self._embeddings(self.model.embedding_size)

    @property
    def generator_embeddings(self) -> EmbeddingsConfig:
        """Embeddings of an untied generator, at its own hidden size as in the official code."""
        return self._embeddings(GeneratorSizes(self.model, self.generator).hidden_size)

    @property
    def encoder(self) -> EncoderConfig:
        """Main encoder. Raises ConfigError for an unknown or invalid mixer."""
        return derive_encoder(self.model)

    @property
    def generator_encoder(self) -> EncoderConfig:
        """Encoder of a separate generator. Raises ConfigError as `encoder`."""
        return derive_generator(self.model, self.generator)

    @property
    def writes_text(self) -> bool:
        """Whether the model is generative: a language model or an encoder-decoder."""
        return self.recipe in (*OF_CORPUS, *OF_PAIRS)

    @property
    def reads_pairs(self) -> bool:
        """Whether the training data is pairs (config.parallel), not a corpus (config.data)."""
        return self.recipe in OF_PAIRS

    @property
    def vocabularies(self) -> tuple[int, int]:
        """Source and target vocabulary sizes of a generative model."""
        source = self.tokenizer.vocab_size
        if not self.reads_pairs or self.sequence.shared_vocabulary:
            return source, source
        return source, self.parallel.target_vocab_size or source

    @property
    def encoder_decoder(self) -> EncoderDecoderConfig:
        """Model of span_corruption and pairs. Raises ConfigError as `derive_encoder_decoder`."""
        return derive_encoder_decoder(self.model, self.sequence, *self.vocabularies)

    @property
    def language_model(self) -> LanguageModelConfig:
        """Model of causal_lm. Raises ConfigError as `derive_language_model`."""
        return derive_language_model(self.model, self.sequence, self.tokenizer.vocab_size)

    @property
    def max_predictions(self) -> int:
        """Maximum masked positions per row, as in the official code: 19 of 128 at fraction 0.15."""
        return max(1, int((self.objective.mask_fraction + 0.005) * self.data.length))

    @property
    def prediction_slots(self) -> int:
        """Masked slots M per row (static shape): `max_predictions`, rounded up for the hardware."""
        multiple = self.objective.prediction_multiple
        return math.ceil(self.max_predictions / multiple) * multiple

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Distillation term -> (student width, teacher width), for terms whose widths differ."""
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
        """Names of the metrics of an evaluation; empty in fine-tuning, where tasks define them."""
        names = HELDOUT_METRICS.get(self.recipe, ())
        asked = {
            "release": self.objective.release_metrics,
            "pair": self.objective.sentence_pairs != "none",
            "encoder": self.objective.masked_lm_steps > 0,
            "word": self.tokenizer.kind != "wordpiece",  # it splits words at each punctuation sign
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


def fit_to_steps(of_file: Config, given: Mapping[str, Any]) -> dict[str, int]:
    """Returns shorter warm-up and intervals for a run with fewer steps than its config file.

    Warm-up: a tenth of the steps, or its share of the steps in the file if that is more. Log lines:
    ten. Evaluations and checkpoints: four, at least 100 steps apart, and one at the end.

    Args:
      of_file: the config of the file, without overrides.
      given: path -> value of the overrides; these fields are not changed.

    Returns:
      path -> value of the fields to change; empty unless `train.steps` is smaller than in the file.
      The result depends only on the arguments, so a resumed run gets the same values.
    """
    steps = given.get("train.steps", of_file.train.steps)
    recipe = given.get("recipe", of_file.recipe)
    if recipe == "finetune" or not 0 < steps < of_file.train.steps:
        return {}
    share = steps / of_file.train.steps
    seldom = min(steps, max(100, steps // 4))
    largest = {
        "optimizer.warmup_steps": max(steps // 10, int(of_file.optimizer.warmup_steps * share)),
        "train.log_every": max(1, steps // 10),
        "train.eval_every": seldom,
        "checkpoint.every": seldom,
    }
    return {
        path: most
        for path, most in largest.items()
        if path not in given and operator.attrgetter(path)(of_file) > most
    }
