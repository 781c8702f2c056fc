"""pallas_call over rows: block specs, grid steps and accumulators."""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from convbert_jax.ops.tpu import block_sizes
from convbert_jax.ops.tpu.bands import LANES, SUBLANES
from convbert_jax.ops.tpu.ids import Ids
from convbert_jax.ops.tpu.ids import scratch as ids_scratch


class Grid:
    """Grid steps of `rows` rows each, divided among the cores of a device.

    Attributes:
      rows: rows per step.
      steps: number of steps.
      sums: number of accumulators of a sum over positions, one per core.
    """

    def __init__(self, batch: int, rows: int):
        self.rows, self.steps = rows, batch // rows
        self.sums = block_sizes.cores() if self.steps % block_sizes.cores() == 0 else 1

    def row_block(self, array) -> pl.BlockSpec:
        """Returns the block spec of an array [B, ...], the rows of a step."""
        rest, steps = array.shape[1:], self.steps // self.sums
        return pl.BlockSpec(
            (self.rows, *rest), lambda core, step: (core * steps + step, *(0 for _ in rest))
        )

    def sum_block(self, array) -> pl.BlockSpec:
        """Returns the block spec of an array [sums, ...], the accumulator of a core."""
        rest = array.shape[1:]
        return pl.BlockSpec((1, *rest), lambda core, step: (core, *(0 for _ in rest)))

    def ids_block(self, ids) -> pl.BlockSpec:
        """Returns the block spec of ids [B, L], in blocks of 8 rows, or all if there are fewer."""
        rows, steps = min(len(ids), SUBLANES), self.steps // self.sums
        return pl.BlockSpec(
            (rows, ids.shape[1]), lambda core, step: ((core * steps + step) * self.rows // rows, 0)
        )


def whole(array) -> pl.BlockSpec:
    return pl.BlockSpec(array.shape, lambda core, step: (0,) * array.ndim)


def is_first_step():
    """Returns whether this is the first step of a core, which initializes accumulators."""
    return pl.program_id(1) == 0


def call(
    kernel, bands, grid: Grid, segment_ids, arrays, specs, *, outputs, output_specs, scratch,
    interpret,
) -> list[Array]:  # fmt: skip
    """Runs pallas_call; the kernel gets an `Ids` before the arrays."""
    if segment_ids is None and bands.period == bands.length:

        def with_ids(*references):
            kernel(Ids(bands), *references)

    elif segment_ids is None:
        scratch = [*scratch, ids_scratch(bands)]

        def with_ids(*references):
            *references, columns = references
            kernel(Ids(bands, columns), *references)

    else:
        ids = segment_ids.astype(jnp.int32)
        if ids.shape[1] % LANES:
            ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % LANES)))
        arrays, specs = [ids, *arrays], [grid.ids_block(ids), *specs]
        scratch = [*scratch, ids_scratch(bands)]

        def with_ids(block, *references):
            *references, columns = references
            step = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
            first = step * grid.rows % block.shape[0]
            kernel(Ids(bands, columns, block, first), *references)

    return pl.pallas_call(
        with_ids,
        grid=(grid.sums, grid.steps // grid.sums),
        in_specs=specs,
        out_specs=output_specs,
        out_shape=outputs,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=block_sizes.vmem_limit(),
        ),
        interpret=interpret,
    )(*arrays)
