"""Finds the best rows per grid step of the TPU kernels, by the TPU compiler's model.

    python -m benchmarks.layers.block_sizes --target=tpu:v5e

Compiles each kernel with 1, 2, 4 and 8 rows per step at the shapes of the configs and prints the
costs. Then prints lines for `MEASURED` in convbert_jax/ops/tpu/layout.py where the best is
more than 3% better than the rule of that file. No TPU is needed.
"""

import argparse

from convbert_jax.analysis import tpu_pricing

CANDIDATES = (1, 2, 4, 8)
WORTH = 0.97
TOKENS = 16_384
# (positions, heads, head width): base at both pre-training lengths, small.
SHAPES = ((128, 6, 64), (512, 6, 64), (128, 2, 64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tpu:v5e")
    options = parser.parse_args()
    tpu_pricing.use_compile_only_tpu()
    import jax

    from convbert_jax.ops.tpu import layout

    better = []
    for length, heads, width in SHAPES:
        for kernel, (function, shapes) in kernels(length, heads, width).items():
            costs, key = {}, None
            for rows in ("rule", *CANDIDATES):
                jax.clear_caches()  # otherwise the previous candidate's kernel would be reused
                seen = watch(layout, rows)
                costs[rows] = cost(function, shapes, options.target, layout)
                key = seen[kernel]
            line = ", ".join(f"{rows}: {value / 1e3:.1f}" for rows, value in costs.items() if value)
            print(f"{options.target} {length} x {heads} x {width} {kernel}: {line}", flush=True)
            best = min((value, rows) for rows, value in costs.items() if value and rows != "rule")
            if costs["rule"] is None or best[0] < WORTH * costs["rule"]:
                better.append(f"    {key!r}: {best[1]},")
    print("\n".join(better) or "The rule is within 3% of the best everywhere.")


def kernels(length: int, heads: int, width: int) -> dict:
    """Returns kernel -> (function, its arrays), forward or backward only."""
    import jax
    import jax.numpy as jnp

    from convbert_jax.ops import tpu, xla

    batch, channels, offsets = TOKENS // length, heads * width, xla.tap_offsets(9)

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    values, filters = shape(batch, length, heads, width), shape(batch, length, heads, 9)
    flat = shape(batch, length, channels)
    span = [flat, flat, flat, shape(channels, heads * 9), shape(heads * 9)]

    def plain(values, filters):
        return tpu.dynamic_conv(values, filters, None, offsets)

    def fused(*arrays):
        return tpu.span_dynamic_conv(*arrays, None, heads, offsets)

    def backward(function):
        return lambda cotangent, *arrays: jax.vjp(function, *arrays)[1](cotangent)

    return {
        "plain_forward": (plain, [values, filters]),
        "plain_backward": (backward(plain), [values, values, filters]),
        "span_forward": (fused, span),
        "span_backward": (backward(fused), [flat, *span]),
    }


def watch(layout, rows) -> dict[str, tuple]:
    """Forces `rows` rows per step in all kernels; records their keys of MEASURED by kernel."""
    seen: dict[str, tuple] = {}

    class Answers(dict):
        def get(self, key, default=None):
            seen[key[-1]] = key
            return None if rows == "rule" else rows

    layout.MEASURED = Answers()
    return seen


def cost(function, shapes, target: str, layout) -> float | None:
    """Returns the cycles of a kernel; None if it does not fit the chip."""
    try:
        found = tpu_pricing.price(function, *shapes, target=target)
    except Exception as error:  # XLA's error type if it does not fit
        if "memory" not in str(error) and "VMEM" not in str(error):
            raise
        return None
    return max(kernel.cycles for kernel in found.kernels)


if __name__ == "__main__":
    main()
