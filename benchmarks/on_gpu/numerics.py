"""Are the kernels right on a GPU? Against the definitions in float64 on the CPU."""

import argparse
import functools
import secrets

from benchmarks.layers import dynamic_conv
from benchmarks.on_gpu import forms
from benchmarks.on_gpu.session import Session

# What the tests of the same operations hold in the interpreter; gradients of a span go through a
# product and a softmax more.
TOLERANCES = {"float32": 2e-5, "bfloat16": 1.6e-2, "float16": 2e-3}
OF_SPAN = 3
DRAWS = 2

CASES = {
    "base, bfloat16": forms.describe(2, 512, 12, 64, 9, "bfloat16", segments=True),
    "base, float32": forms.describe(2, 512, 12, 64, 9, "float32", segments=True),
    "uneven": forms.describe(3, 130, 3, 48, 4, "float32", segments=True, dilation=2),
    "many taps, causal": forms.describe(2, 70, 2, 16, 31, "bfloat16", causal=True),
    "one position": forms.describe(1, 1, 1, 64, 1, "float32"),
    "base, float16": forms.describe(2, 512, 12, 64, 9, "float16", segments=True),
}
TINY = {
    "tiny, float32": forms.describe(2, 20, 2, 16, 5, "float32", segments=True),
    "tiny, bfloat16": forms.describe(2, 20, 2, 16, 5, "bfloat16", segments=True),
}


def check(session: Session, part: str, smoke: bool) -> None:
    with session.together():
        _check(session, part, TINY if smoke else CASES, smoke)


def _check(session: Session, part: str, cases: dict[str, argparse.Namespace], smoke: bool) -> None:
    if part == "attention":
        return _check_attention(session, cases)
    plan = [(case, "kernel") for case in cases] + [(case, "xla") for case in list(cases)[:2]]
    session.plan(f"{part}, {case}, {form}" for case, form in plan)
    for case, form in plan:
        measure = functools.partial(_differences, part, cases[case], form, smoke)
        session.run(f"{part}, {case}, {form}", measure)
    return None


def _differences(op: str, shape: argparse.Namespace, form: str, smoke: bool) -> dict:
    found = forms.functions(op, shape, interpret=smoke)
    ids = _documents(shape)
    structs, cotangent, gradients = dynamic_conv.inputs(
        argparse.Namespace(**vars(shape) | {"segments": False}), op
    )
    names = {
        "dynamic_conv": ("values", "filters"),
        "span_dynamic_conv": ("query", "span_key", "values", "projection", "bias"),
        "depthwise_conv": ("x", "filters"),
    }[op]
    allowed = TOLERANCES[shape.dtype] * (OF_SPAN if op == "span_dynamic_conv" else 1)
    return _compare(
        lambda *arrays: found[form](*arrays, ids),
        lambda *arrays: found["reference"](*arrays, ids),
        [cotangent, *structs],
        names[:gradients],
        # what XLA computes of float32 on a GPU may be rounded (TF32): it is not what is judged
        allowed if form == "kernel" else None,
    )


