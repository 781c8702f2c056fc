"""Embedding tables: lookup by id, and logits as products with all rows.

Each device of a mesh sums its part of a table's gradient before the all-reduce.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from convbert_jax.ops import dispatch, partitioning, products

_MANY_VECTORS = 5  # vectors per channel from which _of_all_rows_with_bias pays off


def embedding_lookup(
    table: Float[Array, "V E"] | Float[Array, "D V E"], ids: Int[Array, "B *L"]
) -> Float[Array, "B *L E"]:
    """Returns the row of each id; NaN for ids out of range, as jnp.take.

    The word embeddings are read several times in a step (generator, discriminator, output). With
    autodiff, XLA for TPUs (libtpu 0.0.52) all-reduces the gradient of the output, adds it to the
    gradient of a lookup and all-reduces the sum again: twice the traffic. Here the gradient of a
    lookup is a sum of per-device arrays, to which XLA adds the other gradients before it sends any.

    Args:
      table: [V, E], or [D, V, E] with a leading device axis from
        `partitioning.copy_per_device`; each device then reads its copy.
      ids: row numbers.
    """
    if table.ndim == 2:
        return _lookup(table, ids)
    return partitioning.shard_map_over_rows(
        lambda own, ids: jnp.take(own[0], ids, axis=0), (table, ids)
    )


@jax.custom_vjp
def _lookup(table, ids):
    return jnp.take(partitioning.all_gather_param(table), ids, axis=0)


def _lookup_forward(table, ids):
    # An empty array carries shape and dtype, so the table is not kept as a residual.
    return _lookup(table, ids), (ids, jnp.empty((len(table), 0, *table.shape[1:]), table.dtype))


def _lookup_backward(saved, gradient):
    ids, like = saved
    shape = like.shape[0], *like.shape[2:]

    def of_device(ids, gradient):
        return jnp.zeros(shape, like.dtype).at[ids].add(gradient, mode="drop")[None]

    spec = partitioning.POSITIONS if ids.ndim > 1 else partitioning.ROWS
    each = jax.P(
        (*partitioning.BATCH, partitioning.SEQUENCE)
    )  # one partial sum per device with tokens
    parts = partitioning.shard_map_op(of_device, (ids, gradient), (spec, spec), each)
    return parts.sum(0), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def attend(
    h: Float[Array, "*B E"],
    table: Float[Array, "V E"] | Float[Array, "D V E"],
    bias: Float[Array, " V"] | None = None,
) -> Float[Array, "*B V"]:
    """Returns the float32 product of each vector with each row of the table, plus the row's bias.

    Args:
      h: vectors.
      table: as in `embedding_lookup`.
      bias: one number per row; None: no bias.
    """
    if table.ndim == 2:
        return _attend(h, table, bias)
    if bias is None:
        return partitioning.shard_map_over_rows(lambda h, own: _attend(h, own[0], None), (h, table))

    def of_own(h, table, bias):
        return _attend(h, table[0], bias[0])

    return partitioning.shard_map_over_rows(
        of_own, (h, table, partitioning.copy_per_device(bias, bias.dtype))
    )


def _attend(h, table, bias):
    if bias is None:
        return _of_all_rows(h, table)
    devices = math.prod(partitioning.dividing_rows().values())
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
    """Computes `_of_all_rows` plus bias, with both parameter gradients from one product.

    The backward pass appends ones to the vectors, so the product for the table's gradient also
    yields the bias gradient; a separate sum would read all logits again. Slicing the table's
    gradient costs time, so it pays off only if the logits are much larger than the table
    (benchmarks/notes/tpu_steps.md).
    """
    return _of_all_rows(h, table) + bias


def _with_bias_forward(h, table, bias):
    return _of_all_rows_with_bias(h, table, bias), (h, table, bias)


def _with_bias_backward(saved, cotangent):
    h, table, bias = saved
    batch = "abcd"[: h.ndim - 1]
    cotangent = cotangent.astype(h.dtype)
    whole = partitioning.all_gather_param(table.astype(h.dtype))
    d_h = products.multiply(f"{batch}v,ve->{batch}e", cotangent, whole, h.dtype)

    def of_rows(h, cotangent):
        ones = jnp.ones((*h.shape[:-1], products.SUBLANES), h.dtype)
        beside = jnp.concatenate([h, ones], axis=-1)
        both = products.multiply(f"{batch}e,{batch}v->ve", beside, cotangent, jnp.float32)
        return both[:, : h.shape[-1]], both[:, h.shape[-1]]

    d_table, d_bias = partitioning.sum_over_rows(of_rows, (h, cotangent), None, force_local=True)
    return d_h, d_table.astype(table.dtype), d_bias.astype(bias.dtype)


_of_all_rows_with_bias.defvjp(_with_bias_forward, _with_bias_backward)
