"""Selects the implementation of an op.

Each op has one table, name -> Implementation, in the order of preference of "auto". `choose`
resolves "auto" while a program is traced: by the devices of the current mesh (`jax.set_mesh`; they
may belong to a topology for ahead-of-time compilation), else by the default devices.
lax.platform_dependent would resolve it at lowering instead, but it traces every kernel in every
program and keeps the residuals of each for the backward pass.
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
    """An implementation of an op.

    Attributes:
      function: has the signature of all implementations of the op, and defines its gradient.
      platform: the required platform, as returned by `platform()`; "" for any.
      refuses: called with the arguments of `function`; returns "" or the reason why they are not
        supported, a phrase that can follow "pallas_tpu: ".
      left_by_auto: the same; returns "" or the reason why "auto" skips it although it is supported.
      definition: the function that a kernel is verified against before its first use; None: "xla"
        of the same table.
      check_length: called with the same arguments; returns the length of the rows of that check.
    """

    function: Callable
    platform: str = ""
    refuses: Callable[..., str] = _nothing
    left_by_auto: Callable[..., str] = _nothing
    definition: Callable | None = None
    check_length: Callable[..., int] = lambda *_, **__: verification.LENGTH


def choose(
    op: str,
    implementation: str,
    implementations: Mapping[str, Implementation],
    *arguments: Any,
    **options: Any,
) -> Callable:
    """Returns the function of the named implementation, without fallback, or of "auto".

    "auto" selects the first supported implementation that it does not skip, and logs once which one
    and why it skipped those before. A kernel (an implementation with a `platform`) is verified on
    the device at its first use; "auto" skips it if it fails.

    Args:
      op: name of the op, for messages.
      implementation: "auto" or a key of `implementations`.
      implementations: name -> Implementation, in order of preference.
      arguments, options: arguments that the function will be called with.

    Raises:
      ValueError: the name is unknown, or the named implementation does not support this call.
      KernelError: the named kernel does not match XLA on this device.
    """
    here = platform()

    def find_fault(name):
        one = implementations[name]
        if not one.platform:
            return ""
        definition = one.definition or implementations["xla"].function
        length = one.check_length(*arguments, **options)
        return verification.find_fault(
            op, name, one.platform, one.function, definition, arguments, options, length
        )

    if implementation == "auto":
        left = ""
        for name, one in implementations.items():
            reason = _reason(one, here, arguments, options)
            reason = reason or one.left_by_auto(*arguments, **options) or find_fault(name)
            if not reason:
                say(f"{op}: auto selected {name} on {here}{left}.")
                return one.function
            left += f"; not {name}: {reason}"
        raise ValueError(f"{op}: no implementation supports this call on {here}{left}.")
    if implementation not in implementations:
        names = ", ".join(("auto", *implementations))
        raise ValueError(f"{op}: implementation must be one of {names}, got {implementation!r}.")
    one = implementations[implementation]
    if reason := _reason(one, here, arguments, options):
        name = f"{implementation!r} on {here}"
        raise ValueError(f"{op}: implementation {name} is not supported: {reason}. Use 'auto'.")
    if reason := find_fault(implementation):
        raise verification.KernelError(
            f"{op}: implementation {implementation!r} is disabled on {here}: {reason}. "
            "Use 'auto' or 'xla', and report the warning above.",
            value=implementation,
        )
    return one.function


def _reason(one: Implementation, here: str, arguments, options) -> str:
    if one.platform not in ("", here):
        return f"requires a {one.platform}"
    return one.refuses(*arguments, **options)


def platform() -> str:
    """Returns the platform of the current mesh, else of the default devices: cpu, gpu or tpu."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    found = device.platform if device is not None else jax.default_backend()
    return {"cuda": "gpu", "rocm": "gpu"}.get(found, found)


@functools.cache
def say(message: str) -> None:
    """Logs a message once per process."""
    log.info("%s", message)
