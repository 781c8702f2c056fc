"""No sum accumulates in bfloat16, checked in jaxprs and against float32 gradients.

The tests read the jaxpr because XLA:CPU compiles bfloat16 sums to float32.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.config import MeshSection
from convbert_jax.interfaces import SpecialIds
from convbert_jax.models import layers, networks
from convbert_jax.models.mixers.convolution import SeparableConv
from convbert_jax.ops import dispatch, gpu, tpu, xla
from convbert_jax.recipes import tasks
from convbert_jax.training import partitioning
from convbert_jax.training.train_step import make_program
from tests.models.test_encoder import LOSSES, finetuning_batch

BF16, F32 = jnp.bfloat16, jnp.float32
FEW = 4  # largest number of terms that may be summed in bfloat16


@pytest.fixture
def accelerator(monkeypatch):
    """Trace programs as for a GPU, the fastest platform to trace that computes in bfloat16."""
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")


def equations(jaxpr):
    """Yield all equations of a jaxpr, including loops, branches, calls and kernels."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in _jaxprs(value):
                yield from equations(inner)


def _jaxprs(value):
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _jaxprs(item)
    elif hasattr(value, "eqns"):
        yield value
    elif hasattr(getattr(value, "jaxpr", None), "eqns"):
        yield value.jaxpr


def short_sums(function, *arguments) -> list[str]:
    """List the equations of a program that sum more than FEW terms in 16 bits."""
    return short_sums_of(jax.make_jaxpr(function)(*arguments).jaxpr)


def short_sums_of(jaxpr) -> list[str]:
    found = []
    for equation in equations(jaxpr):
        shapes = [v.aval for v in equation.invars]
        inputs = [a for a in shapes if getattr(a, "dtype", None) in (BF16, jnp.float16)]
        outputs = [v.aval for v in equation.outvars]
        if not inputs or not any(o.dtype in (BF16, jnp.float16) for o in outputs):
            continue
        if _terms(equation.primitive.name, equation.params, shapes, outputs) > FEW:
            found.append(str(equation))
    return found


def _terms(name, params, inputs, outputs) -> int:
    """Return the number of terms in an equation's largest sum; 0 if it does not sum."""
    if name in ("reduce_sum", "reduce_prod", "reduce"):
        axes = params.get("axes", params.get("dimensions"))
        return math.prod(inputs[0].shape[axis] for axis in axes)
    if name in ("cumsum", "cumprod", "cumlogsumexp"):
        return inputs[0].shape[params["axis"]]
    if name in ("scatter-add", "scatter_add"):  # all updates of a row may have the same index
        rows = params["dimension_numbers"].scatter_indices_batching_dims
        sizes = enumerate(inputs[1].shape[:-1])
        return math.prod(size for axis, size in sizes if axis not in rows)
    if name == "dot_general":
        contracted = params["dimension_numbers"][0][0]
        return math.prod(inputs[0].shape[axis] for axis in contracted)
    if name in ("conv_general_dilated", "reduce_window", "reduce_window_sum", "addupdate"):
        return FEW + 1  # unused in this package; check the sums when adding one
    return 0


@pytest.fixture
def step(make_config):
    """Return step(**fields of the model section) -> (training step, its arguments)."""

    def make(recipe="replaced_token", generator=None, **model):
        config = make_config(recipe, generator, **model)
        config = dataclasses.replace(config, compute_dtype="bfloat16")
        special = SpecialIds(pad=0, unknown=4, cls=1, sep=2, mask=3)
        task = tasks.build_task(config, special, jax.devices()[0])
        program = make_program(
            task, config, partitioning.make_mesh(MeshSection(), jax.devices()[:1])
        )
        rows = jax.ShapeDtypeStruct((8, 24), jnp.int32)
        batch = dict.fromkeys(("tokens", "segment_ids", "type_ids"), rows)
        return program.train_step, program.abstract, batch

    return make


@pytest.mark.parametrize(
    "model",
    [
        {"remat": "none"},
        {"remat": "dots", "ffn_groups": 2},
        {"remat": "full", "mask_convolution": False, "generator": {"kind": "shared"}},
        {"recipe": "masked_lm", "mixer": "attention"},
    ],
    ids=str,
)
def test_a_training_step_sums_in_float32(step, model, accelerator):
    """The backward pass keeps only filter logits and one number per token in float32."""
    function, *arguments = step(**model)
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    assert not short_sums_of(jaxpr)
    kept = [
        result.aval
        for equation in equations(jaxpr)
        if equation.primitive.name == "scan" and not equation.params["reverse"]
        for result, each in zip(
            equation.outvars, equation.params["jaxpr"].jaxpr.outvars, strict=True
        )
        if result.aval.ndim > each.aval.ndim  # stacked, not carried
    ]
    assert kept
    for array in kept:
        assert array.shape[1] == 8
        assert array.dtype != F32 or array.shape[-1] in (1, 9, 18)


@pytest.mark.parametrize("other", ["tpu", "cpu"])
def test_a_training_step_of_each_platform_sums_in_float32(step, other, monkeypatch):
    monkeypatch.setattr(dispatch, "platform", lambda: other)
    assert not short_sums(*step())


def test_the_heads_of_fine_tuning_sum_in_float32(make_config, accelerator):
    """Hidden states are bfloat16; the training steps above cover the encoder."""
    config, batch = make_config(), finetuning_batch()
    graphdefs, params = {}, {}
    for head in LOSSES:
        outputs = dataclasses.replace(config.outputs, head=head, labels=("a", "b"))
        made = dataclasses.replace(config, outputs=outputs)
        graphdefs[head], params[head] = nnx.split(
            nnx.eval_shape(lambda made=made: networks.FinetunedModel(made, nnx.Rngs(0)))
        )

    def gradient(params, hidden, key):
        def total(params, hidden):
            losses = []
            for head, each in LOSSES.items():
                model = nnx.merge(graphdefs[head], params[head])
                model.encode = lambda *_, **__: hidden
                losses.append(each(model, batch, key, dtype=BF16)[0].sum())
            return sum(losses)

        return jax.grad(total, (0, 1))(params, hidden)

    hidden = jax.ShapeDtypeStruct((3, 12, 32), BF16)
    assert not short_sums(gradient, params, hidden, jax.random.key(0))


