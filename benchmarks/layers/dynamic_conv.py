"""Cost of the dynamic convolution: official formula, XLA forms, kernels and the memory floor.

    python -m benchmarks.layers.dynamic_conv --target=tpu:v5e
    python -m benchmarks.layers.dynamic_conv --target=cpu --batch=8 --length=128

TPU targets need no TPU: the figures are the TPU compiler's model (analysis/tpu_pricing.py), in
thousand cycles; the floor is the smallest possible HBM traffic at full bandwidth. On cpu and gpu
all rows alternate in one process, including Hugging Face's PyTorch formula if torch is installed.
There the figures are medians in milliseconds, and the floor is the same traffic at the measured
bandwidth of a copy.

`dynamic_conv` takes values [B, L, H D] and filters [B, L, H, K], the layouts of a layer, and
returns [B, L, H D]; the cost includes layout changes and copies. `span_dynamic_conv` also computes
the filters, from query, span key and the projection of their logits. Ops of other mixers (--ops):
`token_dynamic_conv` computes the filters from the values (DynamicConv), `light_conv` has one filter
per head (LightConv), `depthwise_conv` one per channel with --dilation.

    python -m benchmarks.layers.dynamic_conv --ops token_dynamic_conv light_conv depthwise_conv \
        --only pallas_tpu --heads=12 --taps=15 --segments
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Callable

from benchmarks import timing
from convbert_jax.analysis import tpu_devices, tpu_pricing

TARGETS = ("tpu:v5e", "tpu:v5p", "tpu:v6e", "cpu", "gpu")
DIRECTIONS = ("forward", "forward_backward")
ALL_DIRECTIONS = (*DIRECTIONS, "backward")
OPS = ("dynamic_conv", "span_dynamic_conv")
MORE_OPS = ("token_dynamic_conv", "light_conv", "depthwise_conv")


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table; with --json an object with these keys."""

    op: str
    implementation: str
    direction: str
    shape: dict[str, int]
    dtype: str
    target: str
    cost: float | None  # None: unsupported there; `note` has the reason
    unit: str
    floor: float
    ratio_to_floor: float | None
    note: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tpu:v5e", choices=TARGETS)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--width", type=int, default=64, help="head width")
    parser.add_argument("--taps", type=int, default=9)
    parser.add_argument("--dtype", help="default: float32 on cpu, else bfloat16")
    parser.add_argument("--segments", action="store_true", help="four documents in each row")
    parser.add_argument("--ops", nargs="+", default=OPS, choices=(*OPS, *MORE_OPS))
    parser.add_argument("--dilation", type=int, default=1, help="depthwise_conv only")
    parser.add_argument("--causal", action="store_true", help="no future positions")
    parser.add_argument("--directions", nargs="+", default=DIRECTIONS, choices=ALL_DIRECTIONS)
    parser.add_argument("--only", nargs="+", help="implementations to show; default: all")
    parser.add_argument("--rounds", type=int, default=15, help="timed runs of each (cpu, gpu)")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    options.dtype = options.dtype or ("float32" if options.target == "cpu" else "bfloat16")
    if options.target.startswith("tpu"):
        tpu_pricing.use_compile_only_tpu()
        rows = price_rows(options)
    else:
        if "backward" in options.directions:
            parser.error("--directions=backward is priced on TPU targets only.")
        timing.use(options.target)
        rows = time_rows(options)
    if options.json:
        for row in rows:
            print(json.dumps(dataclasses.asdict(row)), flush=True)
    else:
        print_table(list(rows), options)


def print_table(rows: list[Row], options: argparse.Namespace) -> None:
    print(f"{options.target}, {options.dtype}, {rows[0].shape}, {rows[0].unit}")
    print(f"{'':52}{'direction':18}{'cost':>10}{'floor':>9}{'ratio':>8}")
    for row in rows:
        name = f"{row.op}: {row.implementation}"
        if row.cost is None:
            print(f"{name:52}{row.direction:18}  {row.note}")
            continue
        print(
            f"{name:52}{row.direction:18}{row.cost:10,.4g}{row.floor:9,.4g}"
            f"{row.ratio_to_floor:8.2f}  {row.note}"
        )


# --- The functions and their inputs ---


