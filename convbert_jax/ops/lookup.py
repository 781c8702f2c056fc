"""Rows of a table, whose gradient each device of a mesh adds up before it is sent."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from convbert_jax.ops.mesh import division


def look_up(
    table: Float[Array, "V E"] | Float[Array, "D V E"], ids: Int[Array, "B *L"]
) -> Float[Array, "B *L E"]:
    """The row of each id; NaN where there is none, as jnp.take has it.

    Args:
      table: with an axis in front as `sums.copies` makes it; each device then reads its own.

    The table of words is read several times in a step (generator, discriminator, output). By
    autodiff the compiler adds the gradient of the output, which it has summed over the devices for
    that, into the one of a lookup, and then sends that too: twice a table's bytes (XLA for TPUs,
    libtpu 0.0.52). Here the gradient of a lookup is a sum over devices of arrays of their own,
    which it adds to the others' before it sends any.
    """
    if table.ndim == 2:
        return _look_up(table, ids)
    return division.by_rows(lambda own, ids: jnp.take(own[0], ids, axis=0), (table, ids))


@jax.custom_vjp
def _look_up(table, ids):
    return jnp.take(division.whole_parameter(table), ids, axis=0)


def _forward(table, ids):
    # An array without values tells its shape and dtype; the table itself need not be kept.
    return _look_up(table, ids), (ids, jnp.empty((len(table), 0, *table.shape[1:]), table.dtype))


def _backward(saved, gradient):
    ids, like = saved
    shape = like.shape[0], *like.shape[2:]

    def of_device(ids, gradient):
        return jnp.zeros(shape, like.dtype).at[ids].add(gradient, mode="drop")[None]

    spec = division.POSITIONS if ids.ndim > 1 else division.ROWS
    each = jax.P((*division.BATCH, division.SEQUENCE))  # a sum of every device that has tokens
    parts = division.over_mesh(of_device, (ids, gradient), (spec, spec), each)
    return parts.sum(0), None


_look_up.defvjp(_forward, _backward)
