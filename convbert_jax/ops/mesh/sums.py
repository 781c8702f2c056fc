"""Reductions of gradients over the rows of all devices, and the dtype of their communication."""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from convbert_jax.ops.mesh import division

_SENT = contextvars.ContextVar("the dtype that gradients are sent in", default=None)


@contextlib.contextmanager
def gradients_sent_in(dtype: jnp.dtype | None) -> Iterator[None]:
    """Sets the dtype in which gradients of matrices and tables are reduced between devices.

    Trace the loss inside this context. An op reads the dtype when it is called and uses it in its
    backward pass, which is traced later.

    Args:
      dtype: communication dtype; None: float32.
    """
    token = _SENT.set(None if dtype is None else jnp.dtype(dtype))
    try:
        yield
    finally:
        _SENT.reset(token)


def sent_dtype() -> jnp.dtype | None:
    """Returns the dtype of `gradients_sent_in`, or None if the mesh does not split rows."""
    return _SENT.get() if division.dividing_rows() else None


def sum_over_rows(
    function: Callable,
    arrays: Sequence[jax.Array],
    dtype: jnp.dtype | None,
    *,
    told: bool = False,
) -> Any:
    """Sums `function` over the rows (axis 0) of the arrays on all devices.

    Each device applies `function` to its own rows; the partial sums are cast to `dtype` and
    all-reduced. The compiler does the same for replicated parameters. If `fsdp` splits parameters,
    it would send activations instead, so the local sums are then explicit
    (benchmarks/RESULTS.md, section 15). On one device this is `function`.

    Args:
      function: sums the rows of its arguments; returns a tree of arrays.
      arrays: arguments of `function`, with rows along axis 0.
      dtype: communication dtype; None: not cast.
      told: forces explicit local sums, for a `function` that slices its sum: otherwise the whole
        sum would be sent before slicing.

    Returns:
      The tree of total sums.
    """
    sizes = division.dividing_rows()
    devices = math.prod(sizes.values())
    told |= dtype is not None or "fsdp" in sizes
    if not sizes or not told or any(len(x) % devices for x in arrays):
        return function(*arrays)

    def of_own(*own):
        return jax.tree.map(
            lambda part: part[None] if dtype is None else part[None].astype(dtype), function(*own)
        )

    return jax.tree.map(add_up, division.by_rows(of_own, arrays))


def copies(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Broadcasts `x` along a new leading axis, one copy per device that splits rows.

    For `division.by_rows`. For arrays that are read several times in a step, such as word
    embeddings: each device sums its gradients of all reads, and the sum is reduced once, in
    `dtype`.

    Returns:
      [devices, *x.shape], or `x` if rows are not split.
    """
    sizes = division.dividing_rows()
    return _copies(x, dtype, tuple(sizes.items())) if sizes else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _copies(x, dtype, sizes):
    names, counts = zip(*sizes, strict=True)
    copied = jnp.broadcast_to(x, (math.prod(counts), *x.shape))
    return jax.lax.with_sharding_constraint(copied, jax.P(names))


def _copies_forward(x, dtype, sizes):
    return _copies(x, dtype, sizes), None


def _copies_backward(dtype, sizes, saved, parts):
    return (add_up(parts.astype(dtype)).astype(parts.dtype),)


_copies.defvjp(_copies_forward, _copies_backward)


def add_up(parts: jax.Array) -> jax.Array:
    """Sums over axis 0, which is split over devices, in the dtype of `parts`.

    jnp.sum would cast bfloat16 to float32 before communication.
    """
    return jax.lax.reduce(parts, jnp.zeros((), parts.dtype), jax.lax.add, (0,))
