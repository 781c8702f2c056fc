"""Reads the mean of a run's newest checkpoints; changes decoding settings."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from absl import logging

from convbert_jax.config import Config, ConfigError, from_config_dict, to_dict
from convbert_jax.config.checks.sequences import check_asked_decoding
from convbert_jax.interop import matching, sources
from convbert_jax.training.task import Params
from convbert_jax.workdir import Workdir

_OF_SCORES = ("test_sources", "score_words")  # fields of config.decoding for scoring only


def read_mean(
    workdir: Workdir, config: Config, step: int | None = None
) -> tuple[tuple[int, ...], Params]:
    """Reads the mean of the config.decoding.average newest checkpoints, summed in float64.

    If there are fewer checkpoints, logs that and averages all.

    Args:
      step: newest checkpoint to use, default the newest. A single checkpoint (average=1) defaults
        to the newest undamaged one.

    Returns:
      (steps of the checkpoints, mean parameters on the host).

    Raises:
      WorkdirError: there is no checkpoint of `step`.
      CheckpointError: a checkpoint is damaged.
    """
    count, step = config.decoding.average, workdir.choose_step(step)
    steps = [there for there in workdir.steps() if step is None or there <= step][-count:]
    if len(steps) < count:
        logging.info(
            "config.decoding.average=%d, but only %d checkpoints exist.", count, len(steps)
        )
        count = len(steps)
    if count <= 1:
        step, params = sources.read_params(workdir, config, step)
        return (step,), params
    total = None
    for number in steps:
        _, params = sources.read_params(workdir, config, number)
        if total is None:
            kinds = jax.tree.map(lambda leaf: leaf.dtype, params)
            total = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
        else:
            total = jax.tree.map(
                lambda sums, leaf: sums + np.asarray(leaf, np.float64), total, params
            )
    logging.info("Averaged the checkpoints %s.", ", ".join(map(str, steps)))
    mean = jax.tree.map(lambda sums, kind: (sums / count).astype(kind), total, kinds)
    return tuple(steps), mean


def change_decoding(config: Config, fields: Mapping[str, Any]) -> Config:
    """Replaces fields of config.decoding by name.

    Raises:
      ConfigError: a field does not exist or has no effect, or a value is invalid.
    """
    known = [name for name in to_dict(config)["decoding"] if name not in _OF_SCORES]
    if of_scores := [name for name in fields if name in _OF_SCORES]:
        raise ConfigError(
            "has no effect on generated texts; it is for the scores of --mode=eval.",
            field=f"config.decoding.{of_scores[0]}",
        )
    if unknown := [name for name in fields if name not in known]:
        raise ConfigError(
            f"does not exist. Choose from {', '.join(known)}.",
            field=f"config.decoding.{unknown[0]}",
        )
    changed = {f"decoding.{name}": value for name, value in fields.items()}
    config = from_config_dict(to_dict(matching.replace(config, changed)))
    check_asked_decoding(config, changed)
    return config
