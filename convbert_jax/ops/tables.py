"""Rows of a table: read by their ids, and multiplied with vectors.

Each device of a mesh adds up its part of a table's gradient before it is sent.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from convbert_jax.ops import dispatch, products
from convbert_jax.ops.mesh import division, sums

_MANY_VECTORS = 5  # times their width; 3.2 times is a loss


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


def _look_up_forward(table, ids):
    # An array without values tells its shape and dtype; the table itself need not be kept.
    return _look_up(table, ids), (ids, jnp.empty((len(table), 0, *table.shape[1:]), table.dtype))


def _look_up_backward(saved, gradient):
    ids, like = saved
    shape = like.shape[0], *like.shape[2:]

    def of_device(ids, gradient):
        return jnp.zeros(shape, like.dtype).at[ids].add(gradient, mode="drop")[None]

    spec = division.POSITIONS if ids.ndim > 1 else division.ROWS
    each = jax.P((*division.BATCH, division.SEQUENCE))  # a sum of every device that has tokens
    parts = division.over_mesh(of_device, (ids, gradient), (spec, spec), each)
    return parts.sum(0), None


_look_up.defvjp(_look_up_forward, _look_up_backward)


def attend(
    h: Float[Array, "*B E"],
    table: Float[Array, "V E"] | Float[Array, "D V E"],
    bias: Float[Array, " V"] | None = None,
) -> Float[Array, "*B V"]:
    """The float32 product of each vector with every row of a table, plus the bias of that row.

    Args:
      table: as `look_up` takes it.
    """
    if table.ndim == 2:
        return _attend(h, table, bias)
    if bias is None:
        return division.by_rows(lambda h, own: _attend(h, own[0], None), (h, table))

    def of_own(h, table, bias):
        return _attend(h, table[0], bias[0])

    return division.by_rows(of_own, (h, table, sums.copies(bias, bias.dtype)))


def _attend(h, table, bias):
    if bias is None:
        return _of_all_rows(h, table)
    devices = math.prod(division.dividing_rows().values())
    vectors, width = h.size // h.shape[-1] // devices, h.shape[-1]
    many = vectors >= _MANY_VECTORS * width
    if dispatch.platform() == "tpu" and h.dtype == jnp.bfloat16 and many:
        return _of_all_rows_with_bias(h, table, bias)
    return _of_all_rows(h, table) + bias


def _of_all_rows(h, table):
    batch = "abcd"[: h.ndim - 1]
    return products.einsum(f"{batch}e,ve->{batch}v", h, table, jnp.float32)


@jax.custom_vjp
def _of_all_rows_with_bias(h, table, bias):
    """Whose gradient of the bias is made in the product that makes the table's, by ones beside the
    vectors: a sum of its own reads all of the logits once more. What it costs is to cut the table's
    gradient out, so there must be many more logits than numbers in the table (RESULTS, section 6).
    """
    return _of_all_rows(h, table) + bias


def _with_bias_forward(h, table, bias):
    return _of_all_rows_with_bias(h, table, bias), (h, table, bias)


def _with_bias_backward(saved, cotangent):
    h, table, bias = saved
    batch = "abcd"[: h.ndim - 1]
    cotangent = cotangent.astype(h.dtype)
    whole = division.whole_parameter(table.astype(h.dtype))
    d_h = products.multiply(f"{batch}v,ve->{batch}e", cotangent, whole, h.dtype)

    def of_rows(h, cotangent):
        ones = jnp.ones((*h.shape[:-1], products.SUBLANES), h.dtype)
        beside = jnp.concatenate([h, ones], axis=-1)
        both = products.multiply(f"{batch}e,{batch}v->ve", beside, cotangent, jnp.float32)
        return both[:, : h.shape[-1]], both[:, h.shape[-1]]

    d_table, d_bias = sums.sum_over_rows(of_rows, (h, cotangent), None, told=True)
    return d_h, d_table.astype(table.dtype), d_bias.astype(bias.dtype)


_of_all_rows_with_bias.defvjp(_with_bias_forward, _with_bias_backward)
