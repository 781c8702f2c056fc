"""Cost and communication per device of a layer whose rows are sharded over eight devices.

    python -m benchmarks.layers.long_rows --target=tpu:v5e
    python -m benchmarks.layers.long_rows --target=cpu --length 512 --config tiny

Each mixer runs forward with the gradients of parameters and input, in three ways:

- `one`: whole rows on one device.
- `gathered`: sharded rows (config.mesh.sequence), but each convolution gathers the whole row, as
  the compiler does by default.
- `divided`: the package's implementation; a convolution receives K - 1 positions from its
  neighbors.

Attention gathers keys and values in both sharded ways.

On TPU targets the figures per device are by the TPU compiler's model (analysis/tpu_pricing.py):

- Thousand cycles without communication; kernels count as their operands' traffic at full
  bandwidth, a lower bound.
- Megabytes sent; sums over devices are separate (gradients of weights, and of the input if rows
  were gathered).
- Milliseconds in total: cycles at the chip's clock plus bytes over the links of one torus axis,
  without overlap.

On a CPU with eight simulated devices, in float32: the largest difference of output and gradients
from `one`, relative to the largest value of each array.
"""

import argparse
import contextlib
import os
from unittest import mock

from benchmarks import timing
from benchmarks.layers import layer
from benchmarks.layers.ops import with_direction
from convbert_jax.analysis import tpu_pricing

DEVICES = 8
TOPOLOGIES = {"tpu:v5e": "v5e:2x4", "tpu:v6e": "v6e:2x4"}
MIXERS = ("attention", "mixed", "span_dynamic", "dynamic", "light")
COLUMNS = (
    *("mixer", "way", "thousand cycles", "MB of positions sent", "MB of sums sent", "ms"),
    "MB of temporaries",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tpu:v5e", choices=(*TOPOLOGIES, "cpu"))
    parser.add_argument("--length", type=int, default=4_096)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--config", default="base")
    parser.add_argument("--mixers", nargs="+", default=MIXERS, choices=MIXERS)
    options = parser.parse_args()
    options.layers, options.unroll = 0, 1
    on_cpu = options.target == "cpu"
    options.dtype = "float32" if on_cpu else "bfloat16"
    if on_cpu:
        flag = f"--xla_force_host_platform_device_count={DEVICES}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    timing.use(options.target)
    table = timing.Table(*(("mixer", "way", "largest difference") if on_cpu else COLUMNS))
    for mixer in options.mixers:
        for row in (_compare if on_cpu else _price)(options, mixer):
            table.add(mixer, *row)


@contextlib.contextmanager
def _gathering():
    """Hides the sharding of rows from ops while they are traced."""
    from convbert_jax.ops import partitioning

    divide = partitioning.shard_map_op

    def whole(function, arrays, specs, out_spec, **_):
        def keep(spec):
            return partitioning.jax.P(
                *(None if part == partitioning.SEQUENCE else part for part in spec)
            )

        return divide(function, arrays, [keep(spec) for spec in specs], keep(out_spec))

    with mock.patch.object(partitioning, "shard_map_op", whole):
        yield


def _ways(options, mixer, devices):
    """Yields (way, its jitted step, mesh, shapes) of a layer."""
    import jax

    from convbert_jax.config import MeshSection
    from convbert_jax.training import partitioning

    for way in ("one", "gathered", "divided"):
        if way == "gathered" and mixer == "attention":
            continue
        count = 1 if way == "one" else DEVICES
        mesh = partitioning.make_mesh(MeshSection(data=1, sequence=count), devices[:count])
        run, (x, params, ids) = layer.build(
            layer.Layer(mixer), options, options.batch, options.length
        )
        positions = jax.NamedSharding(mesh, jax.P(None, "sequence"))
        whole = jax.NamedSharding(mesh, jax.P())

        def step(*arguments, run=run, way=way):
            with _gathering() if way == "gathered" else contextlib.nullcontext():
                return with_direction(run, "forward_backward", 2)(*arguments)

        jitted = jax.jit(
            step,
            in_shardings=(positions, positions, whole, whole),
            out_shardings=(positions, (positions, whole)),
        )
        yield way, jitted, mesh, (x, x, params, ids)


def _price(options, mixer):
    import jax
    from jax.experimental import topologies

    from convbert_jax.analysis.hlo import find_collectives, kernel_traffic
    from convbert_jax.analysis.tpu_devices import chip

    found = topologies.get_topology_desc(
        platform="tpu", topology_name=TOPOLOGIES[options.target]
    ).devices
    kind = chip(options.target)
    for way, jitted, mesh, shapes in _ways(options, mixer, found):
        try:
            with jax.set_mesh(mesh):
                compiled = jitted.lower(*shapes).compile()
        except jax.errors.JaxRuntimeError as error:  # the kernel exceeds the core's memory
            yield way, str(error).splitlines()[0][:200]
            continue
        price = tpu_pricing.price_compiled(compiled, options.target, kernels=False)
        program = compiled.as_text()
        cycles = price.cycles + kind.bandwidth_cycles(kernel_traffic(program))
        sent = find_collectives(program, dict(mesh.shape))
        summed = sum(one.sent_bytes for one in sent if one.kind == "all-reduce")
        size = sum(one.sent_bytes for one in sent)
        network = size / (kind.link_bytes_per_second / kind.ports)
        yield (
            way,
            cycles / 1e3,
            (size - summed) / 1e6,
            summed / 1e6,
            (cycles / kind.clock + network) * 1e3,
            price.temporary_bytes / 1e6,
        )


def _compare(options, mixer):
    import jax
    import numpy as np

    wanted = None
    for way, jitted, mesh, shapes in _ways(options, mixer, jax.devices()):
        arguments = timing.fill(shapes)  # outside of the mesh: it would place them
        with jax.set_mesh(mesh):
            outputs = jax.tree.leaves(jax.device_get(jitted(*arguments)))
        if way == "one":
            wanted = outputs
            continue
        yield (
            way,
            max(
                float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-3))
                for a, b in zip(outputs, wanted, strict=True)
            ),
        )


if __name__ == "__main__":
    main()