def functions(options: argparse.Namespace) -> dict[tuple[str, str], Callable]:
    """Returns (op, implementation) -> function of the op's arrays."""
    from benchmarks.layers.baselines import BASELINES, spanned
    from convbert_jax.ops import convolution

    def of_token(values, *arguments, **options):
        return convolution.span_dynamic_conv(values, None, None, *arguments, **options)

    def light(values, filters, **options):
        by_head = values.reshape(*values.shape[:2], len(filters), -1)
        return convolution.dynamic_conv(by_head, filters, **options).reshape(values.shape)

    def plain(function):
        def run(values, filters, *ids):
            by_head = values.reshape(*filters.shape[:3], -1)
            return function(by_head, filters, *ids).reshape(values.shape)

        return run

    def ours(op, name, arrays, **arguments):
        def run(*given):
            ids = given[arrays] if options.segments else None
            same = {"causal": options.causal, "implementation": name, **arguments}
            return op(*given[:arrays], segment_ids=ids, **same)

        return run

    found = {}
    if not options.segments and not options.causal:  # baselines support neither
        for name, formula in BASELINES.items():
            found["dynamic_conv", name] = plain(formula)
            found["span_dynamic_conv", name] = spanned(formula, options.heads)
    for name in (*convolution.IMPLEMENTATIONS["dynamic_conv"], "auto"):
        op = ours(convolution.dynamic_conv, name, 2)
        found["dynamic_conv", name] = plain(op)
    for name in (*convolution.IMPLEMENTATIONS["span_dynamic_conv"], "auto"):
        op = ours(convolution.span_dynamic_conv, name, 5, heads=options.heads)
        found["span_dynamic_conv", name] = op
        found["token_dynamic_conv", name] = ours(of_token, name, 3, heads=options.heads)
    for name in (*convolution.IMPLEMENTATIONS["depthwise_conv"], "auto"):
        found["light_conv", name] = ours(light, name, 2)
        op = ours(convolution.depthwise_conv, name, 2, dilation=options.dilation)
        found["depthwise_conv", name] = op
    chosen = [
        key
        for key in sorted(found, key=lambda key: key[0])
        if key[0] in options.ops and (not options.only or key[1] in options.only)
    ]
    return {key: found[key] for key in chosen}


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
    """Returns the arrays of `op`, the output's cotangent, and the number of differentiated arrays.

    The arrays are shapes, as the compiler needs no more; `fill` makes values.
    """
    import jax
    import jax.numpy as jnp

    shape = (options.batch, options.length, options.heads)
    values = jax.ShapeDtypeStruct((*shape[:2], shape[2] * options.width), options.dtype)
    filters = jax.ShapeDtypeStruct((*shape, options.taps), options.dtype)
    outputs = options.heads * options.taps
    projection = jax.ShapeDtypeStruct((values.shape[2], outputs), options.dtype)
    bias = jax.ShapeDtypeStruct((outputs,), options.dtype)
    arrays = {
        "dynamic_conv": [values, filters],
        "span_dynamic_conv": [values, values, values, projection, bias],
        "token_dynamic_conv": [values, projection, bias],
        "light_conv": [values, jax.ShapeDtypeStruct((options.heads, options.taps), jnp.float32)],
        "depthwise_conv": [
            values,
            jax.ShapeDtypeStruct((options.taps, values.shape[2]), jnp.float32),
        ],
    }[op]
    ids = [jax.ShapeDtypeStruct(shape[:2], jnp.int32)] if options.segments else []
    return arrays + ids, values, len(arrays)


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


def _row(options, op, implementation, direction, **figures) -> Row:
    names = ("batch", "length", "heads", "width", "taps", "dilation", "causal")
    return Row(
        op=op,
        implementation=implementation,
        direction=direction,
        shape={name: getattr(options, name) for name in names},
        dtype=options.dtype,
        target=options.target,
        **figures,
    )


# --- TPU: compiler's model ---


def price_rows(options: argparse.Namespace):
    """Yields a row per implementation and direction."""
    import jax

    chip = tpu_devices.chip(options.target)
    jax.config.update("jax_platforms", "cpu")
    for (op, name), function in functions(options).items():
        arrays, cotangent, gradients = inputs(options, op)
        for direction in options.directions:
            size = floor_bytes(arrays, cotangent, gradients, direction)
            floor = chip.bandwidth_cycles(size) / 1e3
            arguments = arrays if direction == "forward" else [cotangent, *arrays]
            cost, note = None, ""
            try:
                cost, note = _price(
                    with_direction(function, direction, gradients), arguments, options.target
                )
            except (ValueError, NotImplementedError, RuntimeError) as error:
                note = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
            yield _row(
                options,
                op,
                name,
                direction,
                cost=cost,
                unit="thousand cycles (compiler's model)",
                floor=floor,
                ratio_to_floor=cost and cost / floor,
                note=note,
            )


def _price(function, arguments, target) -> tuple[float, str]:
    found = tpu_pricing.price(function, *arguments, target=target)
    note = f"{found.bytes_accessed / 1e6:.0f} MB accessed"
    if found.kernels:
        profile = sum(k.times * k.profile_cycles for k in found.kernels) / 1e3
        traffic = sum(k.times * k.bandwidth_cycles for k in found.kernels) / 1e3
        note += f"; kernels {profile:.1f} profiled, {traffic:.1f} by bandwidth"
        note += f"; XLA {found.xla_cycles / 1e3:.1f}"
    if found.unpriced:
        note += f"; without estimate: {', '.join(found.unpriced)}"
    return found.cycles / 1e3, note


