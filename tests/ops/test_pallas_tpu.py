"""TPU kernels without a TPU: numerics in Pallas' interpreter, memory in its TPU mode.

tests/end_to_end/test_tpu_compile.py tests that they compile for TPUs. On a TPU (marker tpu) the
same cases run compiled.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from convbert_jax.ops import partitioning, tpu
from convbert_jax.ops.partitioning import POSITIONS, REPLICATED, ROWS, ROWS_AND_HEADS, Halo
from convbert_jax.ops.tpu import banded, depthwise, layout
from tests.ops import definitions
from tests.ops.definitions import BF16, F32, assert_close, make_mesh, offsets_of, run
from tests.ops.test_convolutions import packed_rows

TOLERANCE = {F32: 6e-6, BF16: 3 * 2**-7}
KERNELS = {
    "dynamic": tpu.dynamic_conv,
    "light": tpu.light_conv,
    "depthwise": tpu.depthwise_conv,
}


@pytest.fixture(autouse=True)
def _looped(request, monkeypatch):
    """Loop over windows; XLA:CPU takes minutes to compile the unrolled interpreter programs."""
    if "tpu" not in request.keywords:
        monkeypatch.setattr(banded, "UNROLLED_WINDOWS", 1)
        monkeypatch.setattr(depthwise, "UNROLLED", 1)
    yield
    # Some of these programs use thousands of memory maps; see tests/conftest.py.
    jax.clear_caches()


def kernel_of(op, ids, offsets, heads, interpret=True):
    ids = None if ids is None else jnp.asarray(ids)
    if op in KERNELS:
        return lambda *arrays: KERNELS[op](*arrays, ids, offsets, interpret)
    return lambda *arrays: tpu.span_dynamic_conv(*arrays, ids, heads, offsets, interpret)


def check(op, taps, batch, length, heads, width, dilation, causal, packed, dtype, interpret=True):
    """Compare a kernel, with NaN in all padding, with the definition."""
    arrays, cotangent = definitions.draw(op, batch, length, heads, width, taps, dtype)
    ids = definitions.segments(batch, length) if packed else None
    offsets = offsets_of(taps, dilation, causal)
    *given, given_cotangent = definitions.spoil([*arrays, cotangent], ids)
    kernel = kernel_of(op, ids, offsets, heads, interpret)
    actual = run(kernel, given, given_cotangent)
    assert jax.eval_shape(kernel, *given).shape == cotangent.shape  # forward only
    assert {x.dtype for x in jax.tree.leaves(actual)} == {jnp.dtype(dtype)}
    expected = definitions.convolve(op, arrays, cotangent, ids, offsets)
    assert_close(actual, expected, TOLERANCE[dtype])
    if ids is not None:
        np.testing.assert_array_equal(np.asarray(actual[0])[ids == 0], 0)


# op, taps, batch, length, heads, width, dilation, causal, packed, dtype
CASES = [
    ("dynamic", 1, 2, 1, 2, 48, 1, False, False, BF16),
    ("dynamic", 2, 2, 7, 2, 64, 1, False, True, F32),
    ("dynamic", 3, 2, 129, 3, 80, 1, False, True, BF16),
    ("dynamic", 9, 2, 128, 4, 48, 1, True, True, F32),
    ("dynamic", 31, 1, 65, 2, 16, 3, True, True, F32),
    ("span", 7, 2, 129, 3, 80, 1, True, True, BF16),
    ("span", 31, 1, 33, 2, 16, 1, False, True, F32),
    ("key", 9, 2, 20, 2, 64, 1, False, False, F32),
    ("token", 5, 1, 20, 2, 64, 1, False, True, F32),
    ("depthwise", 1, 2, 5, 1, 64, 1, False, False, F32),
    ("depthwise", 9, 4, 128, 2, 128, 1, False, True, BF16),
    ("depthwise", 4, 2, 129, 3, 48, 1, True, True, F32),
    ("depthwise", 15, 1, 40, 1, 48, 7, False, True, F32),  # taps span several blocks
    ("depthwise", 31, 3, 16, 1, 128, 1, True, False, BF16),  # taps span the whole row
    ("light", 7, 2, 40, 3, 48, 1, False, True, F32),
    ("light", 31, 1, 129, 2, 64, 1, False, True, BF16),
]
# Rows of several blocks; the interpreter programs are slow to compile.
LONG = [
    ("dynamic", 15, 2, 512, 2, 80, 1, True, True, F32),
    ("dynamic", 9, 1, 1030, 2, 64, 1, False, True, F32),
    ("span", 15, 1, 1030, 2, 128, 1, False, True, BF16),
    ("depthwise", 31, 1, 1030, 1, 80, 2, False, True, F32),
    ("light", 4, 4, 16, 2, 64, 2, True, False, BF16),
]


@pytest.mark.parametrize(
    ("op", "taps", "batch", "length", "heads", "width", "dilation", "causal", "packed", "dtype"),
    [*CASES, *LONG],
)
def test_kernels_are_the_definition(
    op, taps, batch, length, heads, width, dilation, causal, packed, dtype
):
    check(op, taps, batch, length, heads, width, dilation, causal, packed, dtype)


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("op", "taps", "batch", "length", "heads", "width", "dilation", "causal", "packed", "dtype"),
    [
        *CASES,
        *LONG,
        ("dynamic", 9, 4, 128, 6, 64, 1, False, False, BF16),
        ("dynamic", 9, 2, 65, 6, 64, 4, False, True, F32),
        ("dynamic", 31, 2, 129, 2, 64, 1, False, True, BF16),
        ("span", 9, 2, 512, 6, 64, 1, False, True, BF16),
    ],
)
def test_on_a_tpu(op, taps, batch, length, heads, width, dilation, causal, packed, dtype):
    check(op, taps, batch, length, heads, width, dilation, causal, packed, dtype, False)


@pytest.mark.parametrize(
    ("op", "packed"), [("depthwise", True), ("light", False), ("dynamic", True), ("span", False)]
)
def test_rows_too_long_for_the_chip_are_cut(monkeypatch, op, packed):
    """The chunks overlap; values and gradients equal those of the whole row."""
    monkeypatch.setattr(depthwise, "LONGEST", 48)
    monkeypatch.setattr(layout, "longest", lambda *_, **__: 48)
    check(op, 5, 2, 90, 2, 64, 1, False, packed, F32)


def test_taps_beyond_the_row_get_no_gradient():
    check("depthwise", 9, 1, 5, 1, 128, 3, False, False, F32)


@pytest.mark.parametrize("op", ["dynamic", "span"])
def test_memory_of_a_tpu(op):
    """Uninitialized memory contains NaN, and an out-of-bounds access raises."""
    pltpu.reset_tpu_interpret_mode_state()
    check(op, 9, 2, 70, 2, 64, 1, False, True, F32, pltpu.InterpretParams())
    pltpu.reset_tpu_interpret_mode_state()


def test_rotations_in_steps(monkeypatch):
    """TPU v4 rotates in six steps, newer chips in one."""
    monkeypatch.setattr(banded, "TPU_V4", jax.devices()[0].device_kind)
    check("dynamic", 9, 2, 40, 2, 64, 1, False, True, F32)


@pytest.mark.parametrize("op", ["dynamic", "depthwise"])
def test_on_a_mesh(op):
    """Rows and heads are sharded; a depthwise kernel also reads positions of its neighbors."""
    (x, filters), cotangent = definitions.draw(op, 8, 32, 4, 16, 9)
    ids, offsets = np.tile(packed_rows(), (4, 1)), offsets_of(9)

    def run_on_mesh(x, filters):
        rows, of_filters = (POSITIONS, REPLICATED) if op == "depthwise" else (ROWS_AND_HEADS,) * 2
        return partitioning.shard_map_op(
            lambda *arrays: KERNELS[op](*arrays, offsets, True),
            (x, filters, jnp.asarray(ids)),
            (rows, of_filters, POSITIONS if op == "depthwise" else ROWS),
            rows,
            halo=Halo(offsets, read=(0, 2)) if op == "depthwise" else None,
        )

    axis = "sequence" if op == "depthwise" else "tensor"
    with jax.set_mesh(make_mesh(data=2, fsdp=2, **{axis: 2})):
        actual = run(run_on_mesh, (x, filters), cotangent)
    expected = definitions.convolve(op, (x, filters), cotangent, ids, offsets)
    assert_close(actual, expected, TOLERANCE[F32])


def test_seeds_as_an_axis():
    arrays, _ = definitions.draw("dynamic", 2, 20, 2, 16, 9)
    kernel = kernel_of("dynamic", None, offsets_of(9), 2)
    values, filters = arrays
    together = jax.jit(jax.vmap(kernel))(jnp.stack([values, 2 * values]), jnp.stack([filters] * 2))
    np.testing.assert_allclose(together[1], 2 * jax.jit(kernel)(*arrays), atol=1e-5)


# --- Geometry ---


@settings(max_examples=60)
@given(
    length=st.integers(1, 40).map(lambda n: 16 * n),
    heads=st.integers(1, 13),
    width=st.integers(1, 160),
    before=st.integers(0, 47),
    after=st.integers(0, 47),
)
def test_geometry(length, heads, width, before, after):
    """Each tap of each head has its own lane within reach of its window.

    Forward and backward pass use the same windows, which cover the row.
    """
    offsets = tuple(range(-before, after + 1))
    assume(layout.fits(offsets) and (before or not after))  # taps read earlier positions, or only t
    forward = layout.Bands(length, heads, width, offsets, length)
    for found in (forward, forward.opposite):
        lanes = found.lanes()
        assert len(set(lanes)) == len(lanes)
        assert lanes.min() >= 0
        assert lanes.max() < found.slot_lanes
        places = lanes % layout.LANES // layout.WINDOW  # even heads in lanes 0-63, then odd heads
        np.testing.assert_array_equal(places, np.repeat(np.arange(heads) % 2, len(offsets)))
        reach = max(-found.offsets[0], 0), max(found.offsets[-1], 0)
        assert found.halo >= reach[0]
        assert found.halo + found.middle + reach[1] <= layout.WINDOW
        assert found.halo + length + reach[1] <= found.padded_length
        sums = found.same_slot()[lanes % layout.LANES][:, lanes % layout.LANES]
        np.testing.assert_array_equal(sums.sum(axis=1) > 0, True)
        assert found.placing().sum() == found.placing(mirrored=True).sum() == len(lanes)
    assert forward.halo > before  # reversed columns begin at 1
    assert forward.middle == forward.opposite.middle
    assert forward.middle % 16 == 0
    assert forward.middle >= 16
    assert forward.middle * (forward.windows - 1) < length <= forward.middle * forward.windows
    for start, end, pairs in forward.blocks():
        inside = {channel // width for channel in range(start, end)}
        assert {head // 2 for head in inside} == set(pairs)


@given(taps=st.sampled_from((1, 2, 3, 4, 7, 9, 15)))
def test_causal_windows_are_no_smaller(taps):  # not 31: twice the vectors if causal
    centered, causal = (
        layout.Bands(512, 12, 64, offsets_of(taps, causal=c), 512) for c in (False, True)
    )
    assert causal.middle >= centered.middle
    assert causal.vectors <= centered.vectors
    assert causal.opposite.vectors <= centered.opposite.vectors


@given(taps=st.integers(1, 40), dilation=st.integers(1, 30), causal=st.booleans())
def test_groups_of_taps(taps, dilation, causal):
    offsets = offsets_of(taps, dilation=dilation, causal=causal)
    groups = layout.tap_groups(offsets)
    assert tuple(base + inside for base, part in groups for inside in part) == offsets
    assert all(layout.fits(part) for _, part in groups)
