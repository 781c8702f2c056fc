"""What a config must satisfy before any long work starts: one rule, one sentence.

The device count is checked where devices are known (`training/sharding.py`), the corpus where it is
read.
"""

import dataclasses

from convbert_jax.config import rules
from convbert_jax.config.bounds import check_bounds
from convbert_jax.config.finetuning_checks import check_finetuning
from convbert_jax.config.run import DTYPES, PLATFORMS, RECIPES, Config
from convbert_jax.config.sections import (
    ATTENTIONS,
    CONVOLUTIONS,
    HELDOUT_METRICS,
    INITIALIZERS,
    MIXERS,
    REMAT_POLICIES,
    TEXT_FORMATS,
    ObjectiveSection,
    TokenizerSection,
)


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
        _check_data(config)
    _check_tokenizer(config.tokenizer)
    _check_training(config)


def _check_model(config: Config) -> None:
    m, g = config.model, config.generator
    rules.check_choice("model.mixer", m.mixer, MIXERS)
    rules.check_choice("model.attention", m.attention, ATTENTIONS)
    rules.check_choice("model.convolution", m.convolution, CONVOLUTIONS)
    rules.check(
        m.attention in ("auto", "xla") or m.attention_dropout == 0.0,
        f"config.model.attention='{m.attention}' has no attention dropout; set "
        "config.model.attention_dropout=0, or config.model.attention=auto.",
    )
    rules.check(
        m.attention != "splash"
        or config.data.length % 128 == 0
        or config.recipe == "finetune",  # its lengths are those of buckets, checked by the op
        f"config.model.attention='splash' works on multiples of 128 positions, not on "
        f"config.data.length={config.data.length}; set config.model.attention=auto.",
    )
    rules.check_choice("model.remat", m.remat, REMAT_POLICIES)
    rules.check_choice("model.initializers", m.initializers, INITIALIZERS)
    rules.check(
        m.hidden_size % m.heads == 0,
        f"config.model.hidden_size={m.hidden_size} is not divisible by "
        f"config.model.heads={m.heads}; "
        f"use {m.hidden_size // m.heads * m.heads or m.heads} or "
        f"{(m.hidden_size // m.heads + 1) * m.heads}.",
    )
    rules.check(
        m.mixer == "attention" or m.heads == 1 or m.heads % m.head_ratio == 0,
        f"config.model.heads={m.heads} is not divisible by config.model.head_ratio={m.head_ratio}; "
        "attention (and convolution as much) gets heads / head_ratio heads.",
    )
    rules.check(
        m.mixer != "attention" or m.head_ratio in (1, 2),  # 2 is the default, which nobody set
        f"config.model.head_ratio={m.head_ratio} does nothing with config.model.mixer=attention, "
        "which has all heads; set mixer to bottleneck for heads / head_ratio heads of attention "
        "alone, or leave head_ratio out.",
    )
    for width in ("hidden_size", "ffn_size"):
        rules.check(
            getattr(m, width) % m.ffn_groups == 0,
            f"config.model.{width}={getattr(m, width)} is not divisible by "
            f"config.model.ffn_groups={m.ffn_groups}.",
        )
    if config.recipe != "replaced_token":
        return
    rules.check_choice("generator.kind", g.kind, ("separate", "shared", "uniform"))
    if g.kind != "separate":
        return
    e = config.generator_encoder
    heads = max(1, int(m.heads * g.size + 1e-9))
    rules.check(
        e.hidden_size >= heads and e.hidden_size % heads == 0,
        f"config.generator.size={g.size} gives a generator of {e.hidden_size} channels and "
        f"{heads} heads, which does not "
        "divide; change config.generator.size.",
    )
    rules.check(
        m.mixer == "attention" or heads < m.head_ratio or heads % m.head_ratio == 0,
        f"config.generator.size={g.size} leaves the generator {heads} heads, which "
        f"config.model.head_ratio={m.head_ratio} does "
        "not divide; change config.generator.size.",
    )
    rules.check(
        e.hidden_size % m.ffn_groups == 0,
        f"config.generator.size={g.size} gives a generator of {e.hidden_size} channels, which "
        "config.model.ffn_groups="
        f"{m.ffn_groups} does not divide; change config.generator.size.",
    )


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


def _check_data(config: Config) -> None:
    d = config.data
    rules.check_choice("data.layout", d.layout, ("packed", "electra"))
    rules.check_choice("data.format", d.format, TEXT_FORMATS)
    rules.check_choice("data.encoding_errors", d.encoding_errors, ("error", "replace", "skip"))
    rules.check(
        d.source != "",
        "config.data.source is empty; name a corpus, for example text:corpus/*.txt or docstrings.",
    )
    rules.check(
        d.length <= config.model.positions,
        f"config.data.length={d.length} is longer than "
        f"config.model.positions={config.model.positions}; raise positions or "
        "shorten the rows.",
    )
    rules.check(
        d.layout == "packed" or config.model.types >= 2,
        "config.data.layout='electra' marks two segments and needs config.model.types of at "
        "least 2.",
    )
    rules.check(
        d.layout == "electra" or not d.release_builder_bug,
        "config.data.release_builder_bug=True belongs to config.data.layout='electra'; set one "
        "or unset the other.",
    )
    # Whole documents without a mask would flow into each other through the convolution.
    rules.check(
        d.layout == "electra" or config.model.mask_convolution or config.model.mixer != "mixed",
        "config.model.mask_convolution=False lets packed documents read each other; use "
        "config.data.layout='electra' with it.",
    )
    rules.check(
        d.heldout_fraction > 0 or d.validation_source != "",
        "config.data.heldout_fraction=0 leaves nothing to evaluate on; raise it or name "
        "config.data.validation_source.",
    )


def _check_tokenizer(t: TokenizerSection) -> None:
    rules.check_choice("tokenizer.kind", t.kind, ("sentencepiece", "wordpiece"))
    rules.check_choice("tokenizer.algorithm", t.algorithm, ("unigram", "bpe"))


def _check_training(config: Config) -> None:
    o, t, c, mesh = config.optimizer, config.train, config.checkpoint, config.mesh
    rules.check(
        o.warmup_steps <= t.steps,
        f"config.optimizer.warmup_steps={o.warmup_steps} is more than "
        f"config.train.steps={t.steps}; shorten the warm-up.",
    )
    rules.check(
        t.batch_size % t.accumulation == 0,
        f"config.train.batch_size={t.batch_size} is not divisible by "
        f"config.train.accumulation={t.accumulation}.",
    )
    parts = t.accumulation * o.release_replicas
    rules.check(
        t.batch_size % parts == 0,
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
    if c.best_metric and config.recipe in HELDOUT_METRICS:
        release, names = config.objective.release_metrics, HELDOUT_METRICS[config.recipe]
        known = [name for name in names if release or not name.startswith("release_")]
        rules.check_choice("checkpoint.best_metric", c.best_metric, known)
        rules.check(
            not c.best_metric.endswith("loss") or c.best_mode == "min",
            f"config.checkpoint.best_metric={c.best_metric} is best where it is least; set "
            "config.checkpoint.best_mode=min.",
        )
    axes = dataclasses.asdict(mesh)
    rules.check(
        0 not in axes.values() and list(axes.values()).count(-1) <= 1,
        f"config.mesh={axes} needs sizes above 0, and -1 (all devices left) at most once.",
    )