# --- CPU and GPU: measured times ---


def time_rows(options: argparse.Namespace):
    """Times the rows of each direction in alternation, including PyTorch's formula."""
    import jax
    import numpy as np

    for direction in options.directions:
        runs, floors, notes, expected, tried = {}, {}, {}, {}, False
        for (op, name), function in functions(options).items():
            structs, cotangent, gradients = inputs(options, op)
            arrays = [fill(struct, i) for i, struct in enumerate([cotangent, *structs])]
            floors[op] = floor_bytes(structs, cotangent, gradients, direction)
            arguments = arrays[1:] if direction == "forward" else arrays
            compiled = jax.jit(with_direction(function, direction, gradients))
            try:
                first = jax.block_until_ready(compiled(*arguments))
            except (ValueError, NotImplementedError) as error:
                notes[op, name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
                continue
            runs[op, name] = lambda run=compiled, given=arguments: jax.block_until_ready(
                run(*given)
            )
            if op == "dynamic_conv" and not (options.segments or options.causal or tried):
                tried, theirs = True, _pytorch(options, arrays, direction)
                if theirs is not None:
                    runs["dynamic_conv", UNFOLD] = theirs
                    expected["dynamic_conv"] = theirs().detach().float().cpu().numpy().ravel()
            out = np.asarray(jax.tree.leaves(first)[0], np.float32).ravel()
            difference = np.abs(out - expected.setdefault(op, out)).max()
            if difference > (1e-4 if options.dtype == "float32" else 0.1):
                sys.exit(f"{op}, {name}: the output differs by {difference:.1e} from the others.")
        times = timing.alternate(runs, options.rounds)
        bandwidth = timing.copy_bandwidth(max(floors.values()) // 2)
        for (op, name), values in times.items():
            cost, floor = statistics.median(values), 1e3 * floors[op] / bandwidth
            if ("dynamic_conv", UNFOLD) in times and op == "dynamic_conv" and name != UNFOLD:
                faster = timing.paired_ratio(values, times["dynamic_conv", UNFOLD])
                notes[op, name] = f"{faster:.2f} times as fast as PyTorch's unfold"
            yield _row(
                options,
                op,
                name,
                direction,
                cost=cost,
                unit="ms",
                floor=floor,
                ratio_to_floor=cost / floor,
                note=notes.pop((op, name), ""),
            )
        nothing = dict(cost=None, unit="ms", ratio_to_floor=None)
        for (op, name), note in notes.items():  # unsupported there
            floor = 1e3 * floors[op] / bandwidth
            yield _row(options, op, name, direction, floor=floor, note=note, **nothing)


UNFOLD = "Hugging Face's unfold in PyTorch"


def fill(struct, seed: int):
    """Draws normal values, projections with variance 1 / inputs, and ids of four documents."""
    import jax
    import jax.numpy as jnp

    if jnp.issubdtype(struct.dtype, jnp.integer):
        length = struct.shape[-1]
        return jnp.broadcast_to(1 + jnp.arange(length) * 4 // length, struct.shape)
    scale = struct.shape[0] ** -0.5 if len(struct.shape) == 2 else 1
    return (scale * jax.random.normal(jax.random.key(seed), struct.shape)).astype(struct.dtype)


def _pytorch(options, arrays, direction):
    """Returns a function that computes the unfold formula; None without torch."""
    try:
        import torch
    except ImportError:
        print("PyTorch is skipped: torch is not installed.", file=sys.stderr)
        return None
    import numpy as np

    from benchmarks.layers.baselines import pytorch_unfold

    torch.set_num_threads(len(os.sched_getaffinity(0)))  # as many as XLA uses
    device = "cuda" if options.target == "gpu" else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        print("PyTorch is skipped: torch has no CUDA.", file=sys.stderr)
        return None
    dtype = getattr(torch, options.dtype)
    cotangent, values, filters = (
        torch.tensor(np.asarray(x, np.float32)).to(device, dtype) for x in arrays[:3]
    )
    by_head = (*filters.shape[:3], options.width)
    cotangent, values = cotangent.reshape(by_head), values.reshape(by_head)

    def run():
        if direction == "forward":
            with torch.no_grad():
                out = pytorch_unfold(values, filters)
        else:
            leaves = [x.detach().requires_grad_() for x in (values, filters)]
            out = pytorch_unfold(*leaves)
            out.backward(cotangent)
        if device == "cuda":
            torch.cuda.synchronize()
        return out

    return run


if __name__ == "__main__":
    main()
