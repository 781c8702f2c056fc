"""Cost of an encoder layer: attention, and ConvBERT with each form of its convolution.

    python -m benchmarks.layers.layer --target=tpu:v5e
    python -m benchmarks.layers.layer --target=tpu:v5e --lengths 512 --only attention

The layer is `models.encoder.Layer` at the shapes of the base size: bfloat16 compute (float32 on a
CPU), float32 parameters, no dropout, outside a scan; forward only, or forward with the gradients
of its parameters and input. TPU targets need no TPU: the figures are the TPU compiler's model
(analysis/tpu_pricing.py) in thousand cycles, XLA's operations plus the kernels' prices. On cpu and
gpu the layers alternate in one process; the figures are medians in milliseconds.
`ratio_to_attention` divides by the attention-only layer with the same attention.
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
from unittest import mock

from benchmarks import timing
from benchmarks.layers.dynamic_conv import DIRECTIONS, TARGETS, with_direction
from convbert_jax.analysis import tpu_pricing

BATCHES = {128: 64, 512: 16}  # 8,192 tokens
BASE = {"hidden_size": 768, "embedding_size": 768, "heads": 12, "ffn_size": 3072}


@dataclasses.dataclass(frozen=True)
class Layer:
    """A measured layer: a mixer, its attention, and its dynamic convolution."""

    mixer: str
    attention: str  # config.model.attention
    convolution: str = "auto"  # a baseline, or config.model.convolution


LAYERS = {
    "attention": Layer("attention", "xla"),
    "convbert, published formula": Layer("mixed", "xla", "published formula"),
    "convbert, published formula as einsum": Layer("mixed", "xla", "published formula as einsum"),
    "convbert, xla": Layer("mixed", "xla", "xla"),
    "convbert, auto": Layer("mixed", "xla", "auto"),
    "attention, best attention": Layer("attention", "auto"),
    "convbert, auto, best attention": Layer("mixed", "auto", "auto"),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table; with --json an object with these keys."""

    layer: str
    length: int
    batch: int
    direction: str
    target: str
    cost: float | None  # None: unsupported there; `note` has the reason
    unit: str
    ratio_to_attention: float | None
    note: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tpu:v5e", choices=TARGETS)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--batch", type=int, help="default: rows for 8,192 tokens")
    parser.add_argument("--directions", nargs="+", default=DIRECTIONS, choices=DIRECTIONS)
    parser.add_argument("--only", nargs="+", choices=LAYERS, help="layers to show; default: all")
    parser.add_argument("--dtype", help="compute dtype; default: float32 on cpu, else bfloat16")
    parser.add_argument("--operations", type=int, default=0, help="print the N costliest (tpu)")
    parser.add_argument("--rounds", type=int, default=9, help="timed runs of each (cpu, gpu)")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    options.dtype = options.dtype or ("float32" if options.target == "cpu" else "bfloat16")
    options.only = options.only or list(LAYERS)
    if options.target.startswith("tpu"):
        tpu_pricing.use_compile_only_tpu()
    else:
        timing.use(options.target)
    if not options.json:
        print(f"{options.target}, {options.dtype}, base shapes, no dropout")
        print(f"{'':40}{'B x L':>10} {'direction':18}{'cost':>10}{'ratio':>8}")
    for row in rows(options):
        if options.json:
            print(json.dumps(dataclasses.asdict(row)), flush=True)
        else:
            print_row(row)


def print_row(row: Row) -> None:
    name = f"{row.layer:40}{f'{row.batch} x {row.length}':>10} {row.direction:18}"
    if row.cost is None:
        print(f"{name}  {row.note}", flush=True)
        return
    ratio = f"{row.ratio_to_attention:8.2f}" if row.ratio_to_attention else " " * 8
    print(f"{name}{row.cost:10,.5g}{ratio}  {row.note}", flush=True)


