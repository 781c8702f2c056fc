"""Validation of a config before any long work starts: rules between fields.

Single fields are checked by their annotations, see `fields.py`. The number of devices is checked in
`training/partitioning.py`, the corpus when it is read.
"""

import dataclasses
import re
from collections.abc import Collection, Iterator

from convbert_jax.config import lengths
from convbert_jax.config.errors import ConfigError
from convbert_jax.config.fields import are_numbers, check_choice, check_fields
from convbert_jax.config.mixers import check_name
from convbert_jax.config.network import layers_of_stages, list_stages, schedules
from convbert_jax.config.recipes import Problem
from convbert_jax.config.run import Config
from convbert_jax.config.training import OPTIMIZERS

_SMALLEST_WEIGHT = 1e-3  # of a source; gives 16 rows of a cycle of 16,384
# Fields of config.decoding that only one method uses.
_OF_METHOD = {"beam": "beam", "temperature": "sample", "top_k": "sample", "top_p": "sample"}


def check(config: Config) -> None:
    """Raises ConfigError for the first invalid field."""
    check_fields(config)
    _refuse(config, _find_problems(config))
    _refuse(config, _find_in_phases(config))
    for phase, of_phase in zip(config.phases, config.phase_configs, strict=False):
        if of_phase != config:
            try:
                _refuse(of_phase, _find_problems(of_phase))
            except ConfigError as error:
                message = f"in phase '{phase.name}': {error}"
                raise ConfigError(message, field="config.phases") from None
    _check_mixers(config)  # last, because it loads jax


def check_asked(config: Config, asked: Collection[str]) -> None:
    """Raises ConfigError for a field that was set explicitly but has no effect.

    Args:
      asked: paths of the fields that were set, as "decoding.beam".
    """
    _refuse(config, _find_idle(config, asked))


def _find_idle(config: Config, asked: Collection[str]) -> Iterator[Problem]:
    if "train.batch_size" in asked and config.spec.data == "parallel":
        yield (
            "train.batch_size",
            "has no effect on pairs of texts; remove it and set config.parallel.batch_tokens, the "
            "rows of a batch times the tokens of the longer text.",
        )
    of_phases = [isinstance(p.length, int) or lengths.SHARE not in p.length for p in config.phases]
    if "train.steps" in asked and any(of_phases):
        yield "train.steps", "has no effect: the lengths of config.phases set it; remove it."
    if "optimizer.schedule" in asked and config.phases:
        yield "optimizer.schedule", "has no effect: config.phases have their own; remove it."
    for name in ("data.source", "data.validation_source"):
        if name in asked and config.data.mixture:
            yield name, "has no effect with config.data.mixture; set it there, or unset one."
    for name in ("lora_alpha", "lora_targets"):
        changed = getattr(config.finetune, name) != getattr(type(config.finetune)(), name)
        if changed and not config.finetune.lora_rank:
            yield f"finetune.{name}", "has no effect with config.finetune.lora_rank=0; set a rank."
    used = config.decoding.method
    for name, method in _OF_METHOD.items():
        if f"decoding.{name}" in asked and used != method and config.spec.generates:
            yield (
                f"decoding.{name}",
                f"has no effect with config.decoding.method={used}; remove it, or set "
                f"config.decoding.method={method}.",
            )


def _refuse(config: Config, problems: Iterator[Problem]) -> None:
    """Raises ConfigError for the first problem, with the value of its field."""
    for path, message in problems:
        value = config
        for name, number in re.findall(r"(\w+)(?:\[(\d+)\])?", path):
            value = getattr(value, name)
            value = value[int(number)] if number else value
        of_sections = dataclasses.is_dataclass(value) or path in ("data.mixture", "phases")
        value = None if of_sections or value == "" else value
        raise ConfigError(message, field=f"config.{path}", value=value)


