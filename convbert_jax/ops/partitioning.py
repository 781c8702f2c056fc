"""Partitioning of arrays over a mesh of devices, and reductions over their rows.

A program is traced under a mesh (`jax.set_mesh`). This module defines the meaning of the mesh axes:
they split rows, heads or positions. Ops and models use these functions and never access the mesh
directly.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from convbert_jax.ops import dispatch

BATCH = ("data", "fsdp")  # the mesh axes that split rows
HEADS = "tensor"  # the mesh axis that splits heads
SEQUENCE = "sequence"  # the mesh axis that splits the positions of a row
ROWS = jax.P(BATCH)
ROWS_AND_HEADS = jax.P(BATCH, None, HEADS)  # of [B, L, H, ...]
POSITIONS = jax.P(BATCH, SEQUENCE)  # of [B, L, ...]
POSITIONS_AND_HEADS = jax.P(BATCH, SEQUENCE, HEADS)
REPLICATED = jax.P()  # replicated


@dataclasses.dataclass(frozen=True)
class Halo:
    """Positions that a convolution reads from neighboring devices.

    Attributes:
      offsets: offsets of its taps, from `xla.tap_offsets`.
      read: indices of the arrays that are read there. Their halo comes from the neighbors and is 0
        outside the row; the halo of other arrays is 0.
    """

    offsets: tuple[int, ...]
    read: tuple[int, ...]

    @property
    def left(self) -> int:
        return max(0, -min(self.offsets))

    @property
    def right(self) -> int:
        return max(0, *self.offsets)


def shard_map_op(
    function: Callable,
    arrays: Sequence[Any],
    specs: Sequence[jax.P],
    out_spec: jax.P,
    *,
    halo: Halo | None = None,
    kernel: bool = True,
) -> Any:
    """Runs an op on each device's part of the arrays (shard_map).

    The compiler cannot partition kernels, and it would gather positions for ops that read other
    positions.

    Args:
      function: the op, called with the local part of each array.
      arrays: inputs; None is passed through.
      specs: for each array, how the mesh may split it: BATCH, SEQUENCE and HEADS at its axes. A
        mesh axis that does not exist, or does not divide all array axes it applies to, is ignored:
        its devices all compute the same.
      out_spec: the same for the result.
      halo: positions to fetch from neighbors if SEQUENCE splits axis 1; None: no halo.
      kernel: False: the compiler can partition the op, except over positions.

    Returns:
      The result of `function`, partitioned by `out_spec`.

    Raises:
      ValueError: the mesh has an unknown axis.
    """
    sizes = _axes()
    for name in sizes:
        if name not in (*BATCH, HEADS, SEQUENCE):
            raise ValueError(
                f"Unknown mesh axis {name!r}. Kernels support {' and '.join(BATCH)} (rows), "
                f"{HEADS} (heads) and {SEQUENCE} "
                "(positions)."
            )
    alone = all(size == 1 for size in sizes.values())
    if alone or (not kernel and sizes.get(SEQUENCE, 1) == 1):
        return function(*arrays)
    there = [place for place, array in enumerate(arrays) if array is not None]
    given = [(arrays[place], specs[place]) for place in there]
    kept = _dividing(sizes, given)
    # With one device along the axis there are no neighbors; padding every row would be wasted.
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
    """Adds the halo of the neighbors: local [B, l, ...] -> [B, left + l + right, ...]."""
    if not read:
        sides = ((0, 0), (halo.left, halo.right)) + ((0, 0),) * (part.ndim - 2)
        return jnp.pad(part, sides)
    length, devices = part.shape[1], jax.lax.axis_size(SEQUENCE)

    def fetch(width, step):
        """Fetches the `width` positions before (step 1) or after (step -1) the local ones.

        Returns the parts of the neighbors, nearest first.
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


def constrain_activations(x: jax.Array) -> jax.Array:
    """Constrains activations [B, L, C] to be split over rows and positions, not over channels.

    Used between layers, and between products within a layer.

    Without it the compiler may also split channels, over `fsdp` like parameters or over `tensor`
    like a preceding product, and propagate that to the next product. XLA for CPUs (jax 0.10.2 and
    0.12.0) computes wrong results for y @ w if y and the result are split by (data x fsdp, -,
    tensor) and w by (tensor, fsdp): it swaps rows between devices and does not swap them back.
    """
    return _placed(x, POSITIONS, ("fsdp", HEADS, SEQUENCE))