def rows(options: argparse.Namespace):
    """Yields a row per length, direction and layer."""
    measure = _price if options.target.startswith("tpu") else _time
    unit = "thousand cycles (compiler's model)" if measure is _price else "ms"
    for length in options.lengths:
        batch = options.batch or BATCHES.get(length) or max(1, 8192 // length)
        for direction in options.directions:
            baselines = {}
            for name, cost, note in measure(options, batch, length, direction):
                layer = LAYERS[name]
                if layer.mixer == "attention":
                    baselines[layer.attention] = cost
                baseline = baselines.get(layer.attention)
                ratio = cost / baseline if cost and baseline else None
                yield Row(name, length, batch, direction, options.target, cost, unit, ratio, note)


# --- Layer as a function of its parameters and input ---


def build(layer: Layer, dtype: str, batch: int, length: int, sizes=BASE):
    """Returns (function of (x, params, segment ids), shapes of these three, layer factory).

    Args:
      sizes: fields of config.model.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from benchmarks.layers.baselines import BASELINES
    from convbert_jax.config import Config
    from convbert_jax.models import encoder

    baseline = layer.convolution in BASELINES
    model = dataclasses.replace(
        Config().model,
        **sizes,
        mixer=layer.mixer,
        dropout=0.0,
        attention_dropout=0.0,
        attention=layer.attention,
        convolution="xla" if baseline else layer.convolution,
    )
    config = dataclasses.replace(Config(), model=model).encoder.stages[0].layer

    def make():
        return encoder.Layer(config, nnx.Rngs(0))

    graphdef, params = nnx.split(nnx.eval_shape(make))

    def run(x, params, ids):
        with _baseline(layer.convolution) if baseline else contextlib.nullcontext():
            return nnx.merge(graphdef, params)(x, ids)

    shape = (batch, length)
    x = jax.ShapeDtypeStruct((*shape, model.hidden_size), dtype)
    return run, (x, params, jax.ShapeDtypeStruct(shape, jnp.int32)), make


@contextlib.contextmanager
def _baseline(name: str):
    """Replaces the convolution branch by the named baseline, unmasked, while a layer is traced."""
    from benchmarks.layers.baselines import BASELINES, spanned
    from convbert_jax.models.mixers import convolution

    def branch(*arrays, heads, **_):
        return spanned(BASELINES[name], heads)(*arrays)

    with mock.patch.object(convolution, "span_dynamic_conv", branch):
        yield


def _price(options, batch, length, direction):
    for name in options.only:
        run, shapes, _ = build(LAYERS[name], options.dtype, batch, length)
        x, *_ = shapes
        arguments = shapes if direction == "forward" else (x, *shapes)
        try:
            found = tpu_pricing.price(
                with_direction(run, direction, 2), *arguments, target=options.target
            )
        except (ValueError, NotImplementedError, RuntimeError) as error:
            yield name, None, f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
            continue
        note = f"{found.bytes_accessed / 1e6:.0f} MB accessed"
        if found.kernels:
            profile = (found.profile_cycles - found.xla_cycles) / 1e3
            note += (
                f"; XLA {found.xla_cycles / 1e3:.0f}, kernels {found.kernel_cycles / 1e3:.0f} "
                f"({profile:.0f} profiled)"
            )
        if options.operations and not options.json:
            for operation, cycles, source in found.operations[: options.operations]:
                note += f"\n    {cycles / 1e3:9.1f}  {operation}  {source}"
            for kernel in found.kernels:
                note += f"\n    {kernel.times * kernel.cycles / 1e3:9.1f}  kernel {kernel.name}"
        yield name, found.cycles / 1e3, note


def _time(options, batch, length, direction):
    import jax
    import jax.numpy as jnp
    from flax import nnx

    runs, failures = {}, {}
    for name in options.only:
        run, (x, _, ids), make = build(LAYERS[name], options.dtype, batch, length)
        params = nnx.state(make())
        x = jax.random.normal(jax.random.key(1), x.shape).astype(x.dtype)
        given = (x, params, jnp.ones(ids.shape, ids.dtype))
        given = given if direction == "forward" else (x, *given)
        compiled = jax.jit(with_direction(run, direction, 2))
        try:
            jax.block_until_ready(compiled(*given))
        except (ValueError, NotImplementedError) as error:
            failures[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
            continue
        runs[name] = lambda run=compiled, given=given: jax.block_until_ready(run(*given))
    times = timing.alternate(runs, options.rounds)
    for name in options.only:
        if name in failures:
            yield name, None, failures[name]
        else:
            yield name, statistics.median(times[name]), ""


if __name__ == "__main__":
    main()
