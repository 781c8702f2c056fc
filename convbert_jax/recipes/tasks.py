"""Losses of the recipes, and the `Task` that the trainer runs."""

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp
from flax import nnx

from convbert_jax.analysis import flops, pretraining_report
from convbert_jax.config import Config, ConfigError
from convbert_jax.config.sequences.sections import OF_PAIRS
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.interfaces.placement import Rules
from convbert_jax.interfaces.special_ids import SpecialIds
from convbert_jax.interop.networks import MODELS
from convbert_jax.models import mixers, sequences
from convbert_jax.models.build import build
from convbert_jax.objectives import (
    masked_lm,
    metrics,
    next_tokens,
    replaced_token,
    span_corruption,
    written_text,
)
from convbert_jax.ops.mesh import sums
from convbert_jax.recipes import teaching
from convbert_jax.recipes.prepared import Effort, effort_of_corpus
from convbert_jax.training import sharding
from convbert_jax.training.environment import devices
from convbert_jax.training.state import parameter_path
from convbert_jax.training.task import Params, Task


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Objective, health checks and logged metrics of a recipe."""

    objective: ModuleType  # loss(model, batch, key, ...) -> (loss, metrics)
    warn: Callable[[int, dict[str, float]], list[str]]  # (step, metrics) -> warnings
    show: tuple[str, ...]  # metrics of the log line, if the config computes them


_OF_WRITING = ("token_loss", "token_accuracy", "perplexity", "word_perplexity")
RECIPES = {
    "replaced_token": Recipe(
        replaced_token,
        pretraining_report.warn_replaced_token,
        ("mlm_loss", "mlm_accuracy", "encoder_mlm_loss", "replaced_rate", "discriminator_auc"),
    ),
    "masked_lm": Recipe(
        masked_lm,
        pretraining_report.warn_masked_lm,
        ("mlm_loss", "mlm_accuracy", "pair_accuracy"),
    ),
    "causal_lm": Recipe(next_tokens, pretraining_report.warn_writing, _OF_WRITING),
    "span_corruption": Recipe(span_corruption, pretraining_report.warn_writing, _OF_WRITING),
    **dict.fromkeys(OF_PAIRS, Recipe(written_text, pretraining_report.warn_writing, _OF_WRITING)),
}


def build_task(
    config: Config,
    special: SpecialIds,
    device: jax.Device,
    teacher: teaching.Teacher | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    effort: Effort | None = None,
) -> Task:
    """Builds the functional `Task` of a config from its Flax model and objective.

    Args:
      special: special token ids of the (target) vocabulary.
      device: one of the devices to run on; determines dtype and peak FLOP/s.
      teacher: required to train with config.distillation.teacher; unused in evaluations.
      tokenizer: required by causal_lm, which counts words.
      effort: cost of a step, default `effort_of_corpus`.

    Raises:
      ConfigError: the vocabulary has too few sentinels for the objective.
    """
    recipe = RECIPES[config.recipe]
    graphdef, init = build(MODELS[config.recipe], config)
    first = config.objective.masked_lm_steps
    settings = {
        "dtype": devices.compute_dtype(config, device),
        "config": config,
        "special": special,
    }
    if config.recipe == "causal_lm":
        settings["begins_word"] = jnp.asarray(tokenizer.begins_word)
    if config.recipe == "span_corruption":
        check_sentinels(config, len(special.sentinels))
    effort = effort or effort_of_corpus(config)
    of_words = "word_perplexity" in config.heldout_metrics
    warn = recipe.warn
    if config.recipe == "replaced_token":
        warn = functools.partial(warn, uniform=config.generator.kind == "uniform")
    sent = None if config.train.gradient_dtype == "float32" else config.train.gradient_dtype

    def judge(*given, **more):
        value, found = recipe.objective.loss(*given, **settings, **more)
        if not of_words:
            found = {name: pair for name, pair in found.items() if name != "word_loss"}
        return value, found

    def loss(params, batch, key, *given):
        if sent:
            params = _copy_tables(params, sent)
        model, more = nnx.merge(graphdef, params), {}
        if teacher:
            more["teacher"] = teacher.over(given[0], config)
        elif first:
            more["masked_first"] = given[0]
        with sums.gradients_sent_in(sent), jax.named_scope("loss"):
            return judge(model, batch, key, train=True, **more)

    def evaluate(params, batch, key):
        model = nnx.merge(graphdef, params)
        return judge(model, batch, key, train=False)[1]

    if config.writes_text:
        evaluator = written_text.heldout(config.heldout_metrics)
    else:
        evaluator = metrics.heldout(config.heldout_metrics, recipe.objective.terms(config))
    return Task(
        init=init,
        loss=loss,
        summarize=metrics.summarize,
        evaluate=evaluate,
        evaluator=evaluator,
        # Teacher first: stage i of the teacher may have another mixer than stage i of the student.
        rules=(*(teacher.rules if teacher else ()), *_rules(config), *sharding.RULES),
        # The checks do not apply to the first steps, which train masked words.
        health=lambda step, values: warn(step - first, values),
        show=tuple(name for name in recipe.show if name in config.heldout_metrics),
        tokens_per_step=effort.tokens,
        flops_per_step=effort.flops,
        peak_flops_per_device=flops.peak_flops(device.device_kind),
        phase=(lambda step: (step < first,)) if first else (lambda step: ()),
        batch_shapes=effort.shapes,
        frozen=teacher.params if teacher else None,
    )


def _copy_tables(params: Params, dtype: str) -> Params:
    """Replicates embedding tables per batch device, see `sums.copies`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            sums.copies(leaf, jnp.dtype(dtype))
            if parameter_path(path).endswith("/embedding")
            else leaf
        ),
        params,
    )


def check_sentinels(config: Config, there: int) -> None:
    """Checks that the vocabulary has a sentinel for each span of a row.

    Args:
      there: number of sentinels of the vocabulary.

    Raises:
      ConfigError: there are fewer; the message has the required number.
    """
    needed = span_corruption.count_spans(config).spans
    if there < needed:
        raise ConfigError(
            f"config.recipe='span_corruption' needs {needed} sentinels for rows of "
            f"{config.data.length} tokens, but the vocabulary has {there}. Train a vocabulary with "
            f"config.tokenizer.sentinels={needed}, or use one that has them.",
            field="config.tokenizer.sentinels",
        )


def _rules(config: Config) -> Rules:
    if not config.writes_text:
        return mixers.sharding_rules(config.encoder)
    of_words = config.recipe == "causal_lm"
    return sequences.sharding_rules(config.language_model if of_words else config.encoder_decoder)
