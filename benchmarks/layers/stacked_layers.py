"""Cost per layer in a training stack: with dropout, forward and backward.

    python -m benchmarks.layers.stacked_layers --target=tpu:v5e --layers 4 --unroll 1 2 4
    python -m benchmarks.layers.stacked_layers --layers 4 --config.model.remat=dots

The stack is `models.encoder.Encoder` of configs/base.py in bfloat16 with hidden states as input,
and gradients of these and the parameters. Unlike a single layer (layer.py), it includes dropout
and the activations that a scan stores for the backward pass. The figures are the TPU compiler's
model (analysis/tpu_pricing.py) in thousand cycles per layer; no TPU is needed.
"""

import argparse
import time

import convbert_jax
from convbert_jax.analysis import tpu_devices, tpu_pricing
from convbert_jax.command_line import overrides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--target", default="tpu:v5e", choices=[f"tpu:{n}" for n in tpu_devices.CHIPS]
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--unroll", type=int, nargs="+", default=[1], help="values of scan_unroll")
    parser.add_argument("--batch", type=int, default=64, help="rows")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--xla-only", action="store_true", help="disable the Pallas kernels")
    parser.add_argument("--operations", type=int, default=0, help="print the N most expensive")
    options, rest = parser.parse_known_args()
    fields, rest = overrides.take(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    tpu_pricing.use_compile_only_tpu()
    print(f"base, {options.layers} layers, {options.batch} x {options.length}, {options.target}")
    print("unroll  thousand cycles per layer       temporaries, MB    seconds to price")
    for unroll in options.unroll:
        print_price(options, fields | {"model.scan_unroll": unroll})


def print_price(options: argparse.Namespace, fields: dict) -> None:
    function, shapes = build(options, fields)
    started = time.perf_counter()
    kernels = not options.xla_only
    found = tpu_pricing.price(function, *shapes, target=options.target, kernels=kernels)
    seconds = time.perf_counter() - started
    of_layer = 1e3 * options.layers
    kernels = f"{found.kernel_cycles / of_layer:,.0f}" if kernels else "left out"
    cycles = f"{found.cycles / of_layer:,.0f} (kernels {kernels})"
    megabytes = found.temporary_bytes / 1e6 / options.layers
    unroll = fields["model.scan_unroll"]
    print(f"{unroll:6}  {cycles:30}{megabytes:14,.0f}{seconds:20.0f}", flush=True)
    for name, cycles, source in found.operations[: options.operations]:
        print(f"{cycles / of_layer:9.1f}  {name}  {source}")


def build(options: argparse.Namespace, fields: dict):
    """Returns (gradients of a stack, shapes of its parameters, states, segment ids and key)."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from convbert_jax.models.encoder import Encoder

    jax.config.update("jax_default_prng_impl", "rbg")  # as in training on a TPU
    config = convbert_jax.load_config("base", **{"model.layers": options.layers} | fields)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Encoder(config.encoder, nnx.Rngs(0))))

    def value(params, x, segment_ids, key):
        out = nnx.merge(graphdef, params)(x, segment_ids, jax.random.wrap_key_data(key))
        return jnp.vdot(out.astype(jnp.float32), x.astype(jnp.float32))

    shape = (options.batch, options.length)
    x = jax.ShapeDtypeStruct((*shape, config.encoder.hidden_size), jnp.bfloat16)
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    shapes = (params, x, jax.ShapeDtypeStruct(shape, jnp.int32), key)
    return jax.grad(value, argnums=(0, 1)), shapes


if __name__ == "__main__":
    main()
