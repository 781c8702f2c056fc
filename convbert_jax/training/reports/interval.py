"""Metric sums of an unfinished log interval, saved as JSON in the checkpoint.

With them, a run resumed within a log interval reports the same metrics as an uninterrupted run.
"""

from typing import Any

import jax
import numpy as np
from absl import logging

from convbert_jax.training import sharding
from convbert_jax.training.task import Metrics

KEY = "interval"  # stored next to the fields of the data position


def to_json(totals: Metrics | None) -> dict[str, Any]:
    """Converts sums to JSON exactly: JSON round-trips doubles, which represent every float32."""
    if totals is None:
        return {}
    pairs = jax.device_get(totals)
    return {KEY: {name: [np.asarray(a).tolist() for a in pair] for name, pair in pairs.items()}}


def from_json(kept: dict[str, Any], like: Metrics) -> Metrics | None:
    """Restores the sums with the shardings of `like`.

    Logs a warning and returns None if the names or shapes of the metrics have changed.
    """
    try:
        pairs = {
            name: tuple(np.asarray(k, a.dtype) for k, a in zip(kept[name], like[name], strict=True))
            for name in like.keys() | kept.keys()
        }
    except (KeyError, TypeError, ValueError):
        pairs = {}
    if jax.tree.map(np.shape, pairs) != jax.tree.map(np.shape, dict(like)):
        logging.warning("The metrics have changed; the log interval restarts at this checkpoint.")
        return None
    return sharding.put_params(pairs, jax.tree.map(lambda a: a.sharding, dict(like)))
