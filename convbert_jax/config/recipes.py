"""What each recipe trains: its network, data, metrics, and the rules for its fields.

`Config.spec` is the `RecipeSpec` of a config. Objectives and training of a recipe are in
`convbert_jax/recipes/`.
"""

import operator
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from convbert_jax.config.fields import are_numbers
from convbert_jax.config.network import (
    GeneratorSizes,
    LayerConfig,
    decoder_fields,
    idle_fields,
    list_stages,
)
from convbert_jax.config.sequences import PairFormat
from convbert_jax.config.training import POOLINGS

if TYPE_CHECKING:
    from convbert_jax.config.run import Config

# Path of an invalid field, and the problem with its fix.
Problem = tuple[str, str]

_OF_TASKS = ("finetune", "task", "outputs")  # sections that only fine-tuning reads
_OF_PAIRS = ("translation", "summarization", "text_to_text")
_DECODER_SCHEDULES = ("decoder_kernel_sizes", "decoder_dilations")


class RecipeSpec:
    """A recipe that trains on rows of a corpus, as seen by config, data, interop and inference.

    Attributes:
      name: value of config.recipe.
      metrics: metrics of an evaluation. release_* needs objective.release_metrics, pair_*
        objective.sentence_pairs, encoder_* objective.masked_lm_steps; word_* is not available with
        WordPiece. Empty in fine-tuning, where tasks define them.
      data: section of the training data: "data" (a corpus), "parallel" (pairs of texts) or "task".
      length: field with the maximum number of tokens of a row.
      material: what the training data consists of, for messages.
      own_source: example of a source of own data.
      generates: whether the model is generative: a language model or an encoder-decoder.
      network: kind of the model, for messages.
      function: Python function of `convbert_jax` that runs it.
      followed_by: recipes that can start from its weights, as tasks of a sweep.
      less_disk: how to need less space for checkpoints.
      unread: sections that the recipe does not read.
      refused_modes: mode -> why the recipe does not have it; {source} is the value of --source.
    """

    name: str
    metrics: tuple[str, ...] = ()
    data = "data"
    length = "data.length"
    material = "text"
    own_source = "'text:FOLDER/*.txt'"
    generates = False
    network = "an encoder"
    function = "pretrain"
    followed_by: tuple[str, ...] = ("finetune",)
    less_disk = "reduce config.checkpoint.keep"
    unread: tuple[str, ...] = ()
    refused_modes: ClassVar[Mapping[str, str]] = {}

    def __init__(self, name: str):
        self.name = name

    def find_problems(self, config: "Config") -> Iterator[Problem]:
        """Finds invalid combinations of fields that the recipe reads, before any long work."""
        yield from _find_in_objective(config, self)
        yield from _find_in_distillation(config)
        yield from self._find_in_rows(config)
        yield from _find_in_sentence_pairs(config, self)

    def _find_in_rows(self, config: "Config") -> Iterator[Problem]:
        d = config.data
        if not d.source:
            yield (
                "data.source",
                "is empty; set a corpus, for example text:corpus/*.txt or docstrings.",
            )
        if d.layout != "packed" and config.model.types == 1:
            yield (
                "data.layout",
                "has two segments per row; set config.model.types=2, or 0 for none.",
            )
        if d.release_builder_bug and d.layout != "electra":
            yield (
                "data.release_builder_bug",
                "needs config.data.layout='electra'; set it, or unset release_builder_bug.",
            )
        if d.heldout_fraction == 0 and not all(s.validation_source for s in d.mixture or (d,)):
            yield (
                "data.heldout_fraction",
                "leaves no text for evaluation; raise it or set config.data.validation_source.",
            )
        yield from _find_in_batches(config)

    def layers(self, config: "Config") -> tuple[LayerConfig, ...]:
        """Returns the layers of all networks; raises ConfigError for an invalid mixer."""
        return config.encoder.layers

    def decoder_mixer(self, config: "Config") -> tuple[str, tuple[str, ...]] | None:
        """Returns (mixer, mixer_fields) of the decoder of an encoder-decoder."""
        return None

    def rows_are_packed(self, config: "Config") -> bool:
        """Returns whether rows contain several documents, which convolutions must not mix."""
        return config.data.layout == "packed"

    def has_two_vocabularies(self, config: "Config") -> bool:
        """Returns whether sources and targets have separate vocabularies."""
        return False

    def tokens_per_step(self, config: "Config") -> int | None:
        """Returns the tokens of a batch with padding; None if it is known only from the data."""
        return config.train.batch_size * config.data.length

    def pair_format(self, config: "Config") -> PairFormat:
        """Returns the format of the pairs of a recipe with data = "parallel"."""
        return PairFormat()

    def accumulation(self, config: "Config") -> int:
        """Returns the number of microbatches whose gradients a step adds up."""
        return config.train.accumulation

    def idle_fields(self, config: "Config") -> list[str]:
        """Returns the fields of config.model that no layer reads."""
        return idle_fields(config.model)

    def count_checkpoints(self, config: "Config") -> tuple[int, int]:
        """Returns the largest number of saved states, and of saved parameters without moments.

        Counts the checkpoints that are kept, and the one that is written before the oldest is
        deleted.
        """
        c = config.checkpoint
        count = c.keep + 1 + bool(c.best_metric)
        if c.keep_every and are_numbers(c.keep_every, config.train.steps):
            count += config.train.steps // c.keep_every
        return count, 0


