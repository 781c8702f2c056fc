"""Cost of attention implementations on a TPU, with and without attention dropout.

    python -m benchmarks.layers.attention --target=tpu:v5e
    python -m benchmarks.layers.attention --lengths 512 --heads 12 --forms pallas_tpu

Query, key and value have the layout of dense outputs, [rows, length, heads x width] in bfloat16.
Output and gradients have the same layout, so the cost includes transposes for forms that need
separate heads. Segment ids are used. The figures are the TPU compiler's model
(analysis/tpu_pricing.py), forward and backward, in thousand cycles. XLA operations that draw
random bits have no estimate. Each kernel counts as the larger of its schedule (with random bits)
and its memory traffic. No TPU is needed.
"""

import argparse

from convbert_jax.analysis import tpu_devices, tpu_pricing

TOKENS = 8_192
FORMS = ("xla", "splash", "pallas_tpu")
RATES = (0.0, 0.1)
COLUMNS = (
    *("rows x length", "form", "dropout", "cycles", "kernels", "kernel traffic"),
    "temporaries, MB",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--target", default="tpu:v5e", choices=[f"tpu:{n}" for n in tpu_devices.CHIPS]
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--heads", type=int, default=6, help="default: as in `base`")
    parser.add_argument("--width", type=int, default=64, help="head width")
    parser.add_argument("--forms", nargs="+", default=FORMS, choices=FORMS)
    options = parser.parse_args()
    tpu_pricing.use_compile_only_tpu()
    print(f"{options.target}, {options.heads} heads of {options.width}, bfloat16, thousand cycles")
    print("| rows x length | form | dropout | cycles | kernels | kernel traffic | temporaries |")
    print("|---|---|---:|---:|---:|---:|---:|", flush=True)
    for length in options.lengths:
        for form in options.forms:
            for rate in RATES:
                if not (form == "splash" and rate):  # splash has no dropout
                    print_price(options, TOKENS // length, length, form, rate)


def print_price(options: argparse.Namespace, rows: int, length: int, form: str, rate: float):
    """Prints one row of the table."""
    title = f"| {rows} x {length} | {form} | {rate} |"
    function, shapes = build(rows, length, options.heads, options.width, form, rate)
    try:
        found = tpu_pricing.price(function, *shapes, target=options.target)
    except RuntimeError as error:  # the profiler does not support all compiler outputs
        print(f"{title} {str(error)[:100]} | | | |", flush=True)
        return
    traffic = sum(kernel.times * kernel.bandwidth_cycles for kernel in found.kernels)
    thousands = (f"{each / 1e3:,.0f}" for each in (found.cycles, found.kernel_cycles, traffic))
    print(f"{title} {' | '.join(thousands)} | {found.temporary_bytes / 1e6:,.0f} |", flush=True)


def build(rows: int, length: int, heads: int, width: int, form: str, rate: float):
    """Returns (output and gradients of the named form, shapes of its arguments)."""
    import jax
    import jax.numpy as jnp

    from convbert_jax.ops.attention import attention
    from convbert_jax.ops.nn import dropout_of

    def run(query, key, value, cotangent, ids, seed):
        drop = dropout_of(rate, jax.random.wrap_key_data(seed, impl="rbg"))

        def attend(*arrays):
            arrays = (x.reshape(rows, length, heads, width) for x in arrays)
            out = attention(*arrays, segment_ids=ids, implementation=form, drop=drop)
            return out.reshape(rows, length, heads * width)

        out, back = jax.vjp(attend, query, key, value)
        return out, back(cotangent)

    states = jax.ShapeDtypeStruct((rows, length, heads * width), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return run, ([states] * 4 + [ids, jax.ShapeDtypeStruct((4,), jnp.uint32)])


if __name__ == "__main__":
    main()
