"""Which device holds which part: the mesh, the batch, and the parameters by path.

The rules come with the task, see `interfaces/placement.py`: regular expressions over parameter
paths; the first one that matches decides, and a parameter without a rule is an error. The moments
of the optimizer carry the paths of their parameters and so follow the same rules.
"""

import math
import re
from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from convbert_jax.config import MeshSection, UserError
from convbert_jax.interfaces.batch import Batch
from convbert_jax.interfaces.placement import REPLICATED, Rules, Split
from convbert_jax.training.state import parameter_path

AXES = ("data", "fsdp", "tensor", "sequence")
BATCH_AXES = ("data", "fsdp")  # rows are split over both


class ShardingError(UserError):
    """Mesh, batch and parameters do not fit together."""


# The tensor axis keeps a head, or a feed-forward channel, whole on one device: projections into
# heads are cut along their output, the one out of the heads along its input.
RULES: Rules = (
    (r"(^|_|/)(bias|scale)$", REPLICATED),
    (r"(^|/)embedding$", Split(table=True)),
    (r"/feed_forward/(intermediate|gate)/kernel$", Split(tensor=-1)),
    (r"/feed_forward/output/kernel$", Split(tensor=-2)),
    (r"(^|/)kernel$", Split()),
)

_STACKED = re.compile(r"(^|/)stages/[^/]+/")  # leaves below have a leading axis of layers
_SMALL = 2**14  # values of one layer; smaller tensors cost more to gather than to keep


