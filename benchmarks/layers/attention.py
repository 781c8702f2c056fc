"""Attention alone: what each form costs on a TPU, with and without dropout of its weights.

    python -m benchmarks.layers.attention --target=tpu:v5e
    python -m benchmarks.layers.attention --lengths 512 --heads 12 --forms pallas_tpu

Query, key and value come as a dense layer gives them out, [rows, length, heads x width] in
bfloat16, and so the output and the gradients of the three go: a form that wants heads apart pays
for putting them apart. Segment ids are given. The figures are the TPU compiler's model
(analysis/tpu/pricing.py), forward and backward, in thousand cycles: XLA's operations, of which
those that draw random bits have no estimate, and each kernel at the larger of its schedule, random
bits included, and its traffic. No TPU is needed.
"""

import argparse

from convbert_jax.analysis.tpu import chips
from convbert_jax.analysis.tpu import pricing as tpu_pricing

TOKENS = 8_192
FORMS = ("xla", "splash", "pallas_tpu")
RATES = (0.0, 0.1)
COLUMNS = (
    *("rows x length", "form", "dropout", "cycles", "of it kernels", "their traffic"),
    "temporaries, MB",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tpu:v5e", choices=[f"tpu:{n}" for n in chips.CHIPS])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--heads", type=int, default=6, help="of `base`, beside its convolution")
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--forms", nargs="+", default=FORMS, choices=FORMS)
    options = parser.parse_args()
    tpu_pricing.use_compile_only_tpu()
    print(f"{options.target}, {options.heads} heads of {options.width}, bfloat16, thousand cycles")
    print(
        "| rows x length | form | dropout | cycles | of it kernels | their traffic | temporaries |"
    )
    print("|---|---|---:|---:|---:|---:|---:|", flush=True)
    for length in options.lengths:
        for form in options.forms:
            for rate in RATES:
                if not (form == "splash" and rate):  # it has none
                    print_price(options, TOKENS // length, length, form, rate)


def print_price(options: argparse.Namespace, rows: int, length: int, form: str, rate: float):
    """One line of the table."""
    title = f"| {rows} x {length} | {form} | {rate} |"
    function, shapes = build(rows, length, options.heads, options.width, form, rate)
    try:
        found = tpu_pricing.price(function, *shapes, target=options.target)
    except RuntimeError as error:  # the profiler cannot read all that the compiler makes
        print(f"{title} {str(error)[:100]} | | | |", flush=True)
        return
    traffic = sum(kernel.times * kernel.bandwidth_cycles for kernel in found.kernels)
    thousands = (f"{each / 1e3:,.0f}" for each in (found.cycles, found.kernel_cycles, traffic))
    print(f"{title} {' | '.join(thousands)} | {found.temporary_bytes / 1e6:,.0f} |", flush=True)


def build(rows: int, length: int, heads: int, width: int, form: str, rate: float):
    """(output and gradients of the named form, shapes of its arguments)."""
    import jax
    import jax.numpy as jnp

    from convbert_jax.ops.attention import attention
    from convbert_jax.ops.dropout import dropout_of

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
