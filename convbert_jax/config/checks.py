"""Validation of a config before any long work starts: rules between fields.

Single fields are checked by their annotations, see `fields.py`. The number of devices is checked in
`training/partitioning.py`, the corpus when it is read.
"""

import dataclasses
import operator
import re
from collections.abc import Collection, Iterator

from convbert_jax.config.errors import ConfigError
from convbert_jax.config.fields import check_choice, check_fields
from convbert_jax.config.mixers import check_name
from convbert_jax.config.network import GeneratorSizes, decoder_fields, list_stages, schedules
from convbert_jax.config.run import Config
from convbert_jax.config.training import OPTIMIZERS

# Path of an invalid field, and the problem with its fix.
Problem = tuple[str, str]

# Fields of config.decoding that only one method uses.
_OF_METHOD = {"beam": "beam", "temperature": "sample", "top_k": "sample", "top_p": "sample"}
_DECODER_SCHEDULES = ("decoder_kernel_sizes", "decoder_dilations")


def check(config: Config) -> None:
    """Raises ConfigError for the first invalid field."""
    check_fields(config)
    _refuse(config, _find_problems(config))
    _check_mixers(config)  # last, because it loads jax


def check_asked(config: Config, asked: Collection[str]) -> None:
    """Raises ConfigError for a field that was set explicitly but has no effect.

    Args:
      asked: paths of the fields that were set, as "decoding.beam".
    """
    _refuse(config, _find_idle(config, asked))


def _find_idle(config: Config, asked: Collection[str]) -> Iterator[Problem]:
    if "train.batch_size" in asked and config.reads_pairs:
        yield (
            "train.batch_size",
            "has no effect on pairs of texts; remove it and set config.parallel.batch_tokens, the "
            "rows of a batch times the tokens of the longer text.",
        )
    used = config.decoding.method
    for name, method in _OF_METHOD.items():
        if f"decoding.{name}" in asked and used != method and config.writes_text:
            yield (
                f"decoding.{name}",
                f"has no effect with config.decoding.method={used}; remove it, or set "
                f"config.decoding.method={method}.",
            )


def _refuse(config: Config, problems: Iterator[Problem]) -> None:
    """Raises ConfigError for the first problem, with the value of its field."""
    for path, message in problems:
        value = operator.attrgetter(path)(config)
        value = None if dataclasses.is_dataclass(value) or value == "" else value
        raise ConfigError(message, field=f"config.{path}", value=value)


def _find_problems(config: Config) -> Iterator[Problem]:
    yield from _find_in_model(config)
    if config.recipe == "finetune":
        yield from _find_in_finetuning(config)
    else:
        yield from _find_in_objective(config)
        yield from _find_in_distillation(config)
        if not config.reads_pairs:
            yield from _find_in_data(config)
        yield from _find_in_sentence_pairs(config)
    yield from _find_in_tokenizer(config)
    yield from _find_in_parallel(config)
    yield from _find_in_decoding(config)
    if config.writes_text:
        yield from _find_in_generative(config)
    yield from _find_in_training(config)


def _find_in_model(config: Config) -> Iterator[Problem]:
    m, g, s = config.model, config.generator, config.sequence
    if m.attention in ("cudnn", "splash") and m.attention_dropout:
        yield (
            "model.attention",
            "does not support attention dropout; set config.model.attention_dropout=0, or "
            "config.model.attention=auto.",
        )
    # The op checks the lengths of buckets in fine-tuning, and of batches of generative models.
    rows = config.recipe != "finetune" and not config.writes_text
    if m.attention in ("splash", "pallas_tpu") and rows and config.data.length % 128:
        yield (
            "model.attention",
            f"needs a row length divisible by 128, but config.data.length={config.data.length}; "
            "set config.model.attention=auto.",
        )
    _check_stages(config)
    if config.recipe == "replaced_token":
        if g.disentangle_embeddings and (g.kind != "separate" or not g.tie_embeddings):
            yield (
                "generator.disentangle_embeddings",
                "needs a separate generator with tied embeddings; set "
                "config.generator.kind=separate and tie_embeddings=true, or unset it.",
            )
        if g.kind == "separate":
            yield from _find_in_generator(config)
    if s.last_dropout and (s.norm != "pre" or not s.last_norm):
        yield (
            "sequence.last_dropout",
            "is applied after the final norm, which this model does not have; set it to 0, or "
            "config.sequence.norm=pre with last_norm.",
        )


