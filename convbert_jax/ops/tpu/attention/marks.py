"""Which attention weights dropout keeps: a function of two words and of where a weight stands.

A generator with a state would draw other marks wherever blocks, devices or passes are others. Here
the backward pass makes the marks of the forward pass again, whatever is divided how, and nothing of
them is in memory. A word of 32 bits for four weights is a counter, mixed in two rounds as a hash
function mixes (Ettinger, "hash-prospector", lowbias32), with a word of the row's head before each.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

I32 = jnp.int32
# Keys whose marks come from the same words: 32 words of 4 bytes, one behind the other.
GROUP = 128
_WORDS = GROUP // 4
_HEADS = 1024  # most of a row
_QUERIES = 1 << 16  # and most positions


def of_head(seed: Int[Array, " 2"], row, head) -> tuple[Array, Array]:
    """The two words of a head of a row, which are others for every row and head."""
    unit = row * _HEADS + head
    return _mix(unit ^ seed[0]), _mix(unit ^ seed[1])


def kept(
    words: tuple[Array, Array], keys: tuple[int, int], queries: tuple[int, int], kept_of_256: int
) -> Bool[Array, "keys queries"]:
    """Which weights of some keys and queries are kept.

    Args:
      words: of `of_head`.
      keys, queries: the first position, and how many; of keys multiples of GROUP.
      kept_of_256: with probability kept_of_256 / 256.
    """
    shape = _WORDS, queries[1]
    counter = jax.lax.broadcasted_iota(I32, shape, 0) * _QUERIES
    counter = counter + jax.lax.broadcasted_iota(I32, shape, 1) + queries[0]
    limit = I32((kept_of_256 << 24) - (1 << 31))
    parts = []
    for first in range(0, keys[1], GROUP):
        place = (keys[0] + first) // GROUP * (_WORDS * _QUERIES)
        drawn = _mix(counter + place ^ words[0], words[1])
        # The upper byte decides, as the limit has no others.
        parts += [drawn << (8 * byte) < limit for byte in range(4)]
    return jnp.concatenate(parts, axis=0)


def _mix(x, between=0):
    x = x ^ jax.lax.shift_right_logical(x, I32(16))
    x = x * I32(0x7FEB352D)
    x = x ^ jax.lax.shift_right_logical(x, I32(15)) ^ between
    x = x * I32(0x846CA68B - (1 << 32))
    return x ^ jax.lax.shift_right_logical(x, I32(16))
