"""How fast the convolutions are, and a layer of them against one of attention."""

import functools
import statistics

from benchmarks import timing
from benchmarks.layers import dynamic_conv, layer
from benchmarks.on_gpu import clock, forms
from benchmarks.on_gpu.session import Session

DIRECTIONS = {"forward": "first", "forward_backward": "all"}  # -> what a chain feeds on
FORMS = ("xla", "kernel")
OP_SHAPES = ((32, 512), (256, 128))  # 12 heads of 64 channels, 9 taps
LAYER_SHAPES = ((256, 128), (64, 512))
ROUNDS = 9
IN_A_ROW = 4  # forward and backward of a layer before the host waits
COPIED = 1 << 30  # bytes of the copy that is 100%
TINY = {"hidden_size": 32, "embedding_size": 32, "heads": 4, "ffn_size": 64}
LAYERS = {  # those of benchmarks/layers/layer.py and of attention alone, by the attention they have
    "attention, xla": layer.Layer("attention", "xla"),
    "attention, cudnn": layer.Layer("attention", "cudnn"),
    "convbert, xla": layer.Layer("mixed", "xla", "xla"),
    "convbert, cudnn": layer.Layer("mixed", "cudnn", "xla"),
    "convbert, cudnn, kernel": layer.Layer("mixed", "cudnn", "pallas_gpu"),
}


def ops(session: Session, part: str, smoke: bool) -> None:
    """Milliseconds, and bytes per second where each array is read and each result written once
    (`dynamic_conv.floor_bytes`), as a share of the bandwidth of a copy in this process.
    """
    import jax.numpy as jnp

    shapes = [forms.describe(b, length, 12, 64, 9, "bfloat16") for b, length in OP_SHAPES]
    if smoke:
        shapes = [forms.describe(2, 24, 2, 16, 3, "float32")]
    groups = {
        f"{op}, {shape.batch} x {shape.length} x {shape.heads * shape.width}, {direction}": (
            op,
            shape,
            direction,
        )
        for direction in DIRECTIONS
        for shape in shapes
        for op in forms.OPS
    }
    session.plan(f"{name}, {form}" for name in groups for form in FORMS)
    chained = 1 if smoke else clock.TIMES  # Pallas' interpreter compiles for seconds
    with session.alone():
        copied = clock.copy_bandwidth(1 << 16 if smoke else COPIED, jnp.bfloat16)
    cases, sizes = {}, {}
    for name, (op, shape, direction) in groups.items():
        structs, cotangent, gradients = dynamic_conv.inputs(shape, op)
        sizes[name] = dynamic_conv.floor_bytes(structs, cotangent, gradients, direction)
        arrays = [dynamic_conv.fill(x, i) for i, x in enumerate([cotangent, *structs])]
        arguments = arrays[direction == "forward" :]
        found = forms.functions(op, shape, interpret=smoke)

        def make(function, direction=direction, gradients=gradients, given=arguments):
            def run(*given):
                return function(*given, None)

            run = dynamic_conv.with_direction(run, direction, gradients)
            return clock.prepare(clock.chain(run, DIRECTIONS[direction], chained), given)

        for form in FORMS:
            cases[f"{name}, {form}"] = functools.partial(make, found[form])
    with session.compiling():
        made = session.prepare(cases)
    for name, size in sizes.items():
        turns = {case: made[case] for form in FORMS if (case := f"{name}, {form}") in made}
        with session.alone():
            times = timing.alternate(turns, 1 if smoke else ROUNDS)
        for case, values in times.items():
            milliseconds = clock.application(values, chained)
            rate = size / (milliseconds / 1e3)
            session.write(
                "figures",
                case,
                ms=milliseconds,
                bytes=size,
                gb_per_s=rate / 1e9,
                share_of_copy=rate / copied,
                copy_gb_per_s=copied / 1e9,
            )


def layers(session: Session, part: str, smoke: bool) -> None:
    """Milliseconds of forward and backward, and the layer's as a multiple of attention's."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    dtype, sizes = ("float32", TINY) if smoke else ("bfloat16", layer.BASE)
    shapes = ((2, 16),) if smoke else LAYER_SHAPES
    session.plan(f"{name}, {batch} x {length}" for batch, length in shapes for name in LAYERS)

    def make(name, batch, length):
        run, (x, _, ids), build = layer.build(LAYERS[name], dtype, batch, length, sizes)
        params = nnx.state(build())
        x = jax.random.normal(jax.random.key(1), x.shape).astype(x.dtype)
        given = (x, x, params, jnp.ones(ids.shape, ids.dtype))
        both = dynamic_conv.with_direction(run, "forward_backward", 2)
        return clock.prepare(both, given, IN_A_ROW)

    cases = {
        f"{name}, {batch} x {length}": functools.partial(make, name, batch, length)
        for batch, length in shapes
        for name in LAYERS
    }
    with session.compiling():
        made = session.prepare(cases, 1)  # XLA measures their products
    for batch, length in shapes:
        ending = f", {batch} x {length}"
        turns = {name + ending: made[name + ending] for name in LAYERS if name + ending in made}
        with session.alone():
            times = timing.alternate(turns, 1 if smoke else ROUNDS)
        for case, values in times.items():
            figures = {"ms": statistics.median(values) / IN_A_ROW}
            for name in ("attention, xla", "attention, cudnn"):
                if name + ending in times and case.startswith("convbert"):
                    # `paired_ratio` is above 1 where the layer is faster
                    ratio = 1 / timing.paired_ratio(values, times[name + ending])
                    figures[f"times_{name.replace(', ', '_')}"] = ratio
            session.write("figures", case, **figures)