def _check_stages(config: Config) -> None:
    """Raises ConfigError for invalid stages; mixers check their own fields."""
    model = config.model
    for i, section in enumerate(model.stages):
        if section.mixer_fields and not section.mixer:
            raise ConfigError(
                f"needs a mixer; set config.model.stages[{i}].mixer.",
                field=f"config.model.stages[{i}].mixer_fields",
                value=section.mixer_fields,
            )
    check_name(model.mixer, "config.model.mixer")
    for name, numbers in schedules(model).items():
        if model.stages:
            raise ConfigError(
                f"config.model.{name}s and config.model.stages both describe the layers; set "
                f"{name} in each of config.model.stages and clear the other: "
                f"--config.model.{name}s=",
                field=f"config.model.{name}",
            )
        if len(numbers) != model.layers:
            raise ConfigError(
                f"config.model.{name}s has {len(numbers)} numbers, but config.model.layers="
                f"{model.layers}; set one number per layer.",
                field=f"config.model.{name}",
            )
    stages = list_stages(model)
    for stage in stages:
        sizes, names = stage.sizes, stage.names
        check_name(sizes.mixer, names["mixer"])
        fewer = model.hidden_size // sizes.heads * sizes.heads
        if fewer != model.hidden_size:
            raise ConfigError(
                f"is not divisible by {names['heads']}={sizes.heads}; use {fewer or sizes.heads} "
                f"or {fewer + sizes.heads}.",
                field="config.model.hidden_size",
                value=model.hidden_size,
            )
        widths = {"config.model.hidden_size": model.hidden_size, names["ffn_size"]: sizes.ffn_size}
        for name, width in widths.items():
            if width % sizes.ffn_groups:
                raise ConfigError(
                    f"is not divisible by {names['ffn_groups']}={sizes.ffn_groups}.",
                    field=name,
                    value=width,
                )
    used = [(stage.sizes.mixer, stage.sizes.mixer_fields) for stage in stages]
    if config.writes_text and config.recipe != "causal_lm":
        decoder = decoder_fields(model, config.sequence)
        used.append((decoder["mixer"], decoder["mixer_fields"]))
    if model.mixer_fields and (model.mixer, model.mixer_fields) not in used:
        raise ConfigError(
            "is not used: every stage in config.model.stages sets another mixer or its own "
            "mixer_fields; remove it.",
            field="config.model.mixer_fields",
            value=",".join(model.mixer_fields),
        )
    layers = sum(section.layers for section in model.stages)
    if model.stages and layers != model.layers:
        raise ConfigError(
            f"has {layers} layers, but config.model.layers={model.layers}; make them equal.",
            field="config.model.stages",
        )


def _find_in_generator(config: Config) -> Iterator[Problem]:
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


def _find_in_objective(config: Config) -> Iterator[Problem]:
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
    if o.masked_lm_steps and config.recipe != "replaced_token":
        yield (
            "objective.masked_lm_steps",
            f"is for config.recipe='replaced_token', not '{config.recipe}'; set it to 0.",
        )
    if o.masked_lm_steps >= steps:
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


def _find_in_distillation(config: Config) -> Iterator[Problem]:
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


def _find_in_data(config: Config) -> Iterator[Problem]:
    d = config.data
    yield from _find_in_encoding("data.encoding", d.encoding)
    if not d.source:
        yield "data.source", "is empty; set a corpus, for example text:corpus/*.txt or docstrings."
    if d.length > config.model.positions and not config.writes_text:
        yield (
            "data.length",
            f"is longer than config.model.positions={config.model.positions}; raise positions or "
            "shorten the rows.",
        )
    if d.layout != "packed" and config.model.types < 2:
        yield "data.layout", "has two segments per row; set config.model.types to at least 2."
    if d.release_builder_bug and d.layout != "electra":
        yield (
            "data.release_builder_bug",
            "needs config.data.layout='electra'; set it, or unset release_builder_bug.",
        )
    if d.heldout_fraction == 0 and not d.validation_source:
        yield (
            "data.heldout_fraction",
            "leaves no text for evaluation; raise it or set config.data.validation_source.",
        )


