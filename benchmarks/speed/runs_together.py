"""Several small pre-training runs as one vmapped program, compared with sequential runs.

    python -m benchmarks.speed.runs_together --target=cpu --config=tiny --runs 8
    python -m benchmarks.speed.runs_together --target=tpu:v5e --config=tiny --runs 8

The step is loss, gradients and update with dropout, as in a run of the config; batches are random.
On a CPU both forms alternate in one process and the figures are medians of seconds for one step of
all runs. TPU targets need no TPU: the figures are the TPU compiler's model in million cycles, with
kernels as their traffic at full bandwidth, because the profiler does not support the narrow ones.
Ratios above 1 mean that the vmapped program is faster.
"""

import argparse
import statistics

from benchmarks import step as step_benchmark
from benchmarks import timing
from convbert_jax.analysis import tpu_devices, tpu_pricing
from convbert_jax.config import Config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="cpu", choices=step_benchmark.TARGETS)
    parser.add_argument("--config", default="tiny", help="as tiny or tiny:paper")
    parser.add_argument(
        "--batch", type=int, help="rows of a step of one run; default: the config's"
    )
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each (cpu)")
    options = parser.parse_args()
    if options.target == "cpu":
        timing.use("cpu")
        in_turn, together = _time(options)
        unit = "s"
    else:
        tpu_pricing.use_compile_only_tpu()
        in_turn, together = _price(options)
        unit = "million cycles (compiler's model)"
    print(
        f"{options.config}, {options.runs} runs: in turn {in_turn:.4g} {unit}, together "
        f"{together:.4g} {unit}, in turn / together {in_turn / together:.2f}"
    )


def _read_config(options: argparse.Namespace) -> Config:
    rows = {} if options.batch is None else {"train.batch_size": options.batch}
    return step_benchmark.read_config(options.config, None, rows)


def _price(options: argparse.Namespace) -> tuple[float, float]:
    import jax

    from convbert_jax.analysis.hlo import kernel_traffic

    jax.config.update("jax_default_prng_impl", "rbg")
    kind, cycles = tpu_devices.chip(options.target), []
    for runs in (None, options.runs):
        program, shapes = step_benchmark.build(_read_config(options), options.target, runs)
        compiled = tpu_pricing.compile_for(program.train_step, *shapes, target=options.target)
        found = tpu_pricing.price_compiled(compiled, options.target, kernels=False)
        traffic = kind.bandwidth_cycles(kernel_traffic(compiled.as_text()))
        of_all = (found.cycles + traffic) / 1e6
        cycles.append(of_all * (options.runs if runs is None else 1))
        print(f"runs={runs}: {len(found.unpriced)} operations not estimated", flush=True)
    return cycles[0], cycles[1]


def _time(options: argparse.Namespace) -> tuple[float, float]:
    import jax
    import numpy as np

    def start(runs):
        program, (_, shapes) = step_benchmark.build(_read_config(options), options.target, runs)
        draws = np.random.default_rng(0)
        batch = {
            name: np.ones(shape.shape, np.int32)
            if name != "tokens"
            else draws.integers(5, 4_000, shape.shape, np.int32)
            for name, shape in shapes.items()
        }
        with jax.set_mesh(program.mesh):
            key = jax.random.key(0)
            states = [program.init(key if runs is None else jax.random.split(key, runs))]
            rows = program.put_batch(batch)
        if runs is None:
            states *= options.runs
            states = [jax.tree.map(lambda leaf: leaf.copy(), state) for state in states]
        return program, states, rows

    def step(program, states, rows):
        with jax.set_mesh(program.mesh):
            for number, state in enumerate(states):
                states[number], *_ = program.train_step(state, rows)
        jax.block_until_ready(states)

    forms = {"in turn": start(None), "together": start(options.runs)}
    times = timing.alternate(
        {name: lambda form=form: step(*form) for name, form in forms.items()}, options.rounds
    )
    for name, found in times.items():
        print(f"{name}: {min(found) / 1e3:.3f} to {max(found) / 1e3:.3f} s", flush=True)
    return tuple(statistics.median(times[name]) / 1e3 for name in ("in turn", "together"))


if __name__ == "__main__":
    main()
