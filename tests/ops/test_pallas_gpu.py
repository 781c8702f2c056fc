"""GPU kernels without a GPU: numerics in Pallas' interpreter, and lowering for CUDA.

On a GPU (marker gpu) the same cases run compiled.
"""

import jax
import jax.numpy as jnp
import pytest

from convbert_jax.ops import gpu
from tests.ops import definitions
from tests.ops.definitions import BF16, F32, assert_close, offsets_of, run

# Span gradients pass through a matmul and a softmax, each rounded to bfloat16.
TOLERANCE = {F32: 2e-5, BF16: 4 * 2**-7}
KERNELS = {"dynamic": gpu.dynamic_conv, "depthwise": gpu.depthwise_conv}


def documents(length):
    """Return two rows of 20-token documents, followed by a few tokens of padding."""
    positions = jnp.arange(length)
    row = jnp.where(positions < max(1, length - 5), 1 + positions // 20, 0)
    return jnp.tile(row.astype(jnp.int32), (2, 1))


def kernel_of(op, ids, offsets, heads, interpret=True):
    if op in KERNELS:
        return lambda *arrays: KERNELS[op](*arrays, ids, offsets, interpret)
    return lambda *arrays: gpu.span_dynamic_conv(*arrays, ids, heads, offsets, interpret)


def check(op, length, heads, width, taps, dilation, causal, packed, dtype, interpret=True):
    """Compare a kernel, with NaN in all padding, with the definition."""
    arrays, cotangent = definitions.draw(op, 2, length, heads, width, taps, dtype)
    ids = documents(length) if packed else None
    offsets = offsets_of(taps, dilation, causal)
    *given, given_cotangent = definitions.spoil([*arrays, cotangent], ids)
    kernel = kernel_of(op, ids, offsets, heads, interpret)
    actual = run(kernel, given, given_cotangent)
    assert jax.eval_shape(kernel, *given).shape == cotangent.shape  # forward only
    assert {x.dtype for x in jax.tree.leaves(actual)} == {jnp.dtype(dtype)}
    expected = definitions.convolve(op, arrays, cotangent, ids, offsets)
    assert_close(actual, expected, TOLERANCE[dtype] * (1 if interpret else 3))


# op, length, heads, width, taps, dilation, causal, packed, dtype
CASES = [
    ("dynamic", 7, 3, 48, 9, 1, False, True, BF16),
    ("dynamic", 65, 2, 80, 4, 2, False, True, F32),
    ("dynamic", 1, 1, 64, 1, 1, False, False, F32),
    ("dynamic", 70, 2, 16, 31, 1, True, False, F32),
    ("span", 7, 3, 48, 9, 1, False, True, BF16),
    ("span", 65, 2, 80, 4, 2, False, True, F32),
    ("span", 70, 2, 16, 31, 1, True, False, BF16),
    ("span", 130, 1, 128, 9, 1, False, True, F32),
    ("key", 20, 2, 16, 5, 1, False, True, F32),
    ("depthwise", 7, 1, 80, 9, 1, False, True, BF16),
    ("depthwise", 130, 1, 48, 4, 2, True, True, F32),
    ("depthwise", 65, 2, 100, 3, 40, False, False, F32),
]
CASE = ("op", "length", "heads", "width", "taps", "dilation", "causal", "packed", "dtype")


@pytest.mark.parametrize(CASE, CASES)
def test_kernels_are_the_definition(
    op, length, heads, width, taps, dilation, causal, packed, dtype
):
    check(op, length, heads, width, taps, dilation, causal, packed, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(CASE, [*CASES, ("dynamic", 130, 1, 128, 9, 1, False, True, BF16)])
def test_on_a_gpu(op, length, heads, width, taps, dilation, causal, packed, dtype):
    check(op, length, heads, width, taps, dilation, causal, packed, dtype, interpret=False)


def test_more_blocks_than_programs_add_up(monkeypatch):
    monkeypatch.setattr(gpu, "PROGRAMS", 2)
    check("span", 129, 2, 16, 3, 1, False, True, F32)


def count_kernels(function, *arrays):
    """Return the number of GPU kernels in a function lowered for CUDA."""
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
    mesh = jax.sharding.AbstractMesh(
        (1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device
    )
    with jax.sharding.use_abstract_mesh(mesh):  # needed by jax 0.12
        lowered = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("__gpu$xla.gpu.triton")


@pytest.mark.parametrize(
    ("heads", "width", "packed", "dtype"), [(6, 64, True, BF16), (3, 48, False, F32)]
)
def test_forward_and_backward_lower_for_cuda(heads, width, packed, dtype):
    ids = jax.ShapeDtypeStruct((2, 512), jnp.int32)
    for op, kernels in (("dynamic", 2), ("depthwise", 2), ("span", 4), ("key", 4)):

        def both(ids, arrays, cotangent, op=op):
            ids = ids if packed else None
            return run(kernel_of(op, ids, offsets_of(9), heads, False), arrays, cotangent)

        shapes = jax.eval_shape(lambda op=op: definitions.draw(op, 2, 512, heads, width, 9, dtype))
        assert count_kernels(both, ids, *shapes) == kernels, op


def test_seeds_as_an_axis_lower_for_cuda():
    """Fine-tuning vmaps over seeds on a GPU."""
    shapes = jax.eval_shape(lambda: definitions.draw("span", 2, 512, 6, 64, 9, BF16))
    many = jax.tree.map(lambda x: jax.ShapeDtypeStruct((5, *x.shape), x.dtype), shapes)
    ids = jax.ShapeDtypeStruct((2, 512), jnp.int32)

    def both(ids, arrays, cotangent):
        return run(kernel_of("span", ids, offsets_of(9), 6, False), arrays, cotangent)

    assert count_kernels(jax.vmap(both, (None, 0, 0)), ids, *many) == 4
