"""Time and memory of a layer by row length, for every mixer, as table and picture.

    python -m benchmarks.layers.lengths --target=cpu --config=small --picture=lengths.png
    python -m benchmarks.layers.lengths --target=tpu:v5e --config=base --lengths 128 512 2048

One encoder layer of a config: each mixer with the config's taps, float32 parameters, no dropout,
segment ids, forward with the gradients of parameters and input, `--tokens` tokens at every length.
On a CPU the mixers alternate in one process and the figures are medians in milliseconds. TPU
targets need no TPU: figures are the TPU compiler's model in thousand cycles
(analysis/tpu_pricing.py). Memory is the size of the compiled program's temporaries. A crossing is
the shortest measured length from which a mixer costs less than attention.
"""

import argparse
import dataclasses
import importlib
import json
import pathlib
import statistics

from benchmarks import timing
from benchmarks.layers import layer
from benchmarks.layers.dynamic_conv import with_direction
from convbert_jax.analysis import tpu_pricing
from convbert_jax.config import mixers

TARGETS = ("cpu", "tpu:v5e", "tpu:v5p", "tpu:v6e")
MIXERS = ("attention", *(name for name in mixers.MIXERS if name != "attention"))


@dataclasses.dataclass(frozen=True)
class Row:
    """One mixer at one length; with --json an object with these keys."""

    mixer: str
    length: int
    batch: int
    target: str
    cost: float
    unit: str
    ratio_to_attention: float
    memory_mb: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="cpu", choices=TARGETS)
    parser.add_argument("--config", default="small", help="source of width, heads, taps")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**n for n in range(6, 13)])
    parser.add_argument("--tokens", type=int, default=8_192, help="tokens per batch")
    parser.add_argument("--mixers", nargs="+", default=MIXERS, choices=MIXERS)
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each (cpu)")
    parser.add_argument("--picture", type=pathlib.Path, help="a PNG to draw")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    if "attention" not in options.mixers:
        parser.error("--mixers must include attention, the baseline.")
    if options.target == "cpu":
        timing.use("cpu")
    else:
        tpu_pricing.use_compile_only_tpu()
    rows = []
    for length in options.lengths:
        for row in measure(options, length):
            rows.append(row)
            print(json.dumps(dataclasses.asdict(row)) if options.json else show(row), flush=True)
    if not options.json:
        print(*crossings(rows), sep="\n")
    if options.picture:
        draw(rows, options.picture)


def measure(options: argparse.Namespace, length: int) -> list[Row]:
    batch = max(1, options.tokens // length)
    costs, memory = (_time if options.target == "cpu" else _price)(options, batch, length)
    unit = "ms" if options.target == "cpu" else "thousand cycles (compiler's model)"
    return [
        Row(
            *(mixer, length, batch, options.target, costs[mixer], unit),
            costs[mixer] / costs["attention"],
            memory[mixer] / 1e6,
        )
        for mixer in options.mixers
    ]


def show(row: Row) -> str:
    shape = f"{row.batch} x {row.length}"
    return (
        f"{row.mixer:16}{shape:>11}{row.cost:12,.5g} {row.unit}"
        f"{row.ratio_to_attention:8.2f}{row.memory_mb:10,.0f} MB"
    )


def crossings(rows: list[Row]) -> list[str]:
    """Returns a sentence per mixer with the length from which it is cheaper than attention."""
    sentences = []
    for mixer in dict.fromkeys(row.mixer for row in rows if row.mixer != "attention"):
        start = None
        for row in sorted((r for r in rows if r.mixer == mixer), key=lambda r: -r.length):
            if row.ratio_to_attention >= 1:
                break
            start = row.length
        sentences.append(f"{mixer}: {f'cheaper from {start} on' if start else 'never cheaper'}")
    return sentences


def draw(rows: list[Row], picture: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for place, mixer in enumerate(dict.fromkeys(row.mixer for row in rows)):
        line = [row for row in rows if row.mixer == mixer]
        lengths = [row.length for row in line]
        style = {"color": f"C{place}", "marker": "o", "ms": 3.5, "lw": 2.5 if place == 0 else 1.4}
        axes[0].plot(lengths, [row.cost for row in line], label=mixer, **style)
        axes[1].plot(lengths, [row.memory_mb for row in line], label=mixer, **style)
    axes[0].set_ylabel(rows[0].unit)
    axes[1].set_ylabel("MB of temporaries")
    tokens = rows[0].batch * rows[0].length
    for axis, title in zip(axes, ("forward and backward", "memory"), strict=True):
        axis.set(xscale="log", yscale="log", title=f"{title}, {tokens:,} tokens", xlabel="length")
        ticks = sorted({row.length for row in rows})
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(picture, dpi=130)


def build(options: argparse.Namespace, mixer: str, batch: int, length: int):
    """Like `layer.build`, with the sizes of a config."""
    from convbert_jax.config import from_config_dict

    config = from_config_dict(importlib.import_module(f"configs.{options.config}").get_config())
    names = ("hidden_size", "embedding_size", "heads", "ffn_size", "kernel_size")
    sizes = {name: getattr(config.model, name) for name in names}
    dtype = "float32" if options.target == "cpu" else "bfloat16"
    return layer.build(layer.Layer(mixer, "xla"), dtype, batch, length, sizes)


def _price(options, batch, length):
    costs, memory = {}, {}
    for mixer in options.mixers:
        run, shapes, _ = build(options, mixer, batch, length)
        found = tpu_pricing.price(
            with_direction(run, "forward_backward", 2), shapes[0], *shapes, target=options.target
        )
        costs[mixer], memory[mixer] = found.cycles / 1e3, found.temporary_bytes
    return costs, memory


def _time(options, batch, length):
    import jax
    import jax.numpy as jnp
    from flax import nnx

    runs, memory = {}, {}
    for mixer in options.mixers:
        run, (x, _, ids), make = build(options, mixer, batch, length)
        x = jax.random.normal(jax.random.key(1), x.shape).astype(x.dtype)
        given = (x, x, nnx.state(make()), jnp.ones(ids.shape, ids.dtype))
        compiled = jax.jit(with_direction(run, "forward_backward", 2)).lower(*given).compile()
        memory[mixer] = compiled.memory_analysis().temp_size_in_bytes
        runs[mixer] = lambda run=compiled, given=given: jax.block_until_ready(run(*given))
    times = timing.alternate(runs, options.rounds)
    return {mixer: statistics.median(times[mixer]) for mixer in runs}, memory


if __name__ == "__main__":
    main()
