"""Kernels are verified against XLA before their first use, on a CPU with kernels made for it."""

import functools
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.ops import (
    attention,
    depthwise_conv,
    dispatch,
    dynamic_conv,
    span_dynamic_conv,
    taps,
    tpu,
)
from convbert_jax.ops.attention import kernels
from convbert_jax.ops.dispatch import Implementation
from convbert_jax.ops.dropout import Dropout
from convbert_jax.ops.verification import KernelError, compare, verdicts
from tests.running import needs_libtpu

X = jnp.ones((4, 64, 2, 8))


def double(x, ids):
    return 2 * x * (ids != 0)[..., None, None]


@jax.custom_vjp
def wrong_gradient(x, ids):
    return double(x, ids)


def _backward(ids, cotangent):
    return 2.2 * cotangent * (ids != 0)[..., None, None], None


wrong_gradient.defvjp(lambda x, ids: (double(x, ids), ids), _backward)


def raises(x, ids):
    raise NotImplementedError("no such instruction")


WRONG = {
    "output": lambda x, ids: 1.1 * double(x, ids),
    "one position": lambda x, ids: double(x, ids).at[1, 17].set(0),
    "padding": lambda x, ids: 2 * x,
    "gradient": wrong_gradient,
    "nan": lambda x, ids: double(x, ids) / (x != x[0, 0, 0, 0]),
    "raises": raises,
}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(verdicts, "_passed", set())
    monkeypatch.setattr(verdicts, "_faults", {})
    dispatch.say.cache_clear()


