"""Checksums of a training state, independent of the mesh and sensitive to every bit."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_BLOCK = 2**20  # values per block on the host


def of_parts(parts: Mapping[str, Any]) -> dict[str, int]:
    """Returns a 32-bit checksum by name for every array, and for the JSON part `data` if any."""
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
    """Returns path -> leaf, with paths like `params/stages/0/kernel`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def sum_bits(array: jax.Array) -> jax.Array:
    """Sums the values' bits as integers, weighted by 2 * position + 1, modulo 2**32.

    The weights are odd, so changing one value always changes the sum. They differ, so swapping two
    values almost always does.

    Returns:
      A uint32 scalar.
    """
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")
    position = jnp.zeros(array.shape, jnp.uint32)
    for axis, size in enumerate(array.shape):  # flattening would gather a sharded array
        along = jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
        position = position * jnp.uint32(size) + along
    return (bits.astype(jnp.uint32) * (2 * position + 1)).sum(dtype=jnp.uint32)


def sum_host_bits(array: np.ndarray) -> int:
    """Computes `sum_bits` in numpy."""
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