def make_mesh(section: MeshSection, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh with the axes AXES over `devices` (default: all).

    Of several TPU slices each has whole rows of the mesh along `data`: only what goes over this
    axis, the gradient once in a step, leaves a slice by the network of the data center.

    Raises:
      ShardingError: the sizes do not multiply to the number of devices, or the slices do not divide
        `data`.
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(section, len(devices))
    # Auto is not the default of make_mesh any more; Explicit asks every op for shardings.
    kinds = (AxisType.Auto,) * len(AXES)
    slices = count_slices(devices)
    if slices == 1:
        return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=kinds, devices=devices)
    if sizes["data"] % slices:
        raise ShardingError(
            f"config.mesh.data={sizes['data']} is no multiple of the {slices} slices; lower "
            "config.mesh.fsdp, .tensor or .sequence, which lie within a slice.",
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
    """TPU slices that these devices are of, which the network of the data center joins."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def mesh_sizes(section: MeshSection, count: int) -> dict[str, int]:
    """Axis -> size, of a mesh of `count` devices.

    Raises:
      ShardingError: the sizes do not multiply to it.
    """
    of_section = (section.data, section.fsdp, section.tensor, section.sequence)
    sizes = dict(zip(AXES, of_section, strict=True))
    fixed = math.prod(size for size in sizes.values() if size != -1)
    named = ", ".join(f"config.mesh.{axis}={size}" for axis, size in sizes.items())
    if count % fixed:
        raise ShardingError(
            f"{named} do not divide the {count} devices of this run; choose sizes whose product "
            f"is {count}, or -1 for one of them."
        )
    sizes = {axis: count // fixed if n == -1 else n for axis, n in sizes.items()}
    if math.prod(sizes.values()) != count:
        raise ShardingError(
            f"{named} use {fixed} of the {count} devices of this run; set config.mesh.data=-1 to "
            "use all."
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
    """Refuses a batch that does not split evenly.

    Args:
      replicas: parts of the batch that are batches of their own, as `Learning` has it.
      field: that has the batch size.

    Raises:
      ShardingError: with the nearest batch sizes that work; or devices of several processes that
        are to have the same rows, of which each process reads its own.
    """
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    if shards % jax.process_count():
        raise ShardingError(
            f"config.mesh.data={mesh.shape['data']} x fsdp={mesh.shape['fsdp']} is no multiple of "
            f"the {jax.process_count()} processes, each of which reads rows of its own; lower "
            "config.mesh.tensor or config.mesh.sequence to what one process' devices divide by.",
            field="config.mesh.data",
            value=mesh.shape["data"],
        )
    unit = shards * accumulation * replicas
    if batch_size % unit:
        below, above = batch_size // unit * unit, -(-batch_size // unit) * unit
        choices = f"{below} or {above}" if below else f"{above}"
        raise ShardingError(
            f"{field}={batch_size} does not split into {shards} device shards (data x fsdp)"
            + (f" times config.train.accumulation={accumulation}" if accumulation > 1 else "")
            + (f" times config.optimizer.release_replicas={replicas}" if replicas > 1 else "")
            + f"; the nearest that does: {choices}.",
            field=field,
            value=batch_size,
        )


def check_length(length: int, mesh: Mesh, *, field: str = "config.data.length") -> None:
    """Raises ShardingError for rows whose positions do not split evenly."""
    if length % mesh.shape["sequence"]:
        raise ShardingError(
            f"{field}={length} does not split into config.mesh.sequence={mesh.shape['sequence']} "
            f"parts; choose a divisor of {length}.",
            field=field,
            value=length,
        )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def behind_runs(sharding: NamedSharding) -> NamedSharding:
    """The same for arrays with a leading axis of runs, which is not divided."""
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def put_batch(batch: Batch, sharding: NamedSharding) -> Batch:
    """Rows of this process -> global arrays; returns before the copy is done."""
    return {
        name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()
    }


def put_whole_batch(batch: Batch, sharding: NamedSharding) -> Batch:
    """Rows of all processes, known to each of them -> global arrays."""
    if sharding.mesh.size == 1:
        return batch  # the compiled function takes them as they are, which is faster
    if jax.process_count() == 1:
        return jax.device_put(batch, sharding)
    return put_params(batch, dict.fromkeys(batch, sharding))


def gather(tree):
    """Arrays however divided -> whole, on the host of each process; all processes call it."""
    if jax.process_count() > 1:
        tree = multihost_utils.process_allgather(tree, tiled=True)
    return jax.device_get(tree)


def put_params(params, shardings):
    """A tree of whole arrays, the same on every process -> global arrays, each divided."""
    return jax.tree.map(
        lambda leaf, place: jax.make_array_from_callback(
            leaf.shape, place, lambda index: leaf[index]
        ),
        params,
        shardings,
    )


def partition_spec(path: str, shape: tuple[int, ...], mesh: Mesh, rules: Rules) -> PartitionSpec:
    """How one parameter is divided.

    Tensors below 16,384 values per layer stay whole on every device, vectors, as those that
    factored moments are kept in, and tables whose rows `fsdp` does not divide.

    Raises:
      ShardingError: no rule matches, or the mesh does not divide a large parameter.
    """
    rule = _find_rule(path, rules)
    first = 1 if _STACKED.search(path) else 0  # the axis of layers is what the scan runs over
    small = len(shape) - first < 2 or math.prod(shape[first:]) < _SMALL
    if rule is REPLICATED or small:
        return PartitionSpec()
    spec: list[str | None] = [None] * len(shape)
    fsdp, tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
    if tensor > 1 and rule.tensor is not None:
        if shape[rule.tensor] % tensor:
            raise ShardingError(
                f"config.mesh.tensor={tensor} does not divide {path} of shape {shape} along "
                f"dimension {rule.tensor}; choose a divisor of {shape[rule.tensor]}.",
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
                f"config.mesh.fsdp={fsdp} divides no dimension of {path} of shape {shape}; choose "
                "a divisor of one, or use config.mesh.data instead.",
                field="config.mesh.fsdp",
                value=fsdp,
            )
        spec[max(free, key=lambda i: shape[i])] = "fsdp"
    return PartitionSpec(*spec)


def tree_shardings(tree, mesh: Mesh, rules: Rules):
    """Shardings for a tree of parameters, a `TrainState` or an optimizer state, by path.

    Args:
      tree: arrays or `jax.ShapeDtypeStruct`s. Scalars (the step, counts) are on every device, and
        so is what an optimizer keeps that belongs to no parameter.

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
    raise ShardingError(f"no sharding rule matches parameter {path}; add one for it.", value=path)
