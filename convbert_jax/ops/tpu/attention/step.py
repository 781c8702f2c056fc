"""Grid steps of the attention kernels: rows, visibility and dropout masks."""

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

Part = tuple  # (first position, number of positions)


class Step:
    """A grid step. Create it outside of loops: the interpreter needs that for `pl.program_id`.

    Args:
      numbers: as in `call`.
      ids: segment ids of queries and keys, or empty.
      columns: scratch memory for the transposed ids of keys; None without ids.

    Attributes:
      first: index in the step of the first row being computed.
    """

    def __init__(self, blocks: Blocks, numbers, ids, columns):
        self.blocks, self._ids, self._columns = blocks, ids, columns
        self._seed = numbers[0, 0], numbers[0, 1]
        self._row = numbers[0, 2] + pl.program_id(0) * blocks.rows
        self._head = numbers[0, 3] + pl.program_id(1) * blocks.tiles * blocks.tile_heads
        self._query = numbers[0, 4]
        self.first = 0

    def for_rows(self, function: Callable[[], None]) -> None:
        """Calls `function` for each group of `together` rows of the step."""

        @pl.loop(0, self.blocks.rows // self.blocks.together)
        def _(index):
            self.first = index * self.blocks.together
            for row in range(self.blocks.together if self._ids else 0):
                self._turn_ids(row)
            function()

    def _turn_ids(self, row: int) -> None:
        """Transposes the ids of keys from lanes to sublanes, broadcast to all lanes."""
        ids = self._ids[1][self.first + row]
        for first in range(0, ids.shape[1], LANES):
            block = jnp.broadcast_to(ids[:, first : first + LANES], (LANES, LANES))
            self._columns[row, first : first + LANES] = block.T

    def tile(self, array, row: int, tile: int, positions=slice(None)):
        """Returns a tile [positions, lanes] of a reference [rows, positions, channels]."""
        return array[self.first + row, positions, self.blocks.lanes_of(tile)]

    def visible(self, keys: Part, queries: Part) -> list:
        """Returns for each row the mask [keys, queries] of visible keys, or None: all visible."""
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
        """Returns the dropout mask of a unit of `Blocks.units`, or None: all weights are kept."""
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
    """Runs pallas_call; the kernel gets a `Step` before the arrays.

    Args:
      numbers: int32, two seed words of dropout; the first row, head and query of this device.
      ids: segment ids of queries and keys, [B, 1, positions], or empty.
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
    )(numbers[None], *ids, *arrays)  # two axes, so that vmap over seeds can add a third


def for_blocks(positions: int, size: int, function: Callable) -> None:
    """Calls function(first position) for each block of `size` positions."""
    if positions == size:
        function(0)
        return

    @pl.loop(0, positions // size)
    def _(block):
        function(pl.multiple_of(block * size, LANES))