def _find_in_encoding(path: str, encoding: str) -> Iterator[Problem]:
    """Finds an encoding that does not exist, or does not decode the byte "\\n" as line end."""
    try:
        same = b"\n".decode(encoding) == "\n"
    except LookupError:
        yield (
            path,
            "is unknown; use an encoding that Python supports, for example utf-8, cp1252 or gbk.",
        )
        return
    except UnicodeDecodeError:
        same = False
    if not same:
        yield (
            path,
            "is not supported, because its line ends differ from ASCII; convert the files "
            f"(iconv -f {encoding} -t UTF-8).",
        )


def _find_in_sentence_pairs(config: Config) -> Iterator[Problem]:
    pairs, layout = config.objective.sentence_pairs != "none", config.data.layout
    if pairs and config.recipe != "masked_lm":
        yield (
            "objective.sentence_pairs",
            f"needs config.recipe='masked_lm', not '{config.recipe}'; change one of the two.",
        )
    if pairs and layout != "pairs":
        yield "objective.sentence_pairs", "needs rows with two texts; set config.data.layout=pairs."
    if layout == "pairs" and not pairs:
        yield (
            "data.layout",
            "config.data.layout='pairs' needs a sentence-pair objective; set "
            "config.objective.sentence_pairs=next or order, or another layout.",
        )


def _find_in_tokenizer(config: Config) -> Iterator[Problem]:
    t = config.tokenizer
    if t.kind == "pieces" and not config.writes_text:
        yield (
            "tokenizer.kind",
            "config.tokenizer.kind='pieces' is for generative models, as in fairseq; an encoder "
            "needs [CLS] and [SEP]: set it to sentencepiece or wordpiece.",
        )
    if t.kind != "sentencepiece" and t.normalization not in ("auto", "identity"):
        yield (
            "tokenizer.normalization",
            f"needs kind='sentencepiece', not '{t.kind}'; change one of the two.",
        )
    if t.sentinels and t.vocab_size < t.sentinels + 17:
        yield (
            "tokenizer.sentinels",
            f"leaves no ids for text in config.tokenizer.vocab_size={t.vocab_size}; set vocab_size "
            f"to {t.sentinels + 17} or more.",
        )


def _find_in_training(config: Config) -> Iterator[Problem]:
    o, t, best = config.optimizer, config.train, config.checkpoint.best_metric
    if ":" not in o.method:
        check_choice("optimizer.method", o.method, (*OPTIMIZERS, "PACKAGE.MODULE:FUNCTION"))
    if o.decay_to and o.schedule not in ("linear", "cosine"):
        yield (
            "optimizer.decay_to",
            f"has no effect with config.optimizer.schedule='{o.schedule}'; set it to 0, or "
            "schedule to linear or cosine.",
        )
    if o.schedule == "inverse_sqrt" and not o.warmup_steps:
        yield (
            "optimizer.schedule",
            "config.optimizer.schedule='inverse_sqrt' decays from the end of the warm-up; set "
            "config.optimizer.warmup_steps above 0.",
        )
    if o.warmup_steps > t.steps:
        yield (
            "optimizer.warmup_steps",
            f"is more than config.train.steps={t.steps}; shorten the warm-up.",
        )
    parts = t.accumulation * o.release_replicas
    if not config.reads_pairs and t.batch_size % t.accumulation:  # batches of pairs are divisible
        yield (
            "train.batch_size",
            f"is not divisible by config.train.accumulation={t.accumulation}.",
        )
    if not config.reads_pairs and t.batch_size % parts:
        yield (
            "train.batch_size",
            f"is not divisible by config.optimizer.release_replicas={o.release_replicas} times "
            f"config.train.accumulation={t.accumulation}; use a multiple of {parts}, or 1 replica.",
        )
    if o.release_replicas > 1 and config.recipe == "finetune":
        yield (
            "optimizer.release_replicas",
            "is for pre-training; fine-tuning does not split batches. Set it to 1.",
        )
    if best and config.heldout_metrics:
        check_choice("checkpoint.best_metric", best, config.heldout_metrics)
        if best.endswith(("loss", "perplexity")) and config.checkpoint.best_mode != "min":
            yield (
                "checkpoint.best_metric",
                "is better when lower; set config.checkpoint.best_mode=min.",
            )
    axes = dataclasses.asdict(config.mesh)
    sizes = list(axes.values())
    if 0 in sizes or sizes.count(-1) > 1:
        raise ConfigError(
            "needs sizes above 0, and -1 (all remaining devices) at most once.",
            field="config.mesh",
            value=axes,
        )


