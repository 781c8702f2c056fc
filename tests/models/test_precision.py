"""What is summed in bfloat16: nothing. Read off the programs, and against float32 gradients.

The program is the jaxpr, not what a compiler makes of it: XLA:CPU sums bfloat16 in float32.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.config import MeshSection
from convbert_jax.interfaces.special_ids import SpecialIds
from convbert_jax.models import finetuned, layers
from convbert_jax.models.mixers.convolution import SeparableConv
from convbert_jax.objectives import classification, span_extraction
from convbert_jax.ops import dispatch, gpu, products, taps, tpu, xla
from convbert_jax.recipes import tasks
from convbert_jax.training import sharding
from convbert_jax.training.program import make_program

BF16, F32 = jnp.bfloat16, jnp.float32
FEW = 4  # so many terms may be summed in bfloat16


@pytest.fixture(params=["tpu", "gpu", "cpu"], ids="for_{}".format)
def platform(request, monkeypatch):
    """Programs are traced, not compiled, as for this platform: with its kernels and dtypes."""
    monkeypatch.setattr(dispatch, "platform", lambda: request.param)
    return request.param


@pytest.fixture
def accelerator(monkeypatch):
    """The fastest to trace of those that compute in bfloat16."""
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")


def equations(jaxpr):
    """All equations of a jaxpr, with those of its loops, branches, calls and kernels."""
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
    """The equations of a program that add up more than FEW terms in 16 bits."""
    found = []
    for equation in equations(jax.make_jaxpr(function)(*arguments).jaxpr):
        shapes = [v.aval for v in equation.invars]
        inputs = [a for a in shapes if getattr(a, "dtype", None) in (BF16, jnp.float16)]
        outputs = [v.aval for v in equation.outvars]
        if not inputs or not any(o.dtype in (BF16, jnp.float16) for o in outputs):
            continue
        if _terms(equation.primitive.name, equation.params, shapes, outputs) > FEW:
            found.append(str(equation))
    return found


def _terms(name, params, inputs, outputs) -> int:
    """How many numbers the largest sum of an equation has; 0 if it is no sum."""
    if name in ("reduce_sum", "reduce_prod", "reduce"):
        axes = params.get("axes", params.get("dimensions"))
        return math.prod(inputs[0].shape[axis] for axis in axes)
    if name in ("cumsum", "cumprod", "cumlogsumexp"):
        return inputs[0].shape[params["axis"]]
    if name in ("scatter-add", "scatter_add"):  # all updates of a row may go to one place
        rows = params["dimension_numbers"].scatter_indices_batching_dims
        sizes = enumerate(inputs[1].shape[:-1])
        return math.prod(size for axis, size in sizes if axis not in rows)
    if name == "dot_general":
        contracted = params["dimension_numbers"][0][0]
        return math.prod(inputs[0].shape[axis] for axis in contracted)
    if name in ("conv_general_dilated", "reduce_window", "reduce_window_sum", "addupdate"):
        return FEW + 1  # not used by this package: whoever adds one looks at its sums
    return 0


def test_finds_the_sums(platform):
    """The walk itself: what it must see, through loops, branches, kernels' calls and remat."""
    rows = jnp.ones((32, 4), BF16)

    def biased(x):
        return (x + jnp.ones(4, BF16)).sum()  # jnp.sum itself sums in float32

    assert not short_sums(biased, rows)
    bias = jnp.ones(4, BF16)

    def gradient(bias):
        return jax.grad(lambda b: (rows + b).astype(F32).sum())(bias)

    for wrapped in (
        gradient,
        jax.jit(gradient),
        jax.checkpoint(gradient),
        lambda b: jax.lax.scan(lambda c, _: (gradient(c), None), b, None, length=2)[0],
        lambda b: jax.lax.cond(b[0] > 0, gradient, jnp.sin, b),
        lambda b: jax.lax.while_loop(lambda c: c[0] > 9, gradient, b),
    ):
        assert len(short_sums(wrapped, bias)) == 1
    assert len(short_sums(lambda x: x.T @ x, rows)) == 1
    assert not short_sums(lambda x: products.einsum("ti,tj->ij", x, x, F32), rows)
    assert len(short_sums(lambda x: x.at[jnp.zeros(32, int)].add(x), rows)) == 1


