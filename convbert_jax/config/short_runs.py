"""Shortens warm-up and intervals of a config for runs with fewer steps than its file."""

import operator
from collections.abc import Mapping
from typing import Any

from convbert_jax.config.run import Config


def fit_to_steps(of_file: Config, given: Mapping[str, Any]) -> dict[str, int]:
    """Returns shorter warm-up and intervals for a run with fewer steps than its config file.

    Warm-up: a tenth of the steps, or its share of the steps in the file if that is more. Log lines:
    ten. Evaluations and checkpoints: four, at least 100 steps apart, and one at the end.

    Args:
      of_file: the config of the file, without overrides.
      given: path -> value of the overrides; these fields are not changed.

    Returns:
      path -> value of the fields to change; empty unless `train.steps` is smaller than in the file.
      The result depends only on the arguments, so a resumed run gets the same values.
    """
    steps = given.get("train.steps", of_file.train.steps)
    recipe = given.get("recipe", of_file.recipe)
    if recipe == "finetune" or not 0 < steps < of_file.train.steps:
        return {}
    share = steps / of_file.train.steps
    seldom = min(steps, max(100, steps // 4))
    largest = {
        "optimizer.warmup_steps": max(steps // 10, int(of_file.optimizer.warmup_steps * share)),
        "train.log_every": max(1, steps // 10),
        "train.eval_every": seldom,
        "checkpoint.every": seldom,
    }
    return {
        path: most
        for path, most in largest.items()
        if path not in given and operator.attrgetter(path)(of_file) > most
    }