class _Encoder(RecipeSpec):
    unread = (*_OF_TASKS, "sequence", "parallel", "decoding")

    def _find_in_rows(self, config: "Config") -> Iterator[Problem]:
        m, length = config.model, config.data.length
        if m.attention in ("splash", "pallas_tpu") and length % 128:
            yield (
                "model.attention",
                f"needs a row length divisible by 128, but config.data.length={length}; set "
                "config.model.attention=auto.",
            )
        if length > m.positions:
            yield (
                "data.length",
                f"is longer than config.model.positions={m.positions}; raise positions or shorten "
                "the rows.",
            )
        yield from super()._find_in_rows(config)


class _MaskedLM(_Encoder):
    unread = (*_Encoder.unread, "generator")
    metrics = ("mlm_loss", "mlm_accuracy", "loss", "pair_loss", "pair_accuracy")


class _ReplacedToken(_Encoder):
    metrics = (
        *("mlm_loss", "mlm_accuracy", "loss", "sampled_accuracy", "replaced_rate"),
        *("discriminator_loss", "discriminator_accuracy", "discriminator_precision"),
        *("discriminator_recall", "discriminator_auc"),
        *("release_discriminator_loss", "release_auc"),
        *("encoder_mlm_loss", "encoder_mlm_accuracy"),
    )

    def find_problems(self, config: "Config") -> Iterator[Problem]:
        g = config.generator
        if g.disentangle_embeddings and (g.kind != "separate" or not g.tie_embeddings):
            yield (
                "generator.disentangle_embeddings",
                "needs a separate generator with tied embeddings; set "
                "config.generator.kind=separate and tie_embeddings=true, or unset it.",
            )
        if g.kind == "separate":
            yield from _find_in_generator(config)
        yield from super().find_problems(config)

    def layers(self, config: "Config") -> tuple[LayerConfig, ...]:
        separate = config.generator.kind == "separate"
        return (*super().layers(config), *(config.generator_encoder.layers if separate else ()))


class _Generative(RecipeSpec):
    generates = True
    metrics = ("loss", "token_loss", "token_accuracy", "perplexity")
    unread = (*_OF_TASKS, "generator", "distillation", "parallel")

    def find_problems(self, config: "Config") -> Iterator[Problem]:
        yield from super().find_problems(config)
        m, length = config.model, operator.attrgetter(self.length)(config)
        if m.position_embedding == "learned" and length > m.positions:
            yield (
                self.length,
                f"is longer than config.model.positions={m.positions} learned positions; raise "
                "positions, shorten the texts or set config.model.position_embedding=sinusoidal.",
            )
        if every := config.checkpoint.huggingface_every:
            yield (
                "checkpoint.huggingface_every",
                f"config.checkpoint.huggingface_every={every}: transformers has no class for these "
                "models; set it to 0.",
            )
        if config.distillation.teacher:
            yield (
                "distillation.teacher",
                f"is for encoders; unset it with config.recipe='{self.name}'.",
            )
        if config.optimizer.release_replicas > 1:
            yield (
                "optimizer.release_replicas",
                f"is for encoders; set it to 1 with config.recipe='{self.name}'.",
            )

    def _find_in_rows(self, config: "Config") -> Iterator[Problem]:
        yield from super()._find_in_rows(config)
        if (layout := config.data.layout) != "packed":
            yield "recipe", f"needs whole documents; set config.data.layout=packed, not {layout}."
        if not config.sequence.shared_vocabulary:
            yield "recipe", "needs a single vocabulary; set config.sequence.shared_vocabulary=True."


