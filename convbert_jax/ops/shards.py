"""Running a kernel on the part of its arrays that is on a device.

The partitioner cannot look into a custom kernel: without `shard_map` a sharded step refuses it on a
TPU ("cannot be automatically partitioned").
"""

import math
from collections.abc import Callable

import jax
from jax import P

# As in training/sharding.py: rows are split over the first two, heads over the third.
BATCH_AXES, HEAD_AXIS = ("data", "fsdp"), "tensor"


def over_rows_and_heads(
    function: Callable, heads_at: tuple[int | None, ...], out_heads_at: int | None
) -> Callable:
    """`function` of arrays [B, ...], applied to each device's rows and heads.

    Args:
      heads_at: for each argument the dimension of its heads; None if it has none.
      out_heads_at: the same for the result.

    Returns:
      `function` itself where no mesh is set (`jax.set_mesh`) or all those axes have size 1.

    Raises (when called):
      ValueError: rows or heads that the mesh does not divide.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)) if mesh.axis_names else {}
    manual = set(getattr(mesh, "manual_axes", ()))
    rows = tuple(axis for axis in BATCH_AXES if sizes.get(axis, 1) > 1 and axis not in manual)
    split = sizes.get(HEAD_AXIS, 1) > 1 and HEAD_AXIS not in manual
    if not rows and not split:
        return function

    def spec(head):
        entries = [rows or None] + [None] * (head or 0)
        if head is not None and split:
            entries[head] = HEAD_AXIS
        return P(*entries)

    def run(*arrays):
        ways = math.prod(sizes[axis] for axis in rows)
        if len(arrays[0]) % ways:
            raise ValueError(f"{len(arrays[0])} rows do not divide over {ways} devices.")
        for array, head in zip(arrays, heads_at, strict=True):
            if split and head is not None and array.shape[head] % sizes[HEAD_AXIS]:
                raise ValueError(
                    f"{array.shape[head]} heads do not divide over config.mesh.tensor="
                    f"{sizes[HEAD_AXIS]}."
                )
        # The kernels say nothing about which axes their results vary over.
        return jax.shard_map(
            function,
            in_specs=tuple(map(spec, heads_at)),
            out_specs=spec(out_heads_at),
            axis_names={*rows, *([HEAD_AXIS] if split else [])},
            check_vma=False,
        )(*arrays)

    return run