def _find_problems(config: Config) -> Iterator[Problem]:
    yield from _find_in_lengths(config)
    yield from _find_in_model(config)
    yield from config.spec.find_problems(config)
    yield from _find_in_mixture(config)
    yield from _find_in_tokenizer(config)
    yield from _find_in_parallel(config)
    yield from _find_in_decoding(config)
    yield from _find_in_training(config)


def _find_in_lengths(config: Config) -> Iterator[Problem]:
    for field, text in lengths.find_texts(config):
        path = field.removeprefix("config.")
        _, unit = lengths.parse(text, field)
        if config.spec.data == "task":
            yield path, "is for pre-training; in fine-tuning set config.finetune.epochs."
        if config.spec.data == "parallel" and unit not in ("steps", lengths.SHARE):
            yield path, "needs a corpus; with pairs of texts give a number of steps."
        if config.data.mixture and unit == "epochs":
            yield path, "is not defined for config.data.mixture; give it in words or tokens."
        if path == "train.steps" and unit == lengths.SHARE:
            yield path, "is a share of itself; give it in steps, tokens, words or epochs."
        if unit == lengths.HOURS and path != "train.steps":
            yield path, "is in hours, which only config.train.steps supports; give a share of it."
        # The speed is measured at the start, so all steps must have equal costs.
        if unit == lengths.HOURS and (config.phases or config.objective.masked_lm_steps):
            varies = "config.phases" if config.phases else "config.objective.masked_lm_steps"
            yield (
                path,
                f"is in hours, but {varies} changes the cost of a step; give steps or words.",
            )


