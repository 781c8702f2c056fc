"""Metrics as weighted sums, `{name: (sum, weight)}`, added over batches and divided once, on the
host.

A ranking measure is no ratio of sums, but its two histograms of scores add in the same way: the
area under the ROC curve travels as (scores of positives, scores of negatives), by bin.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Metrics = dict[str, tuple[Array, Array]]

_BINS = 32  # per digit; 1024 bins in all
_LOGIT_RANGE = 12.0  # beyond it a probability is 0 or 1 to five digits


def mean(values: Float[Array, "..."], weights: Float[Array, "..."]) -> tuple[Array, Array]:
    """(sum of weighted values, sum of weights)."""
    weights = weights.astype(jnp.float32)
    return (values.astype(jnp.float32) * weights).sum(), weights.sum()


def score_histograms(
    logits: Float[Array, "..."], positive: Float[Array, "..."], weights: Float[Array, "..."]
) -> tuple[Float[Array, " bins"], Float[Array, " bins"]]:
    """Histograms of the logits of positives and of negatives, 1024 bins even in the logit.

    As a product of two one-hot digits, a matmul: a scatter-add would serialize on accelerators.
    """
    bins = _BINS * _BINS
    scaled = jnp.clip((logits.reshape(-1) + _LOGIT_RANGE) / (2 * _LOGIT_RANGE), 0.0, 1.0)
    index = jnp.minimum((scaled * bins).astype(jnp.int32), bins - 1)
    high = jax.nn.one_hot(index // _BINS, _BINS, dtype=jnp.float32)
    low = jax.nn.one_hot(index % _BINS, _BINS, dtype=jnp.float32)
    weights = weights.reshape(-1).astype(jnp.float32)
    positive = positive.reshape(-1).astype(jnp.float32) * weights
    count = lambda w: jnp.einsum(  # noqa: E731
        "nh,nl,n->hl", high, low, w, precision=jax.lax.Precision.HIGHEST
    ).reshape(-1)
    return count(positive), count(weights - positive)


def area_under_roc(positives: np.ndarray, negatives: np.ndarray) -> float:
    """Probability that a positive scores above a negative, ties counted half; NaN without both "
    "kinds."""
    positives, negatives = np.float64(positives), np.float64(negatives)
    below = np.cumsum(negatives) - negatives
    total = positives.sum() * negatives.sum()
    if total == 0:
        return float("nan")
    return float((positives * (below + 0.5 * negatives)).sum() / total)


def divide(total: np.ndarray, weight: np.ndarray) -> float:
    """total / weight; NaN where nothing was counted."""
    return float(total) / float(weight) if float(weight) > 0 else float("nan")
