"""Losses of the recipes, and the `Task` that the trainer runs."""

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from convbert_jax.analysis import flops, pretraining_report
from convbert_jax.config import Config, ConfigError
from convbert_jax.config.sequences import OF_PAIRS
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.interfaces import Evaluator, Rules, SpecialIds
from convbert_jax.models import build
from convbert_jax.models.networks import MODELS, sharding_rules
from convbert_jax.objectives import (
    masked_lm,
    metrics,
    next_tokens,
    replaced_token,
    span_corruption,
    written_text,
)
from convbert_jax.ops import partitioning
from convbert_jax.recipes import teaching
from convbert_jax.recipes.prepared import Effort, effort_of_corpus
from convbert_jax.training import environment
from convbert_jax.training import partitioning as partitioning_lib
from convbert_jax.training.partitioning import Params, parameter_path
from convbert_jax.training.train_step import Task

Warn = Callable[[int, dict[str, float]], list[str]]  # (step, metrics) -> warnings


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Objective, metrics and sharding of a recipe.

    Attributes:
      objective: has loss(model, batch, key, ...) -> (loss, metrics).
      warn: config -> health checks of the metrics.
      show: metrics of the log line, if the config computes them.
      evaluator: config -> evaluator of the held-out metrics.
      rules: config -> partition rules of the model.
      settings: (config, special ids, tokenizer) -> further arguments of the loss. Raises
        ConfigError if the vocabulary does not fit the objective.
    """

    objective: ModuleType
    warn: Callable[[Config], Warn]
    show: tuple[str, ...]
    evaluator: Callable[[Config], Evaluator]
    rules: Callable[[Config], Rules]
    settings: Callable[[Config, SpecialIds, Tokenizer | None], dict[str, Any]] = (
        lambda config, special, tokenizer: {}
    )


def _encoder_recipe(objective: ModuleType, warn: Callable[[Config], Warn], *show: str) -> Recipe:
    return Recipe(
        objective,
        warn,
        show,
        evaluator=lambda config: metrics.heldout(config.heldout_metrics, objective.terms(config)),
        rules=lambda config: sharding_rules(config.encoder),
    )


def _generative_recipe(objective: ModuleType, network: str, **more: Any) -> Recipe:
    """Returns the recipe of a generative model.

    Args:
      network: property of `Config` that describes the model.
    """
    return Recipe(
        objective,
        lambda config: pretraining_report.warn_writing,
        ("token_loss", "token_accuracy", "perplexity", "word_perplexity"),
        evaluator=lambda config: written_text.heldout(config.heldout_metrics),
        rules=lambda config: sharding_rules(getattr(config, network)),
        **more,
    )


def _warn_replaced_token(config: Config) -> Warn:
    uniform = config.generator.kind == "uniform"
    return functools.partial(pretraining_report.warn_replaced_token, uniform=uniform)


def _count_words(config: Config, special: SpecialIds, tokenizer: Tokenizer | None):
    return {"begins_word": jnp.asarray(tokenizer.begins_word)}


def _check_vocabulary(config: Config, special: SpecialIds, tokenizer: Tokenizer | None):
    check_sentinels(config, len(special.sentinels))
    return {}


RECIPES = {
    "replaced_token": _encoder_recipe(
        replaced_token,
        _warn_replaced_token,
        *("mlm_loss", "mlm_accuracy", "encoder_mlm_loss", "replaced_rate", "discriminator_auc"),
    ),
    "masked_lm": _encoder_recipe(
        masked_lm,
        lambda config: pretraining_report.warn_masked_lm,
        *("mlm_loss", "mlm_accuracy", "pair_accuracy"),
    ),
    "causal_lm": _generative_recipe(next_tokens, "language_model", settings=_count_words),
    "span_corruption": _generative_recipe(
        span_corruption, "encoder_decoder", settings=_check_vocabulary
    ),
    **dict.fromkeys(OF_PAIRS, _generative_recipe(written_text, "encoder_decoder")),
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
        "dtype": environment.compute_dtype(config, device),
        "config": config,
        "special": special,
        **recipe.settings(config, special, tokenizer),
    }
    effort = effort or effort_of_corpus(config)
    of_words = "word_perplexity" in config.heldout_metrics
    warn = recipe.warn(config)
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
        with partitioning.communicate_gradients_in(sent), jax.named_scope("loss"):
            return judge(model, batch, key, train=True, **more)

    def evaluate(params, batch, key):
        model = nnx.merge(graphdef, params)
        return judge(model, batch, key, train=False)[1]

    return Task(
        init=init,
        loss=loss,
        summarize=metrics.summarize,
        evaluate=evaluate,
        evaluator=recipe.evaluator(config),
        # Teacher first: stage i of the teacher may have another mixer than stage i of the student.
        rules=(*(teacher.rules if teacher else ()), *recipe.rules(config), *partitioning_lib.RULES),
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
    """Replicates embedding tables per batch device, see `partitioning.copy_per_device`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            partitioning.copy_per_device(leaf, jnp.dtype(dtype))
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
