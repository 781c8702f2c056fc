"""GPU kernels without a GPU: numerics in Pallas' interpreter, and lowering for CUDA.

What only a GPU can show (marker gpu: the same numerics, not interpreted) is at the end.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.ops import pallas_gpu, pallas_gpu_span, reference, taps


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


def plain_arrays(batch, length, heads, width, kernel, dtype, shared=False):
    shape = (heads, kernel) if shared else (batch, length, heads, kernel)
    values, logits, cotangent = draw(
        0, (batch, length, heads, width), shape, (batch, length, heads, width), dtype=dtype
    )
    return values, jax.nn.softmax(logits.astype(jnp.float32)).astype(dtype), cotangent


def span_arrays(batch, length, heads, width, kernel, dtype):
    channels, outputs = heads * width, heads * kernel
    shapes = [(batch, length, channels)] * 4 + [(channels, outputs), (outputs,)]
    *rows, matrix, bias = draw(1, *shapes, dtype=dtype)
    return *rows[:3], (matrix * channels**-0.5).astype(dtype), bias, rows[3]


def run_plain(values, weights, cotangent, ids, offsets, **arguments):
    def conv(values, weights):
        return pallas_gpu.dynamic_conv(values, weights, ids, offsets, *arguments.values())

    out, back = jax.vjp(jax.jit(conv), values, weights)
    return out, *back(cotangent)


def run_span(*arrays, ids, heads, offsets, interpret=True):
    *arrays, cotangent = arrays

    def conv(*arrays):
        return pallas_gpu_span.span_dynamic_conv(*arrays, ids, heads, offsets, interpret)

    out, back = jax.vjp(jax.jit(conv), *arrays)
    return out, *back(cotangent)


def plain_by_definition(values, weights, cotangent, ids, offsets):
    def conv(values, weights):
        weights = jnp.broadcast_to(weights, (*values.shape[:3], len(offsets)))
        return reference.dynamic_conv(values, weights, ids, offsets)

    exact = [x.astype(jnp.float32) for x in (values, weights, cotangent)]
    out, back = jax.vjp(conv, *exact[:2])
    return out, *back(exact[2])


def span_by_definition(*arrays, ids, heads, offsets):
    *arrays, cotangent = (x.astype(jnp.float32) for x in arrays)

    def conv(query, span_key, values, kernel, bias):
        batch, length, _ = values.shape
        logits = jnp.matmul(query * span_key, kernel, precision="highest") + bias
        weights = jax.nn.softmax(logits.reshape(batch, length, heads, -1))
        by_head = values.reshape(batch, length, heads, -1)
        return reference.dynamic_conv(by_head, weights, ids, offsets).reshape(values.shape)

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
    ("length", "heads", "width", "kernel", "dilation", "causal", "packed", "dtype"),
    [*CASES[:2], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[2:])],
)


@MATRIX
def test_plain_operation(length, heads, width, kernel, dilation, causal, packed, dtype):
    arrays = plain_arrays(2, length, heads, width, kernel, dtype)
    ids = documents(2, length) if packed else None
    offsets = taps.offsets(kernel, dilation=dilation, causal=causal)
    actual = run_plain(*arrays, ids, offsets, interpret=True)
    assert [x.dtype for x in actual] == [dtype] * 3
    close(actual, plain_by_definition(*arrays, ids, offsets), dtype)


def test_weights_shared_by_all_positions():
    arrays = plain_arrays(2, 70, 2, 48, 3, jnp.float32, shared=True)
    ids, offsets = documents(2, 70), taps.offsets(3)
    actual = run_plain(*arrays, ids, offsets, interpret=True)
    close(actual, plain_by_definition(*arrays, ids, offsets), jnp.float32)


@MATRIX
def test_fused_operation(length, heads, width, kernel, dilation, causal, packed, dtype):
    arrays = span_arrays(2, length, heads, width, kernel, dtype)
    given = {
        "ids": documents(2, length) if packed else None,
        "heads": heads,
        "offsets": taps.offsets(kernel, dilation=dilation, causal=causal),
    }
    actual = run_span(*arrays, **given)
    assert [x.dtype for x in actual] == [dtype] * 6
    # Gradients go through a product and a softmax, each rounded to bfloat16.
    close(actual, span_by_definition(*arrays, **given), dtype, scale=3)


def test_fused_operation_with_more_blocks_than_splits(monkeypatch):
    monkeypatch.setattr(pallas_gpu_span, "SPLITS", 2)
    arrays = span_arrays(3, 129, 2, 16, 3, jnp.float32)
    given = {"ids": documents(3, 129), "heads": 2, "offsets": taps.offsets(3)}
    close(run_span(*arrays, **given), span_by_definition(*arrays, **given), jnp.float32, scale=3)


def test_nan_in_padding_reaches_nothing():
    ids, offsets = documents(1, 30), taps.offsets(5)
    padding = (ids == 0)[..., None]
    *rows, matrix, bias, cotangent = span_arrays(1, 30, 2, 16, 5, jnp.float32)
    given = {"ids": ids, "heads": 2, "offsets": offsets}
    clean = run_span(*rows, matrix, bias, cotangent, **given)
    *rows, cotangent = (jnp.where(padding, jnp.nan, x) for x in (*rows, cotangent))
    dirty = run_span(*rows, matrix, bias, cotangent, **given)
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
def test_both_operations_lower_for_cuda(heads, width, packed, dtype):
    length, kernel = 512, 9
    offsets = taps.offsets(kernel)
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32) if packed else None
    plain = jax.eval_shape(lambda: plain_arrays(2, length, heads, width, kernel, dtype))
    span = jax.eval_shape(lambda: span_arrays(2, length, heads, width, kernel, dtype))

    def spanned(arrays, ids):
        return run_span(*arrays, ids=ids, heads=heads, offsets=offsets, interpret=False)

    with abstract_gpu():
        lowered = jax.jit(lambda a, ids: run_plain(*a, ids, offsets)).trace(plain, ids)
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("__gpu$xla.gpu.triton") == 2  # forward, backward
        lowered = jax.jit(spanned).trace(span, ids)
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("__gpu$xla.gpu.triton") == 4  # forward and three backward


@pytest.mark.gpu
@MATRIX
def test_on_a_gpu(length, heads, width, kernel, dilation, causal, packed, dtype):
    ids = documents(2, length) if packed else None
    offsets = taps.offsets(kernel, dilation=dilation, causal=causal)
    arrays = plain_arrays(2, length, heads, width, kernel, dtype)
    expected = plain_by_definition(*arrays, ids, offsets)
    close(run_plain(*arrays, ids, offsets), expected, dtype)
    arrays = span_arrays(2, length, heads, width, kernel, dtype)
    given = {"ids": ids, "heads": heads, "offsets": offsets}
    actual = run_span(*arrays, **given, interpret=False)
    close(actual, span_by_definition(*arrays, **given), dtype, scale=3)
