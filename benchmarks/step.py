"""TPU cost of training steps of ConvBERT and ELECTRA, and CPU compilation times.

    python -m benchmarks.step --target=tpu:v5e
    python -m benchmarks.step --configs base electra-base --shapes 256x128 --config.model.layers=2
    python -m benchmarks.step --target=cpu --configs small --shapes 4x128

A step is loss, gradients and update of a file in configs/, with dropout, for one device. ELECTRA of
a size is ConvBERT's config with config.model.mixer=attention: objective, masks, dropout, batch,
dtype and optimizer are the same (configs/electra.py has ELECTRA's recipe, in float32). Shapes are
rows x length, with equally many tokens for one size.

TPU targets need no TPU: a row is the result of `--mode=plan --topology=v5e:1x1`, by the TPU
compiler's model. The compiler prices memory-bound operations at less than half of the bandwidth
(v5e: 222 bytes per cycle of 546), but a Pallas kernel counts as its traffic at full bandwidth.
Therefore the table has three sums: unmodified, all at full bandwidth, and all at the compiler's
bandwidth. Matrix products have the compiler's price in each. On the CPU nothing runs: the seconds
are for tracing, lowering and compiling, without a cache.
"""

import argparse
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import convbert_jax
from benchmarks import timing
from convbert_jax.analysis import tpu_devices
from convbert_jax.command_line import overrides
from convbert_jax.config import Config

SHAPES = {"base": ("256x128", "64x512"), "small": ("128x128", "32x512")}  # equally many tokens
ELECTRA = "electra-"  # prefix of a config name: the same config with attention only
GIB = 2**30
COLUMNS = (
    *("step", "products", "kernels", "the rest", "sum", "full bandwidth", "compiler's bandwidth"),
    *("share of peak", "temporaries, GiB", "s to compile"),
)


