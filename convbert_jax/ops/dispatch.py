"""Which implementation of an op runs where, and how a kernel runs on a mesh of devices.

Each op has one table, name -> Implementation, in the order in which "auto" takes them, and asks
`choose` for one. "auto" is decided when a program is traced, by the devices of the mesh it is
traced under (`jax.set_mesh`, of real devices or of a topology that is only compiled for), else by
the default devices. Deciding when it is lowered instead, by lax.platform_dependent, would trace
every kernel in every program and keep what each would need for its backward pass.
"""

import contextlib
import contextvars
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

log = logging.getLogger(__name__)


def _nothing(*_, **__) -> str:
    return ""


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
      function: takes what all implementations of the op take, and owns its gradient.
      platform: whose devices it needs, in the words of `platform()`; "" for any.
      refuses: the arguments of `function` -> why it cannot do these, the rest of a sentence that
        its name begins, or "".
      left_by_auto: the same -> why "auto" does not take it though it could, or "".
    """

    function: Callable
    platform: str = ""
    refuses: Callable[..., str] = _nothing
    left_by_auto: Callable[..., str] = _nothing


def choose(
    op: str,
    implementation: str,
    implementations: Mapping[str, Implementation],
    *arguments: Any,
    **options: Any,
) -> Callable:
    """The function of the named implementation, which never gives way to another; or of "auto".

    "auto" is the first that can do it and is not left; the log says once which that is, and why
    none of those before it.

    Args:
      op: its name, for messages.
      arguments, options: what the function is to be called with.

    Raises:
      ValueError: an unknown name, or a named implementation that cannot do it here, and why.
    """
    here = platform()
    if implementation == "auto":
        left = ""
        for name, one in implementations.items():
            reason = _reason(one, here, arguments, options)
            reason = reason or one.left_by_auto(*arguments, **options)
            if not reason:
                _say(f"{op}: auto takes {name} on {here}{left}.")
                return one.function
            left += f"; not {name}: {reason}"
        raise ValueError(f"{op}: no implementation can do this on {here}{left}.")
    if implementation not in implementations:
        names = ", ".join(("auto", *implementations))
        raise ValueError(f"{op}: implementation is {implementation!r}, but must be one of {names}.")
    one = implementations[implementation]
    if reason := _reason(one, here, arguments, options):
        name = f"{implementation!r} on {here}"
        raise ValueError(f"{op}: implementation is {name}, but {reason}; take 'auto'.")
    return one.function


def _reason(one: Implementation, here: str, arguments, options) -> str:
    if one.platform not in ("", here):
        return f"it needs a {one.platform}"
    return one.refuses(*arguments, **options)


def platform() -> str:
    """Of the mesh that is being compiled for, else of the default devices: cpu, gpu or tpu."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    found = device.platform if device is not None else jax.default_backend()
    return {"cuda": "gpu", "rocm": "gpu"}.get(found, found)


@functools.cache
def _say(message: str) -> None:
    log.info("%s", message)


# --- On a mesh ---

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


def between_layers(x: jax.Array) -> jax.Array:
    """`x` [B, L, C] as it stands between layers: each device has some rows, along `sequence` some
    of their positions, and all channels.

    Left to itself the compiler may cut channels too, along `fsdp` as it does parameters, or along
    `tensor`, where a product before it does, and then asks the next product for its result in that
    form; XLA for CPUs (jax 0.10.2 and 0.12.0) gets y @ w wrong where y and the result are split by
    (data x fsdp, -, tensor) and w by (tensor, fsdp): it swaps rows between devices and does not
    swap them back.
    """
    return _placed(x, POSITIONS, ("fsdp", HEADS, SEQUENCE))


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


_SENT = contextvars.ContextVar("the dtype that gradients are sent in", default=None)


@contextlib.contextmanager
def gradients_sent_in(dtype: jnp.dtype | None) -> Iterator[None]:
    """Context to trace a loss in, of which the gradients of matrices and tables cross between the
    devices that divide rows in `dtype`; None: as they are, in float32. An op takes it as it is when
    it is called, also for the backward pass that is traced later.
    """
    token = _SENT.set(None if dtype is None else jnp.dtype(dtype))
    try:
        yield
    finally:
        _SENT.reset(token)


def sent_dtype() -> jnp.dtype | None:
    """What `gradients_sent_in` says here; None too where rows are not divided: nothing is sent."""
    return _SENT.get() if _dividing_rows() else None


def sum_over_rows(
    function: Callable, arrays: Sequence[jax.Array], dtype: jnp.dtype | None
) -> jax.Array:
    """A sum over the rows of arrays, axis 0 of each: what each device adds up of its own, by
    `function`, is rounded to `dtype` and then sent and added up.

    None, and rows that one device has all of, are `function` itself: left to itself the compiler
    adds up over devices in the dtype that a product has, which is float32.
    """
    devices = math.prod(_dividing_rows().values())
    if dtype is None or devices == 1 or any(len(x) % devices for x in arrays):
        return function(*arrays)
    return add_up(by_rows(lambda *own: function(*own).astype(dtype)[None], arrays))


def copies(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`x` with a leading axis of the devices that divide rows, each of which has a copy of its own,
    for `by_rows`; on one such device `x` itself.

    What is read several times in a step, as a table of words, is sent once so: each device adds up
    its gradients of all reads, and then they cross in `dtype`.
    """
    sizes = _dividing_rows()
    return _copies(x, dtype, tuple(sizes.items())) if sizes else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _copies(x, dtype, sizes):
    names, counts = zip(*sizes, strict=True)
    copied = jnp.broadcast_to(x, (math.prod(counts), *x.shape))
    return jax.lax.with_sharding_constraint(copied, jax.P(names))


def _copies_forward(x, dtype, sizes):
    return _copies(x, dtype, sizes), None


def _copies_backward(dtype, sizes, saved, parts):
    return (add_up(parts.astype(dtype)).astype(parts.dtype),)


_copies.defvjp(_copies_forward, _copies_backward)


def by_rows(function: Callable, arrays: Sequence[jax.Array]) -> jax.Array:
    """`function` on each device with its part of axis 0 of every array, which the devices that
    divide rows divide; the compiler goes on dividing by the other axes of the mesh.
    """
    rows = tuple(_dividing_rows())
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
    there are.
    """
    sizes = _dividing_rows()
    devices = math.prod(sizes.values())
    if devices == 1 or shape[0] % devices or str(jax.random.key_impl(key)) != "rbg":
        return draw(key, shape)
    own = (shape[0] // devices, *shape[1:])
    return jax.shard_map(
        lambda key, place: draw(jax.random.fold_in(key, place[0]), own),
        in_specs=(WHOLE, jax.P(tuple(sizes))),
        out_specs=jax.P(tuple(sizes)),
        axis_names=set(sizes),
        check_vma=False,
    )(key, jnp.arange(devices))


def _dividing_rows() -> dict[str, int]:
    sizes = _axes()
    return {name: sizes[name] for name in BATCH if sizes.get(name, 1) > 1}


def add_up(parts: jax.Array) -> jax.Array:
    """The sum over axis 0, of which each device has a part, sent in the dtype of `parts`: jnp.sum
    would make bfloat16 float32 before.
    """
    return jax.lax.reduce(parts, jnp.zeros((), parts.dtype), jax.lax.add, (0,))


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
