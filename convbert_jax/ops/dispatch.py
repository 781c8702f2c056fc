"""Which implementation of an op runs where, and how a kernel runs on a mesh of devices.

Each op has one table, name -> Implementation, in the order in which "auto" takes them, and asks
`choose` for one. "auto" is decided when a program is traced, by the devices of the mesh it is
traced under (`jax.set_mesh`, of real devices or of a topology that is only compiled for), else by
the default devices. Deciding when it is lowered instead, by lax.platform_dependent, would trace
every kernel in every program and keep what each would need for its backward pass.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

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
ROWS = jax.P(BATCH)  # a spec: rows are split, the rest is whole
ROWS_AND_HEADS = jax.P(BATCH, None, HEADS)  # the same for [B, L, H, ...]
WHOLE = jax.P()  # every device has all of it


def over_mesh(
    function: Callable, arrays: Sequence[Any], specs: Sequence[jax.P], out_spec: jax.P
) -> Any:
    """Runs a kernel on each device's part of its arrays.

    A kernel cannot be partitioned by the compiler, so it is told here.

    Args:
      arrays: of which None is passed on.
      specs: for each array, how the mesh may split it: BATCH and HEADS at its axes. A mesh axis
        that does not divide all that it is to split, or that the mesh does not have, splits
        nothing: every device computes the whole.
      out_spec: the same for the result.

    Raises:
      ValueError: an axis of the mesh that is neither in BATCH nor HEADS.
    """
    sizes = _axes()
    for name in sizes:
        if name not in (*BATCH, HEADS):
            raise ValueError(
                f"The mesh has an axis {name!r}, but kernels know only {' and '.join(BATCH)}, "
                f"which split rows, and {HEADS}, which splits heads."
            )
    if all(size == 1 for size in sizes.values()):
        return function(*arrays)
    there = [array is not None for array in arrays]
    given = [(a, spec) for a, spec in zip(arrays, specs, strict=True) if a is not None]
    kept = _dividing(sizes, given)

    def local(*parts):
        parts = iter(parts)
        return function(*(next(parts) if is_there else None for is_there in there))

    return jax.shard_map(
        local,
        in_specs=tuple(_only(spec, kept) for _, spec in given),
        out_specs=_only(out_spec, kept),
        check_vma=False,
    )(*(array for array, _ in given))


def rows_alone(x: jax.Array) -> jax.Array:
    """`x` [B, ...], of which each device along `tensor` is to have whole rows.

    What stands between layers. Left to itself the compiler may cut its channels too, along
    `tensor`, where a product before it does, and then asks the next product for its result in that
    form; XLA for CPUs (jax 0.10.2 and 0.12.0) gets y @ w wrong where y and the result are split by
    (data x fsdp, -, tensor) and w by (tensor, fsdp): it swaps rows between devices and does not
    swap them back.
    """
    sizes = _axes()
    if sizes.get(HEADS, 1) == 1:
        return x
    kept = _dividing({name: sizes[name] for name in sizes if name in BATCH}, [(x, ROWS)])
    return jax.lax.with_sharding_constraint(x, _only(ROWS, kept))


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