def _find_in_model(config: Config) -> Iterator[Problem]:
    m = config.model
    if m.attention in ("cudnn", "splash") and m.attention_dropout:
        yield (
            "model.attention",
            "does not support attention dropout; set config.model.attention_dropout=0, or "
            "config.model.attention=auto.",
        )
    _check_stages(config)
    if m.last_dropout and m.norm != "pre":
        yield (
            "model.last_dropout",
            "is applied after the final norm, which this model does not have; set it to 0, or "
            "config.model.norm=pre.",
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
    if of_decoder := config.spec.decoder_mixer(config):
        used.append(of_decoder)
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


def _find_in_mixture(config: Config) -> Iterator[Problem]:
    mixture = config.data.mixture
    names = [section.name for section in mixture]
    for i, section in enumerate(mixture):
        if not re.fullmatch(r"[A-Za-z0-9][\w-]*", section.name) or section.name == "units":
            yield f"data.mixture[{i}].name", "must consist of letters, digits, '_' and '-'."
        if names.count(section.name) > 1:
            yield f"data.mixture[{i}].name", "occurs twice; give each source its own name."
        if not section.source:
            yield f"data.mixture[{i}].source", "is empty; set a corpus, as text:corpus/*.txt."
        if 0 < section.weight < _SMALLEST_WEIGHT:
            yield f"data.mixture[{i}].weight", f"is below {_SMALLEST_WEIGHT}; raise it, or use 0."
    if mixture and config.spec.data != "data":
        yield "data.mixture", "is for pre-training on a corpus; unset it."
    total = sum(section.weight for section in mixture)
    if mixture and abs(total - 1) > 1e-6:
        yield "data.mixture", f"has weights that add up to {total:g}; they must add up to 1."
    if mixture and config.data.release_shuffle:
        yield "data.release_shuffle", "is for one source; unset it, or config.data.mixture."


def _find_in_phases(config: Config) -> Iterator[Problem]:
    phases, names = config.phases, [phase.name for phase in config.phases]
    if phases and config.spec.data != "data":
        yield "phases", "are for pre-training on a corpus; unset them."
    if phases and config.data.release_shuffle:
        yield "data.release_shuffle", "is for runs without phases; unset it, or config.phases."
    for i, phase in enumerate(phases):
        if not re.fullmatch(r"[A-Za-z0-9][\w-]*", phase.name):
            yield f"phases[{i}].name", "must consist of letters, digits, '_' and '-'."
        if names.count(phase.name) > 1:
            yield f"phases[{i}].name", "occurs twice; give each phase its own name."
        if phase.weights and len(phase.weights) != len(config.data.mixture):
            yield (
                f"phases[{i}].weights",
                f"must have one weight for each of the {len(config.data.mixture)} sources of "
                "config.data.mixture.",
            )
        if phase.weights and abs(sum(phase.weights) - 1) > 1e-6:
            yield f"phases[{i}].weights", f"add up to {sum(phase.weights):g}, not to 1."
        if any(0 < weight < _SMALLEST_WEIGHT for weight in phase.weights):
            yield f"phases[{i}].weights", f"are below {_SMALLEST_WEIGHT}; raise them, or use 0."
        if phase.rotary_base and config.model.position_embedding != "rotary":
            yield f"phases[{i}].rotary_base", "needs config.model.position_embedding=rotary."
    parsed = [
        lengths.parse(phase.length, f"config.phases[{i}].length")
        for i, phase in enumerate(phases)
        if isinstance(phase.length, str)
    ]
    shares = [amount for amount, unit in parsed if unit == lengths.SHARE]
    if shares and (len(shares) < len(phases) or sum(shares) != 100):
        yield "phases", "have lengths in %, which must be the unit of all phases and add up to 100."


def _find_in_tokenizer(config: Config) -> Iterator[Problem]:
    t = config.tokenizer
    if t.kind == "pieces" and not config.spec.generates:
        yield (
            "tokenizer.kind",
            "config.tokenizer.kind='pieces' is for generative models, as in fairseq; an encoder "
            "needs [CLS] and [SEP]: set it to sentencepiece, wordpiece or bpe.",
        )
    for name in ("lowercase", "strip_accents"):
        if t.kind == "bpe" and getattr(t, name) is True:
            yield (
                f"tokenizer.{name}",
                "does not apply to config.tokenizer.kind='bpe', which keeps case and accents; set "
                "it to false, or kind to sentencepiece or wordpiece.",
            )
    if t.kind not in ("sentencepiece", "bpe") and t.normalization not in ("auto", "identity"):
        yield (
            "tokenizer.normalization",
            f"needs kind='sentencepiece' or 'bpe', not '{t.kind}'; change one of the two.",
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
    if are_numbers(o.warmup_steps, t.steps) and o.warmup_steps > t.steps:
        yield (
            "optimizer.warmup_steps",
            f"is more than config.train.steps={t.steps}; shorten the warm-up.",
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


def _find_in_parallel(config: Config) -> Iterator[Problem]:
    p, t = config.parallel, config.tokenizer
    if len(p.columns) == 1:
        yield (
            "parallel.columns",
            "must name the columns of source and target, optionally followed by columns of further "
            "references.",
        )
    # For an encoder: SimCSE pairs each text with itself, and a third column has hard negatives.
    references = p.columns if config.spec.generates else ()
    if len(set(references)) < len(references):
        yield "parallel.columns", "contains a column twice; remove one."
    if len(references) > 2 and not p.validation_source and not config.decoding.tests:
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


def _check_mixers(config: Config) -> None:
    """Runs the checks that need the mixers."""
    layers = config.spec.layers(config)
    if not config.spec.rows_are_packed(config):
        return
    # Without a mask, convolutions would mix packed documents.
    remedy = other = "use config.data.layout='electra' with it"
    if config.spec.generates:  # supports only the layout packed
        remedy, other = "set it to True", "use another mixer"
    for mixer in () if config.model.mask_convolution else (layer.mixer for layer in layers):
        if mixer.reads_padding and "mask_convolution" in mixer.fields(config.model.hidden_size):
            raise ConfigError(
                f"lets convolutions mix packed documents; {remedy}.",
                field="config.model.mask_convolution",
                value=False,
            )
    for stage, layer in layers_of_stages(config.model):
        if layer.mixer.reads_padding:
            raise ConfigError(
                "reads beyond the end of a document, where config.data.layout='packed' places "
                f"another document; {other}.",
                field=stage.names["mixer"],
                value=stage.sizes.mixer,
            )
