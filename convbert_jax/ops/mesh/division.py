"""What each device of a mesh has of an array: rows, heads, positions, or all of it.

A program is traced under a mesh (`jax.set_mesh`). Here its axes have their meanings; ops and
models ask by these functions and never for the mesh itself.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from convbert_jax.ops import dispatch

BATCH = ("data", "fsdp")  # the mesh axes that split rows
HEADS = "tensor"  # the one that splits heads
SEQUENCE = "sequence"  # the one that splits the positions of a row
ROWS = jax.P(BATCH)  # a spec: rows are split, the rest is whole
ROWS_AND_HEADS = jax.P(BATCH, None, HEADS)  # the same for [B, L, H, ...]
POSITIONS = jax.P(BATCH, SEQUENCE)  # rows and their positions, of [B, L, ...]
POSITIONS_AND_HEADS = jax.P(BATCH, SEQUENCE, HEADS)
WHOLE = jax.P()  # every device has all of it


@dataclasses.dataclass(frozen=True)
class Halo:
    """What a convolution reads beyond the positions that a device has of a row.

    Attributes:
      offsets: of its taps, as `taps.offsets` has them.
      read: places of the arrays that are read there. A device gets these positions from its
        neighbors, outside the row they are 0; of other arrays they are 0 everywhere.
    """

    offsets: tuple[int, ...]
    read: tuple[int, ...]

    @property
    def left(self) -> int:
        return max(0, -min(self.offsets))

    @property
    def right(self) -> int:
        return max(0, *self.offsets)


def over_mesh(
    function: Callable,
    arrays: Sequence[Any],
    specs: Sequence[jax.P],
    out_spec: jax.P,
    *,
    halo: Halo | None = None,
    kernel: bool = True,
) -> Any:
    """Runs an op on each device's part of its arrays.

    A kernel cannot be partitioned by the compiler, so it is told here; and no op whose positions
    read others is left to it, which would gather them.

    Args:
      arrays: of which None is passed on.
      specs: for each array, how the mesh may split it: BATCH, SEQUENCE and HEADS at its axes. A
        mesh axis that does not divide all that it is to split, or that the mesh does not have,
        splits nothing: every device computes the whole.
      out_spec: the same for the result.
      halo: what is read of neighbors where SEQUENCE splits axis 1.
      kernel: False: the compiler can divide it, but for positions.

    Raises:
      ValueError: an axis of the mesh that is none of these.
    """
    sizes = _axes()
    for name in sizes:
        if name not in (*BATCH, HEADS, SEQUENCE):
            raise ValueError(
                f"The mesh has an axis {name!r}, but kernels know only {' and '.join(BATCH)}, "
                f"which split rows, {HEADS}, which splits heads, and {SEQUENCE}, which splits "
                "positions."
            )
    alone = all(size == 1 for size in sizes.values())
    if alone or (not kernel and sizes.get(SEQUENCE, 1) == 1):
        return function(*arrays)
    there = [place for place, array in enumerate(arrays) if array is not None]
    given = [(arrays[place], specs[place]) for place in there]
    kept = _dividing(sizes, given)
    # A mesh of one device along it has no neighbors, and would pad every row for nothing.
    exchanged = halo if SEQUENCE in kept and sizes[SEQUENCE] > 1 else None

    def local(*parts):
        full = dict(zip(there, parts, strict=True))
        if exchanged is not None:
            for place, part in full.items():
                if SEQUENCE in _names((*specs[place], None, None)[1]):
                    full[place] = _widen(part, exchanged, place in exchanged.read)
        out = function(*(full.get(place) for place in range(len(arrays))))
        if exchanged is not None:
            out = out[:, exchanged.left : out.shape[1] - exchanged.right]
        return out

    return jax.shard_map(
        local,
        in_specs=tuple(_only(spec, kept) for _, spec in given),
        out_specs=_only(out_spec, kept),
        check_vma=False,
    )(*(array for array, _ in given))


def _widen(part: jax.Array, halo: Halo, read: bool) -> jax.Array:
    """[B, l, ...] of a device -> [B, left + l + right, ...], with what its neighbors have there."""
    if not read:
        sides = ((0, 0), (halo.left, halo.right)) + ((0, 0),) * (part.ndim - 2)
        return jnp.pad(part, sides)
    length, devices = part.shape[1], jax.lax.axis_size(SEQUENCE)

    def fetch(width, step):
        """`width` positions that end (step 1) or begin (step -1) where those of the device do not,
        nearest devices first.
        """
        found = []
        for hop in range(1, -(-width // length) + 1):
            taken = min(length, width - (hop - 1) * length)
            sent = part[:, length - taken :] if step > 0 else part[:, :taken]
            sends = [(i, i + step * hop) for i in range(devices) if 0 <= i + step * hop < devices]
            found.append(jax.lax.ppermute(sent, SEQUENCE, sends) if sends else sent * 0)
        return found

    before, behind = fetch(halo.left, 1), fetch(halo.right, -1)
    return jnp.concatenate([*reversed(before), part, *behind], axis=1)


def whole_channels(x: jax.Array) -> jax.Array:
    """`x` [B, L, C] as it stands between layers, and between two products in one, as those that
    make values and then filters of them: each device has some rows, along `sequence` some of their
    positions, and all channels.

    Left to itself the compiler may cut channels too, along `fsdp` as it does parameters, or along
    `tensor`, where a product before it does, and then asks the next product for its result in that
    form; XLA for CPUs (jax 0.10.2 and 0.12.0) gets y @ w wrong where y and the result are split by
    (data x fsdp, -, tensor) and w by (tensor, fsdp): it swaps rows between devices and does not
    swap them back.
    """
    return _placed(x, POSITIONS, ("fsdp", HEADS, SEQUENCE))


def several_cpus() -> bool:
    """Whether CPUs share the work, which then must send nothing in a loop or a branch.

    XLA for CPUs (jax 0.10.2) does not wait for the end of either before it sends something else, if
    neither needs the other: each device then sends in an order of its own, and what arrives is what
    another wanted, without a word, or all wait for ever. A teacher beside its student did both.
    """
    return math.prod(_axes().values()) > 1 and dispatch.platform() == "cpu"


def layers_at_once(depth: int, wanted: int) -> int:
    """How many of `depth` equal layers an iteration of a loop over them is made of: as `wanted`,
    but all of them on several CPUs.
    """
    if not several_cpus():
        return min(wanted, depth)
    if wanted < depth:
        dispatch.say(
            f"Several CPUs: all {depth} layers in one iteration, not config.model.scan_unroll="
            f"{wanted}, for XLA mixes up what loops on CPUs send."
        )
    return depth


def divides_heads() -> bool:
    """Whether the mesh has several devices along the axis that cuts what kernels make."""
    return _axes().get(HEADS, 1) > 1


def whole_parameter(x: jax.Array) -> jax.Array:
    """A parameter that `fsdp` divides, with all of its values on each device, for a product.

    Left to itself the compiler does not always fetch it: it multiplies with parts that go around,
    writes activations bit by bit for that, or sends activations in place of parameters. On a mesh
    with a `tensor` axis it is left to the compiler, which must keep what that divides.
    """
    sizes = _axes()
    if sizes.get("fsdp", 1) == 1 or divides_heads():
        return x
    return jax.lax.with_sharding_constraint(x, WHOLE)


def positions_here(length: int) -> int:
    """How many positions of rows of `length` a device of the mesh has."""
    devices = _axes().get(SEQUENCE, 1)
    return length if length % devices else length // devices


def whole_rows(x: jax.Array) -> jax.Array:
    """`x` [B, L, H, ...] with all positions of a row on one device, as attention reads keys."""
    return _placed(x, ROWS_AND_HEADS, (SEQUENCE,))


def by_rows(function: Callable, arrays: Sequence[jax.Array]) -> jax.Array:
    """`function` on each device with its part of axis 0 of every array, which the devices that
    divide rows divide; the compiler goes on dividing by the other axes of the mesh.
    """
    rows = tuple(dividing_rows())
    return jax.shard_map(
        function,
        in_specs=(jax.P(rows),) * len(arrays),
        out_specs=jax.P(rows),
        axis_names=set(rows),
        check_vma=False,
    )(*arrays)


def draw_by_rows(
    draw: Callable[[jax.Array, tuple[int, ...]], jax.Array], key: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """draw(key, shape) of rows along axis 0, of which each device draws its own, by a key of its
    own, where the generator is RBG.

    The compiler divides what threefry draws, and the numbers are those of one device. What RBG
    draws it does not: each of 256 devices drew the bits of all 32,768 rows, 2 GB for the weights of
    four heads of attention (XLA for TPUs, libtpu 0.0.52). Divided, they depend on how many devices
    there are. Rows that the devices do not divide are drawn whole by each.
    """
    devices = math.prod(dividing_rows().values())
    if devices == 1 or shape[0] % devices or str(jax.random.key_impl(key)) != "rbg":
        return draw(key, shape)
    own = (shape[0] // devices, *shape[1:])
    places = jnp.arange(devices)
    return by_rows(lambda place: draw(jax.random.fold_in(key, place[0]), own), [places])


def dividing_rows() -> dict[str, int]:
    """The mesh axes of more than one device that rows are divided by, and their sizes."""
    sizes = _axes()
    return {name: sizes[name] for name in BATCH if sizes.get(name, 1) > 1}


def _placed(x, spec, unless_alone):
    """`x` by `spec`, on a mesh that has more than one device along one of these axes."""
    sizes = _axes()
    if all(sizes.get(name, 1) == 1 for name in unless_alone):
        return x
    kept = _dividing(sizes, [(x, spec)])
    return jax.lax.with_sharding_constraint(x, _only(spec, kept))


def _axes() -> dict[str, int]:
    """Sizes of the axes of the mesh that the compiler divides by."""
    mesh = jax.sharding.get_abstract_mesh()
    return {
        name: mesh.shape[name]
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == jax.sharding.AxisType.Auto
    }


def _names(part) -> tuple[str, ...]:
    """The mesh axes at one axis of an array, of a part of a PartitionSpec."""
    return (part,) if isinstance(part, str) else tuple(part or ())


def _dividing(sizes: Mapping[str, int], given) -> list[str]:
    """The mesh axes, in their order, that divide all that the specs split by them."""
    kept: list[str] = []
    left = [list(array.shape) for array, _ in given]
    for name, size in sizes.items():
        places = [
            (shape, axis)
            for shape, (_, spec) in zip(left, given, strict=True)
            for axis, part in enumerate(spec)
            if name in _names(part)
        ]
        if all(shape[axis] % size == 0 for shape, axis in places):
            kept.append(name)
            for shape, axis in places:
                shape[axis] //= size
    return kept


def _only(spec: jax.P, kept: Sequence[str]) -> jax.P:
    return jax.P(*(tuple(name for name in _names(part) if name in kept) or None for part in spec))
