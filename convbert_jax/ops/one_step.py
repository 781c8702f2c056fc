"""The causal convolutions one position at a time, as a decoder makes them.

What a filter of K taps, `dilation` apart, reads are the last (K - 1) * dilation positions and the
new one: a window of P = (K - 1) * dilation + 1, which is all that is kept of a row.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def dynamic_conv_step(
    window: Float[Array, "B P H D"], filters: Float[Array, "*B H K"], *, dilation: int = 1
) -> Float[Array, "B H D"]:
    """What causal `dynamic_conv` gives out at the last position of the window.

    Args:
      window: 0 where the row had not begun.
      filters: of this position, or [H, K] of all.

    Raises:
      ValueError: the window is not what the filters read.
    """
    reads = _reads("dynamic_conv_step", window, filters.shape[-1], dilation)
    shares = jnp.moveaxis(filters, -1, -2)[..., None].astype(jnp.float32)  # [..., K, H, 1]
    return (reads * shares).sum(axis=1).astype(window.dtype)


def depthwise_conv_step(
    window: Float[Array, "B P C"], filters: Float[Array, "K C"], *, dilation: int = 1
) -> Float[Array, "B C"]:
    """What causal `depthwise_conv` gives out there; arguments as in `dynamic_conv_step`."""
    reads = _reads("depthwise_conv_step", window, len(filters), dilation)
    return (reads * filters.astype(jnp.float32)).sum(axis=1).astype(window.dtype)


def _reads(op, window, taps, dilation):
    """Every tap's read, in float32."""
    positions = (taps - 1) * dilation + 1
    if window.shape[1] != positions:
        raise ValueError(
            f"{op}: window is {list(window.shape)}, but must have {positions} positions, for "
            f"{taps} taps with dilation {dilation}."
        )
    return window[:, ::dilation].astype(jnp.float32)
