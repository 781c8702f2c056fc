"""Device mesh, batch sharding, and parameter sharding by path.

A task provides the partition rules (`interfaces.Rules`): regular expressions over parameter paths.
The first match applies; a parameter without a match is an error. Optimizer moments have the paths
of their parameters, so the same rules apply to them.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from convbert_jax.config import MeshSection, UserError
from convbert_jax.interfaces import REPLICATED, Batch, Rules, Split

Params = dict[str, Any]  # nested dict of float32 arrays


def parameter_path(path: tuple) -> str:
    """Joins the dict keys of a JAX key path, for example `encoder/stages/0/query/kernel`.

    Other containers are ignored, so a parameter and its optimizer moments have the same path.
    """
    keys = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)]
    return "/".join(map(str, keys))


def flatten_params(params: Params) -> dict[str, jax.Array]:
    """Returns path -> leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {parameter_path(path): leaf for path, leaf in leaves}


def count_params(params: Params) -> int:
    """Counts the scalars in a tree of arrays or `jax.ShapeDtypeStruct`s."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


AXES = ("data", "fsdp", "tensor", "sequence")

BATCH_AXES = ("data", "fsdp")


class ShardingError(UserError):
    """The mesh does not fit the devices, the batch or the parameters."""


# Megatron-style: the tensor axis never splits a head or a feed-forward channel. Projections into
# heads are split along their output, the projection out of the heads along its input.
RULES: Rules = (
    (r"(^|_|/)(bias|scale)$", REPLICATED),
    (r"(^|/)embedding$", Split(table=True)),
    (r"/feed_forward/(intermediate|gate)/kernel$", Split(tensor=-1)),
    (r"/feed_forward/output/kernel$", Split(tensor=-2)),
    (r"(^|/)kernel$", Split()),
)

_STACKED = re.compile(r"(^|/)stages/[^/]+/")  # leaves with a leading axis of layers

_SMALL = 2**14  # values per layer; smaller tensors are cheaper to replicate than to gather


def make_mesh(section: MeshSection, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes a mesh with the axes AXES over `devices` (default: all).

    With several TPU slices, only the axis `data` spans slices, so only the gradient all-reduce uses
    the data-center network.

    Raises:
      ShardingError: the product of the sizes is not the number of devices, or `data` is not
        divisible by the number of slices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(section, len(devices))
    # The default, Explicit, requires shardings at every op.
    kinds = (AxisType.Auto,) * len(AXES)
    slices = count_slices(devices)
    if slices == 1:
        return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=kinds, devices=devices)
    if sizes["data"] % slices:
        raise ShardingError(
            f"config.mesh.data={sizes['data']} is not a multiple of the {slices} TPU slices. "
            "Lower config.mesh.fsdp, .tensor or .sequence, which cannot span slices.",
            field="config.mesh.data",
            value=sizes["data"],
        )
    inside = sizes | {"data": sizes["data"] // slices}
    between = {axis: slices if axis == "data" else 1 for axis in AXES}
    placed = mesh_utils.create_hybrid_device_mesh(
        tuple(inside.values()), tuple(between.values()), devices
    )
    return Mesh(placed, AXES, axis_types=kinds)


def count_slices(devices: Sequence[jax.Device]) -> int:
    """Counts the TPU slices of the devices; slices are connected by the data-center network."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def mesh_sizes(section: MeshSection, count: int) -> dict[str, int]:
    """Returns axis -> size for a mesh of `count` devices.

    Raises:
      ShardingError: the product of the sizes is not `count`.
    """
    of_section = (section.data, section.fsdp, section.tensor, section.sequence)
    sizes = dict(zip(AXES, of_section, strict=True))
    fixed = math.prod(size for size in sizes.values() if size != -1)
    named = ", ".join(f"config.mesh.{axis}={size}" for axis, size in sizes.items())
    if count % fixed:
        raise ShardingError(
            f"{named} do not divide the {count} devices of this run. Choose sizes whose product "
            f"is {count}, or -1 for one of them."
        )
    sizes = {axis: count // fixed if n == -1 else n for axis, n in sizes.items()}
    if math.prod(sizes.values()) != count:
        raise ShardingError(
            f"{named} use only {fixed} of the {count} devices of this run. Set config.mesh.data=-1 "
            "to use all."
        )
    return sizes


def check_batch_size(
    batch_size: int,
    accumulation: int,
    mesh: Mesh,
    *,
    replicas: int = 1,
    field: str = "config.train.batch_size",
) -> None:
    """Checks that a batch splits evenly over devices, microbatches and replicas.

    Args:
      replicas: `TrainStepConfig.replicas`.
      field: name of the setting that defines the batch size.

    Raises:
      ShardingError: the batch does not split evenly (the message has the nearest valid sizes), or
        two processes would need the same rows although each reads separate rows.
    """
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    if shards % jax.process_count():
        raise ShardingError(
            f"config.mesh.data={mesh.shape['data']} x fsdp={mesh.shape['fsdp']} is not a multiple "
            f"of the {jax.process_count()} processes, which read separate rows. Lower "
            "config.mesh.tensor or .sequence so that their product divides a process's devices.",
            field="config.mesh.data",
            value=mesh.shape["data"],
        )
    unit = shards * accumulation * replicas
    if batch_size % unit:
        below, above = batch_size // unit * unit, -(-batch_size // unit) * unit
        choices = f"{below} or {above}" if below else f"{above}"
        raise ShardingError(
            f"{field}={batch_size} is not divisible by {shards} device shards (data x fsdp)"
            + (f" times config.train.accumulation={accumulation}" if accumulation > 1 else "")
            + (f" times config.optimizer.release_replicas={replicas}" if replicas > 1 else "")
            + f". The nearest valid size: {choices}.",
            field=field,
            value=batch_size,
        )


def check_length(length: int, mesh: Mesh, *, field: str = "config.data.length") -> None:
    """Raises ShardingError if the positions of a row do not split evenly."""
    if length % mesh.shape["sequence"]:
        raise ShardingError(
            f"{field}={length} is not divisible by config.mesh.sequence="
            f"{mesh.shape['sequence']}. Set config.mesh.sequence to a divisor of {length}.",
            field=field,
            value=length,
        )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch: rows over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def with_leading_axis(sharding: NamedSharding) -> NamedSharding:
    """Prepends an unsharded axis of runs to a sharding."""
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def put_batch(batch: Batch, sharding: NamedSharding) -> Batch:
    """Makes global arrays from the rows of this process; the copy is asynchronous."""
    return {
        name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()
    }


def put_whole_batch(batch: Batch, sharding: NamedSharding) -> Batch:
    """Makes global arrays from the whole batch, which every process has."""
    if sharding.mesh.size == 1:
        return batch  # passing host arrays to the compiled function is faster
    if jax.process_count() == 1:
        return jax.device_put(batch, sharding)
    return put_params(batch, dict.fromkeys(batch, sharding))


def gather(tree):
    """Gathers sharded arrays to the host of each process; all processes call it."""
    if jax.process_count() > 1:
        tree = multihost_utils.process_allgather(tree, tiled=True)
    return jax.device_get(tree)


def put_params(params, shardings):
    """Shards a tree of host arrays that is the same on every process."""
    return jax.tree.map(
        lambda leaf, place: jax.make_array_from_callback(
            leaf.shape, place, lambda index: leaf[index]
        ),
        params,
        shardings,
    )


def partition_spec(path: str, shape: tuple[int, ...], mesh: Mesh, rules: Rules) -> PartitionSpec:
    """Returns the partition spec of one parameter.

    Replicated are tensors below 16,384 values per layer, vectors (also of factored moments), and
    embedding tables whose number of rows is not divisible by `fsdp`.

    Raises:
      ShardingError: no rule matches, or a large parameter is not divisible by the mesh.
    """
    rule = _find_rule(path, rules)
    first = 1 if _STACKED.search(path) else 0  # the scan over layers needs this axis whole
    small = len(shape) - first < 2 or math.prod(shape[first:]) < _SMALL
    if rule is REPLICATED or small:
        return PartitionSpec()
    spec: list[str | None] = [None] * len(shape)
    fsdp, tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
    if tensor > 1 and rule.tensor is not None:
        if shape[rule.tensor] % tensor:
            raise ShardingError(
                f"config.mesh.tensor={tensor} does not divide dimension {rule.tensor} of {path} "
                f"with shape {shape}. Choose a divisor of {shape[rule.tensor]}.",
                field="config.mesh.tensor",
                value=tensor,
            )
        spec[rule.tensor] = "tensor"
    if fsdp > 1:
        there = [len(shape) - 2] if rule.table else range(first, len(shape))
        free = [i for i in there if not spec[i] and shape[i] % fsdp == 0]
        if rule.table and not free:
            return PartitionSpec()
        if not free:
            raise ShardingError(
                f"config.mesh.fsdp={fsdp} divides no dimension of {path} with shape {shape}. "
                "Choose a divisor of one, or use config.mesh.data instead.",
                field="config.mesh.fsdp",
                value=fsdp,
            )
        spec[max(free, key=lambda i: shape[i])] = "fsdp"
    return PartitionSpec(*spec)


def tree_shardings(tree, mesh: Mesh, rules: Rules):
    """Returns shardings for a tree of parameters, a `TrainState` or an optimizer state, by path.

    Args:
      tree: arrays or `jax.ShapeDtypeStruct`s. Scalars (step, counts) and optimizer state that does
        not belong to a parameter are replicated.

    Raises:
      ShardingError: as `partition_spec`.
    """

    def place(path, leaf):
        spec = PartitionSpec()
        if leaf.ndim and (name := parameter_path(path)):
            spec = partition_spec(name, leaf.shape, mesh, rules)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(place, tree)


def _find_rule(path: str, rules: Rules) -> Split | None:
    for pattern, rule in rules:
        if re.search(pattern, path):
            return rule
    raise ShardingError(f"No sharding rule matches parameter {path}. Add one.", value=path)