# --- Kernels, which a CPU step does not use ---

HEADS, OFFSETS = 2, xla.tap_offsets(9)
SPAN_OPS = {
    "xla": lambda *arrays: xla.span_dynamic_conv(*arrays, HEADS, OFFSETS),
    "pallas_tpu": lambda *arrays: tpu.span_dynamic_conv(*arrays, HEADS, OFFSETS, True),
    "pallas_gpu": lambda *arrays: gpu.span_dynamic_conv(*arrays, HEADS, OFFSETS, True),
}
PLAIN_OPS = {
    "xla": lambda *arrays: xla.dynamic_conv(*arrays, OFFSETS),
    "pallas_tpu": lambda *arrays: tpu.dynamic_conv(*arrays, OFFSETS, True),
    "pallas_gpu": lambda *arrays: gpu.dynamic_conv(*arrays, OFFSETS, True),
}
IDS = np.asarray([[1] * 20 + [2] * 30 + [0] * 14] * 2)


def forward_and_gradients(function, ids):
    def both(*arrays):
        out, back = jax.vjp(lambda *arrays: function(*arrays, ids), *arrays)
        return out, *back(jnp.ones_like(out))

    return both


def test_kernels_sum_in_float32(accelerator):
    x = jnp.ones((2, 64, 128), BF16)
    projection, bias = jnp.ones((128, 9 * HEADS)), jnp.ones(9 * HEADS)
    values, filters = jnp.ones((2, 64, HEADS, 64), BF16), jnp.ones((2, 64, HEADS, 9), BF16)
    for name in SPAN_OPS:
        span = forward_and_gradients(SPAN_OPS[name], IDS)
        assert not short_sums(span, x, x, x, projection, bias), name
        plain = forward_and_gradients(PLAIN_OPS[name], IDS)
        assert not short_sums(plain, values, filters), name
    for ours in (tpu, gpu):

        def conv(x, filters, ids, ours=ours):
            return ours.depthwise_conv(x, filters, ids, OFFSETS, True)

        assert not short_sums(forward_and_gradients(conv, IDS), x, jnp.ones((9, 128))), ours


def test_filter_logits_reach_their_softmax_in_float32():
    """bfloat16 logits near 100 are multiples of 0.5, so taps that differ by 0.2 would tie."""
    ones = jnp.ones((1, 32, HEADS * 16), BF16)
    values = jax.random.normal(jax.random.key(0), ones.shape).astype(BF16)
    projection = jnp.zeros((HEADS * 16, HEADS * 9))
    bias = 100 + 0.2 * jnp.arange(HEADS * 9.0)
    exact = [x.astype(F32) for x in (ones, ones, values)]
    wanted = SPAN_OPS["xla"](*exact, projection, bias, None)
    for name, op in SPAN_OPS.items():
        out = op(ones, ones, values, projection, bias, None)
        np.testing.assert_allclose(out.astype(F32), wanted, atol=0.01, err_msg=name)


# --- Against float32 ---

TOKENS = 128, 128


def test_many_equal_terms_add_up():
    graphdef, params = nnx.split(layers.Dense(8, 8, jax.nn.initializers.ones, nnx.Rngs(0)))

    @jax.jit
    @jax.grad
    def gradients(params, x):
        return nnx.merge(graphdef, params)(x).astype(F32).sum()

    found = gradients(params, jnp.ones((*TOKENS, 8), BF16))
    np.testing.assert_array_equal(found["bias"][...], 16_384)
    np.testing.assert_array_equal(found["kernel"][...], 16_384)


@pytest.mark.parametrize("kind", ["grouped", "separable"])
def test_gradients_of_a_batch_are_those_of_float32(kind):
    """From the same bfloat16 inputs; only single terms are rounded, not sums."""
    normal = jax.nn.initializers.normal(0.1)
    starts = layers.Initializers(normal, lambda taps: normal, normal)
    module = {
        "grouped": lambda: layers.GroupedDense(32, 16, 2, normal, nnx.Rngs(0)),
        "separable": lambda: SeparableConv(32, 16, 9, starts, nnx.Rngs(0)),
    }[kind]()
    graphdef, params = nnx.split(module)
    params = jax.tree.map(lambda p: p.astype(BF16).astype(F32), params)
    x = jax.random.normal(jax.random.key(1), (*TOKENS, 32)).astype(BF16)
    cotangent = jax.random.normal(jax.random.key(2), (*TOKENS, 16)) + 0.5

    @jax.jit
    def gradients(params, x, cotangent):
        def of(dtype):
            def run(params):
                more = (None,) if kind == "separable" else ()
                return nnx.merge(graphdef, params)(x.astype(dtype), *more)

            return jax.vjp(run, params)[1](cotangent.astype(BF16).astype(dtype))[0]

        return of(BF16), of(F32)

    def check(path, ours, wanted):
        error = jnp.linalg.norm(ours - wanted) / jnp.linalg.norm(wanted)
        # The array between the two convolutions is rounded; sums over it are exact.
        limit = 2**-9 if kind == "separable" and path[0].key != "bias" else 2e-6
        assert error < limit, (path, float(error))

    jax.tree_util.tree_map_with_path(check, *gradients(params, x, cotangent))
