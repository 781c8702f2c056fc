"""Causal convolutions of one position, for decoding step by step.

A filter of K taps reads the new position and the (K - 1) * dilation positions before it. The
decoder keeps only this window of P = (K - 1) * dilation + 1 positions of each row.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def dynamic_conv_step(
    window: Float[Array, "B P H D"], filters: Float[Array, "*B H K"], *, dilation: int = 1
) -> Float[Array, "B H D"]:
    """Returns the output of causal `dynamic_conv` at the last position of the window.

    Args:
      window: inputs of the last P positions; 0 before the start of the row.
      filters: filters of this position, or [H, K] for all positions and rows.
      dilation: distance between neighboring taps.

    Raises:
      ValueError: the window does not have P positions.
    """
    reads = _reads("dynamic_conv_step", window, filters.shape[-1], dilation)
    shares = jnp.moveaxis(filters, -1, -2)[..., None].astype(jnp.float32)  # [..., K, H, 1]
    return (reads * shares).sum(axis=1).astype(window.dtype)


def depthwise_conv_step(
    window: Float[Array, "B P C"], filters: Float[Array, "K C"], *, dilation: int = 1
) -> Float[Array, "B C"]:
    """Returns the output of causal `depthwise_conv` at the last position of the window."""
    reads = _reads("depthwise_conv_step", window, len(filters), dilation)
    return (reads * filters.astype(jnp.float32)).sum(axis=1).astype(window.dtype)


def _reads(op, window, taps, dilation):
    """Returns the inputs of all taps, in float32."""
    positions = (taps - 1) * dilation + 1
    if window.shape[1] != positions:
        raise ValueError(
            f"{op}: window is {list(window.shape)} but must have {positions} positions for "
            f"{taps} taps with dilation {dilation}."
        )
    return window[:, ::dilation].astype(jnp.float32)
