"""Validation of configs before any long work starts.

The number of devices is checked in `training/partitioning.py`, the corpus when it is read.
"""

import dataclasses

from convbert_jax.config.checks import rules
from convbert_jax.config.checks.bounds import check_bounds
from convbert_jax.config.checks.distillation import check_distillation
from convbert_jax.config.checks.finetuning import check_finetuning
from convbert_jax.config.checks.sequences import check_sequence_model, check_sequences
from convbert_jax.config.checks.stages import check_generator, check_stages
from convbert_jax.config.implementations import ATTENTIONS, CONVOLUTIONS
from convbert_jax.config.network import list_stages
from convbert_jax.config.run import DTYPES, PLATFORMS, RECIPES, Config
from convbert_jax.config.sections import (
    GRADIENT_DTYPES,
    INITIALIZERS,
    NORMALIZATIONS,
    OPTIMIZERS,
    REMAT_POLICIES,
    SCHEDULES,
    SENTENCE_PAIRS,
    TEXT_FORMATS,
    TOKENIZERS,
    TRACKERS,
    ObjectiveSection,
)
from convbert_jax.config.sequences.network import decoder_fields


def check(config: Config) -> None:
    """Raises ConfigError for the first invalid field."""
    check_bounds(config)
    rules.check_choice("recipe", config.recipe, RECIPES)
    rules.check_choice("platform", config.platform, PLATFORMS)
    rules.check_choice("compute_dtype", config.compute_dtype, DTYPES)
    _check_model(config)
    if config.recipe == "finetune":
        check_finetuning(config)
    else:
        _check_objective(config.objective)
        _check_phases(config)
        check_distillation(config)
        if not config.reads_pairs:
            _check_data(config)
        _check_sentence_pairs(config)
    _check_tokenizer(config)
    check_sequences(config)
    _check_training(config)
    _check_mixers(config)  # last, because it loads jax


def _check_model(config: Config) -> None:
    m, g = config.model, config.generator
    rules.check_choice("model.attention", m.attention, ("auto", *ATTENTIONS))
    rules.check_choice("model.convolution", m.convolution, ("auto", *CONVOLUTIONS))
    rules.check(
        m.attention in ("auto", "xla", "pallas_tpu") or m.attention_dropout == 0.0,
        "does not support attention dropout; set config.model.attention_dropout=0, or "
        "config.model.attention=auto.",
        field="config.model.attention",
        value=m.attention,
    )
    rules.check(
        m.attention not in ("splash", "pallas_tpu")
        or config.data.length % 128 == 0
        or config.recipe == "finetune"  # the op checks the lengths of buckets
        or config.writes_text,  # and of batches
        "needs a row length divisible by 128, but "
        f"config.data.length={config.data.length}; set config.model.attention=auto.",
        field="config.model.attention",
        value=m.attention,
    )
    rules.check_choice("model.remat", m.remat, REMAT_POLICIES)
    rules.check_choice("model.initializers", m.initializers, INITIALIZERS)
    others = ()
    if config.writes_text and config.recipe != "causal_lm":
        decoder = decoder_fields(m, config.sequence)
        others = ((decoder["mixer"], decoder["mixer_fields"]),)
    check_stages(m, others)
    if config.recipe == "replaced_token":
        rules.check_choice("generator.kind", g.kind, ("separate", "shared", "uniform"))
        rules.check(
            not g.disentangle_embeddings or (g.kind == "separate" and g.tie_embeddings),
            "needs a separate generator with tied embeddings; set "
            "config.generator.kind=separate and tie_embeddings=true, or unset it.",
            field="config.generator.disentangle_embeddings",
            value=True,
        )
        if g.kind == "separate":
            check_generator(m, g)


def _check_objective(o: ObjectiveSection) -> None:
    rules.check(
        o.mask_token_fraction + o.random_token_fraction <= 1,
        f"and random_token_fraction={o.random_token_fraction} must sum to at most 1.",
        field="config.objective.mask_token_fraction",
        value=o.mask_token_fraction,
    )
    rules.check(
        o.generator_weight + o.discriminator_weight > 0,
        f"and discriminator_weight={o.discriminator_weight} must not both be 0.",
        field="config.objective.generator_weight",
        value=o.generator_weight,
    )


