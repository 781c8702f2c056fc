"""Cost of convolutions and attention: official formula, XLA forms, kernels and the memory floor.

    python -m benchmarks.layers.ops --target=tpu:v5e
    python -m benchmarks.layers.ops --target=cpu --batch=8 --length=128
    python -m benchmarks.layers.ops --ops attention --batch=64 --length=128 --segments
    python -m benchmarks.layers.ops --ops token_dynamic_conv light_conv depthwise_conv \
        --only pallas_tpu --heads=12 --taps=15 --segments

TPU targets need no TPU: the figures are the TPU compiler's model (analysis/tpu_pricing.py), in
thousand cycles; the floor is the smallest possible HBM traffic at full bandwidth. On cpu and gpu
all rows alternate in one process, including Hugging Face's PyTorch formula if torch is installed.
There the figures are medians in milliseconds, and the floor is the same traffic at the measured
bandwidth of a copy.

`dynamic_conv` takes values [B, L, H D] and filters [B, L, H, K], the layouts of a layer, and
returns [B, L, H D]; the cost includes layout changes and copies. `span_dynamic_conv` also computes
the filters, from query, span key and the projection of their logits. `token_dynamic_conv` computes
the filters from the values (DynamicConv), `light_conv` has one filter per head (LightConv),
`depthwise_conv` one per channel with --dilation. `attention` runs without and with dropout of 0.1;
drawing random bits in XLA has no estimate.

`--picture` draws costs of several targets, forward and backward:

    python -m benchmarks.layers.ops --target tpu:v5e tpu:v5p tpu:v6e \
        --only "published formula as einsum" xla pallas_tpu --picture benchmarks/figures/kernels.png
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable

from benchmarks import timing
from convbert_jax.analysis import tpu_devices

DIRECTIONS = ("forward", "forward_backward", "backward")
CONVOLUTIONS = ("dynamic_conv", "span_dynamic_conv")
OPS = (*CONVOLUTIONS, "token_dynamic_conv", "light_conv", "depthwise_conv", "attention")
UNFOLD = "Hugging Face's unfold in PyTorch"
BARS = {
    "published formula as einsum": ("published formula", "#b0b0b0"),
    "xla": ("shift and accumulate, XLA", "#7fa7d1"),
    "pallas_tpu": ("ours, Pallas", "#1f4e8c"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", nargs="+", default=["tpu:v5e"], choices=timing.TARGETS)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--width", type=int, default=64, help="head width")
    parser.add_argument("--taps", type=int, default=9)
    parser.add_argument("--dtype", help="default: float32 on cpu, else bfloat16")
    parser.add_argument("--segments", action="store_true", help="four documents in each row")
    parser.add_argument("--ops", nargs="+", default=CONVOLUTIONS, choices=OPS)
    parser.add_argument("--dilation", type=int, default=1, help="depthwise_conv only")
    parser.add_argument("--causal", action="store_true", help="no future positions")
    parser.add_argument("--window", type=int, default=0, help="attention only; 0: no limit")
    parser.add_argument("--directions", nargs="+", default=DIRECTIONS[:2], choices=DIRECTIONS)
    parser.add_argument("--only", nargs="+", help="implementations to show; default: all")
    parser.add_argument("--rounds", type=int, default=15, help="timed runs of each (cpu, gpu)")
    parser.add_argument("--picture", help="a PNG to draw")
    options = parser.parse_args()
    options.dtype = options.dtype or ("float32" if options.target == ["cpu"] else "bfloat16")
    timing.use(options.target[0])
    unit = timing.UNITS.get(options.target[0], "thousand cycles")
    columns = ("op", "implementation", "direction", "cost", "floor", "cost / floor", "MB", "note")
    drawn = {}
    for target in options.target:
        print(f"{target}, {options.dtype}, {unit}, {options.batch} x {options.length}, "
              f"{options.heads} heads of {options.width}, {options.taps} taps")  # fmt: skip
        table = timing.Table(*columns)
        for direction in options.directions:
            for (op, name), cost, floor in measure(options, target, direction):
                ratio = cost.value and cost.value / floor
                table.add(op, name, direction, cost.value, floor, ratio, cost.megabytes, cost.note)
                drawn[op, name, direction, target] = cost.value, floor
    if options.picture:
        draw(drawn, options)


def measure(options: argparse.Namespace, target: str, direction: str):
    """Yields ((op, implementation), cost, floor); exits if outputs differ on a CPU or GPU."""
    programs, sizes = {}, {}
    for (op, name), function in functions(options).items():
        arrays, cotangent, gradients = inputs(options, op)
        sizes[op] = floor_bytes(arrays, cotangent, gradients, direction)
        arguments = arrays if direction == "forward" else [cotangent, *arrays]
        programs[op, name] = with_direction(function, direction, gradients), arguments
    if target.startswith("tpu:"):
        costs = timing.measure(programs, target)
        floors = {op: tpu_devices.chip(target).bandwidth_cycles(size) / 1e3
                  for op, size in sizes.items()}  # fmt: skip
    else:
        others = {}
        if "dynamic_conv" in options.ops and not (options.segments or options.causal):
            theirs = _pytorch(options, target, direction)
            others = {} if theirs is None else {UNFOLD: theirs}
        _check_outputs(programs, others, options.dtype)
        costs = timing.measure(programs, target, options.rounds, **others)
        bandwidth = timing.copy_bandwidth(max(sizes.values()) // 2)
        floors = {op: 1e3 * size / bandwidth for op, size in sizes.items()}
        if UNFOLD in costs:
            costs["dynamic_conv", UNFOLD] = costs.pop(UNFOLD)
            for (op, _), cost in costs.items():
                if op == "dynamic_conv" and cost.times:
                    faster = timing.ratio(cost.times, costs["dynamic_conv", UNFOLD].times)
                    cost.note = f"{faster:.2f} times as fast as PyTorch's unfold"
    for key, cost in costs.items():
        yield key, cost, floors[key[0]]


def _check_outputs(programs, others, dtype: str) -> None:
    import jax
    import numpy as np

    expected = {}
    for run in others.values():
        expected["dynamic_conv"] = run().detach().float().cpu().numpy().ravel()
    for (op, name), (function, shapes) in programs.items():
        if op == "attention" and "dropout" in name:
            continue
        try:
            out = jax.jit(function)(*timing.fill(shapes))
        except (ValueError, NotImplementedError):
            continue
        out = np.asarray(jax.tree.leaves(out)[0], np.float32).ravel()
        difference = np.abs(out - expected.setdefault(op, out)).max()
        if difference > (1e-4 if dtype == "float32" else 0.1):
            sys.exit(f"{op}, {name}: the output differs by {difference:.1e} from the others.")


# --- The functions and their inputs ---


def functions(options: argparse.Namespace) -> dict[tuple[str, str], Callable]:
    """Returns (op, implementation) -> function of the op's arrays."""
    from benchmarks.layers.baselines import BASELINES, spanned
    from convbert_jax.ops import attention, convolution

    def of_token(values, *arguments, **options):
        return convolution.span_dynamic_conv(values, None, None, *arguments, **options)

    def by_head(x):
        return x.reshape(*x.shape[:2], options.heads, -1)

    def on_heads(function):
        def run(values, *arguments, **options):
            return function(by_head(values), *arguments, **options).reshape(values.shape)

        return run

    def attend(query, key, value, seed, *, rate, **arguments):
        import jax

        from convbert_jax.ops.nn import dropout_of

        drop = dropout_of(rate, jax.random.wrap_key_data(seed, impl="rbg"))
        out = attention.attention(*map(by_head, (query, key, value)), drop=drop, **arguments)
        return out.reshape(value.shape)

    dynamic = on_heads(convolution.dynamic_conv)
    span = functools.partial(convolution.span_dynamic_conv, heads=options.heads)
    depthwise = functools.partial(convolution.depthwise_conv, dilation=options.dilation)
    ours = {  # op -> (function, number of arrays, implementations)
        "dynamic_conv": (dynamic, 2, "dynamic_conv"),
        "span_dynamic_conv": (span, 5, "span_dynamic_conv"),
        "token_dynamic_conv": (
            functools.partial(of_token, heads=options.heads), 3, "span_dynamic_conv"
        ),
        "light_conv": (dynamic, 2, "depthwise_conv"),
        "depthwise_conv": (depthwise, 2, "depthwise_conv"),
    }  # fmt: skip

    def bind(function, arrays, name, **more):
        def run(*given):
            ids = given[arrays] if options.segments else None
            same = {"segment_ids": ids, "causal": options.causal, "implementation": name}
            return function(*given[:arrays], **same, **more)

        return run

    found = {}
    for op in options.ops:
        if op in CONVOLUTIONS and not (options.segments or options.causal):  # not in baselines
            for name, formula in BASELINES.items():
                plain = on_heads(formula) if op == "dynamic_conv" else None
                found[op, name] = plain or spanned(formula, options.heads)
        if op == "attention":
            for name in attention.IMPLEMENTATIONS:
                found[op, name] = bind(attend, 4, name, rate=0.0, window=options.window)
                found[op, f"{name}, dropout"] = bind(
                    attend, 4, name, rate=0.1, window=options.window
                )
            continue
        function, arrays, of = ours[op]
        for name in (*convolution.IMPLEMENTATIONS[of], "auto"):
            found[op, name] = bind(function, arrays, name)
    wanted = options.only
    return {key: f for key, f in found.items() if not wanted or key[1].split(",")[0] in wanted}


