"""The convolutions by XLA, by their kernels for GPUs and by definition, as functions alike.

Arrays are those of `benchmarks.layers.dynamic_conv.inputs`, segment ids (or None) behind them.
"""

import argparse
from collections.abc import Callable

OPS = ("dynamic_conv", "span_dynamic_conv", "depthwise_conv")


def functions(op: str, shape: argparse.Namespace, interpret: bool) -> dict[str, Callable]:
    """ "kernel", "xla" and "reference" -> function.

    Args:
      shape: as `describe` makes it.
      interpret: the kernel in Pallas' interpreter, on any device.
    """
    from convbert_jax.ops import gpu, reference, taps, xla

    offsets = taps.offsets(shape.taps, dilation=shape.dilation, causal=shape.causal)
    heads = (shape.heads,) if op == "span_dynamic_conv" else ()
    found = {}
    for name, room, more in (
        ("kernel", gpu, (interpret,)),
        ("xla", xla, ()),
        ("reference", reference, ()),
    ):
        function = getattr(room, op)

        def run(*given, function=function, more=more):
            return function(*given, *heads, offsets, *more)

        found[name] = _by_head(run) if op == "dynamic_conv" else run
    return found


def _by_head(function):
    """Of values [B, L, C], as a layer has them."""

    def run(values, filters, ids):
        by_head = values.reshape(*filters.shape[:3], -1)
        return function(by_head, filters, ids).reshape(values.shape)

    return run


def describe(
    batch: int, length: int, heads: int, width: int, taps: int, dtype: str, **more
) -> argparse.Namespace:
    """A shape as `benchmarks.layers.dynamic_conv` takes it."""
    known = {"dilation": 1, "causal": False, "segments": False} | more
    return argparse.Namespace(
        batch=batch, length=length, heads=heads, width=width, taps=taps, dtype=dtype, **known
    )