def several_cpus() -> bool:
    """Returns whether the mesh has several CPUs; then loops and branches must not communicate.

    XLA for CPUs (jax 0.10.2) may start other collectives before a loop or branch has finished if
    they do not depend on it. Devices then run collectives in different orders, which silently mixes
    up their data or deadlocks. Distillation showed both.
    """
    return math.prod(_axes().values()) > 1 and dispatch.platform() == "cpu"


def layers_at_once(depth: int, wanted: int, training: bool) -> int:
    """Returns the layers per scan iteration: `wanted`, at most `depth`.

    On several CPUs `depth`. On one CPU, unless in training, 1: XLA slices the stacked parameters of
    unrolled layers in slow loops and compiles two to three times as long.
    """
    if not several_cpus():
        alone = dispatch.platform() == "cpu" and not training
        return 1 if alone else min(wanted, depth)
    if wanted < depth:
        dispatch.say(
            f"Using {depth} layers per scan iteration instead of config.model.scan_unroll="
            f"{wanted}: XLA mixes up messages of loops on several CPUs."
        )
    return depth


def splits_heads() -> bool:
    """Returns whether the mesh splits heads, the output channels of dense kernels."""
    return _axes().get(HEADS, 1) > 1


def all_gather_param(x: jax.Array) -> jax.Array:
    """All-gathers a parameter that `fsdp` splits, for a product.

    Without it the compiler may instead rotate parts of the parameter between devices and write
    activations piecewise, or send activations. On a mesh with a `tensor` axis the decision is left
    to the compiler, because the parameter must stay split over that axis.
    """
    sizes = _axes()
    if sizes.get("fsdp", 1) == 1 or splits_heads():
        return x
    return jax.lax.with_sharding_constraint(x, REPLICATED)


def positions_here(length: int) -> int:
    """Returns the number of positions per device in rows of `length` positions."""
    devices = _axes().get(SEQUENCE, 1)
    return length if length % devices else length // devices


def all_gather_positions(x: jax.Array) -> jax.Array:
    """Gathers all positions of `x` [B, L, H, ...] on each device, as attention reads keys."""
    return _placed(x, ROWS_AND_HEADS, (SEQUENCE,))


