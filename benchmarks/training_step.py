"""A whole training step: what it costs on a TPU, and how long a CPU compiles it.

    python -m benchmarks.training_step --target=tpu:v5e --config=base
    python -m benchmarks.training_step --target=cpu --config=base --batch=4

The step is loss, gradients and update of a file in configs/, with dropout, for one device. On TPU
targets, which need no TPU, it computes in bfloat16 and the figures are the TPU compiler's model
(analysis/tpu/pricing.py). On the CPU nothing runs either: the seconds are those of tracing,
lowering and compiling, without a cache.
"""

import argparse
import dataclasses
import importlib
import os
import time

from convbert_jax.analysis.tpu import chips
from convbert_jax.analysis.tpu import pricing as tpu_pricing

TARGETS = ("cpu", *(f"tpu:{name}" for name in chips.CHIPS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tpu:v5e", choices=TARGETS)
    parser.add_argument("--config", default="base", help="as base or base:paper")
    parser.add_argument("--batch", type=int, help="rows of a step; default: the config's")
    parser.add_argument("--unroll", type=int, default=1, help="config.model.scan_unroll")
    parser.add_argument("--operations", type=int, default=0, help="print the dearest N (tpu)")
    parser.add_argument("--xla-only", action="store_true", help="leave Pallas kernels out (tpu)")
    options = parser.parse_args()
    if options.target == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        print_seconds(options)
    else:
        tpu_pricing.use_compile_only_tpu()
        print_price(options)


def build(options: argparse.Namespace, runs: int | None = None, unroll: int = 1):
    """(program, shapes of the state and the batch of its train_step).

    Args:
      runs: how many are trained together, as `Program` takes it.
      unroll: `config.model.scan_unroll`.
    """
    import jax

    from convbert_jax.config import from_config_dict
    from convbert_jax.recipes.planning.traced import make_batch, make_task
    from convbert_jax.training.program import make_program
    from convbert_jax.training.sharding import make_mesh

    name, _, variant = options.config.partition(":")
    config = from_config_dict(
        importlib.import_module(f"configs.{name}").get_config(variant or "default")
    )
    train = dataclasses.replace(config.train, batch_size=options.batch or config.train.batch_size)
    dtype = "float32" if options.target == "cpu" else "bfloat16"
    model = dataclasses.replace(config.model, scan_unroll=unroll)
    config = dataclasses.replace(config, train=train, model=model, compute_dtype=dtype)
    on_cpu = options.target == "cpu"
    device = jax.devices()[0]
    mesh = make_mesh(config.mesh, [device]) if on_cpu else tpu_pricing.make_mesh(options.target)
    program = make_program(make_task(config, device), config, mesh, runs=runs)
    batch = make_batch(config)
    rows = batch["tokens"]
    print(f"{options.config}, {rows.shape[0]} x {rows.shape[1]}, {dtype}, {options.target}")
    if runs is not None:
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((runs, *x.shape), x.dtype), batch)
    return program, (program.abstract, batch)


def print_price(options: argparse.Namespace) -> None:
    import jax

    jax.config.update("jax_default_prng_impl", "rbg")  # as training/environment/devices.py on a TPU
    program, shapes = build(options, unroll=options.unroll)
    started = time.perf_counter()
    kernels = not options.xla_only
    found = tpu_pricing.price(program.train_step, *shapes, target=options.target, kernels=kernels)
    of_kernels = f"{found.kernel_cycles / 1e6:.1f}" if kernels else "left out"
    print(
        f"{found.cycles / 1e6:.1f} million cycles (compiler's model): XLA "
        f"{found.xla_cycles / 1e6:.1f}, kernels {of_kernels}; temporaries "
        f"{found.temporary_bytes / 1e9:.2f} GB; not estimated: {len(found.unpriced)} operations; "
        f"{time.perf_counter() - started:.0f} s to compile and price"
    )
    for name, cycles, source in found.operations[: options.operations]:
        print(f"{cycles / 1e6:9.2f}  {name}  {source}")


def print_seconds(options: argparse.Namespace) -> None:
    program, shapes = build(options, unroll=options.unroll)
    started = time.perf_counter()
    traced = program.train_step.trace(*shapes)
    lowered = traced.lower()
    seconds = time.perf_counter() - started
    compiled = lowered.compile()
    total = time.perf_counter() - started
    memory = compiled.memory_analysis().temp_size_in_bytes / 1e9
    print(
        f"traced and lowered in {seconds:.1f} s, compiled in {total - seconds:.1f} s; "
        f"temporaries {memory:.2f} GB"
    )


if __name__ == "__main__":
    main()