def _check_phases(config: Config) -> None:
    first, steps = config.objective.masked_lm_steps, config.train.steps
    rules.check(
        not first or config.recipe == "replaced_token",
        f"is for config.recipe='replaced_token', not '{config.recipe}'; set it to 0.",
        field="config.objective.masked_lm_steps",
        value=first,
    )
    rules.check(
        first < steps,
        f"leaves none of config.train.steps={steps} for replaced token detection; lower it, or "
        "set config.recipe=masked_lm.",
        field="config.objective.masked_lm_steps",
        value=first,
    )
    rules.check(
        not first or config.generator.kind != "shared",
        "needs a generator other than the encoder, but with config.generator.kind='shared' the "
        "encoder predicts masked tokens in all steps; change one of the two.",
        field="config.objective.masked_lm_steps",
        value=first,
    )


def _check_data(config: Config) -> None:
    d = config.data
    rules.check_choice("data.layout", d.layout, ("packed", "electra", "pairs"))
    rules.check_choice("data.format", d.format, TEXT_FORMATS)
    rules.check_encoding("data.encoding", d.encoding)
    rules.check_choice("data.encoding_errors", d.encoding_errors, ("error", "replace", "skip"))
    rules.check(
        d.source != "",
        "is empty; set a corpus, for example text:corpus/*.txt or docstrings.",
        field="config.data.source",
    )
    rules.check(
        d.length <= config.model.positions or config.writes_text,
        f"is longer than config.model.positions={config.model.positions}; raise positions "
        "or shorten the rows.",
        field="config.data.length",
        value=d.length,
    )
    rules.check(
        d.layout == "packed" or config.model.types >= 2,
        "has two segments per row; set config.model.types to at least 2.",
        field="config.data.layout",
        value=d.layout,
    )
    rules.check(
        d.layout == "electra" or not d.release_builder_bug,
        "needs config.data.layout='electra'; set it, or unset release_builder_bug.",
        field="config.data.release_builder_bug",
        value=True,
    )
    rules.check(
        d.heldout_fraction > 0 or d.validation_source != "",
        "leaves no text for evaluation; raise it or set config.data.validation_source.",
        field="config.data.heldout_fraction",
        value=0,
    )


def _check_sentence_pairs(config: Config) -> None:
    pairs, layout = config.objective.sentence_pairs, config.data.layout
    rules.check_choice("objective.sentence_pairs", pairs, SENTENCE_PAIRS)
    rules.check(
        pairs == "none" or config.recipe == "masked_lm",
        f"needs config.recipe='masked_lm', not '{config.recipe}'; change one of the two.",
        field="config.objective.sentence_pairs",
        value=pairs,
    )
    rules.check(
        pairs == "none" or layout == "pairs",
        "needs rows with two texts; set config.data.layout=pairs.",
        field="config.objective.sentence_pairs",
        value=pairs,
    )
    rules.check(
        pairs != "none" or layout != "pairs",
        "config.data.layout='pairs' needs a sentence-pair objective; set "
        "config.objective.sentence_pairs=next or order, or another layout.",
        field="config.data.layout",
    )


def _check_tokenizer(config: Config) -> None:
    t = config.tokenizer
    rules.check_choice("tokenizer.kind", t.kind, TOKENIZERS)
    rules.check(
        t.kind != "pieces" or config.writes_text,
        "config.tokenizer.kind='pieces' is for generative models, as in fairseq; an encoder "
        "needs [CLS] and [SEP]: set it to sentencepiece or wordpiece.",
        field="config.tokenizer.kind",
    )
    rules.check_choice("tokenizer.algorithm", t.algorithm, ("unigram", "bpe"))
    rules.check_choice("tokenizer.normalization", t.normalization, NORMALIZATIONS)
    rules.check(
        t.kind == "sentencepiece" or t.normalization in ("auto", "identity"),
        f"needs kind='sentencepiece', not '{t.kind}'; change one of the two.",
        field="config.tokenizer.normalization",
        value=t.normalization,
    )
    rules.check(
        t.sentinels == 0 or t.vocab_size >= t.sentinels + 17,
        f"leaves no ids for text in config.tokenizer.vocab_size={t.vocab_size}; set vocab_size to "
        f"{t.sentinels + 17} or more.",
        field="config.tokenizer.sentinels",
        value=t.sentinels,
    )


