"""Self-attention with dropout by key; the arithmetic is in `ops/attention.py`."""

from jaxtyping import Array, Float, Int

from convbert_jax.models.layers import dropout
from convbert_jax.ops.attention import attention


def attend(
    query: Float[Array, "B L H D"],
    key: Float[Array, "B L H D"],
    value: Float[Array, "B L H D"],
    segment_ids: Int[Array, "B L"],
    *,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    implementation: str = "auto",
) -> Float[Array, "B L H D"]:
    """softmax(query . key / sqrt(D)) . value within segments, dropout on the softmax.

    Args:
      dropout_key: None is no dropout.
      implementation: as in `ops.attention.attention`.
    """
    drop = None
    if dropout_rate > 0.0 and dropout_key is not None:

        def drop(weights):
            return dropout(weights, dropout_rate, dropout_key)

    return attention(query, key, value, segment_ids, implementation=implementation, drop=drop)
