"""Cost of encoder layers: attention, ConvBERT with each form of its convolution, other mixers.

    python -m benchmarks.layers.layer --target=tpu:v5e
    python -m benchmarks.layers.layer --target=tpu:v5e --lengths 512 --only attention
    python -m benchmarks.layers.layer --target=cpu --config=small --lengths 64 1024 4096 --only all
    python -m benchmarks.layers.layer --target=tpu:v5e --layers 4 --unroll 2 --only "convbert, auto"

The layer is `models.encoder.Layer` at the shapes of a config: bfloat16 compute (float32 on a CPU),
float32 parameters, segment ids; forward only, or forward with the gradients of its parameters and
input. `--only all` takes each mixer of the package with XLA's attention. With --layers it is a
stack of layers with the config's dropout, scanned `--unroll` at a time, and the costs are per
layer; this includes the activations that a scan stores. TPU targets need no TPU: the figures are
the TPU compiler's model (analysis/tpu_pricing.py) in thousand cycles, XLA's operations plus the
kernels' prices. On cpu and gpu the layers alternate in one process; the figures are medians in
milliseconds. `ratio` divides by the attention-only layer with the same attention.
"""

import argparse
import contextlib
import dataclasses
from unittest import mock

from benchmarks import timing
from benchmarks.layers.ops import DIRECTIONS, with_direction
from convbert_jax.config import mixers

TOKENS = 8_192


@dataclasses.dataclass(frozen=True)
class Layer:
    """A measured layer: a mixer, its attention, and its dynamic convolution."""

    mixer: str
    attention: str = "xla"  # config.model.attention
    convolution: str = "auto"  # a baseline, or config.model.convolution
    kernel_size: int | None = None  # None: the config's


LAYERS = {
    "attention": Layer("attention"),
    "convbert, published formula": Layer("mixed", "xla", "published formula"),
    "convbert, published formula as einsum": Layer("mixed", "xla", "published formula as einsum"),
    "convbert, xla": Layer("mixed", "xla", "xla"),
    "convbert, auto": Layer("mixed"),
    "short, 3 taps": Layer("short", kernel_size=3),
    "attention, best attention": Layer("attention", "auto"),
    "convbert, auto, best attention": Layer("mixed", "auto"),
}
ALL = {"attention": Layer("attention"), **{name: Layer(name) for name in mixers.MIXERS}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tpu:v5e", choices=timing.TARGETS)
    parser.add_argument("--config", default="base", help="source of width, heads, taps, dropout")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--batch", type=int, help="default: rows for 8,192 tokens")
    parser.add_argument("--directions", nargs="+", default=DIRECTIONS[:2], choices=DIRECTIONS[:2])
    parser.add_argument(
        "--only", nargs="+", default=list(LAYERS), metavar="LAYER",
        help=f"of {', '.join({**LAYERS, **ALL})}; or all: each mixer",
    )  # fmt: skip
    parser.add_argument("--layers", type=int, default=0, help="a stack of layers with dropout")
    parser.add_argument("--unroll", type=int, default=1, help="config.model.scan_unroll of it")
    parser.add_argument("--dtype", help="compute dtype; default: float32 on cpu, else bfloat16")
    parser.add_argument("--operations", type=int, default=0, help="print the N costliest (tpu)")
    parser.add_argument("--rounds", type=int, default=9, help="timed runs of each (cpu, gpu)")
    options = parser.parse_args()
    layers = ALL if options.only == ["all"] else {**LAYERS, **ALL}
    names = list(ALL) if options.only == ["all"] else options.only
    if unknown := set(names) - set(layers):
        parser.error(f"--only: unknown layers {', '.join(unknown)}.")
    options.dtype = options.dtype or ("float32" if options.target == "cpu" else "bfloat16")
    timing.use(options.target)
    unit = timing.UNITS.get(options.target, "thousand cycles")
    print(f"{options.target}, {options.dtype}, shapes of {options.config}, {unit} per layer")
    table = timing.Table("layer", "rows x length", "direction", "cost", "ratio", "MB", "note")
    for length in options.lengths:
        batch = options.batch or max(1, TOKENS // length)
        for direction in options.directions:
            programs = {}
            for name in names:
                run, shapes = build(layers[name], options, batch, length)
                given = shapes if direction == "forward" else (shapes[0], *shapes)
                programs[name] = with_direction(run, direction, 2), given
            costs = timing.measure(programs, options.target, options.rounds)
            baselines = {layers[name].attention: cost.value for name, cost in costs.items()
                         if layers[name].mixer == "attention"}  # fmt: skip
            for name, cost in costs.items():
                baseline = baselines.get(layers[name].attention)
                ratio = cost.value / baseline if cost.value and baseline else None
                of_layer = cost.value and cost.value / max(1, options.layers)
                shape = f"{batch} x {length}"
                table.add(name, shape, direction, of_layer, ratio, cost.megabytes, cost.note)
                for operation, cycles, source in cost.operations[: options.operations]:
                    print(f"{cycles:9.1f}  {operation}  {source}")


def build(layer: Layer, options: argparse.Namespace, batch: int, length: int):
    """Returns (function of (x, params, segment ids[, key]), shapes of its arguments).

    Args:
      options: "config", "dtype", "layers" and "unroll" of the command line.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import convbert_jax
    from benchmarks.layers.baselines import BASELINES
    from convbert_jax.models import encoder

    baseline = layer.convolution in BASELINES
    fields = {
        "mixer": layer.mixer,
        "attention": layer.attention,
        "convolution": "xla" if baseline else layer.convolution,
        "layers": options.layers or 1,
        "scan_unroll": options.unroll,
    }
    if layer.kernel_size:
        fields["kernel_size"] = layer.kernel_size
    loaded = convbert_jax.load_config(
        options.config, **{f"model.{name}": value for name, value in fields.items()}
    )
    config = loaded.encoder

    def make():
        if options.layers:
            return encoder.Encoder(config, nnx.Rngs(0))
        return encoder.Layer(config.stages[0].layer, nnx.Rngs(0))

    graphdef, params = nnx.split(nnx.eval_shape(make))

    def run(x, params, ids, *seed):
        key = [jax.random.wrap_key_data(each, impl="rbg") for each in seed]
        with _baseline(layer.convolution) if baseline else contextlib.nullcontext():
            return nnx.merge(graphdef, params)(x, ids, *key)

    x = jax.ShapeDtypeStruct((batch, length, config.hidden_size), options.dtype)
    seed = [jax.ShapeDtypeStruct((4,), jnp.uint32)] * bool(options.layers)
    return run, (x, params, jax.ShapeDtypeStruct((batch, length), jnp.int32), *seed)


@contextlib.contextmanager
def _baseline(name: str):
    """Replaces the convolution branch by the named baseline, unmasked, while a layer is traced."""
    from benchmarks.layers.baselines import BASELINES, spanned
    from convbert_jax.models.mixers import convolution

    def branch(*arrays, heads, **_):
        return spanned(BASELINES[name], heads)(*arrays)

    with mock.patch.object(convolution, "span_dynamic_conv", branch):
        yield


if __name__ == "__main__":
    main()
