"""Verification of kernels against XLA before their first use, with fake kernels on a CPU."""

import functools
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.ops import attention, convolution, dispatch, verification
from convbert_jax.ops.dispatch import Implementation
from convbert_jax.ops.nn import Dropout
from convbert_jax.ops.verification import KernelError
from tests.ops import definitions
from tests.refusals import refused
from tests.running import needs_libtpu


def make_x(dtype=jnp.float32):
    return jnp.ones((4, 64, 2, 8), dtype)


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
    monkeypatch.setattr(verification, "_passed", set())
    monkeypatch.setattr(verification, "_faults", {})
    dispatch.say.cache_clear()


def restart():
    """Forget all verdicts that are not in files, like a new process."""
    verification._passed.clear()
    verification._faults.clear()


@pytest.fixture
def cache(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / verification.FILE
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(autouse=True)
def _no_cache():
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


class Counted:
    """Kernel that counts how often it is traced."""

    def __init__(self, function=double):
        self.function, self.calls = function, 0

    def __call__(self, *arguments):
        self.calls += 1
        return self.function(*arguments)


def choose(kernel, name="auto", x=None):
    x = make_x() if x is None else x
    table = {"kernel": Implementation(kernel, "cpu"), "xla": Implementation(double)}
    return dispatch.choose("twice", name, table, x, jnp.ones(x.shape[:2], jnp.int32))


# --- Results of a check ---


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float32", verification.TOLERANCE_32_BITS), ("bfloat16", verification.TOLERANCE_16_BITS)],
)
def test_a_correct_kernel_is_taken_and_its_error_logged(dtype, tolerance, caplog):
    kernel = Counted()
    with caplog.at_level(logging.INFO):
        assert choose(kernel, x=make_x(dtype)) is kernel
    assert str(tolerance) in caplog.records[0].getMessage()
    factor = 1 + 1.01 * tolerance
    wrong = Counted(lambda x, ids: (factor * double(x.astype(jnp.float32), ids)).astype(x.dtype))
    restart()
    assert choose(wrong, x=make_x(dtype)) is double


def test_a_kernel_chooses_the_length_of_its_check():
    wrong = Counted(lambda x, ids: (1 + (x.shape[1] == 640)) * double(x, ids))
    for length, chosen in ((512, wrong), (640, double)):
        restart()
        kernel = Implementation(wrong, "cpu", check_length=lambda x, _, n=length: n)
        table = {"kernel": kernel, "xla": Implementation(double)}
        x = make_x()
        ids = jnp.ones(x.shape[:2], jnp.int32)
        assert dispatch.choose("twice", "auto", table, x, ids) is chosen


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_kernel_is_left_by_auto_and_an_error_by_name(wrong, caplog):
    x, kernel = make_x(), WRONG[wrong]
    assert choose(kernel, x=x) is double
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    for mention in ("twice", "kernel", jax.__version__, *(["0.1"] if wrong == "output" else [])):
        assert mention in warning
    # other calls of the same op do not take it either
    assert choose(kernel, x=x.astype(jnp.bfloat16)) is double
    with refused(KernelError, "twice", value="kernel"):
        choose(kernel, "kernel", x=x)


def attend(drop, length=128, form=attention.pallas_tpu_definition):
    """Return the largest error of an attention implementation, and the array with this error."""
    x = jax.ShapeDtypeStruct((8, length, 2, 64), jnp.float32)
    ids = jax.ShapeDtypeStruct((8, length), jnp.int32)
    arguments = verification.shrink((x, x, x, ids, ids, False, 0))
    options = {"drop": drop}
    return verification.largest_error(form, attention.pallas_tpu_definition, arguments, options)


class OneWrong(attention.KernelDropout):
    def draw(self, shape):
        keep = super().draw(shape)
        return keep.at[1, 1, 200, 210].set(~keep[1, 1, 200, 210])


class OtherKey(attention.KernelDropout):
    def draw(self, shape):
        return attention.KernelDropout(self.rate, jax.random.key(9)).draw(shape)