def with_direction(function, direction: str, gradients: int):
    """Returns `function`, its output with gradients of `gradients` arrays, or only gradients."""
    if direction == "forward":
        return function
    import jax

    def both(cotangent, *arguments):
        arrays, rest = arguments[:gradients], arguments[gradients:]
        out, back = jax.vjp(lambda *arrays: function(*arrays, *rest), *arrays)
        return back(cotangent) if direction == "backward" else (out, back(cotangent))

    return both


def inputs(options: argparse.Namespace, op: str) -> tuple[list, object, int]:
    """Returns the shapes of `op`, of the output's cotangent, and the number of gradients."""
    import jax
    import jax.numpy as jnp

    def shape(*sizes, dtype=options.dtype):
        return jax.ShapeDtypeStruct(sizes, dtype)

    rows = (options.batch, options.length)
    channels, outputs = options.heads * options.width, options.heads * options.taps
    values = shape(*rows, channels)
    projection, bias = shape(channels, outputs), shape(outputs)
    seed = [shape(4, dtype=jnp.uint32)] * (op == "attention")
    arrays = {
        "dynamic_conv": [values, shape(*rows, options.heads, options.taps)],
        "span_dynamic_conv": [values, values, values, projection, bias],
        "token_dynamic_conv": [values, projection, bias],
        "light_conv": [values, shape(options.heads, options.taps, dtype=jnp.float32)],
        "depthwise_conv": [values, shape(options.taps, channels, dtype=jnp.float32)],
        "attention": [values] * 3,
    }[op]
    ids = [shape(*rows, dtype=jnp.int32)] if options.segments else []
    return arrays + seed + ids, values, len(arrays)