def _find_in_finetuning(config: Config) -> Iterator[Problem]:
    f, outputs = config.finetune, config.outputs
    if config.distillation.teacher:
        yield (
            "distillation.teacher",
            "is for pre-training; in fine-tuning set config.finetune.distill_from.",
        )
    if config.train.tracker:
        yield (
            "train.tracker",
            "is for pre-training; fine-tuning writes WORKDIR/results.jsonl and report.html. Unset "
            "it.",
        )
    yield from _find_in_encoding("task.encoding", config.task.encoding)
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
            f"and config.finetune.seeds={f.seeds} exceed the largest seed, 2**32 - 1; lower the "
            "seed.",
        )
    for name in ("learning_rates", "epochs", "buckets", "tasks"):
        values = getattr(f, name)
        if len(set(values)) < len(values):
            what = "task" if name == "tasks" else "value"
            yield f"finetune.{name}", f"contains a {what} twice; remove one."


def _find_in_parallel(config: Config) -> Iterator[Problem]:
    p, t = config.parallel, config.tokenizer
    yield from _find_in_encoding("parallel.encoding", p.encoding)
    if len(p.columns) == 1:
        yield (
            "parallel.columns",
            "must name the columns of source and target, optionally followed by columns of further "
            "references.",
        )
    if len(set(p.columns)) < len(p.columns):
        yield "parallel.columns", "contains a column twice; remove one."
    if len(p.columns) > 2 and not p.validation_source and not config.decoding.tests:
        yield (
            "parallel.columns",
            "names further references, which are used only with config.parallel.validation_source "
            "or config.decoding.test_sources; set one of these, or name two columns.",
        )
    if 0 < p.max_ratio < 1:
        yield (
            "parallel.max_ratio",
            "would exclude all pairs; use 1 or more, or 0 for no limit.",
        )
    if p.from_scratch and not config.init_from:
        yield (
            "parallel.from_scratch",
            "takes sizes and vocabulary from config.init_from, which is empty; unset it, or set "
            "config.init_from.",
        )
    if p.heldout_fraction == 0 and not p.validation_source:
        yield (
            "parallel.heldout_fraction",
            "leaves no pairs for evaluation; raise it or set config.parallel.validation_source.",
        )
    unigram = t.kind == "sentencepiece" and (t.path or t.algorithm == "unigram")
    if p.sampling and not unigram:
        yield (
            "parallel.sampling",
            "needs a unigram vocabulary; set it to 0, or config.tokenizer.kind=sentencepiece and "
            "algorithm=unigram.",
        )
    if config.sequence.shared_vocabulary and (p.target_vocab_size or p.target_vocabulary):
        yield (
            "parallel.target_vocab_size",
            "and target_vocabulary need a separate target vocabulary; set "
            "config.sequence.shared_vocabulary=False.",
        )
    if p.batch_tokens < p.max_length:
        yield (
            "parallel.batch_tokens",
            f"is less than one text of config.parallel.max_length={p.max_length} tokens; raise it "
            "or lower max_length.",
        )


def _find_in_decoding(config: Config) -> Iterator[Problem]:
    d = config.decoding
    if d.method == "beam" and d.n_best > d.beam:
        yield "decoding.n_best", f"is larger than config.decoding.beam={d.beam}; raise the beam."
    if d.method == "greedy" and d.n_best > 1:
        yield (
            "decoding.n_best",
            f"config.decoding.n_best={d.n_best}, but config.decoding.method=greedy generates one "
            "text; set method to beam or sample.",
        )
    if d.length_ratio == 0 and d.length_extra == 0:
        yield (
            "decoding.length_ratio",
            "and config.decoding.length_extra=0 limit outputs to 0 tokens; raise one of them.",
        )
    smallest = min(config.vocabularies)
    if d.method == "beam" and 2 * d.beam > smallest:
        yield (
            "decoding.beam",
            f"needs {2 * d.beam} candidate tokens, but the vocabulary has {smallest}; set it to at "
            f"most {smallest // 2}.",
        )
    if d.average > max(1, config.checkpoint.keep):
        yield (
            "decoding.average",
            f"is larger than config.checkpoint.keep={config.checkpoint.keep}, the number of kept "
            "checkpoints; raise keep.",
        )
    names = [name for name, _ in d.tests]
    for name, source in d.tests:
        if not name:
            raise ConfigError(
                f"contains '{source}', which must be NAME=SOURCE, as "
                "2016=parallel:test.en,test.de.",
                field="config.decoding.test_sources",
            )
    for name in names:
        if names.count(name) > 1 or name == "validation":
            raise ConfigError(
                f"contains the name '{name}' twice, or it is the name of the held-out pairs; use "
                "unique names.",
                field="config.decoding.test_sources",
            )