@pytest.mark.parametrize("marks", [OneWrong, OtherKey, Dropout], ids=lambda one: one.__name__)
def test_a_wrong_dropout_mask_is_found(marks):
    def form(*arguments, drop):
        return attention.xla(*arguments, drop=marks(drop.rate, drop.key))

    error, _ = attend(Dropout(0.1, None), form=form)
    assert error > 0.9


def test_a_wrong_rate_is_found_although_both_forms_agree(monkeypatch):
    draw = attention.KernelDropout.draw
    monkeypatch.setattr(
        attention.KernelDropout, "draw", lambda self, s: draw(self, s).at[:, 0].set(True)
    )
    error, where = attend(Dropout(0.5, None))
    assert 0.2 < error < 0.3
    assert "rate" in where


def test_the_kernel_of_attention_passes_with_dropout():
    form = functools.partial(attention.pallas_tpu, interpret=True)
    error, _ = attend(Dropout(0.1, None), form=form)
    assert error < 1e-3


# --- Every op ---


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape).astype(jnp.bfloat16)


# call -> (table of convolutions, op or None for attention, key positions, options)
CALLS = {
    "attention": (None, None, 40, {}),
    "attention to a source": (None, None, 24, {}),
    "dynamic": ("dynamic_conv", "dynamic", 40, {}),
    "light": ("light_conv", "light", 40, {"causal": True, "segment_ids": None}),
    "depthwise": ("depthwise_conv", "depthwise", 40, {"dilation": 2}),
    "span": ("span_dynamic_conv", "span", 40, {}),
    "token": ("span_dynamic_conv", "token", 40, {"segment_ids": None}),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_calls_of_every_op_can_be_checked(call, monkeypatch, caplog):
    """In bfloat16, to check that rounding errors do not disable a kernel."""
    name, op, keys, options = CALLS[call]
    tables = convolution.IMPLEMENTATIONS
    plain = (tables[name] if name else attention.IMPLEMENTATIONS)["xla"]
    kernel = Counted(plain.function)
    table = {"kernel": Implementation(kernel, "cpu"), "xla": plain}
    if name:
        monkeypatch.setitem(tables, name, table)
    else:
        monkeypatch.setattr(attention, "IMPLEMENTATIONS", table)
    ids = jnp.asarray(np.repeat([[1, 2, 0]] * 2, [20, 12, 8], axis=1))
    given = {"segment_ids": ids, **options}
    if op is None:
        shapes = ((2, n, 2, 8) for n in (40, keys, keys))
        arrays = definitions.normal(0, *shapes, dtype="bfloat16")
        function = attention.attention
    else:
        arrays, _ = definitions.draw(op, 2, 40, 2, 8, 3, "bfloat16")
        function, given["heads"] = definitions.OPS[op], 2
    jax.jit(functools.partial(function, **given))(*arrays)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert kernel.calls == 2  # of the check and of the program


# --- When kernels are checked ---


@pytest.mark.parametrize("around", ["jit", "vmap", "grad", "mesh"])
def test_it_runs_while_a_program_is_traced(around):
    def op(x):
        return choose(kernel, x=x)(x, jnp.ones(x.shape[:2], jnp.int32)).sum()

    kernel, mesh = Counted(), definitions.make_mesh(data=8)
    if around == "mesh":
        with jax.set_mesh(mesh):
            x = jax.device_put(jnp.ones((8, 64, 2, 8)), jax.NamedSharding(mesh, jax.P("data")))
            assert jax.jit(op)(x) == 2 * x.size
        assert kernel.calls == 2
        return
    x = make_x()
    if around == "vmap":
        assert jax.jit(jax.vmap(op))(jnp.stack([x, x])).tolist() == [2 * x.size] * 2
    else:
        assert jax.jit({"jit": op, "grad": jax.grad(op)}[around])(x).sum() == 2 * x.size
    assert kernel.calls == 2  # of the check and of the program


def test_each_kind_of_call_is_checked_once():
    kernel, x = Counted(), make_x()
    for similar in (x, x[:3], x[:, :50], x.astype(jnp.bfloat16), x):
        choose(kernel, x=similar)
    assert kernel.calls == 2  # float32 and bfloat16


@pytest.mark.parametrize("found", ["gpu", "tpu"])
def test_nothing_is_checked_for_devices_that_are_not_here(found, monkeypatch):
    monkeypatch.setattr(dispatch, "platform", lambda: found)
    kernel = Counted(raises)
    table = {"kernel": Implementation(kernel, found), "xla": Implementation(double)}
    assert dispatch.choose("twice", "auto", table, make_x(), None) is kernel
    assert not kernel.calls


def test_named_forms_of_every_platform_are_not_checked():
    table = {"other": Implementation(raises), "xla": Implementation(double)}
    assert dispatch.choose("twice", "other", table, make_x(), None) is raises


# --- Stored verdicts ---


def test_a_verdict_is_kept_beside_the_compiled_programs(cache):
    kernel = Counted()
    for _ in range(2):
        choose(kernel)
        restart()
    assert kernel.calls == 1
    assert list(json.loads(cache.read_text()).values()) == [0.0]


def test_a_kept_verdict_disables_a_wrong_kernel_too(cache):
    kernel = Counted(WRONG["output"])
    for _ in range(2):
        assert choose(kernel) is double
        restart()
    assert kernel.calls == 1


def test_a_kernel_that_raises_is_tried_again_in_the_next_run(cache):
    assert choose(raises) is double
    restart()
    assert not cache.exists()
    kernel = Counted()
    assert choose(kernel) is kernel


@pytest.mark.parametrize("change", ["jax", "sources", "damage", "a list"])
def test_a_stale_or_damaged_verdict_is_not_used(change, cache, monkeypatch):
    kernel = Counted()
    choose(kernel)
    restart()
    if change == "jax":
        monkeypatch.setattr(jax, "__version__", "0.99.0")
    elif change == "sources":
        monkeypatch.setattr(verification, "_hash_sources", lambda: "0123")
    else:
        cache.write_text("{" if change == "damage" else "[]")
    choose(kernel)
    assert kernel.calls == 2


def test_a_cache_that_cannot_be_written_costs_another_check_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(verification, "_path", lambda: tmp_path / "file" / verification.FILE)
    (tmp_path / "file").write_text("")
    kernel = Counted()
    assert choose(kernel) is kernel


# --- Several processes ---


@pytest.fixture
def two_processes(monkeypatch):
    """Return a function that sets the error found by the other process."""
    other = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        verification.multihost_utils,
        "process_allgather",
        lambda x: np.stack([x, np.float32(other[0])]),
    )
    return other.append


def test_a_kernel_that_fails_in_one_process_is_used_in_none(two_processes, caplog):
    two_processes(np.inf)
    kernel = Counted()
    assert choose(kernel) is double
    assert [r for r in caplog.records if r.levelno == logging.WARNING]
    with refused(KernelError, value="kernel"):
        choose(kernel, "kernel")


def test_a_kernel_that_is_right_in_all_processes_is_used(two_processes):
    two_processes(1e-6)
    kernel = Counted()
    assert choose(kernel) is kernel


# --- Compilation for a TPU ---


@pytest.mark.tpu_compile
@needs_libtpu
def test_a_check_compiles_for_a_tpu():
    from convbert_jax.analysis import tpu_pricing

    x = jax.ShapeDtypeStruct((8, 128, 6, 64), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((8, 128), jnp.int32)
    arguments = verification.shrink((x, x, x, ids, ids, False, 0))
    places, run = verification.make_program(arguments, {"drop": Dropout(0.1, None)})
    compiled = tpu_pricing.compile_for(
        lambda *arrays: run(attention.pallas_tpu, arrays),
        *(arguments[i] for i in places),
        target="tpu:v5e",
    )
    assert compiled.as_text().count('"tpu_custom_call"') >= 2