@pytest.fixture
def step(make_config):
    """step(**fields of the model section) -> (training step, its arguments)."""

    def make(recipe="replaced_token", generator=None, **model):
        config = make_config(recipe, generator, **model)
        config = dataclasses.replace(config, compute_dtype="bfloat16")
        special = SpecialIds(pad=0, unknown=4, cls=1, sep=2, mask=3)
        task = tasks.build_task(config, special, jax.devices()[0])
        program = make_program(task, config, sharding.make_mesh(MeshSection(), jax.devices()[:1]))
        rows = jax.ShapeDtypeStruct((8, 24), jnp.int32)
        batch = dict.fromkeys(("tokens", "segment_ids", "type_ids"), rows)
        return program.train_step, program.abstract, batch

    return make


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"ffn_groups": 2},
        {"remat": "dots"},
        {"remat": "full", "mask_convolution": False},
        {"generator": {"kind": "shared"}},
        {"recipe": "masked_lm", "mixer": "attention"},
    ],
    ids=str,
)
def test_training_step_sums_in_float32(step, model, accelerator):
    assert not short_sums(*step(**model))


def test_training_step_of_each_platform_sums_in_float32(step, platform):
    assert not short_sums(*step())


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_layers_keep_nothing_in_float32_for_the_backward_pass(step, remat, accelerator):
    """But what is one number a token, and the logits of filters; and no copies of kernels."""
    kept = [
        result.aval
        for equation in equations(jax.make_jaxpr(step(remat=remat)[0])(*step()[1:]).jaxpr)
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


@pytest.mark.parametrize(
    "head", ["sequence", "first_and_mean", "first_token", "token", "span", "span_beam"]
)
def test_finetuning_sums_in_float32(make_config, head, accelerator):
    config = make_config()
    outputs = dataclasses.replace(config.outputs, head=head, labels=("a", "b"))
    graphdef, params = nnx.split(
        nnx.eval_shape(
            lambda: finetuned.FinetunedModel(
                dataclasses.replace(config, outputs=outputs), nnx.Rngs(0)
            )
        )
    )
    losses = {
        "token": classification.tag_losses,
        "span": span_extraction.plain_losses,
        "span_beam": span_extraction.beam_losses,
    }.get(head, classification.text_losses)
    rows, row = jnp.ones((8, 24), jnp.int32), jnp.zeros(8, jnp.int32)
    batch = dict.fromkeys(("tokens", "segment_ids", "type_ids", "tags"), rows)
    batch |= dict.fromkeys(("label", "start", "end", "impossible"), row)
    batch |= {"value": row * 1.0, "outputs": jnp.ones(2, bool), "is_regression": False}

    def gradient(params, key):
        return jax.grad(lambda p: losses(nnx.merge(graphdef, p), batch, key, dtype=BF16)[0].sum())(
            params
        )

    assert not short_sums(gradient, params, jax.random.key(0))


# --- The kernels, which no step on a CPU has ---

HEADS, OFFSETS = 2, taps.offsets(9)
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
IDS = jnp.asarray([[1] * 20 + [2] * 30 + [0] * 14] * 2)


def forward_and_gradients(function, ids):
    def both(*arrays):
        out, back = jax.vjp(lambda *arrays: function(*arrays, ids), *arrays)
        return out, *back(jnp.ones_like(out))

    return both


@pytest.mark.parametrize("name", SPAN_OPS)
def test_span_kernels_sum_in_float32(name, accelerator):
    x = jnp.ones((2, 64, 128), BF16)
    projection, bias = jnp.ones((128, 9 * HEADS)), jnp.ones(9 * HEADS)
    function = forward_and_gradients(SPAN_OPS[name], IDS)
    assert not short_sums(function, x, x, x, projection, bias)


@pytest.mark.parametrize("name", PLAIN_OPS)
def test_plain_kernels_sum_in_float32(name, accelerator):
    values, filters = jnp.ones((2, 64, HEADS, 64), BF16), jnp.ones((2, 64, HEADS, 9), BF16)
    assert not short_sums(forward_and_gradients(PLAIN_OPS[name], IDS), values, filters)


@pytest.mark.parametrize("ours", [tpu, gpu], ids=["for_tpu", "for_gpu"])
def test_depthwise_kernel_sums_in_float32(ours, accelerator):
    def conv(x, filters, ids):
        return ours.depthwise_conv(x, filters, ids, OFFSETS, True)

    x, filters = jnp.ones((2, 64, 128), BF16), jnp.ones((9, 128))
    assert not short_sums(forward_and_gradients(conv, IDS), x, filters)


@pytest.mark.parametrize("name", SPAN_OPS)
def test_filter_logits_reach_their_softmax_in_float32(name):
    """In bfloat16 logits around 100 are multiples of 0.5: taps that differ by e^0.2 would tie."""
    batch, length, width = 1, 32, 16
    ones = jnp.ones((batch, length, HEADS * width), BF16)
    values = jax.random.normal(jax.random.key(0), ones.shape).astype(BF16)
    projection = jnp.zeros((HEADS * width, HEADS * 9))
    bias = 100 + 0.2 * jnp.arange(HEADS * 9.0)
    out = SPAN_OPS[name](ones, ones, values, projection, bias, None)
    wanted = SPAN_OPS["xla"](*(x.astype(F32) for x in (ones, ones, values)), projection, bias, None)
    np.testing.assert_allclose(out.astype(F32), wanted, atol=0.01)


# --- Against float32 ---

TOKENS = 128, 128


def test_many_equal_terms_add_up():
    dense = layers.Dense(8, 8, jax.nn.initializers.ones, nnx.Rngs(0))
    graphdef, params = nnx.split(dense)

    def total(params, x):
        return nnx.merge(graphdef, params)(x).astype(F32).sum()

    gradients = jax.grad(total)(params, jnp.ones((*TOKENS, 8), BF16))
    np.testing.assert_array_equal(gradients["bias"][...], 16_384)
    np.testing.assert_array_equal(gradients["kernel"][...], 16_384)


@pytest.mark.parametrize("kind", ["dense", "grouped", "separable"])
def test_gradients_of_a_batch_are_those_of_float32(kind):
    """Of the same bfloat16 numbers; what is rounded on the way are single terms, not sums."""
    normal = jax.nn.initializers.normal(0.1)
    starts = layers.Initializers(normal, lambda taps: normal, normal)
    module = {
        "dense": lambda: layers.Dense(32, 16, normal, nnx.Rngs(0)),
        "grouped": lambda: layers.GroupedDense(32, 16, 2, normal, nnx.Rngs(0)),
        "separable": lambda: SeparableConv(32, 16, 9, starts, nnx.Rngs(0)),
    }[kind]()
    graphdef, params = nnx.split(module)
    params = jax.tree.map(lambda p: p.astype(BF16).astype(F32), params)
    x = jax.random.normal(jax.random.key(1), (*TOKENS, 32)).astype(BF16)
    cotangent = jax.random.normal(jax.random.key(2), (*TOKENS, 16)) + 0.5

    def gradients(dtype):
        def run(params):
            module = nnx.merge(graphdef, params)
            given = (x.astype(dtype),) if kind != "separable" else (x.astype(dtype), None)
            return module(*given)

        return jax.vjp(run, params)[1](cotangent.astype(BF16).astype(dtype))[0]

    def check(path, ours, wanted):
        error = jnp.linalg.norm(ours - wanted) / jnp.linalg.norm(wanted)
        # Between the two convolutions there is a rounded array; sums over it are exact.
        limit = 2**-9 if kind == "separable" and path[0].key != "bias" else 2e-6
        assert error < limit, (path, float(error))

    jax.tree_util.tree_map_with_path(check, gradients(BF16), gradients(F32))
