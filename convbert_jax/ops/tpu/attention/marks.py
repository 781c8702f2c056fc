"""Dropout masks of attention weights from a counter-based generator.

The mask is a function of two seed words and the index of a weight, so it does not depend on the
partitioning into blocks and devices. The backward pass draws the same mask again, and none is
stored. Four weights share a 32-bit word: a counter, mixed by the two rounds of a hash function
(Ettinger, "hash-prospector", lowbias32), XORed with a word of the row and head before each round.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

I32 = jnp.int32
# Keys per group of 32 words: byte k from the top decides keys 32 k to 32 k + 31 of the group.
GROUP = 128
_WORDS = GROUP // 4
_HEADS = 1024  # maximum number of heads
_QUERIES = 1 << 16  # maximum number of positions


def of_head(seed: Int[Array, " 2"], row, head) -> tuple[Array, Array]:
    """Returns two words that are distinct for each row and head."""
    unit = row * _HEADS + head
    return _mix(unit ^ seed[0]), _mix(unit ^ seed[1])


def kept(
    words: tuple[Array, Array], keys: tuple[int, int], queries: tuple[int, int], kept_of_256: int
) -> Bool[Array, "keys queries"]:
    """Returns the dropout mask of a block of weights, True for kept weights.

    Args:
      words: result of `of_head`.
      keys, queries: (first position, number); multiples of GROUP for keys.
      kept_of_256: a weight is kept with probability kept_of_256 / 256.
    """
    shape = _WORDS, queries[1]
    counter = jax.lax.broadcasted_iota(I32, shape, 0) * _QUERIES
    counter = counter + jax.lax.broadcasted_iota(I32, shape, 1) + queries[0]
    limit = I32((kept_of_256 << 24) - (1 << 31))
    parts = []
    for first in range(0, keys[1], GROUP):
        place = (keys[0] + first) // GROUP * (_WORDS * _QUERIES)
        drawn = _mix(counter + place ^ words[0], words[1])
        # Only the upper byte matters, since the lower bytes of the limit are 0.
        parts += [drawn << (8 * byte) < limit for byte in range(4)]
    return jnp.concatenate(parts, axis=0)


def _mix(x, between=0):
    x = x ^ jax.lax.shift_right_logical(x, I32(16))
    x = x * I32(0x7FEB352D)
    x = x ^ jax.lax.shift_right_logical(x, I32(15)) ^ between
    x = x * I32(0x846CA68B - (1 << 32))
    return x ^ jax.lax.shift_right_logical(x, I32(16))
