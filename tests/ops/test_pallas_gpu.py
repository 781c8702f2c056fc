"""GPU kernels without a GPU: numerics in Pallas' interpreter, and lowering for CUDA.

What only a GPU can show (marker gpu: the same numerics, not interpreted) is at the end.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.ops import gpu, reference
from convbert_jax.ops.gpu import span
from convbert_jax.ops.taps import offsets as offsets_of


def draw(seed, *shapes, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [
        jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)
    ]


def documents(batch, length):
    """Rows of documents of 20 tokens, a few tokens of padding behind them."""
    positions = np.arange(length)
    row = np.where(positions < max(1, length - 5), 1 + positions // 20, 0)
    return jnp.asarray(np.tile(row, (batch, 1)), jnp.int32)


def close(actual, expected, dtype, scale=1.0):
    tolerance = {jnp.float32: 2e-5, jnp.bfloat16: 1.6e-2}[dtype] * scale
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * abs(other).max())


def plain_arrays(batch, length, heads, width, taps, dtype):
    shape = (batch, length, heads, taps)
    values, logits, cotangent = draw(
        0, (batch, length, heads, width), shape, (batch, length, heads, width), dtype=dtype
    )
    return values, jax.nn.softmax(logits.astype(jnp.float32)).astype(dtype), cotangent


def span_arrays(batch, length, heads, width, taps, dtype):
    channels, outputs = heads * width, heads * taps
    shapes = [(batch, length, channels)] * 4 + [(channels, outputs), (outputs,)]
    *rows, matrix, bias = draw(1, *shapes, dtype=dtype)
    return *rows[:3], (matrix * channels**-0.5).astype(dtype), bias, rows[3]


def run_plain(values, filters, cotangent, ids, offsets, **arguments):
    def conv(values, filters):
        return gpu.dynamic_conv(values, filters, ids, offsets, *arguments.values())

    out, back = jax.vjp(jax.jit(conv), values, filters)
    return out, *back(cotangent)


def run_span(*arrays, ids, heads, offsets, interpret=True):
    *arrays, cotangent = arrays

    def conv(*arrays):
        return gpu.span_dynamic_conv(*arrays, ids, heads, offsets, interpret)

    out, back = jax.vjp(jax.jit(conv), *arrays)
    return out, *back(cotangent)


def plain_by_definition(values, filters, cotangent, ids, offsets):
    def conv(values, filters):
        return reference.dynamic_conv(values, filters, ids, offsets)

    exact = [x.astype(jnp.float32) for x in (values, filters, cotangent)]
    out, back = jax.vjp(conv, *exact[:2])
    return out, *back(exact[2])


def span_by_definition(*arrays, ids, heads, offsets):
    *arrays, cotangent = (x.astype(jnp.float32) for x in arrays)

    def conv(query, span_key, values, projection, bias):
        batch, length, _ = values.shape
        logits = jnp.matmul(query * span_key, projection, precision="highest") + bias
        filters = jax.nn.softmax(logits.reshape(batch, length, heads, -1))
        by_head = values.reshape(batch, length, heads, -1)
        return reference.dynamic_conv(by_head, filters, ids, offsets).reshape(values.shape)

    out, back = jax.vjp(conv, *arrays)
    return out, *back(cotangent)


# (length, heads, width, taps, dilation, causal, documents, dtype)
CASES = [
    (7, 3, 48, 9, 1, False, True, jnp.bfloat16),
    (65, 2, 80, 4, 2, False, True, jnp.float32),
    (1, 1, 64, 1, 1, False, False, jnp.float32),
    (70, 2, 16, 31, 1, True, False, jnp.float32),
    (70, 2, 16, 31, 1, True, False, jnp.bfloat16),
    (130, 1, 128, 9, 1, False, True, jnp.float32),
    (130, 1, 128, 9, 1, False, True, jnp.bfloat16),
]
# Pallas' interpreter compiles each for seconds.
MATRIX = pytest.mark.parametrize(
    ("length", "heads", "width", "taps", "dilation", "causal", "packed", "dtype"),
    [*CASES[:2], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[2:])],
)


@MATRIX
def test_plain_operation(length, heads, width, taps, dilation, causal, packed, dtype):
    arrays = plain_arrays(2, length, heads, width, taps, dtype)
    ids = documents(2, length) if packed else None
    offsets = offsets_of(taps, dilation=dilation, causal=causal)
    actual = run_plain(*arrays, ids, offsets, interpret=True)
    assert [x.dtype for x in actual] == [dtype] * 3
    close(actual, plain_by_definition(*arrays, ids, offsets), dtype)


def depthwise_arrays(batch, length, channels, taps, dtype):
    rows = (batch, length, channels)
    return draw(2, rows, (taps, channels), rows, dtype=dtype)


def run_depthwise(x, filters, cotangent, ids, offsets, interpret=True):
    def conv(x, filters):
        return gpu.depthwise_conv(x, filters, ids, offsets, interpret)

    out, back = jax.vjp(jax.jit(conv), x, filters)
    return out, *back(cotangent)


def depthwise_by_definition(x, filters, cotangent, ids, offsets):
    exact = [a.astype(jnp.float32) for a in (x, filters, cotangent)]
    out, back = jax.vjp(lambda *a: reference.depthwise_conv(*a, ids, offsets), *exact[:2])
    return out, *back(exact[2])


@pytest.mark.parametrize(
    ("length", "channels", "taps", "dilation", "causal", "packed", "dtype"),
    [
        (7, 80, 9, 1, False, True, jnp.bfloat16),
        (130, 48, 4, 2, True, True, jnp.float32),
        (65, 200, 3, 40, False, False, jnp.float32),
    ],
)
def test_depthwise_operation(length, channels, taps, dilation, causal, packed, dtype):
    arrays = depthwise_arrays(2, length, channels, taps, dtype)
    ids = documents(2, length) if packed else None
    offsets = offsets_of(taps, dilation=dilation, causal=causal)
    actual = run_depthwise(*arrays, ids, offsets)
    assert [x.dtype for x in actual] == [dtype] * 3
    close(actual, depthwise_by_definition(*arrays, ids, offsets), dtype)


@MATRIX
def test_fused_operation(length, heads, width, taps, dilation, causal, packed, dtype):
    arrays = span_arrays(2, length, heads, width, taps, dtype)
    given = {
        "ids": documents(2, length) if packed else None,
        "heads": heads,
        "offsets": offsets_of(taps, dilation=dilation, causal=causal),
    }
    actual = run_span(*arrays, **given)
    assert [x.dtype for x in actual] == [dtype] * 6
    # Gradients go through a product and a softmax, each rounded to bfloat16.
    close(actual, span_by_definition(*arrays, **given), dtype, scale=3)


@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_filters_of_the_query_alone(dtype):
    """What a span key of ones gives, without one."""
    query, key, *rest = span_arrays(2, 20, 2, 16, 5, dtype)
    given = {"ids": documents(2, 20), "heads": 2, "offsets": offsets_of(5)}
    expected = span_by_definition(query, jnp.ones_like(key), *rest, **given)
    actual = run_span(query, None, *rest, **given)
    assert actual[2] is None
    close([*actual[:2], *actual[3:]], [*expected[:2], *expected[3:]], dtype, scale=3)


def test_fused_operation_with_more_blocks_than_splits(monkeypatch):
    monkeypatch.setattr(span, "PROGRAMS", 2)
    arrays = span_arrays(3, 129, 2, 16, 3, jnp.float32)
    given = {"ids": documents(3, 129), "heads": 2, "offsets": offsets_of(3)}
    close(run_span(*arrays, **given), span_by_definition(*arrays, **given), jnp.float32, scale=3)


def test_nan_in_padding_reaches_nothing():
    ids, offsets = documents(1, 30), offsets_of(5)
    padding = (ids == 0)[..., None]
    *rows, matrix, bias, cotangent = span_arrays(1, 30, 2, 16, 5, jnp.float32)
    given = {"ids": ids, "heads": 2, "offsets": offsets}
    clean = run_span(*rows, matrix, bias, cotangent, **given)
    *rows, cotangent = (jnp.where(padding, jnp.nan, x) for x in (*rows, cotangent))
    dirty = run_span(*rows, matrix, bias, cotangent, **given)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    x, filters, cotangent = depthwise_arrays(1, 30, 32, 5, jnp.float32)
    clean = run_depthwise(x, filters, cotangent, ids, offsets)
    x, cotangent = (jnp.where(padding, jnp.nan, x) for x in (x, cotangent))
    dirty = run_depthwise(x, filters, cotangent, ids, offsets)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)


@contextlib.contextmanager
def abstract_gpu():
    """What lowering asks for instead of a GPU (jax 0.12 does)."""
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
    mesh = jax.sharding.AbstractMesh(
        (1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device
    )
    with jax.sharding.use_abstract_mesh(mesh):
        yield


@pytest.mark.parametrize(
    ("heads", "width", "packed", "dtype"),
    [(6, 64, True, jnp.bfloat16), (3, 48, False, jnp.float32)],
)
def test_operations_lower_for_cuda(heads, width, packed, dtype):
    length, taps = 512, 9
    offsets = offsets_of(taps)
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32) if packed else None
    plain = jax.eval_shape(lambda: plain_arrays(2, length, heads, width, taps, dtype))
    fused = jax.eval_shape(lambda: span_arrays(2, length, heads, width, taps, dtype))

    depthwise = jax.eval_shape(lambda: depthwise_arrays(2, length, heads * width, taps, dtype))

    def spanned(arrays, ids):
        return run_span(*arrays, ids=ids, heads=heads, offsets=offsets, interpret=False)

    with abstract_gpu():
        lowered = jax.jit(lambda a, ids: run_plain(*a, ids, offsets)).trace(plain, ids)
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("__gpu$xla.gpu.triton") == 2  # forward, backward
        lowered = jax.jit(lambda a, ids: run_depthwise(*a, ids, offsets, False)).trace(
            depthwise, ids
        )
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("__gpu$xla.gpu.triton") == 2
        lowered = jax.jit(spanned).trace(fused, ids)
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("__gpu$xla.gpu.triton") == 4  # forward and three backward
        lowered = jax.jit(spanned).trace((fused[0], None, *fused[2:]), ids)
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("__gpu$xla.gpu.triton") == 4


def test_seeds_as_an_axis_lower_for_cuda():
    """As fine-tuning trains them on a GPU."""
    arrays = jax.eval_shape(lambda: span_arrays(2, 512, 6, 64, 9, jnp.bfloat16))
    many = [jax.ShapeDtypeStruct((5, *x.shape), x.dtype) for x in arrays]
    ids = jax.ShapeDtypeStruct((2, 512), jnp.int32)

    def run(ids, *arrays):
        return run_span(*arrays, ids=ids, heads=6, offsets=offsets_of(9), interpret=False)

    with abstract_gpu():
        lowered = jax.jit(jax.vmap(run, (None, *[0] * len(many)))).trace(ids, *many)
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 4


@pytest.mark.gpu
@MATRIX
def test_on_a_gpu(length, heads, width, taps, dilation, causal, packed, dtype):
    ids = documents(2, length) if packed else None
    offsets = offsets_of(taps, dilation=dilation, causal=causal)
    arrays = plain_arrays(2, length, heads, width, taps, dtype)
    expected = plain_by_definition(*arrays, ids, offsets)
    close(run_plain(*arrays, ids, offsets), expected, dtype)
    arrays = span_arrays(2, length, heads, width, taps, dtype)
    given = {"ids": ids, "heads": heads, "offsets": offsets}
    actual = run_span(*arrays, **given, interpret=False)
    close(actual, span_by_definition(*arrays, **given), dtype, scale=3)
    arrays = depthwise_arrays(2, length, heads * width, taps, dtype)
    expected = depthwise_by_definition(*arrays, ids, offsets)
    close(run_depthwise(*arrays, ids, offsets, False), expected, dtype)