@pytest.fixture
def cache(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / verdicts.FILE
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(autouse=True)
def _no_cache():
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


class Counted:
    """A kernel that counts how often it is traced."""

    def __init__(self, function=double):
        self.function, self.calls = function, 0

    def __call__(self, *arguments):
        self.calls += 1
        return self.function(*arguments)


def choose(kernel, name="auto", x=X):
    table = {"kernel": Implementation(kernel, "cpu"), "xla": Implementation(double)}
    return dispatch.choose("twice", name, table, x, jnp.ones(x.shape[:2], jnp.int32))


# --- What a check finds ---


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_a_correct_kernel_is_taken_and_the_error_logged(dtype, caplog):
    kernel = Counted()
    with caplog.at_level(logging.INFO):
        assert choose(kernel, x=X.astype(dtype)) is kernel
    verdict = caplog.records[0].message
    assert "largest relative error 0 " in verdict
    assert str(compare.TOLERANCE_16_BITS if dtype == jnp.bfloat16 else 0.02) in verdict


@pytest.mark.parametrize("wrong", WRONG)
def test_auto_leaves_a_wrong_kernel(wrong, caplog):
    assert choose(WRONG[wrong]) is double
    (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert "twice: kernel" in warning
    assert jax.__version__ in warning
    if wrong == "output":
        assert "error 0.1 " in warning
    # other calls of the same op do not take it either
    assert choose(WRONG[wrong], x=X.astype(jnp.bfloat16)) is double


@pytest.mark.parametrize("wrong", WRONG)
def test_a_named_kernel_that_is_wrong_is_an_error(wrong):
    with pytest.raises(KernelError, match="kernel"):
        choose(WRONG[wrong], "kernel")


def attend(drop, length=128, form=kernels.pallas_tpu_definition):
    """The largest error of a form of attention, and the array that has it."""
    x = jax.ShapeDtypeStruct((8, length, 2, 64), jnp.float32)
    ids = jax.ShapeDtypeStruct((8, length), jnp.int32)
    arguments = compare.shrink((x, x, x, ids, ids, False))
    options = {"drop": drop}
    return compare.largest_error(form, kernels.pallas_tpu_definition, arguments, options)


class OneWrong(kernels.KernelDropout):
    def draw(self, shape):
        keep = super().draw(shape)
        return keep.at[1, 1, 200, 210].set(~keep[1, 1, 200, 210])


class OtherKey(kernels.KernelDropout):
    def draw(self, shape):
        return kernels.KernelDropout(self.rate, jax.random.key(9)).draw(shape)


@pytest.mark.parametrize("marks", [OneWrong, OtherKey, Dropout], ids=lambda one: one.__name__)
def test_a_wrong_dropout_mask_is_found(marks):
    def form(*arguments, drop):
        return attention.xla(*arguments, drop=marks(drop.rate, drop.key))

    error, _ = attend(Dropout(0.1, None), form=form)
    assert error > 0.9


def test_a_wrong_rate_is_found_although_both_forms_agree(monkeypatch):
    draw = kernels.KernelDropout.draw
    monkeypatch.setattr(
        kernels.KernelDropout, "draw", lambda self, s: draw(self, s).at[:, 0].set(True)
    )
    error, where = attend(Dropout(0.5, None))
    assert 0.2 < error < 0.3
    assert "rate" in where


def test_the_kernel_of_attention_passes_with_dropout():
    form = functools.partial(kernels.pallas_tpu, interpret=True)
    error, _ = attend(Dropout(0.1, None), form=form)
    assert error < 1e-3


# --- Every op ---


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape).astype(jnp.bfloat16)


OP_IDS = jnp.asarray(np.repeat([[1, 2, 0]], [20, 12, 8], axis=1).repeat(2, axis=0))
WIDE, FLAT = normal(2, 40, 2, 8), normal(2, 40, 16)
# name -> (table, op with positional arguments, its arguments, its options)
OPS = {
    "attention": (attention, attention.attention, (WIDE,) * 3, {"segment_ids": OP_IDS}),
    "attention to a source": (
        *(attention, attention.attention, (WIDE, normal(2, 24, 2, 8), normal(2, 24, 2, 8))),
        {"segment_ids": OP_IDS},
    ),
    "dynamic_conv": (
        *(dynamic_conv, dynamic_conv.dynamic_conv, (WIDE, normal(2, 40, 2, 3))),
        {"segment_ids": OP_IDS},
    ),
    "light_conv": (dynamic_conv, dynamic_conv.dynamic_conv, (WIDE, normal(2, 3)), {"causal": True}),
    "depthwise_conv": (
        *(depthwise_conv, depthwise_conv.depthwise_conv, (FLAT, normal(3, 16))),
        {"dilation": 2, "segment_ids": OP_IDS},
    ),
    "span_dynamic_conv": (
        span_dynamic_conv,
        span_dynamic_conv.span_dynamic_conv,
        (FLAT, FLAT, FLAT, normal(16, 6), normal(6)),
        {"heads": 2, "segment_ids": OP_IDS},
    ),
    "span_dynamic_conv of the token": (
        span_dynamic_conv,
        span_dynamic_conv.span_dynamic_conv,
        (FLAT, None, None, normal(16, 6), normal(6)),
        {"heads": 2},
    ),
}


@pytest.mark.parametrize("factor", [1.0, 1.2], ids=["right", "wrong"])
@pytest.mark.parametrize("name", OPS)
def test_the_calls_of_every_op_can_be_checked(name, factor, monkeypatch, caplog):
    """In bfloat16: rounding alone disables no kernel."""
    module, op, arguments, options = OPS[name]
    tables = "LIGHT_IMPLEMENTATIONS" if name == "light_conv" else "IMPLEMENTATIONS"
    plain = getattr(module, tables)["xla"]

    def kernel(*given, **more):
        out = plain.function(*given, **more)
        return (factor * out.astype(jnp.float32)).astype(out.dtype)

    table = {"kernel": Implementation(kernel, "cpu"), "xla": plain}
    monkeypatch.setattr(module, tables, table)
    if module is attention:
        monkeypatch.setattr("convbert_jax.ops.attention.op.IMPLEMENTATIONS", table)
    with caplog.at_level(logging.INFO):
        jax.jit(functools.partial(op, **options))(*arguments)
    assert ("auto takes kernel" in caplog.text) == (factor == 1.0), caplog.text
    assert ("disabled for this run" in caplog.text) == (factor != 1.0)


# --- When it checks ---


@pytest.mark.parametrize("around", ["jit", "vmap", "grad", "mesh"])
def test_it_runs_while_a_program_is_traced(around):
    def op(x):
        return choose(kernel, x=x)(x, jnp.ones(x.shape[:2], jnp.int32)).sum()

    kernel, mesh = (
        Counted(),
        jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)),
    )
    if around == "mesh":
        with jax.set_mesh(mesh):
            x = jax.device_put(jnp.ones((8, 64, 2, 8)), jax.NamedSharding(mesh, jax.P("data")))
            assert jax.jit(op)(x) == 2 * x.size
    elif around == "vmap":
        assert jax.jit(jax.vmap(op))(jnp.stack([X, X])).tolist() == [2 * X.size] * 2
    else:
        assert jax.jit({"jit": op, "grad": jax.grad(op)}[around])(X).sum() == 2 * X.size
    assert kernel.calls == 2  # of the check and of the program


def test_each_kind_of_call_is_checked_once():
    kernel = Counted()
    for x in (X, X[:3], X[:, :50], X.astype(jnp.bfloat16), X):
        choose(kernel, x=x)
    assert kernel.calls == 2  # float32 and bfloat16


@pytest.mark.parametrize("found", ["gpu", "tpu"])
def test_nothing_is_checked_for_devices_that_are_not_here(found, monkeypatch):
    monkeypatch.setattr(dispatch, "platform", lambda: found)
    kernel = Counted(raises)
    table = {"kernel": Implementation(kernel, found), "xla": Implementation(double)}
    assert dispatch.choose("twice", "auto", table, X, None) is kernel
    assert not kernel.calls