def shard_map_over_rows(function: Callable, arrays: Sequence[jax.Array]) -> jax.Array:
    """Runs `function` on each device's part of axis 0 of every array (shard_map over rows).

    The compiler still partitions over the other mesh axes.
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
    """Returns draw(key, shape), partitioned over rows (axis 0) if the generator is RBG.

    The compiler partitions threefry without changing its numbers, but not RBG: each device would
    draw the bits of all rows (XLA for TPUs, libtpu 0.0.52). Here each device draws its own rows
    with its own key, so RBG numbers depend on the number of devices. If the devices do not divide
    the rows, each draws all of them.
    """
    devices = math.prod(dividing_rows().values())
    if devices == 1 or shape[0] % devices or str(jax.random.key_impl(key)) != "rbg":
        return draw(key, shape)
    own = (shape[0] // devices, *shape[1:])
    places = jnp.arange(devices)
    return shard_map_over_rows(lambda place: draw(jax.random.fold_in(key, place[0]), own), [places])


def dividing_rows() -> dict[str, int]:
    """Returns the mesh axes that split rows over more than one device, and their sizes."""
    sizes = _axes()
    return {name: sizes[name] for name in BATCH if sizes.get(name, 1) > 1}


def _placed(x, spec, unless_alone):
    """Constrains `x` to `spec`, unless the axes `unless_alone` all have one device."""
    sizes = _axes()
    if all(sizes.get(name, 1) == 1 for name in unless_alone):
        return x
    kept = _dividing(sizes, [(x, spec)])
    return jax.lax.with_sharding_constraint(x, _only(spec, kept))


def _axes() -> dict[str, int]:
    """Returns the sizes of the mesh axes that the compiler partitions over (AxisType.Auto)."""
    mesh = jax.sharding.get_abstract_mesh()
    return {
        name: mesh.shape[name]
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == jax.sharding.AxisType.Auto
    }


def _names(part) -> tuple[str, ...]:
    """Returns the mesh axes in one entry of a PartitionSpec."""
    return (part,) if isinstance(part, str) else tuple(part or ())


def _dividing(sizes: Mapping[str, int], given) -> list[str]:
    """Returns the mesh axes, in order, whose sizes divide all array axes that the specs give them.

    Args:
      sizes: mesh axis -> number of devices.
      given: (array, spec) pairs.
    """
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


# --- Reductions over the rows of all devices ---


_COMM_DTYPE = contextvars.ContextVar("the dtype that gradients are sent in", default=None)


@contextlib.contextmanager
def communicate_gradients_in(dtype: jnp.dtype | None) -> Iterator[None]:
    """Sets the dtype in which gradients of matrices and tables are reduced between devices.

    Trace the loss inside this context. An op reads the dtype when it is called and uses it in its
    backward pass, which is traced later.

    Args:
      dtype: communication dtype; None: float32.
    """
    token = _COMM_DTYPE.set(None if dtype is None else jnp.dtype(dtype))
    try:
        yield
    finally:
        _COMM_DTYPE.reset(token)


def grad_comm_dtype() -> jnp.dtype | None:
    """Returns the dtype of `communicate_gradients_in`, or None if the mesh does not split rows."""
    return _COMM_DTYPE.get() if dividing_rows() else None


def sum_over_rows(
    function: Callable,
    arrays: Sequence[jax.Array],
    dtype: jnp.dtype | None,
    *,
    force_local: bool = False,
) -> Any:
    """Sums `function` over the rows (axis 0) of the arrays on all devices.

    Each device applies `function` to its own rows; the partial sums are cast to `dtype` and
    all-reduced. The compiler does the same for replicated parameters. If `fsdp` splits parameters,
    it would send activations instead, so the local sums are then explicit
    (benchmarks/notes/tpu_steps.md). On one device this is `function`.

    Args:
      function: sums the rows of its arguments; returns a tree of arrays.
      arrays: arguments of `function`, with rows along axis 0.
      dtype: communication dtype; None: not cast.
      force_local: forces explicit local sums, for a `function` that slices its sum: otherwise the
        whole sum would be sent before slicing.

    Returns:
      The tree of total sums.
    """
    sizes = dividing_rows()
    devices = math.prod(sizes.values())
    force_local |= dtype is not None or "fsdp" in sizes
    if not sizes or not force_local or any(len(x) % devices for x in arrays):
        return function(*arrays)

    def of_own(*own):
        return jax.tree.map(
            lambda part: part[None] if dtype is None else part[None].astype(dtype), function(*own)
        )

    return jax.tree.map(add_up, shard_map_over_rows(of_own, arrays))


def copy_per_device(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Broadcasts `x` along a new leading axis, one copy per device that splits rows.

    For `by_rows`. For arrays that are read several times in a step, such as word
    embeddings: each device sums its gradients of all reads, and the sum is reduced once, in
    `dtype`.

    Returns:
      [devices, *x.shape], or `x` if rows are not split.
    """
    sizes = dividing_rows()
    return _copy_per_device(x, dtype, tuple(sizes.items())) if sizes else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _copy_per_device(x, dtype, sizes):
    names, counts = zip(*sizes, strict=True)
    copied = jnp.broadcast_to(x, (math.prod(counts), *x.shape))
    return jax.lax.with_sharding_constraint(copied, jax.P(names))


def _copy_forward(x, dtype, sizes):
    return _copy_per_device(x, dtype, sizes), None


def _copy_backward(dtype, sizes, saved, parts):
    return (add_up(parts.astype(dtype)).astype(parts.dtype),)


_copy_per_device.defvjp(_copy_forward, _copy_backward)


def add_up(parts: jax.Array) -> jax.Array:
    """Sums over axis 0, which is split over devices, in the dtype of `parts`.

    jnp.sum would cast bfloat16 to float32 before communication.
    """
    return jax.lax.reduce(parts, jnp.zeros((), parts.dtype), jax.lax.add, (0,))