class _CausalLM(_Generative):
    network = "a language model"
    followed_by = ()
    metrics = (*_Generative.metrics, "word_perplexity")

    def find_problems(self, config: "Config") -> Iterator[Problem]:
        yield from super().find_problems(config)
        s = config.sequence
        if s.decoder_layers not in (0, config.model.layers):
            yield (
                "sequence.decoder_layers",
                "is for encoder-decoders; with config.recipe='causal_lm' set config.model.layers.",
            )
        for name in ("decoder_mixer", "decoder_mixer_fields", *_DECODER_SCHEDULES):
            if getattr(s, name):
                yield (
                    f"sequence.{name}",
                    "is for encoder-decoders; with config.recipe='causal_lm' set "
                    f"config.model.{name.removeprefix('decoder_')}.",
                )

        if any(phase.mask_fraction for phase in config.phases):
            yield "phases", "set mask_fraction, which a language model does not have; unset it."

    def layers(self, config: "Config") -> tuple[LayerConfig, ...]:
        return config.language_model.decoder.layers


class _EncoderDecoder(_Generative):
    network = "an encoder-decoder"
    followed_by = _OF_PAIRS

    def find_problems(self, config: "Config") -> Iterator[Problem]:
        yield from super().find_problems(config)
        s = config.sequence
        layers = s.decoder_layers or config.model.layers
        for name in _DECODER_SCHEDULES:
            numbers = getattr(s, name)
            if numbers and len(numbers) != layers:
                yield (
                    f"sequence.{name}",
                    f"has {len(numbers)} numbers, but the decoder has {layers} layers "
                    "(config.sequence.decoder_layers, by default as the encoder); set one number "
                    "per layer.",
                )

    def layers(self, config: "Config") -> tuple[LayerConfig, ...]:
        model = config.encoder_decoder
        return (*model.encoder.layers, *model.decoder.layers)

    def decoder_mixer(self, config: "Config") -> tuple[str, tuple[str, ...]]:
        fields = decoder_fields(config.model, config.sequence)
        return fields["mixer"], fields["mixer_fields"]

    def idle_fields(self, config: "Config") -> list[str]:
        return idle_fields(config.model, config.sequence)


class _PairRecipe(RecipeSpec):
    data = "parallel"
    length = "parallel.max_length"
    material = "pairs"
    own_source = "parallel:FILE,FILE"

    def _find_in_rows(self, config: "Config") -> Iterator[Problem]:
        return iter(())  # batches of pairs are built to be divisible

    def rows_are_packed(self, config: "Config") -> bool:
        return False

    def tokens_per_step(self, config: "Config") -> None:
        return None


class _TextPairs(_PairRecipe, _EncoderDecoder):
    followed_by = ()
    unread = (
        *(*_OF_TASKS, "generator", "distillation"),
        *("parallel.score_column", "parallel.prompts", "objective.matryoshka"),
    )

    def has_two_vocabularies(self, config: "Config") -> bool:
        return not config.sequence.shared_vocabulary


class _Embedding(_PairRecipe):
    metrics = ("contrastive_loss", "contrastive_accuracy", "spearman", "loss")
    unread = (*_OF_TASKS, "generator", "distillation", "sequence", "decoding")

    def find_problems(self, config: "Config") -> Iterator[Problem]:
        yield from super().find_problems(config)
        p, positions = config.parallel, config.model.positions
        if p.max_length > positions:
            yield (
                "parallel.max_length",
                f"is longer than config.model.positions={positions}; lower max_length or raise "
                "positions.",
            )
        if len(p.columns) > 3 or (len(p.columns) > 2 and p.score_column):
            yield (
                "parallel.columns",
                "must name two columns, the texts of a pair, or also a hard negative, which pairs "
                "with a score_column do not have.",
            )
        if p.score_column and p.source.startswith("parallel:"):
            yield (
                "parallel.score_column",
                "needs columns; set config.parallel.source to csv:FILE, tsv:FILE, jsonl:FILE or "
                "parquet:FILE.",
            )
        if len(p.prompts) not in (0, 2):
            yield (
                "parallel.prompts",
                "must be two texts, for first and other texts; '' is no prompt.",
            )
        width = len(POOLINGS[config.objective.pooling]) * config.model.hidden_size
        if any(size >= width for size in config.objective.matryoshka):
            yield (
                "objective.matryoshka",
                f"must be smaller than the {width} channels of a vector (config.model.hidden_size, "
                "twice with config.objective.pooling=first_and_mean).",
            )
        if p.from_scratch:
            yield "parallel.from_scratch", "is for generative models; unset it and init_from."
        if not config.sequence.shared_vocabulary:
            yield "sequence.shared_vocabulary", "must be True; an encoder has a single vocabulary."
        if config.optimizer.release_replicas > 1:
            yield "optimizer.release_replicas", "would split the batch; set it to 1."
        if config.distillation.teacher:
            yield "distillation.teacher", "is for pre-training; unset it."

    def pair_format(self, config: "Config") -> PairFormat:
        p = config.parallel
        return PairFormat(len(p.columns) or 2, scored=bool(p.score_column), encoder=True)

    def accumulation(self, config: "Config") -> int:
        return 1  # the objective compares all pairs and computes their vectors part by part


