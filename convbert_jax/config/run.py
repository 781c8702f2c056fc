"""`Config`: all sections of a run, and values derived from them."""

import dataclasses
import itertools
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
    derive_embeddings,
    derive_encoder,
    derive_encoder_decoder,
    derive_generator,
    derive_language_model,
)
from convbert_jax.config.recipes import RECIPES, RecipeSpec
from convbert_jax.config.sequences import DecodingSection, ParallelSection, SequenceSection
from convbert_jax.config.training import (
    CheckpointSection,
    DistillationSection,
    MeshSection,
    ObjectiveSection,
    OptimizerSection,
    PhaseSection,
    TrainSection,
)

Recipe = Literal[*RECIPES]


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run."""

    name: str = "run"  # workdir defaults to runs/NAME
    # name after the colon of --config: default, or a variant of the config file, as paper, bert, a
    # size or a mixer
    variant: str = "default"
    # replaced_token (ELECTRA) | masked_lm (MLM only) | finetune. Generative models: causal_lm (next
    # token) and span_corruption (T5) on a corpus; translation, summarization and text_to_text on
    # pairs, with different metrics. embedding fine-tunes an encoder on pairs (contrastive)
    recipe: Recipe = "replaced_token"
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    # initial weights of a new run: a run's folder, RUN@PHASE, RUN@average=N (mean of its N newest
    # checkpoints), a Hugging Face folder or a TensorFlow 1 checkpoint; "" is random initialization
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
    # Parts of the run with their own length, schedule, weights of data.mixture, row_length,
    # batch_size, mask_fraction and rotary_base, as JSON: '[{"name": "stable", "length": "90%"},
    # {"name": "decay", "length": "10%", "schedule": "1-sqrt"}]'. They replace optimizer.schedule;
    # lengths in other units than % also set train.steps (docs/howto/phases.md)
    phases: tuple[PhaseSection, ...] = ()
    checkpoint: CheckpointSection = dataclasses.field(default_factory=CheckpointSection)
    mesh: MeshSection = dataclasses.field(default_factory=MeshSection)
    finetune: FinetuneSection = dataclasses.field(default_factory=FinetuneSection)
    task: TaskSection = dataclasses.field(default_factory=TaskSection)
    outputs: OutputsSection = dataclasses.field(default_factory=OutputsSection)

    @property
    def embeddings(self) -> EmbeddingsConfig:
        """Embeddings of the encoder, shared with the generator if tied."""
        return derive_embeddings(self.model, self.tokenizer.vocab_size, self.model.embedding_size)

    @property
    def generator_embeddings(self) -> EmbeddingsConfig:
        """Embeddings of an untied generator, at its own hidden size as in the official code."""
        size = GeneratorSizes(self.model, self.generator).hidden_size
        return derive_embeddings(self.model, self.tokenizer.vocab_size, size)

    @property
    def encoder(self) -> EncoderConfig:
        """Main encoder. Raises ConfigError for an unknown or invalid mixer."""
        return derive_encoder(self.model)

    @property
    def generator_encoder(self) -> EncoderConfig:
        """Encoder of a separate generator. Raises ConfigError as `encoder`."""
        return derive_generator(self.model, self.generator)

    @property
    def spec(self) -> RecipeSpec:
        """What the recipe trains: data, metrics and rules."""
        return RECIPES[self.recipe]

    @property
    def training_data(self) -> DataSection | ParallelSection | TaskSection:
        """The section of the training data."""
        return getattr(self, self.spec.data)

    @property
    def vocabularies(self) -> tuple[int, int]:
        """Source and target vocabulary sizes of a generative model."""
        source = self.tokenizer.vocab_size
        two = self.spec.has_two_vocabularies(self)
        return source, (two and self.parallel.target_vocab_size) or source

    @property
    def encoder_decoder(self) -> EncoderDecoderConfig:
        """Model of span_corruption and pairs. Raises ConfigError as `derive_encoder_decoder`."""
        return derive_encoder_decoder(self.model, self.sequence, *self.vocabularies)

    @property
    def language_model(self) -> LanguageModelConfig:
        """Model of causal_lm. Raises ConfigError as `derive_language_model`."""
        return derive_language_model(self.model, self.sequence, self.tokenizer.vocab_size)

    @property
    def phase_configs(self) -> tuple["Config", ...]:
        """The config of each phase, with its values in the fields that it changes."""
        return tuple(map(self._in_phase, self.phases)) or (self,)

    def _in_phase(self, phase: PhaseSection) -> "Config":
        replace, o, d, t, m = dataclasses.replace, self.objective, self.data, self.train, self.model
        return replace(
            self,
            objective=replace(o, mask_fraction=phase.mask_fraction or o.mask_fraction),
            data=replace(d, length=phase.row_length or d.length),
            train=replace(t, batch_size=phase.batch_size or t.batch_size),
            model=replace(m, rotary_base=phase.rotary_base or m.rotary_base),
        )

    @property
    def phase_lengths(self) -> tuple[int, ...]:
        """The steps of each phase of `phase_configs`; lengths must be numbers."""
        return tuple(phase.length for phase in self.phases) or (self.train.steps,)

    @property
    def phase_ends(self) -> tuple[int, ...]:
        """The last step of each phase of `phase_configs`."""
        return tuple(itertools.accumulate(self.phase_lengths))

    def at(self, step: int) -> "Config":
        """Returns the config of the phase that trained the checkpoint of a step."""
        return self.phase_configs[self.phase_number(step)]

    def phase_number(self, step: int) -> int:
        """Returns the index of the phase that trained the checkpoint of a step."""
        numbers = (number for number, end in enumerate(self.phase_ends) if step <= end)
        return next(numbers, max(0, len(self.phases) - 1))

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
        asked = {
            "release": self.objective.release_metrics,
            "pair": self.objective.sentence_pairs != "none",
            "encoder": self.objective.masked_lm_steps > 0,
            "word": self.tokenizer.kind != "wordpiece",  # it splits words at each punctuation sign
            "spearman": bool(self.parallel.score_column),
        }
        return tuple(name for name in self.spec.metrics if asked.get(name.split("_")[0], True))


def fit_to_steps(of_file: Config, given: Mapping[str, Any]) -> dict[str, int]:
    """Returns shorter warm-up and intervals for a run with fewer steps than its config file.

    Warm-up: a tenth of the steps, or its share of the steps in the file if that is more. Log lines:
    ten. Evaluations and checkpoints: four, at least 100 steps apart, and one at the end.

    Args:
      of_file: the config of the file, without overrides.
      given: path -> value of the overrides; these fields are not changed.

    Returns:
      path -> value of the fields to change; empty unless `train.steps` is a smaller number than in
      the file.
      The result depends only on the arguments, so a resumed run gets the same values.
    """
    steps = given.get("train.steps", of_file.train.steps)
    recipe = RECIPES.get(given.get("recipe", of_file.recipe))
    texts = any(isinstance(length, str) for length in (steps, of_file.train.steps))
    if not recipe or recipe.data == "task" or texts or not 0 < steps < of_file.train.steps:
        return {}
    share = steps / of_file.train.steps
    warmup = of_file.optimizer.warmup_steps
    warmup = warmup if isinstance(warmup, int) else 0  # a text follows the steps by itself
    seldom = min(steps, max(100, steps // 4))
    largest = {
        "optimizer.warmup_steps": max(steps // 10, int(warmup * share)),
        "train.log_every": max(1, steps // 10),
        "train.eval_every": seldom,
        "checkpoint.every": seldom,
    }
    return {
        path: most
        for path, most in largest.items()
        if path not in given
        and isinstance(length := operator.attrgetter(path)(of_file), int)
        and length > most
    }
