"""Which implementation of an op runs where.

Each op has one table, name -> Implementation, in the order in which "auto" takes them, and asks
`choose` for one. "auto" is decided when a program is traced, by the devices of the mesh it is
traced under (`jax.set_mesh`, of real devices or of a topology that is only compiled for), else by
the default devices. Deciding when it is lowered instead, by lax.platform_dependent, would trace
every kernel in every program and keep what each would need for its backward pass.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax

from convbert_jax.ops import verification

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
      definition: what a kernel is verified against before its first use; None: the "xla" of the
        same table.
    """

    function: Callable
    platform: str = ""
    refuses: Callable[..., str] = _nothing
    left_by_auto: Callable[..., str] = _nothing
    definition: Callable | None = None


def choose(
    op: str,
    implementation: str,
    implementations: Mapping[str, Implementation],
    *arguments: Any,
    **options: Any,
) -> Callable:
    """The function of the named implementation, which never gives way to another; or of "auto".

    "auto" is the first that can do it and is not left; the log says once which that is, and why
    none of those before it. A kernel, which only one platform has, is verified on the device at its
    first use; "auto" does not take one that fails.

    Args:
      op: its name, for messages.
      arguments, options: what the function is to be called with.

    Raises:
      ValueError: an unknown name, or a named implementation that cannot do it here, and why.
      KernelError: a named kernel that computes something else than XLA on this device.
    """
    here = platform()

    def find_fault(name):
        one = implementations[name]
        if not one.platform:
            return ""
        definition = one.definition or implementations["xla"].function
        return verification.find_fault(
            op, name, one.platform, one.function, definition, arguments, options
        )

    if implementation == "auto":
        left = ""
        for name, one in implementations.items():
            reason = _reason(one, here, arguments, options)
            reason = reason or one.left_by_auto(*arguments, **options) or find_fault(name)
            if not reason:
                say(f"{op}: auto takes {name} on {here}{left}.")
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
    if reason := find_fault(implementation):
        raise verification.KernelError(
            f"{op}: implementation {implementation!r} cannot be used on {here}: {reason}. "
            "Set it to 'auto' or 'xla', and report the warning above.",
            value=implementation,
        )
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
def say(message: str) -> None:
    """Logs it, once in a process."""
    log.info("%s", message)
