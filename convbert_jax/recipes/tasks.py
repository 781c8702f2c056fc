"""The recipes, and the `Task` that the trainer runs for a config."""

import jax
import jax.numpy as jnp
from flax import nnx

from convbert_jax.analysis import flops
from convbert_jax.config import Config
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.interfaces import SpecialIds
from convbert_jax.models import build
from convbert_jax.models.networks import MODELS
from convbert_jax.objectives import metrics
from convbert_jax.ops import partitioning
from convbert_jax.recipes import teaching
from convbert_jax.recipes.causal_lm import CausalLM
from convbert_jax.recipes.embedding import Embedding
from convbert_jax.recipes.masked_lm import MaskedLM
from convbert_jax.recipes.prepared import Data, Effort
from convbert_jax.recipes.recipe import Recipe
from convbert_jax.recipes.replaced_token import ReplacedToken
from convbert_jax.recipes.span_corruption import SpanCorruption
from convbert_jax.recipes.text_pairs import TextPairs
from convbert_jax.training import environment
from convbert_jax.training import partitioning as partitioning_lib
from convbert_jax.training.partitioning import Params, parameter_path
from convbert_jax.training.train_step import Task
from convbert_jax.workdir import Workdir

RECIPES: dict[str, Recipe] = {
    "replaced_token": ReplacedToken(),
    "masked_lm": MaskedLM(),
    "causal_lm": CausalLM(),
    "span_corruption": SpanCorruption(),
    **dict.fromkeys(("translation", "summarization", "text_to_text"), TextPairs()),
    "embedding": Embedding(),
}


def recipe_of(config: Config) -> Recipe:
    """Returns the recipe of a config, which does not fine-tune."""
    return RECIPES[config.recipe]


def open_data(config: Config, workdir: Workdir) -> Data:
    """Opens the training and held-out data of a config; raises as `prepared.open_prepared`."""
    return recipe_of(config).open_data(config, workdir)


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
      effort: cost of a step, default `Recipe.effort`.

    Raises:
      ConfigError: the vocabulary has too few sentinels for the objective.
    """
    recipe = recipe_of(config)
    graphdef, init = build(MODELS[config.recipe], config)
    first = config.objective.masked_lm_steps
    settings = {
        "dtype": environment.compute_dtype(config, device),
        "config": config,
        "special": special,
        **recipe.settings(config, special, tokenizer),
    }
    effort = effort or recipe.effort(config)
    of_words = "word_perplexity" in config.heldout_metrics
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
        health=lambda step, values: recipe.warn(config, step - first, values),
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
