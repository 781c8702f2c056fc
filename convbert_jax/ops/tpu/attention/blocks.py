"""Partitioning of rows and heads into grid steps, shared by both passes.

Heads lie side by side in the lanes of a *tile* of 128 channels. Products take a whole tile in which
the other heads are 0: the matrix unit sums over 128 channels at the cost of one head. Scores have
keys along sublanes and queries along lanes. Statistics of a query (maximum score, sum) are then a
row, and no product needs transposed scores.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from convbert_jax.ops.tpu import block_sizes
from convbert_jax.ops.tpu.attention.factors import F32, I32, only
from convbert_jax.ops.tpu.bands import LANES

HIDDEN = -1e30  # score of an invisible key
# Heads x rows computed at once, so that their instructions can overlap.
MOST_TOGETHER = 24
# The memory budget allows one score at a time per _BYTES (a million on a v5e), of which at most
# _OF_ONE_HEAD belong to one head.
_BYTES = 24
_OF_ONE_HEAD = 1 << 18


@dataclasses.dataclass(frozen=True)
class Settings:
    """Static settings of a kernel.

    Attributes:
      width: channels per head.
      causal: a position sees only itself and earlier ones.
      kept: expected number of weights out of 256 that dropout keeps; None: no dropout.
      interpret: run in Pallas' interpreter.
    """

    width: int
    causal: bool
    kept: int | None
    interpret: bool

    @property
    def scale(self) -> float:
        return self.width**-0.5

    @property
    def factor(self) -> float:
        """Scale of kept weights."""
        return 1.0 if self.kept is None else 256 / self.kept


class Blocks:
    """Block sizes of the grid.

    Args:
      query, key: [B, L, C] and [B, S, C].
      arrays: number of inputs and outputs; each is double-buffered.

    Attributes:
      rows, tiles: rows per step, and tiles of each row.
      together: rows of a step that are computed at once.
      lanes, tile_heads: lanes and heads per tile.
    """

    def __init__(self, settings: Settings, query, key, *, arrays: int):
        self.settings = settings
        self.batch, self.queries, channels = query.shape
        self.keys = key.shape[1]
        self.lanes = min(channels, LANES)
        self.tile_heads = self.lanes // settings.width
        self.all_tiles = channels // self.lanes
        together = block_sizes.budget() // _BYTES
        self._of_one_head = min(_OF_ONE_HEAD, together // self.tile_heads)
        scores = self.tile_heads * min(self.queries * self.keys, self._of_one_head)
        self.tiles = _largest_divisor(
            self.all_tiles, min(together // scores, MOST_TOGETHER // self.tile_heads)
        )
        lanes = self.tiles * self.lanes
        row = max(self.queries, self.keys) * max(lanes, LANES) * query.dtype.itemsize
        fits = block_sizes.budget() // (2 * arrays * row)
        few = self.batch * self.all_tiles // (self.tiles * block_sizes.FEWEST_STEPS)
        self.rows = _largest_divisor(self.batch, min(fits, few, block_sizes.ROWS[0]))
        heads = self.tiles * self.tile_heads
        self.together = _largest_divisor(
            self.rows, min(together // (self.tiles * scores), MOST_TOGETHER // heads)
        )

    def units(self) -> list[tuple[int, int, int]]:
        """Returns (row, tile, head of the tile) of the heads that are computed at once."""
        return [
            (row, tile, head)
            for row in range(self.together)
            for tile in range(self.tiles)
            for head in range(self.tile_heads)
        ]

    def at_once(self, positions: int, others: int) -> int:
        """Returns the number of positions, a divisor, to compute at once against all `others`."""
        blocks = _largest_divisor(positions // LANES, self._of_one_head // (others * LANES))
        return blocks * LANES

    def row_block(self, array) -> pl.BlockSpec:
        """Returns the block spec of an array [B, positions, channels]."""
        shape = self.rows, array.shape[1], self.tiles * self.lanes
        return pl.BlockSpec(shape, lambda step, tile: (step, 0, tile))

    def ids_block(self, ids) -> pl.BlockSpec:
        """Returns the block spec of ids [B, 1, positions]."""
        return pl.BlockSpec((self.rows, 1, ids.shape[2]), lambda step, tile: (step, 0, 0))

    @property
    def sums_shape(self) -> tuple[int, ...]:
        """Shape of the log-sums, one number per query and head."""
        return self.batch, self.all_tiles, self.tile_heads, self.queries

    def sums_block(self) -> pl.BlockSpec:
        shape = self.rows, self.tiles, self.tile_heads, self.queries
        return pl.BlockSpec(shape, lambda step, tile: (step, tile, 0, 0))

    def lanes_of(self, tile: int) -> slice:
        return slice(tile * self.lanes, (tile + 1) * self.lanes)

    def only_head(self, x, head: int):
        """Returns a tile [positions, lanes] with the lanes of all other heads set to 0."""
        if self.tile_heads == 1:
            return x
        own = jax.lax.broadcasted_iota(I32, (1, self.lanes), 1) // self.settings.width == head
        return only(own, x.astype(F32)).astype(x.dtype)

    def of_head(self, x, head: int):
        """Returns the rows of a head of a transposed tile [lanes, positions]."""
        return x[head * self.settings.width : (head + 1) * self.settings.width]


def longest(dtype, width: int) -> int:
    """Returns the number of positions of the longest row that the kernels can be compiled for.

    Estimates the memory of the backward pass for one tile in 16 bits: eight double-buffered arrays
    and two more for temporaries, ids, a transposed gradient, and five sets of scores of 128 keys
    for each head of the tile. 32 bits halve the length. A third of the memory is left for compiler
    spills, which differ by chip.
    """
    of_position = (2 * 10 * 2 + 2 * 4 + 20 * max(LANES // width, 2)) * LANES
    of_position = of_position * jnp.dtype(dtype).itemsize // 2
    return int(0.67 * block_sizes.vmem_limit()) // of_position // LANES * LANES


def _largest_divisor(number: int, most: int) -> int:
    return max(n for n in range(1, max(most, 1) + 1) if number % n == 0)
