"""Metrics as weighted sums, `{name: (sum, weight)}`, summed over batches and divided on the host.

ROC AUC is not a ratio of such sums. Training reports it within batches, as concordant pairs over
all pairs; evaluation collects the scores of all rows (`Scores`) and ranks them exactly. Neither
uses bins, so AUC does not depend on the scale or shift of the scores.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped

from convbert_jax.interfaces import Evaluator

_RANKED = 65_536  # maximum positions ranked per batch; sorting does not scale over devices


class Scores(NamedTuple):
    """Scores of one batch; batches are concatenated, never summed."""

    values: Float[Array, "..."]
    positive: Bool[Array, "..."]
    counted: Bool[Array, "..."]


class Ranks(NamedTuple):
    """Predictions and true values of one batch; batches are concatenated, never summed."""

    values: Float[Array, " B"]
    truth: Float[Array, " B"]
    counted: Bool[Array, " B"]


Metrics = dict[str, tuple[Array, Array] | Scores | Ranks]


def mean(values: Shaped[Array, "*S"], weights: Shaped[Array, "*S"]) -> tuple[Array, Array]:
    """Return (sum of weighted values, sum of weights)."""
    weights = weights.astype(jnp.float32)
    return (values.astype(jnp.float32) * weights).sum(), weights.sum()


def ratio(sums: tuple[Array, Array]) -> Float[Array, ""]:
    """Return sum / weight, 0 without weights. The official code adds the same 1e-6."""
    total, weight = sums
    return total / (weight + 1e-6)


def ranked_pairs(scores: Scores) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return (concordant positive-negative pairs, all such pairs) of the batch; ties count half.

    Their ratio is the batch's ROC AUC (Mann-Whitney statistic). The ratio of sums over batches or
    microbatches is the mean of their AUCs weighted by pairs. Exact up to float32 sums for at most
    65,536 positions; larger batches use the first rows that fit. NaN if a counted score is NaN.
    """
    rows = max(1, _RANKED // max(1, scores.values[0].size))
    values, positive, counted = (array[:rows].reshape(-1) for array in scores)
    positives = (positive & counted).astype(jnp.float32)
    negatives = (~positive & counted).astype(jnp.float32)

    def pairs_in_order(ties):
        _, _, high, low = jax.lax.sort((values, ties, positives, negatives), num_keys=2)
        return (high * jnp.cumsum(low)).sum()

    # Among equal scores, sort negatives first (ties count), then positives first (they do not).
    in_order = (pairs_in_order(positives) + pairs_in_order(-positives)) / 2
    unknown = (jnp.isnan(values) & counted).any()
    return jnp.where(unknown, jnp.nan, in_order), positives.sum() * negatives.sum()


def area_under_roc(batches: Sequence[Scores]) -> float:
    """Return the probability that a positive scores above a negative, ties counted half.

    Exact, in float64, over all batches. NaN if one class is missing or a counted score is NaN.

    Args:
      batches: Scores as numpy arrays.
    """
    values = np.concatenate([batch.values[batch.counted] for batch in batches])
    positive = np.concatenate([batch.positive[batch.counted] for batch in batches])
    positives, negatives = values[positive], np.sort(values[~positive])
    if not positives.size or not negatives.size or np.isnan(values).any():
        return float("nan")
    below, tied_too = (np.searchsorted(negatives, positives, side) for side in ("left", "right"))
    return float((below + tied_too).mean() / 2 / negatives.size)


def spearman(batches: Sequence[Ranks]) -> float:
    """Return Spearman's rank correlation over all batches, with mean ranks for ties.

    NaN if predictions or true values are all equal, or if a counted one is NaN.

    Args:
      batches: Ranks as numpy arrays.
    """
    values, truth = (
        np.concatenate([getattr(batch, name)[batch.counted] for batch in batches])
        for name in ("values", "truth")
    )
    if values.size < 2 or np.isnan(values).any() or np.isnan(truth).any():
        return float("nan")
    with np.errstate(invalid="ignore"):
        return float(np.corrcoef(_mean_ranks(values), _mean_ranks(truth))[0, 1])


def _mean_ranks(values: np.ndarray) -> np.ndarray:
    ordered = np.sort(values)
    below, up_to = (np.searchsorted(ordered, values, side) for side in ("left", "right"))
    return (below + up_to) / 2


def divide(total: np.ndarray, weight: np.ndarray) -> float:
    """Return total / weight; NaN if the weight is 0."""
    return float(total) / float(weight) if float(weight) > 0 else float("nan")


def summarize(sums: Metrics) -> dict[str, float]:
    """Convert sums, as numpy arrays, to numbers."""
    return {name: divide(total, weight) for name, (total, weight) in sums.items()}


def heldout(
    names: Collection[str], terms: Mapping[str, float] | None = None
) -> Evaluator[dict[str, Any]]:
    """Return an evaluator of means over all rows, and of ROC AUC and rank correlations over all.

    Its inputs are metrics, including `Scores` and `Ranks`; sums are accumulated in float64.

    Args:
      terms: Weights of the loss terms by name. "loss" is the weighted sum of their means over all
        rows; a mean over batches would give the padded last batch the same weight as the others.
    """

    def update(state, outputs: Metrics):
        if outputs.keys() != set(names):
            raise ValueError(f"Metrics are {sorted(outputs)}; expected {sorted(names)}.")
        return {name: _join(state.get(name), part) for name, part in outputs.items()}

    def finish(state):
        values = {name: _number(state.get(name, (0.0, 0.0))) for name in sorted(names)}
        counted = [name for name in terms or () if name in state and state[name][1] > 0]
        if counted:
            values["loss"] = sum(terms[name] * values[name] for name in counted)
        return values

    return Evaluator(tuple(sorted(names)), dict, update, finish)


def _join(kept, part):
    if isinstance(part, Scores | Ranks):
        return [*(kept or ()), part]
    total = np.asarray(part, np.float64)
    return total if kept is None else kept + total


def _number(kept) -> float:
    if not isinstance(kept, list):
        return divide(*kept)
    return spearman(kept) if isinstance(kept[0], Ranks) else area_under_roc(kept)
