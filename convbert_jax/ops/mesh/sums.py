"""Sums over the rows of all devices, and the dtype that they are sent in: gradients."""

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
    """Context to trace a loss in, of which the gradients of matrices and tables cross between the
    devices that divide rows in `dtype`; None: as they are, in float32. An op takes it as it is when
    it is called, also for the backward pass that is traced later.
    """
    token = _SENT.set(None if dtype is None else jnp.dtype(dtype))
    try:
        yield
    finally:
        _SENT.reset(token)


def sent_dtype() -> jnp.dtype | None:
    """What `gradients_sent_in` says here; None too where rows are not divided: nothing is sent."""
    return _SENT.get() if division.dividing_rows() else None


def sum_over_rows(
    function: Callable,
    arrays: Sequence[jax.Array],
    dtype: jnp.dtype | None,
    *,
    told: bool = False,
) -> Any:
    """A sum over the rows of arrays, axis 0 of each, or several: what each device adds up of its
    own, by `function`, is rounded to `dtype` and then sent and added up; None: as it is.

    Args:
      told: each device adds up its own rows also where the compiler could be left to do it: where
        `function` cuts what it adds up, which would else be sent whole and cut then.

    Left to itself the compiler does the same where each device has all of a parameter. Where `fsdp`
    divides parameters it sends activations around instead, so there it is told (two layers of base
    on four chips: 58 million cycles and 480 MB, and 47 and 234 so; benchmarks/RESULTS.md, section
    15). Rows that one device has all of are `function` itself.
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
    """`x` with a leading axis of the devices that divide rows, each of which has a copy of its own,
    for `division.by_rows`; on one such device `x` itself.

    What is read several times in a step, as a table of words, is sent once so: each device adds up
    its gradients of all reads, and then they cross in `dtype`.
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
    """The sum over axis 0, of which each device has a part, sent in the dtype of `parts`: jnp.sum
    would make bfloat16 float32 before.
    """
    return jax.lax.reduce(parts, jnp.zeros((), parts.dtype), jax.lax.add, (0,))
