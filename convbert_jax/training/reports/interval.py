"""The sums of a log interval that a checkpoint cuts in two, kept as JSON beside the data position.

So a run that resumes in the middle of an interval reports what one without a break does.
"""

from typing import Any

import jax
import numpy as np
from absl import logging

from convbert_jax.training import sharding
from convbert_jax.training.task import Metrics

KEY = "interval"  # beside the fields of the data position


def to_json(totals: Metrics | None) -> dict[str, Any]:
    """Sums so far, exact: a float32 is a double, and JSON gives back every double."""
    if totals is None:
        return {}
    pairs = jax.device_get(totals)
    return {KEY: {name: [np.asarray(a).tolist() for a in pair] for name, pair in pairs.items()}}


def from_json(kept: dict[str, Any], like: Metrics) -> Metrics | None:
    """What `to_json` got, placed as `like`; None, told, where it is of other metrics."""
    try:
        pairs = {
            name: tuple(np.asarray(k, a.dtype) for k, a in zip(kept[name], like[name], strict=True))
            for name in like.keys() | kept.keys()
        }
    except (KeyError, TypeError, ValueError):
        pairs = {}
    if jax.tree.map(np.shape, pairs) != jax.tree.map(np.shape, dict(like)):
        logging.warning("The metrics have changed: the first interval counts from here.")
        return None
    return sharding.put_params(pairs, jax.tree.map(lambda a: a.sharding, dict(like)))
