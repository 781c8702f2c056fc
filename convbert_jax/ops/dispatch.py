"""Which implementation of an op runs where, and how a kernel runs on a mesh of devices.

"auto" is decided when a program is traced, by the devices of the mesh it is traced under
(`jax.set_mesh`, of real devices or of a topology that is only compiled for), else by the default
devices. Deciding when it is lowered instead, by lax.platform_dependent, would trace every kernel in
every program and keep what each would need for its backward pass.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

log = logging.getLogger(__name__)

# Implementation -> the platform whose devices it needs.
PLATFORM = {"pallas_tpu": "tpu", "pallas_gpu": "gpu"}


def choose(
    op: str,
    implementation: str,
    implementations: Mapping[str, Callable],
    auto: Mapping[str, str],
) -> Callable:
    """The named implementation, or for "auto" the one that `auto` has for the platform.

    Args:
      op: its name, for messages.
      auto: platform -> name, with "default" for all others.

    Raises:
      ValueError: an unknown implementation, or one that does not run on the devices at hand.
    """
    found = platform()
    if implementation == "auto":
        implementation = auto.get(found, auto["default"])
        _log_once(op, found, implementation, tuple(implementations))
    if implementation not in implementations:
        names = ", ".join(("auto", *implementations))
        raise ValueError(f"{op}: implementation is {implementation!r}, but must be one of {names}.")
    needed = PLATFORM.get(implementation, found)
    if needed != found:
        raise ValueError(
            f"{op}: implementation is {implementation!r}, but must be one for {found}, not for "
            f"{needed}; take 'auto'."
        )
    return implementations[implementation]


def platform() -> str:
    """Of the mesh that is being compiled for, else of the default devices: cpu, gpu or tpu."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    found = device.platform if device is not None else jax.default_backend()
    return {"cuda": "gpu", "rocm": "gpu"}.get(found, found)


@functools.cache
def _log_once(op: str, found: str, chosen: str, names: tuple[str, ...]) -> None:
    """What auto took and, of each kernel it did not take, why."""
    reasons = [
        f"; {name} " + ("has not been measured yet" if needed == found else f"needs a {needed}")
        for name, needed in PLATFORM.items()
        if name in names and name != chosen
    ]
    log.info("%s: auto takes %s on %s%s.", op, chosen, found, "".join(reasons))


# --- On a mesh ---


def over_mesh(function: Callable, arrays: Sequence[Any], head_axis: Sequence[int | None]) -> Any:
    """Runs a kernel on each device's part of the batch and, over axis `tensor`, of the heads.

    A kernel cannot be partitioned by the compiler, so it is told here. Mesh axes other than
    `tensor` split the batch, as far as it is divisible.

    Args:
      arrays: with the batch in axis 0, or without one where `head_axis` is -1; None is passed on.
      head_axis: of each array: the axis of its heads, None if it has none, or -1: replicated.
    """
    mesh = jax.sharding.get_abstract_mesh()
    automatic = [
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == jax.sharding.AxisType.Auto
    ]
    if all(mesh.shape[name] == 1 for name in automatic):
        return function(*arrays)
    batch = arrays[0].shape[0]
    split = []
    for name in automatic:
        if name != "tensor" and batch % mesh.shape[name] == 0:
            split.append(name)
            batch //= mesh.shape[name]
    heads = "tensor" if "tensor" in automatic else None
    axes = [axis for axis in head_axis if axis not in (None, -1)]
    sizes = [a.shape[axis] for a, axis in zip(arrays, head_axis, strict=True) if axis in axes]
    if heads and any(size % mesh.shape[heads] for size in sizes):
        heads = None

    def spec(array, axis):
        if axis == -1:
            return jax.P()
        parts: list[Any] = [tuple(split) or None] + [None] * (array.ndim - 1)
        if axis is not None:
            parts[axis] = heads
        return jax.P(*parts)

    there = [array is not None for array in arrays]
    specs = [spec(a, axis) for a, axis in zip(arrays, head_axis, strict=True) if a is not None]

    def local(*given):
        given = iter(given)
        return function(*(next(given) if is_there else None for is_there in there))

    return jax.shard_map(
        local,
        in_specs=tuple(specs),
        out_specs=specs[0],
        check_vma=False,
    )(*(array for array in arrays if array is not None))