def _documents(shape: argparse.Namespace):
    """Rows of four documents and some padding behind them; None for a shape without."""
    import jax.numpy as jnp
    import numpy as np

    if not shape.segments:
        return None
    positions = np.arange(shape.length)
    row = np.where(positions < shape.length - 5, 1 + positions * 4 // shape.length, 0)
    return jnp.asarray(np.tile(row, (shape.batch, 1)), jnp.int32)


def _compare(function, definition, structs, names, allowed) -> dict:
    """Largest errors of output and gradients, relative to the largest number that is right.

    Args:
      structs: of the output's cotangent and the arrays.
      names: of the arrays.
      allowed: of each error; None: any.
    """
    import jax
    import numpy as np

    run = jax.jit(dynamic_conv.with_direction(function, "forward_backward", len(names)))
    exact = jax.jit(dynamic_conv.with_direction(definition, "forward_backward", len(names)))
    errors, seeds = dict.fromkeys(("out", *names), 0.0), []
    for _ in range(DRAWS):
        seeds.append(secrets.randbits(30))
        arrays = [dynamic_conv.fill(x, seeds[-1] + i) for i, x in enumerate(structs)]
        actual = [np.asarray(x, np.float64) for x in jax.tree.leaves(run(*arrays))]
        doubles = [np.asarray(x, np.float64) for x in arrays]
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            expected = [np.asarray(x) for x in jax.tree.leaves(exact(*doubles))]
        for name, one, other in zip(errors, actual, expected, strict=True):
            if other.dtype != np.float64:
                raise TypeError(f"the definition computed {name} in {other.dtype}")
            error = np.abs(one - other).max() / (np.abs(other).max() or 1.0)
            # NaN is the largest of errors
            errors[name] = float(error if np.isnan(error) else max(errors[name], error))
    judged = {} if allowed is None else {"allowed": allowed}
    if allowed is not None:
        judged["ok"] = all(error <= allowed for error in errors.values())
    return {f"error_{name}": error for name, error in errors.items()} | judged | {"seeds": seeds}


# --- Attention ---


def _check_attention(session: Session, cases: dict[str, argparse.Namespace]) -> None:
    refusals = _refusals()
    fits = {k: v for k, v in cases.items() if v.segments and v.dtype != "float32"}
    session.plan(
        [*(f"attention, {case}, cudnn" for case in fits), *(f"takes {name}" for name in refusals)]
    )
    for case, shape in fits.items():
        measure = functools.partial(_attention_differences, shape)
        session.run(f"attention, {case}, cudnn", measure)
    for name, ask in refusals.items():
        session.run(f"takes {name}", ask)


def _attention_differences(shape: argparse.Namespace) -> dict:
    import jax
    import jax.numpy as jnp

    from convbert_jax.ops import attention

    ids = _documents(shape)

    def by_definition(query, key, value):
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * shape.width**-0.5
        seen = attention.visible_keys(ids)[:, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value)

    size = (shape.batch, shape.length, shape.heads, shape.width)
    return _compare(
        lambda *arrays: attention.attention(*arrays, segment_ids=ids, implementation="cudnn"),
        by_definition,
        [jax.ShapeDtypeStruct(size, shape.dtype)] * 4,
        ("query", "key", "value"),
        TOLERANCES[shape.dtype] * 3,
    )


def _refusals() -> dict:
    """What the tables of the ops say of the device at hand: a name -> function of nothing."""
    import jax

    from convbert_jax.ops import attention, depthwise_conv, dispatch
    from convbert_jax.ops import dynamic_conv as plain
    from convbert_jax.ops import span_dynamic_conv as span

    def of(table, op, name, *arguments, **options):
        def ask():
            try:
                chosen = dispatch.choose(op, name, table, *arguments, **options)
            except ValueError as refused:
                return {"taken": False, "why": str(refused)}
            taken = [key for key, one in table.items() if one.function is chosen]
            return {"taken": True, "by": taken[0]}

        return ask

    found = {}
    for dtype in ("bfloat16", "float32"):
        x = jax.ShapeDtypeStruct((2, 128, 6, 64), dtype)
        for op, table in (
            ("dynamic_conv", plain.IMPLEMENTATIONS),
            ("span_dynamic_conv", span.IMPLEMENTATIONS),
            ("depthwise_conv", depthwise_conv.IMPLEMENTATIONS),
        ):
            for name in ("pallas_gpu", "auto"):
                found[f"{op}, {name}, {dtype}"] = of(table, op, name, x)
        for name in ("cudnn", "auto"):
            given = (x, x, x, None, None, False)
            found[f"attention, {name}, {dtype}"] = of(
                attention.IMPLEMENTATIONS, "attention", name, *given
            )
    ids = jax.ShapeDtypeStruct((2, 127), "int32")
    for name, size, more in (
        ("an odd length with segments", (2, 127, 6, 64), {}),
        ("heads of width 160", (2, 128, 6, 160), {}),
        ("heads of width 60", (2, 128, 6, 60), {}),
        ("dropout", (2, 128, 6, 64), {"drop": lambda weights: weights}),
    ):
        x = jax.ShapeDtypeStruct(size, "bfloat16")
        given = (x, x, x, *((ids, ids) if "segments" in name else (None, None)), False)
        found[f"attention, cudnn, {name}"] = of(
            attention.IMPLEMENTATIONS, "attention", "cudnn", *given, **more
        )
    return found
