"""Finds how many rows a grid step of the TPU kernels should take, by the TPU compiler's model.

    python -m benchmarks.layers.block_sizes --target=tpu:v5e

Compiles each kernel with 1, 2, 4 and 8 rows a step, at the shapes of the configs, and prints what
each costs, then the lines of `MEASURED` in convbert_jax/ops/tpu/block_sizes.py where the best beats
the rule of that file by more than 3%. No TPU is needed.
"""

import argparse

from convbert_jax.analysis.tpu import pricing as tpu_pricing

CANDIDATES = (1, 2, 4, 8)
WORTH = 0.97
TOKENS = 16_384
# (positions, heads, head width): base at both lengths of pre-training, small.
SHAPES = ((128, 6, 64), (512, 6, 64), (128, 2, 64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tpu:v5e")
    options = parser.parse_args()
    tpu_pricing.use_compile_only_tpu()
    import jax

    from convbert_jax.ops.tpu import block_sizes

    better = []
    for length, heads, width in SHAPES:
        for kernel, (function, shapes) in kernels(length, heads, width).items():
            costs, key = {}, None
            for rows in ("rule", *CANDIDATES):
                jax.clear_caches()  # else the kernel of the last candidate would be found there
                seen = watch(block_sizes, rows)
                costs[rows] = cost(function, shapes, options.target, block_sizes)
                key = seen[kernel]
            line = ", ".join(f"{rows}: {value / 1e3:.1f}" for rows, value in costs.items() if value)
            print(f"{options.target} {length} x {heads} x {width} {kernel}: {line}", flush=True)
            best = min((value, rows) for rows, value in costs.items() if value and rows != "rule")
            if costs["rule"] is None or best[0] < WORTH * costs["rule"]:
                better.append(f"    {key!r}: {best[1]},")
    print("\n".join(better) or "The rule is the best or close to it everywhere.")


def kernels(length: int, heads: int, width: int) -> dict:
    """Kernel -> (function, its arrays), forward or backward alone."""
    import jax
    import jax.numpy as jnp

    from convbert_jax.ops import taps, tpu

    batch, channels, offsets = TOKENS // length, heads * width, taps.offsets(9)

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


def watch(block_sizes, rows) -> dict[str, tuple]:
    """Makes every kernel take `rows` rows a step; the keys of MEASURED it asks for, by kernel."""
    seen: dict[str, tuple] = {}

    class Answers(dict):
        def get(self, key, default=None):
            seen[key[-1]] = key
            return None if rows == "rule" else rows

    block_sizes.MEASURED = Answers()
    return seen


def cost(function, shapes, target: str, block_sizes) -> float | None:
    """Cycles of the kernel, None if it does not fit the chip."""
    try:
        found = tpu_pricing.price(function, *shapes, target=target)
    except Exception as error:  # XLA's own type, for what does not fit
        if "memory" not in str(error) and "VMEM" not in str(error):
            raise
        return None
    return max(kernel.cycles for kernel in found.kernels)


if __name__ == "__main__":
    main()