def _check_training(config: Config) -> None:
    o, t, c, mesh = config.optimizer, config.train, config.checkpoint, config.mesh
    if ":" not in o.method:
        rules.check_choice("optimizer.method", o.method, (*OPTIMIZERS, "PACKAGE.MODULE:FUNCTION"))
    rules.check_choice("optimizer.schedule", o.schedule, SCHEDULES)
    rules.check_choice("train.tracker", t.tracker, TRACKERS)
    rules.check_choice("train.gradient_dtype", t.gradient_dtype, GRADIENT_DTYPES)
    rules.check(
        o.decay_to == 0 or o.schedule in ("linear", "cosine"),
        f"has no effect with config.optimizer.schedule='{o.schedule}'; set it to 0, or schedule to "
        "linear or cosine.",
        field="config.optimizer.decay_to",
        value=o.decay_to,
    )
    rules.check(
        o.schedule != "inverse_sqrt" or o.warmup_steps > 0,
        "config.optimizer.schedule='inverse_sqrt' decays from the end of the warm-up; set "
        "config.optimizer.warmup_steps above 0.",
        field="config.optimizer.schedule",
    )
    rules.check(
        o.warmup_steps <= t.steps,
        f"is more than config.train.steps={t.steps}; shorten the warm-up.",
        field="config.optimizer.warmup_steps",
        value=o.warmup_steps,
    )
    rules.check(
        config.reads_pairs or t.batch_size % t.accumulation == 0,  # batches of pairs are divisible
        f"is not divisible by config.train.accumulation={t.accumulation}.",
        field="config.train.batch_size",
        value=t.batch_size,
    )
    parts = t.accumulation * o.release_replicas
    rules.check(
        config.reads_pairs or t.batch_size % parts == 0,
        f"is not divisible by config.optimizer.release_replicas={o.release_replicas} "
        f"times config.train.accumulation={t.accumulation}; use a multiple of {parts}, or "
        "1 replica.",
        field="config.train.batch_size",
        value=t.batch_size,
    )
    rules.check(
        o.release_replicas == 1 or config.recipe != "finetune",
        "is for pre-training; fine-tuning does not split batches. Set it to 1.",
        field="config.optimizer.release_replicas",
        value=o.release_replicas,
    )
    rules.check_choice("checkpoint.best_mode", c.best_mode, ("max", "min"))
    if c.best_metric and config.heldout_metrics:
        rules.check_choice("checkpoint.best_metric", c.best_metric, config.heldout_metrics)
        rules.check(
            not c.best_metric.endswith(("loss", "perplexity")) or c.best_mode == "min",
            "is better when lower; set config.checkpoint.best_mode=min.",
            field="config.checkpoint.best_metric",
            value=c.best_metric,
        )
    axes = dataclasses.asdict(mesh)
    rules.check(
        0 not in axes.values() and list(axes.values()).count(-1) <= 1,
        "needs sizes above 0, and -1 (all remaining devices) at most once.",
        field="config.mesh",
        value=axes,
    )


def _check_mixers(config: Config) -> None:
    """Runs the checks that need the mixers."""
    if config.writes_text:
        check_sequence_model(config)
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
        rules.check(
            not (mixer.reads_padding and "mask_convolution" in mixer.fields(encoder.hidden_size)),
            f"lets convolutions mix packed documents; {remedy}.",
            field="config.model.mask_convolution",
            value=False,
        )
    for stage, made in zip(list_stages(config.model), encoder.stages, strict=True):
        rules.check(
            not made.layer.mixer.reads_padding,
            "reads beyond the end of a document, where config.data.layout='packed' places another "
            f"document; {other}.",
            field=stage.names["mixer"],
            value=stage.sizes.mixer,
        )
