"""Metrics as weighted sums, `{name: (sum, weight)}`, added over batches and divided once, on the
host.

A ranking is no ratio of sums. In training the area under the ROC curve is that within a batch,
whose pairs in order and pairs in all add up; an evaluation keeps the scores of all its rows instead
(`Scores`) and ranks them exactly. Neither has bins, so that no scale or shift of scores is lost.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped

from convbert_jax.interfaces.evaluator import Evaluator

_RANKED = 65_536  # positions of a batch: sorting is the one thing that more devices do not speed up


class Scores(NamedTuple):
    """Scores of one batch; those of several batches are put side by side, never added."""

    values: Float[Array, "..."]
    positive: Bool[Array, "..."]
    counted: Bool[Array, "..."]


Metrics = dict[str, tuple[Array, Array] | Scores]


def mean(values: Shaped[Array, "*S"], weights: Shaped[Array, "*S"]) -> tuple[Array, Array]:
    """(sum of weighted values, sum of weights)."""
    weights = weights.astype(jnp.float32)
    return (values.astype(jnp.float32) * weights).sum(), weights.sum()


def ranked_pairs(scores: Scores) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(pairs of a positive above a negative, ties counted half; all such pairs), within the batch.

    The Mann-Whitney statistic: their ratio is the area under the ROC curve of the batch, and the
    ratio of sums over (micro)batches the mean of theirs by pairs. Exact but for float32 sums, up to
    65,536 positions; of more the first rows that fit count. NaN if a counted score is NaN.
    """
    rows = max(1, _RANKED // max(1, scores.values[0].size))
    values, positive, counted = (array[:rows].reshape(-1) for array in scores)
    positives = (positive & counted).astype(jnp.float32)
    negatives = (~positive & counted).astype(jnp.float32)

    def pairs_in_order(ties):
        _, _, high, low = jax.lax.sort((values, ties, positives, negatives), num_keys=2)
        return (high * jnp.cumsum(low)).sum()

    # Of equal scores once the negatives come first, so that they count, and once the positives.
    in_order = (pairs_in_order(positives) + pairs_in_order(-positives)) / 2
    unknown = (jnp.isnan(values) & counted).any()
    return jnp.where(unknown, jnp.nan, in_order), positives.sum() * negatives.sum()


def area_under_roc(batches: Sequence[Scores]) -> float:
    """Probability that a positive of all batches scores above a negative, ties counted half.

    Exact, in float64. NaN without both kinds, or if a counted score is NaN.

    Args:
      batches: as numpy.
    """
    values = np.concatenate([batch.values[batch.counted] for batch in batches])
    positive = np.concatenate([batch.positive[batch.counted] for batch in batches])
    positives, negatives = values[positive], np.sort(values[~positive])
    if not positives.size or not negatives.size or np.isnan(values).any():
        return float("nan")
    below, tied_too = (np.searchsorted(negatives, positives, side) for side in ("left", "right"))
    return float((below + tied_too).mean() / 2 / negatives.size)


def divide(total: np.ndarray, weight: np.ndarray) -> float:
    """total / weight; NaN where nothing was counted."""
    return float(total) / float(weight) if float(weight) > 0 else float("nan")


def summarize(sums: Metrics) -> dict[str, float]:
    """Named numbers from sums, as numpy."""
    return {name: divide(total, weight) for name, (total, weight) in sums.items()}


def heldout(
    names: Collection[str], terms: Mapping[str, float] | None = None
) -> Evaluator[dict[str, Any]]:
    """Means over all rows, and areas under the ROC curve of all their scores.

    Outputs are metrics, `Scores` among them; sums are added in float64.

    Args:
      terms: of the loss, by name, with their weights: "loss" is the sum of their means over all
        rows. The mean of its batches would count the last one, filled up with padding, as a whole.
    """

    def update(state, outputs: Metrics):
        if outputs.keys() != set(names):
            raise ValueError(f"metrics {sorted(outputs)} instead of {sorted(names)}")
        return {name: _join(state.get(name), part) for name, part in outputs.items()}

    def finish(state):
        values = {name: _number(state.get(name, (0.0, 0.0))) for name in sorted(names)}
        counted = [name for name in terms or () if name in state and state[name][1] > 0]
        if counted:
            values["loss"] = sum(terms[name] * values[name] for name in counted)
        return values

    return Evaluator(tuple(sorted(names)), dict, update, finish)


def _join(kept, part):
    if isinstance(part, Scores):
        return [*(kept or ()), part]
    total = np.asarray(part, np.float64)
    return total if kept is None else kept + total


def _number(kept) -> float:
    return area_under_roc(kept) if isinstance(kept, list) else divide(*kept)