class _Finetuning(RecipeSpec):
    data = "task"
    length = "finetune.length"
    function = "finetune"
    followed_by = ()
    less_disk = "set config.finetune.save_models=false"
    refused_modes: ClassVar[Mapping[str, str]] = {
        "import": "creates a pre-training run; fine-tuning reads weights in any format: "
        "--mode=train --config.init_from={source}.",
        "plan": "is for pre-training; fine-tuning consists of short runs on one machine. Use "
        "--mode=show.",
        "eval": "is for pre-training; the scores of a fine-tuning run are in its table.md and "
        "results.jsonl. For new text use --mode=predict.",
        "verify_resume": "is for pre-training.",
    }
    unread = (
        *("generator", "objective", "distillation", "data", "train", "checkpoint", "outputs"),
        *("optimizer.learning_rate", "optimizer.warmup_steps"),
    )

    def find_problems(self, config: "Config") -> Iterator[Problem]:
        f, outputs = config.finetune, config.outputs
        if config.distillation.teacher:
            yield (
                "distillation.teacher",
                "is for pre-training; in fine-tuning set config.finetune.distill_from.",
            )
        if config.train.tracker:
            yield (
                "train.tracker",
                "is for pre-training; fine-tuning writes WORKDIR/results.jsonl and report.html. "
                "Unset it.",
            )
        if config.optimizer.release_replicas > 1:
            yield (
                "optimizer.release_replicas",
                "is for pre-training; fine-tuning does not split batches. Set it to 1.",
            )
        if not re.fullmatch(r"[\w. -]+", config.task.name):
            yield "task.name", "must be a valid folder name; use letters, digits, - and _."
        if len(outputs.columns) not in (0, outputs.texts):
            yield (
                "outputs.columns",
                f"must name as many columns as config.outputs.texts={outputs.texts}.",
            )
        if config.seed + f.seeds > 2**32:
            yield (
                "seed",
                f"and config.finetune.seeds={f.seeds} exceed the largest seed, 2**32 - 1; lower "
                "the seed.",
            )
        if f.lora_rank and (f.from_scratch or not config.init_from):
            yield (
                "finetune.lora_rank",
                "needs pre-trained weights; set it to 0, or set config.init_from and "
                "config.finetune.from_scratch=false.",
            )
        if f.lora_rank and not f.lora_targets:
            yield "finetune.lora_targets", "is empty; set it to mixer/query,mixer/value."
        several = "trains several models, each with its own loss of privacy"
        reasons = {
            "seeds": f.seeds > 1 and f"{several}; set it to 1",
            "learning_rates": len(f.learning_rates) > 1 and f"{several}; give one value",
            "epochs": len(f.epochs) > 1 and f"{several}; give one value",
            "swap_pairs": f.swap_pairs and "makes two rows of one; set it to False",
            "release_batches": f.release_batches and "draws other batches; set it to False",
            "distill_from": f.distill_from and "is not covered by the guarantee; unset it",
        }
        for name, reason in reasons.items() if f.privacy_epsilon else ():
            if reason:
                yield f"finetune.{name}", f"{reason}, or set config.finetune.privacy_epsilon=0."
        for name in ("learning_rates", "epochs", "buckets", "tasks"):
            values = getattr(f, name)
            if len(set(values)) < len(values):
                what = "task" if name == "tasks" else "value"
                yield f"finetune.{name}", f"contains a {what} twice; remove one."

    def rows_are_packed(self, config: "Config") -> bool:
        return False

    def tokens_per_step(self, config: "Config") -> None:
        return None

    def idle_fields(self, config: "Config") -> list[str]:
        return []  # the weights determine the model

    def count_checkpoints(self, config: "Config") -> tuple[int, int]:
        f = config.finetune
        settings = max(1, len(f.learning_rates)) * max(1, len(f.epochs))
        return 2, len(f.tasks) * settings * f.seeds if f.save_models else 0