def _find_in_generative(config: Config) -> Iterator[Problem]:
    m, s, recipe = config.model, config.sequence, config.recipe
    longest = "parallel.max_length" if config.reads_pairs else "data.length"
    if s.positions == "learned" and operator.attrgetter(longest)(config) > m.positions:
        yield (
            longest,
            f"is longer than config.model.positions={m.positions} learned positions; raise "
            "positions, shorten the texts or set config.sequence.positions=sinusoidal.",
        )
    if not config.reads_pairs and config.data.layout != "packed":
        layout = config.data.layout
        yield "recipe", f"needs whole documents; set config.data.layout=packed, not {layout}."
    if not config.reads_pairs and not s.shared_vocabulary:
        yield "recipe", "needs a single vocabulary; set config.sequence.shared_vocabulary=True."
    if recipe == "causal_lm" and s.decoder_layers not in (0, m.layers):
        yield (
            "sequence.decoder_layers",
            "is for encoder-decoders; with config.recipe='causal_lm' set config.model.layers.",
        )
    for name in ("decoder_mixer", "decoder_mixer_fields", *_DECODER_SCHEDULES):
        if recipe == "causal_lm" and getattr(s, name):
            yield (
                f"sequence.{name}",
                "is for encoder-decoders; with config.recipe='causal_lm' set "
                f"config.model.{name.removeprefix('decoder_')}.",
            )
    layers = s.decoder_layers or m.layers
    for name in _DECODER_SCHEDULES:
        numbers = getattr(s, name)
        if numbers and len(numbers) != layers:
            yield (
                f"sequence.{name}",
                f"has {len(numbers)} numbers, but the decoder has {layers} layers "
                "(config.sequence.decoder_layers, by default as the encoder); set one number per "
                "layer.",
            )
    if every := config.checkpoint.huggingface_every:
        yield (
            "checkpoint.huggingface_every",
            f"config.checkpoint.huggingface_every={every}: transformers has no class for these "
            "models; set it to 0.",
        )
    if config.distillation.teacher:
        yield "distillation.teacher", f"is for encoders; unset it with config.recipe='{recipe}'."
    if config.optimizer.release_replicas > 1:
        yield (
            "optimizer.release_replicas",
            f"is for encoders; set it to 1 with config.recipe='{recipe}'.",
        )


def _check_mixers(config: Config) -> None:
    """Runs the checks that need the mixers."""
    if config.writes_text:
        _ = config.language_model if config.recipe == "causal_lm" else config.encoder_decoder
    encoder = config.encoder
    if config.recipe == "replaced_token" and config.generator.kind == "separate":
        _ = config.generator_encoder  # raises ConfigError
    if config.recipe == "finetune" or config.reads_pairs or config.data.layout != "packed":
        return
    # Without a mask, convolutions would mix packed documents.
    remedy = other = "use config.data.layout='electra' with it"
    decoder = ()
    if config.writes_text:  # supports only the layout packed
        remedy, other = "set it to True", "use another mixer"
    if config.recipe == "span_corruption":
        decoder = config.encoder_decoder.decoder.stages
    for made in () if config.model.mask_convolution else (*encoder.stages, *decoder):
        mixer = made.layer.mixer
        if mixer.reads_padding and "mask_convolution" in mixer.fields(encoder.hidden_size):
            raise ConfigError(
                f"lets convolutions mix packed documents; {remedy}.",
                field="config.model.mask_convolution",
                value=False,
            )
    for stage, made in zip(list_stages(config.model), encoder.stages, strict=True):
        if made.layer.mixer.reads_padding:
            raise ConfigError(
                "reads beyond the end of a document, where config.data.layout='packed' places "
                f"another document; {other}.",
                field=stage.names["mixer"],
                value=stage.sizes.mixer,
            )