def test_named_forms_of_every_platform_are_not_checked():
    table = {"other": Implementation(raises), "xla": Implementation(double)}
    assert dispatch.choose("twice", "other", table, X, None) is raises


# --- Where verdicts are kept ---


def restart(monkeypatch):
    monkeypatch.setattr(verdicts, "_passed", set())
    monkeypatch.setattr(verdicts, "_faults", {})


def test_a_verdict_is_kept_beside_the_compiled_programs(cache, monkeypatch):
    kernel = Counted()
    for _ in range(2):
        choose(kernel)
        restart(monkeypatch)
    assert kernel.calls == 1
    assert list(json.loads(cache.read_text()).values()) == [0.0]


def test_a_kept_verdict_disables_a_wrong_kernel_too(cache, monkeypatch):
    kernel = Counted(WRONG["output"])
    for _ in range(2):
        assert choose(kernel) is double
        restart(monkeypatch)
    assert kernel.calls == 1


def test_a_kernel_that_raises_is_tried_again_in_the_next_run(cache, monkeypatch):
    assert choose(raises) is double
    restart(monkeypatch)
    assert not cache.exists()
    kernel = Counted()
    assert choose(kernel) is kernel


@pytest.mark.parametrize("change", ["jax", "sources", "damage", "a list"])
def test_a_stale_or_damaged_verdict_is_not_used(change, cache, monkeypatch):
    kernel = Counted()
    choose(kernel)
    restart(monkeypatch)
    if change == "jax":
        monkeypatch.setattr(jax, "__version__", "0.99.0")
    elif change == "sources":
        monkeypatch.setattr(verdicts, "_hash_sources", lambda: "0123")
    else:
        cache.write_text("{" if change == "damage" else "[]")
    choose(kernel)
    assert kernel.calls == 2


def test_a_cache_that_cannot_be_written_costs_another_check_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(verdicts, "_path", lambda: tmp_path / "file" / verdicts.FILE)
    (tmp_path / "file").write_text("")
    kernel = Counted()
    assert choose(kernel) is kernel


# --- Several processes ---


@pytest.fixture
def two_processes(monkeypatch):
    """Sets the error that the other process finds."""
    other = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        verdicts.multihost_utils, "process_allgather", lambda x: np.stack([x, np.float32(other[0])])
    )
    return other.append


def test_a_kernel_that_fails_in_one_process_is_used_in_none(two_processes, caplog):
    two_processes(np.inf)
    assert choose(double, name="auto") is double
    assert "another process" in caplog.text
    with pytest.raises(KernelError):
        choose(Counted(), "kernel")


def test_a_kernel_that_is_right_in_all_processes_is_used(two_processes):
    two_processes(1e-6)
    kernel = Counted()
    assert choose(kernel) is kernel


# --- What is compiled for a TPU ---

SHAPE = jax.ShapeDtypeStruct((8, 128, 6, 64), jnp.bfloat16)
ROWS = jax.ShapeDtypeStruct((8, 128, 384), jnp.bfloat16)
IDS = jax.ShapeDtypeStruct((8, 128), jnp.int32)


def parameters(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


CALLS = {
    "attention": (kernels.pallas_tpu, (SHAPE, SHAPE, SHAPE, IDS, IDS, False)),
    "dynamic_conv": (
        tpu.dynamic_conv,
        (SHAPE, jax.ShapeDtypeStruct((8, 128, 6, 9), jnp.bfloat16), IDS, taps.offsets(9)),
    ),
    "span_dynamic_conv": (
        tpu.span_dynamic_conv,
        (ROWS, ROWS, ROWS, parameters(384, 54), parameters(54), IDS, 6, taps.offsets(9)),
    ),
    "depthwise_conv": (tpu.depthwise_conv, (ROWS, parameters(9, 384), IDS, taps.offsets(9))),
}


@pytest.mark.tpu_compile
@needs_libtpu
@pytest.mark.parametrize(
    "op", ["attention", *(pytest.param(op, marks=pytest.mark.slow) for op in list(CALLS)[1:])]
)
def test_checks_compile_for_a_tpu(op):
    from convbert_jax.analysis.tpu import pricing

    function, arguments = CALLS[op]
    arguments = compare.shrink(arguments)
    options = {"drop": Dropout(0.1, None)} if op == "attention" else {}
    places, run = compare.make_program(arguments, options)
    compiled = pricing.compile_for(
        lambda *arrays: run(function, arrays), *(arguments[i] for i in places), target="tpu:v5e"
    )
    assert compiled.as_text().count('"tpu_custom_call"') >= 2
