"""A trial of few steps: the intervals of a config file, made for many steps, are cut to fit."""

import operator
from collections.abc import Mapping
from typing import Any

from convbert_jax.config.run import Config


def fit_to_steps(of_file: Config, given: Mapping[str, Any]) -> dict[str, int]:
    """What to take for the warm-up and the intervals of a file in a run of fewer steps.

    Warm-up: a tenth of the steps, or the share that it has in the file if that is more. Log lines:
    ten. Evaluations and checkpoints: four, but none sooner than after 100 steps but at the end.

    Args:
      of_file: the config as its file has it.
      given: path -> value, what the user asks for; `train.steps` is what the rest is fitted to,
        and what is named here is left alone.

    Returns:
      path -> value of the fields that do not fit; none if the file's own number of steps is kept
      or exceeded. It depends on the arguments only, so that a resumed run has the same.
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
