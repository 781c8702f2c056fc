"""Checksums of a training state: the same on any mesh, and any changed bit changes them."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_BLOCK = 2**20  # values that the host looks at together


def of_parts(parts: Mapping[str, Any]) -> dict[str, int]:
    """A 32-bit number for every array by name, and one for the JSON `data`, if that is there."""
    arrays = by_name({name: part for name, part in parts.items() if name != "data"})
    here = {name: a for name, a in arrays.items() if not isinstance(a, jax.Array)}
    sums = jax.device_get(_sum_all({n: a for n, a in arrays.items() if n not in here}))
    found = {
        name: sum_host_bits(np.asarray(here[name])) if name in here else int(sums[name])
        for name in arrays
    }
    if "data" in parts:
        found["data"] = zlib.crc32(json.dumps(parts["data"], sort_keys=True).encode())
    return found


def by_name(tree) -> dict[str, Any]:
    """The leaves of a tree by path, as `params/stages/0/kernel`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


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


def sum_host_bits(array: np.ndarray) -> int:
    """What `sum_bits` gives, without a device."""
    bits = np.ascontiguousarray(array).reshape(-1).view(f"uint{8 * array.dtype.itemsize}")
    total = 0
    for start in range(0, bits.size, _BLOCK):
        block = bits[start : start + _BLOCK].astype(np.uint32)
        weights = np.arange(2 * start + 1, 2 * (start + block.size), 2, np.uint64)
        total += int((block * weights.astype(np.uint32)).sum(dtype=np.uint32))
    return total % 2**32


@jax.jit
def _sum_all(arrays):
    return jax.tree.map(sum_bits, arrays)
