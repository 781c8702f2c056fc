"""How rows and heads are dealt out to the steps of the kernels, and what both passes share.

Heads lie side by side in the lanes of a *tile*, 128 channels. A factor of a product is a whole tile
whose other heads are 0: the matrix unit sums over 128 channels at the price of one head's. Scores
have keys along sublanes and queries along lanes, so that what belongs to a query (its largest
score, its sum) is a row, and no product needs scores turned over.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from convbert_jax.ops.tpu import block_sizes
from convbert_jax.ops.tpu.attention.factors import F32, I32, only
from convbert_jax.ops.tpu.bands import LANES

HIDDEN = -1e30  # a score of what is not seen
# Heads of rows worked on at once: the instructions of one fill the waits of another.
MOST_TOGETHER = 24
# Of the memory of a kernel: what a score of theirs may take (a million scores on a v5e), and at
# most so many are of one head.
_BYTES = 24
_OF_ONE_HEAD = 1 << 18


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a kernel is made for.

    Attributes:
      width: of a head.
      causal: a position sees itself and what precedes it.
      kept: of 256 weights, those that dropout keeps on average; None: all, and none is drawn.
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
        """What kept weights are multiplied by."""
        return 1.0 if self.kept is None else 256 / self.kept


class Blocks:
    """A step has `rows` rows and `tiles` tiles of them, and works on `together` rows at once.

    Attributes:
      lanes, tile_heads: of a tile.
    """

    def __init__(self, settings: Settings, query, key, *, arrays: int):
        """arrays: inputs and outputs of rows, each held twice: one in work, one on its way."""
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
        """(row, tile, head of the tile) of what is worked on at once."""
        return [
            (row, tile, head)
            for row in range(self.together)
            for tile in range(self.tiles)
            for head in range(self.tile_heads)
        ]

    def at_once(self, positions: int, others: int) -> int:
        """How many of `positions` to work on at once, each with all `others`: a divisor."""
        blocks = _largest_divisor(positions // LANES, self._of_one_head // (others * LANES))
        return blocks * LANES

    def row_block(self, array) -> pl.BlockSpec:
        """Of [B, positions, channels]."""
        shape = self.rows, array.shape[1], self.tiles * self.lanes
        return pl.BlockSpec(shape, lambda step, tile: (step, 0, tile))

    def ids_block(self, ids) -> pl.BlockSpec:
        """Of [B, 1, positions]."""
        return pl.BlockSpec((self.rows, 1, ids.shape[2]), lambda step, tile: (step, 0, 0))

    @property
    def sums_shape(self) -> tuple[int, ...]:
        """Of a number for each query and head."""
        return self.batch, self.all_tiles, self.tile_heads, self.queries

    def sums_block(self) -> pl.BlockSpec:
        shape = self.rows, self.tiles, self.tile_heads, self.queries
        return pl.BlockSpec(shape, lambda step, tile: (step, tile, 0, 0))

    def lanes_of(self, tile: int) -> slice:
        return slice(tile * self.lanes, (tile + 1) * self.lanes)

    def only_head(self, x, head: int):
        """A tile [positions, lanes] with 0 in the lanes of all heads but one."""
        if self.tile_heads == 1:
            return x
        own = jax.lax.broadcasted_iota(I32, (1, self.lanes), 1) // self.settings.width == head
        return only(own, x.astype(F32)).astype(x.dtype)

    def of_head(self, x, head: int):
        """The rows of a head of a tile that is turned over, [lanes, positions]."""
        return x[head * self.settings.width : (head + 1) * self.settings.width]


def longest(dtype, width: int) -> int:
    """Positions of the longest row that the kernels are compiled for, by what the backward pass has
    at once in 16 bits: eight arrays of a tile of it, in work and on their way, and two more of what
    is made of them; its ids and a gradient turned over; and of each head of the tile five times
    scores of the fewest keys. In 32 bits half as many. A third of the memory is left for what the
    compiler spills, which differs by chip.
    """
    of_position = (2 * 10 * 2 + 2 * 4 + 20 * max(LANES // width, 2)) * LANES
    of_position = of_position * jnp.dtype(dtype).itemsize // 2
    return int(0.67 * block_sizes.vmem_limit()) // of_position // LANES * LANES


def _largest_divisor(number: int, most: int) -> int:
    return max(n for n in range(1, max(most, 1) + 1) if number % n == 0)
