"""What a config must satisfy before any long work starts: one rule, one sentence.

The device count is checked where devices are known (`training/sharding.py`), the corpus where it is
read.
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
    """Raises ConfigError for the first thing that cannot work."""
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
    _check_mixers(config)  # the last one, as it loads jax


def _check_model(config: Config) -> None:
    m, g = config.model, config.generator
    rules.check_choice("model.attention", m.attention, ("auto", *ATTENTIONS))
    rules.check_choice("model.convolution", m.convolution, ("auto", *CONVOLUTIONS))
    rules.check(
        m.attention in ("auto", "xla", "pallas_tpu") or m.attention_dropout == 0.0,
        f"config.model.attention='{m.attention}' has no attention dropout; set "
        "config.model.attention_dropout=0, or config.model.attention=auto.",
    )
    rules.check(
        m.attention not in ("splash", "pallas_tpu")
        or config.data.length % 128 == 0
        or config.recipe == "finetune"  # its lengths are those of buckets, checked by the op
        or config.writes_text,  # and theirs those of batches
        f"config.model.attention='{m.attention}' works on multiples of 128 positions, not on "
        f"config.data.length={config.data.length}; set config.model.attention=auto.",
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
            "config.generator.disentangle_embeddings=True needs a generator of its own on the same "
            "embeddings; set config.generator.kind=separate and tie_embeddings=true, or unset it.",
        )
        if g.kind == "separate":
            check_generator(m, g)


def _check_objective(o: ObjectiveSection) -> None:
    rules.check(
        o.mask_token_fraction + o.random_token_fraction <= 1,
        f"config.objective.mask_token_fraction={o.mask_token_fraction} and "
        f"random_token_fraction={o.random_token_fraction} must add up to at most 1.",
    )
    rules.check(
        o.generator_weight + o.discriminator_weight > 0,
        f"config.objective.generator_weight={o.generator_weight} and "
        f"discriminator_weight={o.discriminator_weight} must not both be 0.",
    )


def _check_phases(config: Config) -> None:
    first, steps = config.objective.masked_lm_steps, config.train.steps
    rules.check(
        not first or config.recipe == "replaced_token",
        f"config.objective.masked_lm_steps={first} comes before replaced tokens, and all steps of "
        f"config.recipe='{config.recipe}' train on masked words; set it to 0.",
    )
    rules.check(
        first < steps,
        f"config.objective.masked_lm_steps={first} leaves no step of config.train.steps={steps} "
        "for replaced tokens; lower it, or take config.recipe=masked_lm.",
    )
    rules.check(
        not first or config.generator.kind != "shared",
        f"config.objective.masked_lm_steps={first} needs a generator beside the encoder, which "
        "with config.generator.kind='shared' predicts masked words in all steps; set one of the "
        "two.",
    )


def _check_data(config: Config) -> None:
    d = config.data
    rules.check_choice("data.layout", d.layout, ("packed", "electra", "pairs"))
    rules.check_choice("data.format", d.format, TEXT_FORMATS)
    rules.check_encoding("data.encoding", d.encoding)
    rules.check_choice("data.encoding_errors", d.encoding_errors, ("error", "replace", "skip"))
    rules.check(
        d.source != "",
        "config.data.source is empty; name a corpus, for example text:corpus/*.txt or docstrings.",
    )
    rules.check(
        d.length <= config.model.positions or config.writes_text,
        f"config.data.length={d.length} is longer than "
        f"config.model.positions={config.model.positions}; raise positions or "
        "shorten the rows.",
    )
    rules.check(
        d.layout == "packed" or config.model.types >= 2,
        f"config.data.layout='{d.layout}' marks two segments and needs config.model.types of at "
        "least 2.",
    )
    rules.check(
        d.layout == "electra" or not d.release_builder_bug,
        "config.data.release_builder_bug=True belongs to config.data.layout='electra'; set one "
        "or unset the other.",
    )
    rules.check(
        d.heldout_fraction > 0 or d.validation_source != "",
        "config.data.heldout_fraction=0 leaves nothing to evaluate on; raise it or name "
        "config.data.validation_source.",
    )


def _check_sentence_pairs(config: Config) -> None:
    pairs, layout = config.objective.sentence_pairs, config.data.layout
    rules.check_choice("objective.sentence_pairs", pairs, SENTENCE_PAIRS)
    rules.check(
        pairs == "none" or config.recipe == "masked_lm",
        f"config.objective.sentence_pairs='{pairs}' goes with config.recipe='masked_lm', not with "
        f"'{config.recipe}'; set one of the two.",
    )
    rules.check(
        pairs == "none" or layout == "pairs",
        f"config.objective.sentence_pairs='{pairs}' needs rows of pairs; set "
        "config.data.layout=pairs.",
    )
    rules.check(
        pairs != "none" or layout != "pairs",
        "config.data.layout='pairs' makes pairs to be judged; set "
        "config.objective.sentence_pairs=next or order, or another layout.",
    )


def _check_tokenizer(config: Config) -> None:
    t = config.tokenizer
    rules.check_choice("tokenizer.kind", t.kind, TOKENIZERS)
    rules.check(
        t.kind != "pieces" or config.writes_text,
        "config.tokenizer.kind='pieces' is of models that write text, as fairseq's; an encoder "
        "needs [CLS] and [SEP] of its own: take sentencepiece or wordpiece.",
    )
    rules.check_choice("tokenizer.algorithm", t.algorithm, ("unigram", "bpe"))
    rules.check_choice("tokenizer.normalization", t.normalization, NORMALIZATIONS)
    rules.check(
        t.kind == "sentencepiece" or t.normalization in ("auto", "identity"),
        f"config.tokenizer.normalization='{t.normalization}' needs kind='sentencepiece', not "
        f"'{t.kind}'; set one of the two.",
    )
    rules.check(
        t.sentinels == 0 or t.vocab_size >= t.sentinels + 17,
        f"config.tokenizer.sentinels={t.sentinels} leaves no room for text in "
        f"config.tokenizer.vocab_size={t.vocab_size}; make it {t.sentinels + 17} or more.",
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
        f"config.optimizer.decay_to={o.decay_to} has no effect on config.optimizer.schedule="
        f"'{o.schedule}'; set it to 0, or take linear or cosine.",
    )
    rules.check(
        o.schedule != "inverse_sqrt" or o.warmup_steps > 0,
        "config.optimizer.schedule='inverse_sqrt' falls from the end of the warm-up on; set "
        "config.optimizer.warmup_steps above 0.",
    )
    rules.check(
        o.warmup_steps <= t.steps,
        f"config.optimizer.warmup_steps={o.warmup_steps} is more than "
        f"config.train.steps={t.steps}; shorten the warm-up.",
    )
    rules.check(
        config.reads_pairs or t.batch_size % t.accumulation == 0,  # whose batches are made to
        f"config.train.batch_size={t.batch_size} is not divisible by "
        f"config.train.accumulation={t.accumulation}.",
    )
    parts = t.accumulation * o.release_replicas
    rules.check(
        config.reads_pairs or t.batch_size % parts == 0,
        f"config.train.batch_size={t.batch_size} is not divisible by "
        f"config.optimizer.release_replicas={o.release_replicas} times "
        f"config.train.accumulation={t.accumulation}; use a multiple of {parts}, or 1 replica.",
    )
    rules.check(
        o.release_replicas == 1 or config.recipe != "finetune",
        f"config.optimizer.release_replicas={o.release_replicas} is of pre-training; fine-tuning "
        "takes a batch as one, set it to 1.",
    )
    rules.check_choice("checkpoint.best_mode", c.best_mode, ("max", "min"))
    if c.best_metric and config.heldout_metrics:
        rules.check_choice("checkpoint.best_metric", c.best_metric, config.heldout_metrics)
        rules.check(
            not c.best_metric.endswith(("loss", "perplexity")) or c.best_mode == "min",
            f"config.checkpoint.best_metric={c.best_metric} is best where it is least; set "
            "config.checkpoint.best_mode=min.",
        )
    axes = dataclasses.asdict(mesh)
    rules.check(
        0 not in axes.values() and list(axes.values()).count(-1) <= 1,
        f"config.mesh={axes} needs sizes above 0, and -1 (all devices left) at most once.",
    )


def _check_mixers(config: Config) -> None:
    """What only the mixers themselves know."""
    if config.writes_text:
        check_sequence_model(config)
    encoder = config.encoder
    if config.recipe == "replaced_token" and config.generator.kind == "separate":
        _ = config.generator_encoder  # refused by its mixers
    if config.recipe == "finetune" or config.reads_pairs or config.data.layout != "packed":
        return
    # Whole documents without a mask would flow into each other.
    remedy = other = "use config.data.layout='electra' with it"
    decoder = ()
    if config.writes_text:  # which reads whole documents alone
        remedy, other = "set it to True", "take another mixer"
    if config.recipe == "span_corruption":
        decoder = config.encoder_decoder.decoder.stages
    for made in () if config.model.mask_convolution else (*encoder.stages, *decoder):
        mixer = made.layer.mixer
        rules.check(
            not (mixer.reads_padding and "mask_convolution" in mixer.fields(encoder.hidden_size)),
            f"config.model.mask_convolution=False lets packed documents read each other; {remedy}.",
        )
    for stage, made in zip(list_stages(config.model), encoder.stages, strict=True):
        rules.check(
            not made.layer.mixer.reads_padding,
            f"{stage.names['mixer']}={stage.sizes.mixer} reads what follows a document, and "
            f"config.data.layout='packed' puts another one there; {other}.",
        )
