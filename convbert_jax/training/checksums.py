"""Checksums of a training state: the same on any mesh, and any changed bit changes them."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from convbert_jax.training.state import TrainState


def of_state(state: TrainState, data: Mapping[str, Any]) -> dict[str, int]:
    """A 32-bit number for every array of `state`, by name, and one for the JSON `data`."""
    sums = jax.device_get(_sum_all({"params": state.params, "opt_state": state.opt_state}))
    named = {
        jax.tree_util.keystr(path, simple=True, separator="/"): int(value)
        for path, value in jax.tree_util.tree_leaves_with_path(sums)
    }
    return named | {"data": zlib.crc32(json.dumps(data, sort_keys=True).encode())}


def sum_bits(array: jax.Array) -> jax.Array:
    """The values' bits as integers, weighted by 2 * position + 1, modulo 2**32; uint32 scalar.

    The weights are odd, so a change of one value always changes the sum; and they differ, so an
    exchange of two values does too, but for rare coincidences.
    """
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")
    position = jnp.zeros(array.shape, jnp.uint32)
    for axis, size in enumerate(array.shape):  # by axis: flattening would gather a split array
        along = jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
        position = position * jnp.uint32(size) + along
    return (bits.astype(jnp.uint32) * (2 * position + 1)).sum(dtype=jnp.uint32)


@jax.jit
def _sum_all(tree):
    return jax.tree.map(sum_bits, tree)