def _find_in_generator(config: "Config") -> Iterator[Problem]:
    sizes = GeneratorSizes(config.model, config.generator)
    hidden = sizes.hidden_size
    for stage in list_stages(config.model):
        heads, groups = sizes.heads(stage), stage.sizes.ffn_groups
        if hidden < heads or hidden % heads:
            yield (
                "generator.size",
                f"gives the generator {hidden} channels, which are not divisible by its {heads} "
                "heads; change config.generator.size.",
            )
        if hidden % groups:
            yield (
                "generator.size",
                f"gives the generator {hidden} channels, which are not divisible by "
                f"{stage.names['ffn_groups']}={groups}; change config.generator.size.",
            )


def _find_in_objective(config: "Config", spec: RecipeSpec) -> Iterator[Problem]:
    o, steps = config.objective, config.train.steps
    if o.mask_token_fraction + o.random_token_fraction > 1:
        yield (
            "objective.mask_token_fraction",
            f"and random_token_fraction={o.random_token_fraction} must sum to at most 1.",
        )
    if o.generator_weight + o.discriminator_weight == 0:
        yield (
            "objective.generator_weight",
            f"and discriminator_weight={o.discriminator_weight} must not both be 0.",
        )
    if o.masked_lm_steps and not isinstance(spec, _ReplacedToken):
        yield (
            "objective.masked_lm_steps",
            f"is for config.recipe='replaced_token', not '{spec.name}'; set it to 0.",
        )
    if o.masked_lm_steps and are_numbers(o.masked_lm_steps, steps) and o.masked_lm_steps >= steps:
        yield (
            "objective.masked_lm_steps",
            f"leaves none of config.train.steps={steps} for replaced token detection; lower it, or "
            "set config.recipe=masked_lm.",
        )
    if o.masked_lm_steps and config.generator.kind == "shared":
        yield (
            "objective.masked_lm_steps",
            "needs a generator other than the encoder, but with config.generator.kind='shared' the "
            "encoder predicts masked tokens in all steps; change one of the two.",
        )


def _find_in_distillation(config: "Config") -> Iterator[Problem]:
    d = config.distillation
    if not d.teacher:
        if d.initialize:
            yield (
                "distillation.initialize",
                "needs config.distillation.teacher, which provides the layers; set it.",
            )
        return
    terms = d.logits_weight + d.hidden_weight + d.attention_weight + d.embeddings_weight
    if terms == 0 and not d.initialize:
        yield (
            "distillation.teacher",
            "has no effect: all weights of config.distillation are 0; set, for example, "
            "config.distillation.logits_weight=1.",
        )
    if terms + d.labels_weight == 0:
        yield (
            "distillation",
            "has no weight above 0, so there is no loss; set config.distillation.labels_weight=1.",
        )
    if d.initialize and config.init_from:
        yield (
            "init_from",
            "and config.distillation.initialize=True both set the initial weights; unset one.",
        )
    if config.objective.masked_lm_steps:
        yield (
            "objective.masked_lm_steps",
            "switches the objective, but distillation supports one objective only; set it to 0, or "
            "unset config.distillation.teacher.",
        )


def _find_in_batches(config: "Config") -> Iterator[Problem]:
    t, o = config.train, config.optimizer
    parts = t.accumulation * o.release_replicas
    if t.batch_size % t.accumulation:
        yield (
            "train.batch_size",
            f"is not divisible by config.train.accumulation={t.accumulation}.",
        )
    if t.batch_size % parts:
        yield (
            "train.batch_size",
            f"is not divisible by config.optimizer.release_replicas={o.release_replicas} times "
            f"config.train.accumulation={t.accumulation}; use a multiple of {parts}, or 1 replica.",
        )


def _find_in_sentence_pairs(config: "Config", spec: RecipeSpec) -> Iterator[Problem]:
    pairs, layout = config.objective.sentence_pairs != "none", config.data.layout
    if pairs and not isinstance(spec, _MaskedLM):
        yield (
            "objective.sentence_pairs",
            f"needs config.recipe='masked_lm', not '{spec.name}'; change one of the two.",
        )
    if pairs and layout != "pairs":
        yield "objective.sentence_pairs", "needs rows with two texts; set config.data.layout=pairs."
    if layout == "pairs" and not pairs:
        yield (
            "data.layout",
            "config.data.layout='pairs' needs a sentence-pair objective; set "
            "config.objective.sentence_pairs=next or order, or another layout.",
        )


RECIPES: dict[str, RecipeSpec] = {
    spec.name: spec
    for spec in (
        _ReplacedToken("replaced_token"),
        _MaskedLM("masked_lm"),
        _CausalLM("causal_lm"),
        _EncoderDecoder("span_corruption"),
        *map(_TextPairs, _OF_PAIRS),
        _Embedding("embedding"),
        _Finetuning("finetune"),
    )
}