def floor_bytes(arrays: list, cotangent, gradients: int, direction: str) -> int:
    """Returns the bytes to read each array and write each result once.

    Forward and backward are two passes; backward alone is the second, which reads the arrays again.
    """

    def size(*structs):
        return sum(struct.size * struct.dtype.itemsize for struct in structs)

    forward = size(*arrays, cotangent)  # the output has the size of its cotangent
    if direction == "forward":
        return forward
    backward = size(*arrays, cotangent) + size(*arrays[:gradients])
    return backward if direction == "backward" else forward + backward


def _pytorch(options, target: str, direction: str):
    """Returns a function that computes the unfold formula; None without torch."""
    try:
        import torch
    except ImportError:
        print("PyTorch is skipped: torch is not installed.", file=sys.stderr)
        return None
    import numpy as np

    from benchmarks.layers.baselines import pytorch_unfold

    torch.set_num_threads(len(os.sched_getaffinity(0)))  # as many as XLA uses
    device = "cuda" if target == "gpu" else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        print("PyTorch is skipped: torch has no CUDA.", file=sys.stderr)
        return None
    arrays, cotangent, _ = inputs(options, "dynamic_conv")
    given = timing.fill(arrays if direction == "forward" else [cotangent, *arrays])
    *cotangents, values, filters = (
        torch.tensor(np.asarray(x, np.float32)).to(device, getattr(torch, options.dtype))
        for x in given
    )
    values = values.reshape(*filters.shape[:3], -1)

    def run():
        leaves = [x.detach().requires_grad_(bool(cotangents)) for x in (values, filters)]
        out = pytorch_unfold(*leaves)
        for cotangent in cotangents:
            out.backward(cotangent.reshape(out.shape))
        if device == "cuda":
            torch.cuda.synchronize()
        return out

    return run


# --- The picture ---


def draw(costs: dict[tuple, tuple], options: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    titles = ("dynamic convolution", "with its filters: projection, softmax, convolution")
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    for axis, op, title in zip(axes, CONVOLUTIONS, titles, strict=True):
        for place, target in enumerate(options.target):
            for number, (name, (label, color)) in enumerate(BARS.items()):
                cost, floor = costs[op, name, "forward_backward", target]
                x, first = place + 0.27 * (number - 1), place == 0
                axis.bar(x, cost, 0.25, color=color, label=label if first else None)
                axis.text(x, cost * 1.05, f"{cost:,.0f}", ha="center", fontsize=7)
            axis.hlines(
                floor, place - 0.42, place + 0.42, colors="#c0392b", linestyles="--",
                label="floor: memory traffic" if place == 0 else None,
            )  # fmt: skip
        axis.set_xticks(range(len(options.target)), [t[4:] for t in options.target])
        axis.set_yscale("log")
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("thousand cycles, forward and backward\n(the TPU compiler's model)")
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(options.picture, dpi=150)


if __name__ == "__main__":
    main()
