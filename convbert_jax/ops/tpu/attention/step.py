"""What a step of a kernel knows of the rows it works on: which they are, what is seen and kept."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from convbert_jax.ops.tpu import block_sizes
from convbert_jax.ops.tpu.attention import marks
from convbert_jax.ops.tpu.attention.blocks import Blocks
from convbert_jax.ops.tpu.attention.factors import I32
from convbert_jax.ops.tpu.bands import LANES

Part = tuple  # of positions: the first one, and how many


class Step:
    """Made outside of loops, where the interpreter knows which step it is.

    Attributes:
      first: of the rows of the step, the first one that is worked on.
    """

    def __init__(self, blocks: Blocks, numbers, ids, columns):
        """ids: of queries and keys, or none; columns: scratch memory for those of keys."""
        self.blocks, self._ids, self._columns = blocks, ids, columns
        self._seed = numbers[0, 0], numbers[0, 1]
        self._row = numbers[0, 2] + pl.program_id(0) * blocks.rows
        self._head = numbers[0, 3] + pl.program_id(1) * blocks.tiles * blocks.tile_heads
        self._query = numbers[0, 4]
        self.first = 0

    def for_rows(self, function: Callable[[], None]) -> None:
        """Calls it for the rows that are worked on at once, until the step has no more."""

        @pl.loop(0, self.blocks.rows // self.blocks.together)
        def _(index):
            self.first = index * self.blocks.together
            for row in range(self.blocks.together if self._ids else 0):
                self._turn_ids(row)
            function()

    def _turn_ids(self, row: int) -> None:
        """Those of keys from lanes to sublanes, the same in every lane."""
        ids = self._ids[1][self.first + row]
        for first in range(0, ids.shape[1], LANES):
            block = jnp.broadcast_to(ids[:, first : first + LANES], (LANES, LANES))
            self._columns[row, first : first + LANES] = block.T

    def tile(self, array, row: int, tile: int, positions=slice(None)):
        """[positions, lanes] of a reference [rows, positions, channels]."""
        return array[self.first + row, positions, self.blocks.lanes_of(tile)]

    def visible(self, keys: Part, queries: Part) -> list:
        """[keys, queries] whether a query sees a key, for each row, or None: all do."""
        return [self._visible(row, keys, queries) for row in range(self.blocks.together)]

    def _visible(self, row, keys, queries):
        seen = None
        if self._ids:
            columns = self._columns[row, pl.ds(*keys)]
            wide = jnp.concatenate([columns] * (queries[1] // LANES), axis=1)
            seen = wide == self._ids[0][self.first + row, :, pl.ds(*queries)]
        if self.blocks.settings.causal:
            shape = keys[1], queries[1]
            key = keys[0] + jax.lax.broadcasted_iota(I32, shape, 0)
            query = queries[0] + jax.lax.broadcasted_iota(I32, shape, 1)
            seen = key <= query if seen is None else seen & (key <= query)
        return seen

    def kept(self, unit: tuple[int, int, int], keys: Part, queries: Part):
        """Which weights of a unit of `Blocks.units` dropout keeps, or None: all."""
        blocks = self.blocks
        if blocks.settings.kept is None:
            return None
        row, tile, head = unit
        head = self._head + tile * blocks.tile_heads + head
        words = marks.of_head(self._seed, self._row + self.first + row, head)
        queries = self._query + queries[0], queries[1]
        return marks.kept(words, keys, queries, blocks.settings.kept)


def call(
    kernel, blocks: Blocks, numbers, ids, arrays: Sequence, specs, outputs, output_specs, scratch=()
) -> list:
    """pallas_call; the kernel gets a `Step` before the arrays.

    Args:
      numbers: int32: two words of dropout; the first row, head and query of this device.
      ids: segments of queries and keys, [B, 1, positions], or none.
    """
    count = len(ids)
    columns = [pltpu.VMEM((blocks.together, blocks.keys, LANES), I32)] if ids else []

    def with_step(numbers, *references):
        columns = references[-1] if count else None
        rest = references[count : len(references) - bool(count)]
        kernel(Step(blocks, numbers, references[:count], columns), *rest)

    return pl.pallas_call(
        with_step,
        grid=(blocks.batch // blocks.rows, blocks.all_tiles // blocks.tiles),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            *map(blocks.ids_block, ids),
            *specs,
        ],
        out_specs=output_specs,
        out_shape=outputs,
        scratch_shapes=[*scratch, *columns],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            vmem_limit_bytes=block_sizes.vmem_limit(),
        ),
        interpret=blocks.settings.interpret,
    )(numbers[None], *ids, *arrays)  # of two axes, so that seeds may be a third


def for_blocks(positions: int, size: int, function: Callable) -> None:
    """function(first position) for each block."""
    if positions == size:
        function(0)
        return

    @pl.loop(0, positions // size)
    def _(block):
        function(pl.multiple_of(block * size, LANES))