@dataclasses.dataclass(frozen=True)
class Cycles:
    """Cycles of one step on one device, by the compiler's model.

    Attributes:
      products: operations with a matrix product, at the compiler's price.
      kernels: Pallas kernels, as their traffic at full bandwidth.
      rest: all other operations, at the compiler's bandwidth.
      pessimism: full bandwidth divided by the compiler's.
    """

    products: float
    kernels: float
    rest: float
    pessimism: float

    @property
    def as_priced(self) -> float:
        return self.products + self.kernels + self.rest

    @property
    def at_full_bandwidth(self) -> float:
        return self.products + self.kernels + self.rest / self.pessimism

    @property
    def at_compilers_bandwidth(self) -> float:
        return self.products + self.kernels * self.pessimism + self.rest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tpu:v5e", choices=timing.TARGETS[:-2])
    parser.add_argument(
        "--configs",
        nargs="+",
        default=["base", "electra-base", "small", "electra-small"],
        help=f"as base or base:paper, and {ELECTRA}base for the same with attention alone",
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        help="rows x length, as 256x128; default: "
        + "; ".join(f"{name} {' '.join(shapes)}" for name, shapes in SHAPES.items()),
    )
    parser.add_argument("--operations", type=int, default=0, help="print up to 12 costliest")
    options, rest = parser.parse_known_args()
    fields, rest = overrides.take(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    timing.use(options.target)
    if options.target == "cpu":
        table = timing.Table("step, float32", "s to lower", "s to compile", "temporaries, GB")
    else:
        print(f"million cycles of a step on one {options.target}, by the TPU compiler's model")
        table = timing.Table(*COLUMNS)
    for name in options.configs:
        for shape in options.shapes or default_shapes(name):
            config = read_config(name, shape, fields)
            if options.target == "cpu":
                table.add(f"{name}, {shape}", *compile_on_cpu(config))
                continue
            numbers = price(config, options.target)
            table.add(f"{name}, {shape}", *describe(numbers, options.target))
            for each in numbers["most_expensive"][: options.operations] if numbers["fits"] else ():
                cycles = f"{each['cycles'] / 1e6:9.2f}"
                print(f"{cycles}  {each['times']} x {each['name']}  {each['source']}")


def default_shapes(name: str) -> tuple[str, ...]:
    """Returns the shapes of a config named as in `read_config`; default: the shapes of `small`."""
    return SHAPES.get(name.removeprefix(ELECTRA).partition(":")[0], SHAPES["small"])


def read_config(name: str, shape: str | None, fields: Mapping[str, Any]) -> Config:
    """Reads a config of configs/ and changes its shape and fields.

    Args:
      name: "base", "base:paper", or "electra-base", which is `base` with attention only.
      shape: rows x length, such as "256x128"; None: the config's.
      fields: "model.layers" -> value; applied last.

    Raises:
      SystemExit: the shape is invalid.
      ConfigError: the config does not exist or is inconsistent.
    """
    given = {}
    if shape is not None:
        rows, _, length = shape.partition("x")
        if not (rows.isdecimal() and length.isdecimal()):
            raise SystemExit(f"--shapes {shape} is not rows x length; write it as 256x128.")
        given |= {"train.batch_size": int(rows), "data.length": int(length)}
    if name.startswith(ELECTRA):
        name = name.removeprefix(ELECTRA)
        given["model.mixer"] = "attention"
    return convbert_jax.load_config(name, **{**given, **fields})


def price(config: Config, target: str) -> dict[str, Any]:
    """Returns the numbers of a plan (analysis/tpu_plan.py) for one device of `target`.

    "compile_seconds" has the time of the call.
    """
    from convbert_jax.analysis.tpu_devices import open_topology
    from convbert_jax.recipes.planning import plan_slice

    kind, _, sides = tpu_devices.chip(target).topology.partition(":")
    slice_of_one = open_topology(f"{kind}:{'x'.join('1' for _ in sides.split('x'))}")
    one = dataclasses.replace(slice_of_one, devices=slice_of_one.devices[:1])  # TPU7x has two
    started = time.perf_counter()
    plan = plan_slice(config, one, largest_batch=False, compare=False, price=None)
    return plan.numbers | {"compile_seconds": time.perf_counter() - started}


def count_cycles(numbers: Mapping[str, Any], target: str) -> Cycles:
    """Returns the cycle groups of a plan that fits."""
    from convbert_jax.analysis.tpu_plan import KERNELS, OTHER, PRODUCTS

    groups = (numbers["cycles"][group] for group in (PRODUCTS, KERNELS, OTHER))
    return Cycles(*groups, pessimism=tpu_devices.chip(target).memory_pessimism)


def describe(numbers: Mapping[str, Any], target: str) -> list[str]:
    """Returns the cells of a step under COLUMNS, without its title."""
    seconds = f"{numbers['compile_seconds']:.0f}"
    if not numbers["fits"]:
        needed = f"does not fit: {numbers['memory']['needed'] / GIB:.1f}"
        return [*[""] * (len(COLUMNS) - 3), needed, seconds]
    cycles = count_cycles(numbers, target)
    of_peak = numbers["flops"] / tpu_devices.chip(target).flops_per_cycle  # cycles at peak FLOP/s
    sums = cycles.as_priced, cycles.at_full_bandwidth, cycles.at_compilers_bandwidth
    shares = [of_peak / each for each in (max(sums), min(sums))]
    return [
        *(f"{each / 1e6:,.1f}" for each in (cycles.products, cycles.kernels, cycles.rest, *sums)),
        f"{shares[0]:.1%} to {shares[1]:.1%}",
        f"{numbers['memory']['temporaries'] / GIB:.2f}",
        seconds,
    ]


def compile_on_cpu(config: Config) -> tuple[float, float, float]:
    """Returns the seconds to lower and to compile a step, and its GB of temporaries."""
    import jax

    from convbert_jax.recipes.planning import make_batch, make_task
    from convbert_jax.training.partitioning import make_mesh
    from convbert_jax.training.train_step import make_program

    device = jax.devices()[0]
    config = dataclasses.replace(config, compute_dtype="float32")
    mesh = make_mesh(config.mesh, [device])
    program = make_program(make_task(config, device), config, mesh)
    started = time.perf_counter()
    with jax.set_mesh(mesh):
        lowered = program.train_step.trace(program.abstract, make_batch(config)).lower()
        seconds = time.perf_counter() - started
        compiled = lowered.compile()
    total = time.perf_counter() - started
    return seconds, total - seconds, compiled.memory_analysis().temp_size_in_bytes / 1e9


if __name__ == "__main__":
    main()
