"""TPU kernels without a TPU: numerics in Pallas' interpreter, semantics in that of TPU memory.

Whether they compile for TPUs is tested in tests/end_to_end/test_tpu_compile.py; on a TPU (marker
tpu) the same numerics run not interpreted.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from convbert_jax.ops import reference, tpu, xla
from convbert_jax.ops.mesh import division
from convbert_jax.ops.mesh.division import ROWS, ROWS_AND_HEADS
from convbert_jax.ops.taps import offsets as offsets_of
from convbert_jax.ops.tpu import bands, block_sizes, dealing, depthwise, windows
from tests.ops.test_dynamic_conv import inputs, segments
from tests.ops.test_span_dynamic_conv import definition

F32, BF16 = jnp.float32, jnp.bfloat16


@pytest.fixture(autouse=True)
def _looped(request, monkeypatch):
    """Windows in loops: unrolled, the interpreter's programs take XLA:CPU minutes to compile."""
    if "unrolled" not in request.fixturenames and "tpu" not in request.keywords:
        monkeypatch.setattr(windows, "UNROLLED_WINDOWS", 1)
        monkeypatch.setattr(dealing, "UNROLLED", 1)
    yield
    # Some of these programs hold thousands of memory maps; see tests/conftest.py.
    jax.clear_caches()


@pytest.fixture
def unrolled():
    """As on a TPU."""


def gradients(function, arrays, cotangent):
    out, back = jax.vjp(function, *arrays)
    return out, *back(cotangent)


@functools.partial(jax.jit, static_argnames=("offsets", "interpret"))
def run_plain(values, filters, cotangent, ids, offsets, interpret=True):
    def function(values, filters):
        return tpu.dynamic_conv(values, filters, ids, offsets, interpret)

    return gradients(function, (values, filters), cotangent)


@functools.partial(jax.jit, static_argnames=("offsets",))
def by_reference(values, filters, cotangent, ids, offsets):
    exact = [x.astype(F32) for x in (values, filters)]
    function = functools.partial(reference.dynamic_conv, segment_ids=ids, offsets=offsets)
    return gradients(function, exact, cotangent.astype(F32))


def assert_close(actual, expected, dtype, scale=1.0):
    """Within the rounding of `dtype`, relative to the largest number of an array."""
    relative = {F32: 2e-6, BF16: 2**-7}[dtype] * scale
    for ours, wanted in zip(actual, expected, strict=True):
        ours, wanted = np.asarray(ours, np.float64), np.asarray(wanted, np.float64)
        assert np.isfinite(ours).all()
        np.testing.assert_allclose(ours, wanted, atol=relative * max(1.0, np.abs(wanted).max()))


# (taps, batch, length, heads, width, dilation, causal, packed): each value a few times.
MATRIX = [
    (1, 2, 1, 2, 48, 1, False, False),
    (2, 2, 7, 2, 64, 1, False, True),
    (3, 2, 129, 3, 80, 1, False, True),
    (9, 2, 128, 4, 48, 1, True, True),
    (31, 1, 65, 2, 16, 3, True, True),
]
# Interpreted, each of these takes XLA:CPU ten seconds to compile.
LONG = [
    (7, 4, 127, 1, 128, 1, False, True),
    (15, 2, 512, 2, 80, 1, True, True),
    (9, 1, 1030, 2, 64, 1, False, True),
    (31, 1, 1030, 2, 48, 2, False, True),
]
ON_A_TPU = [
    (9, 4, 128, 6, 64, 1, False, False),
    (9, 2, 65, 6, 64, 4, False, True),
    (15, 2, 7, 2, 64, 1, False, True),
    (31, 2, 129, 2, 64, 1, False, True),
    (9, 2, 512, 6, 64, 1, False, True),
    (9, 1, 1300, 2, 64, 1, False, True),
]


@pytest.mark.parametrize(
    ("taps", "batch", "length", "heads", "width", "dilation", "causal", "packed", "dtype"),
    [
        *((*shape, F32) for shape in MATRIX),
        *((*shape, BF16) for shape in MATRIX[:2]),
        *(pytest.param(*shape, BF16, marks=pytest.mark.slow) for shape in MATRIX[2:]),
        *(pytest.param(*shape, F32, marks=pytest.mark.slow) for shape in LONG),
    ],
)
def test_plain(taps, batch, length, heads, width, dilation, causal, packed, dtype):
    values, filters, cotangent = inputs(0, batch, length, heads, width, taps, dtype)
    ids = segments(batch, length) if packed else None
    offsets = offsets_of(taps, dilation=dilation, causal=causal)
    actual = run_plain(values, filters, cotangent, ids, offsets)
    expected = by_reference(values, filters, cotangent, ids, offsets)
    assert [x.dtype for x in actual] == [dtype] * 3
    assert_close(actual, expected, dtype)


def span_inputs(batch, length, heads, width, taps, dtype):
    keys = jax.random.split(jax.random.key(0), 6)
    shape = (batch, length, heads * width)
    arrays = [jax.random.normal(key, shape) for key in keys[:3]]
    projection = jax.random.normal(keys[3], (heads * width, heads * taps)) * 0.1
    bias = jax.random.normal(keys[4], (heads * taps,))
    cotangent = jax.random.normal(keys[5], shape)
    return [x.astype(dtype) for x in (*arrays, projection, bias)], cotangent.astype(dtype)


@functools.partial(jax.jit, static_argnames=("heads", "offsets", "interpret"))
def run_span(arrays, cotangent, ids, heads, offsets, interpret=True):
    def function(*arrays):
        return tpu.span_dynamic_conv(*arrays, ids, heads, offsets, interpret)

    return gradients(function, arrays, cotangent)


@functools.partial(jax.jit, static_argnames=("heads", "offsets"))
def span_by_definition(arrays, cotangent, ids, heads, offsets):
    def function(*arrays):
        return definition(*arrays, heads, ids, offsets)

    exact = [x.astype(F32) for x in arrays]
    return gradients(function, exact, cotangent.astype(F32))


@pytest.mark.parametrize(
    ("taps", "batch", "length", "heads", "width", "dilation", "causal", "packed", "dtype"),
    [
        (9, 2, 40, 4, 48, 1, False, False, F32),
        (7, 2, 129, 3, 80, 1, True, True, BF16),
        (31, 1, 33, 2, 16, 1, False, True, F32),
        pytest.param(9, 2, 40, 4, 48, 1, False, False, BF16, marks=pytest.mark.slow),
        pytest.param(7, 2, 129, 3, 80, 1, True, True, F32, marks=pytest.mark.slow),
        pytest.param(9, 1, 512, 2, 64, 1, False, True, F32, marks=pytest.mark.slow),
        pytest.param(15, 1, 1030, 2, 128, 1, False, True, BF16, marks=pytest.mark.slow),
    ],
)
def test_span(taps, batch, length, heads, width, dilation, causal, packed, dtype):
    arrays, cotangent = span_inputs(batch, length, heads, width, taps, dtype)
    ids = segments(batch, length) if packed else None
    offsets = offsets_of(taps, dilation=dilation, causal=causal)
    actual = run_span(arrays, cotangent, ids, heads, offsets)
    expected = span_by_definition(arrays, cotangent, ids, heads, offsets)
    assert [x.dtype for x in actual] == [dtype] * 6
    assert_close(actual, expected, dtype, scale=3.0)


@pytest.mark.parametrize("dtype", [F32, pytest.param(BF16, marks=pytest.mark.slow)])
def test_filters_of_the_query_alone(dtype):
    """What a span key of ones gives, without one."""
    (query, key, *rest), cotangent = span_inputs(2, 40, 4, 48, 7, dtype)
    given = (cotangent, segments(2, 40), 4, offsets_of(7))
    expected = span_by_definition([query, jnp.ones_like(key), *rest], *given)
    actual = run_span([query, None, *rest], *given)
    assert actual[2] is None
    assert_close([*actual[:2], *actual[3:]], [*expected[:2], *expected[3:]], dtype, scale=3.0)
    out, *others = span_by_definition([query, jnp.ones_like(key), query, *rest[1:]], *given)
    d_query, _, d_values, *others = others
    actual = run_span([query, None, None, *rest[1:]], *given)
    assert actual[2] is actual[3] is None
    expected = [out, d_query + d_values, *others]
    assert_close([*actual[:2], *actual[4:]], expected, dtype, scale=3.0)


@pytest.mark.parametrize(
    ("taps", "batch", "length", "channels", "dilation", "causal", "packed", "dtype"),
    [
        (1, 2, 5, 64, 1, False, False, F32),
        (9, 4, 128, 256, 1, False, True, BF16),
        (4, 2, 129, 144, 1, True, True, F32),
        (9, 2, 7, 128, 1, False, False, BF16),
        (15, 1, 40, 48, 7, False, True, F32),  # the taps reach over several runs of positions
        (31, 3, 16, 128, 1, True, False, BF16),  # and over the whole row
        pytest.param(9, 2, 512, 128, 1, False, True, BF16, marks=pytest.mark.slow),
        pytest.param(31, 1, 1030, 80, 2, False, True, F32, marks=pytest.mark.slow),
    ],
)
def test_depthwise(taps, batch, length, channels, dilation, causal, packed, dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    x, cotangent = (jax.random.normal(k, (batch, length, channels)).astype(dtype) for k in keys[:2])
    filters = jax.random.normal(keys[2], (taps, channels)).astype(dtype)
    ids = segments(batch, length) if packed else None

    @functools.partial(jax.jit, static_argnums=0)
    def run(function, *arrays):
        return gradients(lambda x, f: function(x, f, ids), arrays[:2], arrays[2])

    offsets = offsets_of(taps, dilation=dilation, causal=causal)

    def ours(x, filters, ids):
        return tpu.depthwise_conv(x, filters, ids, offsets, True)

    def by_xla(x, filters, ids):
        return xla.depthwise_conv(x, filters, ids, offsets)

    exact = [x.astype(F32) for x in (x, filters, cotangent)]
    actual = run(ours, x, filters, cotangent)
    expected = run(by_xla, *exact)
    assert [x.dtype for x in actual] == [dtype] * 3
    assert_close(actual, expected, dtype)


@pytest.mark.parametrize(
    ("taps", "batch", "length", "heads", "width", "dilation", "causal", "packed", "dtype"),
    [
        (7, 2, 40, 3, 48, 1, False, True, F32),
        pytest.param(4, 4, 16, 2, 64, 2, True, False, BF16, marks=pytest.mark.slow),
        pytest.param(31, 1, 129, 2, 64, 1, False, True, BF16, marks=pytest.mark.slow),
    ],
)
def test_light(taps, batch, length, heads, width, dilation, causal, packed, dtype):
    """One filter for each head is the same filter at each position; gradients summed over them."""
    values, filters, cotangent = inputs(0, batch, length, heads, width, taps, dtype)
    filters, ids = filters[0, 0], segments(batch, length) if packed else None
    offsets = offsets_of(taps, dilation=dilation, causal=causal)

    @jax.jit
    def ours(values, filters):
        return gradients(
            lambda v, f: tpu.light_conv(v, f, ids, offsets, True), (values, filters), cotangent
        )

    everywhere = jnp.broadcast_to(filters, (batch, length, *filters.shape))
    *expected, d_filters = by_reference(values, everywhere, cotangent, ids, offsets)
    actual = ours(values, filters)
    assert [x.dtype for x in actual] == [dtype] * 3
    assert_close(actual, [*expected, d_filters.sum((0, 1))], dtype)


TOO_LONG = {
    "depthwise": (tpu.depthwise_conv, xla.depthwise_conv, [(2, 90, 128), (5, 128)]),
    "light": (
        tpu.light_conv,
        lambda values, filters, ids, offsets: xla.dynamic_conv(
            values, jnp.broadcast_to(filters, (2, 90, *filters.shape)), ids, offsets
        ),
        [(2, 90, 2, 64), (2, 5)],
    ),
    "plain": (tpu.dynamic_conv, xla.dynamic_conv, [(2, 90, 2, 64), (2, 90, 2, 5)]),
    "span": (
        lambda *a: tpu.span_dynamic_conv(*a[:-2], 2, *a[-2:]),
        lambda *a: xla.span_dynamic_conv(*a[:-1], 2, a[-1]),
        [(2, 90, 128)] * 3 + [(128, 10), (10,)],
    ),
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("op", TOO_LONG)
def test_rows_too_long_for_the_chip_are_cut(monkeypatch, op, packed):
    """Into pieces that overlap; values and gradients are those of the whole row."""
    monkeypatch.setattr(depthwise, "LONGEST", 48)
    monkeypatch.setattr(block_sizes, "longest", lambda *_, **__: 48)
    kernel, plainly, shapes = TOO_LONG[op]
    arrays = [
        jax.random.normal(jax.random.key(i), shape) * (0.1 if len(shape) < 3 else 1)
        for i, shape in enumerate(shapes)
    ]
    ids, offsets = segments(2, 90) if packed else None, offsets_of(5)

    def ours(*arrays):
        return kernel(*arrays, ids, offsets, True)

    def by_xla(*arrays):
        return plainly(*arrays, ids, offsets)

    run = jax.jit(lambda function, *a: gradients(function, a, a[0]), static_argnums=0)
    assert_close(run(ours, *arrays), run(by_xla, *arrays), F32)


def test_taps_beyond_the_row():
    """They are left out of the kernel, and their filters get no gradient."""
    x = jax.random.normal(jax.random.key(0), (1, 5, 128))
    filters, offsets = jax.random.normal(jax.random.key(1), (9, 128)), offsets_of(9, dilation=3)
    interpreted = functools.partial(tpu.depthwise_conv, interpret=True)
    actual, expected = (
        gradients(lambda x, f, conv=conv: conv(x, f, None, offsets), (x, filters), x)
        for conv in (interpreted, xla.depthwise_conv)
    )
    assert_close(actual, expected, F32)
    np.testing.assert_array_equal(actual[2][:3], 0)


class TestNothingLeaks:
    """What padding holds, NaN too, reaches no output and no gradient; segments stay apart."""

    ids = jnp.asarray([[1] * 20 + [2] * 30 + [0] * 14, [5] * 64])

    def test_plain(self):
        arrays = inputs(0, 2, 64, 2, 64)
        dirty = [jnp.where((self.ids == 0)[..., None, None], jnp.nan, x) for x in arrays]
        clean = run_plain(*arrays, self.ids, offsets_of(9))
        for one, other in zip(clean, run_plain(*dirty, self.ids, offsets_of(9)), strict=True):
            np.testing.assert_array_equal(other[0, :50], one[0, :50])
            np.testing.assert_array_equal(other[0, 50:], 0)
            np.testing.assert_array_equal(other[1], one[1])

    def test_span(self):
        arrays, cotangent = span_inputs(2, 64, 2, 64, 9, F32)

        def spoil(x):
            return jnp.where((self.ids == 0)[..., None], jnp.nan, x)

        dirty = [*map(spoil, arrays[:3]), *arrays[3:]]
        clean = run_span(arrays, cotangent, self.ids, 2, offsets_of(9))
        spoiled = run_span(dirty, spoil(cotangent), self.ids, 2, offsets_of(9))
        for one, other in zip(clean[:4], spoiled[:4], strict=True):
            np.testing.assert_array_equal(other[0, :50], one[0, :50])
            np.testing.assert_array_equal(other[0, 50:], 0)
        for one, other in zip(clean[4:], spoiled[4:], strict=True):
            np.testing.assert_allclose(other, one, atol=1e-5)

    def test_depthwise(self):
        keys = jax.random.split(jax.random.key(0), 2)
        x, filters = jax.random.normal(keys[0], (2, 64, 64)), jax.random.normal(keys[1], (9, 64))
        dirty = jnp.where((self.ids == 0)[..., None], jnp.nan, x)

        @jax.jit
        def run(x):
            def conv(x, filters):
                offsets = offsets_of(9)
                return tpu.depthwise_conv(x, filters, self.ids, offsets, True)

            return gradients(conv, (x, filters), x)

        clean = run(x)
        for one, other in zip(clean[:2], run(dirty)[:2], strict=True):
            np.testing.assert_array_equal(other[0, :50], one[0, :50])
            np.testing.assert_array_equal(other[0, 50:], 0)
        np.testing.assert_allclose(run(dirty)[2], clean[2], atol=1e-5)


@settings(deadline=None)
@given(
    length=st.integers(1, 40).map(lambda n: 16 * n),
    heads=st.integers(1, 13),
    width=st.integers(1, 160),
    before=st.integers(0, 47),
    after=st.integers(0, 47),
)
def test_geometry(length, heads, width, before, after):
    """Every tap of every head has a lane of its own, in reach of its window; both directions walk
    the same windows, which cover a row.
    """
    offsets = tuple(range(-before, after + 1))
    assume(bands.fits(offsets) and (before or not after))  # taps read what precedes, or only t
    forward = bands.Bands(length, heads, width, offsets, length)
    for found in (forward, forward.opposite):
        lanes = found.lanes()
        assert len(set(lanes)) == len(lanes)
        assert lanes.min() >= 0
        assert lanes.max() < found.slot_lanes
        places = lanes % bands.LANES // bands.WINDOW  # even heads in lanes 0-63, odd ones after
        np.testing.assert_array_equal(places, np.repeat(np.arange(heads) % 2, len(offsets)))
        reach = max(-found.offsets[0], 0), max(found.offsets[-1], 0)
        assert found.halo >= reach[0]
        assert found.halo + found.middle + reach[1] <= bands.WINDOW
        assert found.halo + length + reach[1] <= found.padded_length
        sums = found.same_slot()[lanes % bands.LANES][:, lanes % bands.LANES]
        np.testing.assert_array_equal(sums.sum(axis=1) > 0, True)
        assert found.placing().sum() == found.placing(mirrored=True).sum() == len(lanes)
    assert forward.halo > before  # columns that run backwards begin at 1
    assert forward.middle == forward.opposite.middle
    assert forward.middle % 16 == 0
    assert forward.middle >= 16
    assert forward.middle * (forward.windows - 1) < length <= forward.middle * forward.windows
    for start, end, pairs in forward.blocks():
        inside = {channel // width for channel in range(start, end)}
        assert {head // 2 for head in inside} == set(pairs)


@given(taps=st.sampled_from((1, 2, 3, 4, 7, 9, 15)))
def test_causal_windows_are_no_smaller(taps):  # 31 taps need twice the vectors
    centered, causal = (
        bands.Bands(512, 12, 64, offsets_of(taps, causal=c), 512) for c in (False, True)
    )
    assert causal.middle >= centered.middle
    assert causal.vectors <= centered.vectors
    assert causal.opposite.vectors <= centered.opposite.vectors


@given(taps=st.integers(1, 40), dilation=st.integers(1, 30), causal=st.booleans())
def test_groups_of_taps(taps, dilation, causal):
    offsets = offsets_of(taps, dilation=dilation, causal=causal)
    groups = bands.tap_groups(offsets)
    assert tuple(base + inside for base, part in groups for inside in part) == offsets
    assert all(bands.fits(part) for _, part in groups)


def test_rotations_in_steps(monkeypatch):
    """What TPU v4 does in six steps is what the others do in one."""
    monkeypatch.setattr(windows, "TPU_V4", jax.devices()[0].device_kind)
    values, filters, cotangent = inputs(0, 2, 40, 2, 64)
    actual = run_plain(values, filters, cotangent, segments(2, 40), offsets_of(9))
    expected = by_reference(values, filters, cotangent, segments(2, 40), offsets_of(9))
    assert_close(actual, expected, F32)


@pytest.fixture
def tpu_interpreter():
    pltpu.reset_tpu_interpret_mode_state()
    yield pltpu.InterpretParams()
    pltpu.reset_tpu_interpret_mode_state()


def test_memory_of_a_tpu(tpu_interpreter):
    """Memory that nothing was written to holds NaN, and what is out of bounds raises."""
    values, filters, cotangent = inputs(0, 2, 70, 2, 64)
    ids = segments(2, 70)
    actual = run_plain(values, filters, cotangent, ids, offsets_of(9), tpu_interpreter)
    assert_close(actual, by_reference(values, filters, cotangent, ids, offsets_of(9)), F32)


def test_span_in_the_memory_of_a_tpu(tpu_interpreter):
    arrays, cotangent = span_inputs(2, 70, 2, 64, 9, F32)
    ids = segments(2, 70)
    actual = run_span(arrays, cotangent, ids, 2, offsets_of(9), tpu_interpreter)
    assert_close(
        actual, span_by_definition(arrays, cotangent, ids, 2, offsets_of(9)), F32, scale=3.0
    )


@pytest.mark.parametrize("axes", [("data", "fsdp"), ("data", "tensor")])
def test_on_a_mesh(axes):
    """Each device gets its rows and, over `tensor`, its heads."""
    values, filters, cotangent = inputs(0, 8, 32, 4, 16)
    ids = segments(8, 32)

    def kernel(values, filters, ids):
        return division.over_mesh(
            lambda *a: tpu.dynamic_conv(*a, offsets_of(9), True),
            (values, filters, ids),
            (ROWS_AND_HEADS, ROWS_AND_HEADS, ROWS),
            ROWS_AND_HEADS,
        )

    mesh = jax.make_mesh((4, 2), axes, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        actual = jax.jit(lambda v, w: gradients(lambda v, w: kernel(v, w, ids), (v, w), cotangent))(
            values, filters
        )
    assert_close(actual, by_reference(values, filters, cotangent, ids, offsets_of(9)), F32)


@pytest.mark.slow
def test_vmap_and_checkpoint():
    values, filters, cotangent = inputs(0, 2, 20, 2, 16)

    def run(values, filters):
        return tpu.dynamic_conv(values, filters, None, offsets_of(9), True)

    wanted = xla.dynamic_conv(values, filters, None, offsets_of(9))
    many = jax.vmap(run)(jnp.stack([values, 2 * values]), jnp.stack([filters, filters]))
    np.testing.assert_allclose(many[1], 2 * wanted, atol=1e-5)
    plain = gradients(run, (values, filters), cotangent)
    again = gradients(jax.checkpoint(run), (values, filters), cotangent)
    for one, other in zip(plain, again, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.tpu
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    ("taps", "batch", "length", "heads", "width", "dilation", "causal", "packed"),
    [*MATRIX, *LONG, *ON_A_TPU],
)
def test_on_a_tpu(dtype, taps, batch, length, heads, width, dilation, causal, packed):
    values, filters, cotangent = inputs(0, batch, length, heads, width, taps, dtype)
    ids = segments(batch, length) if packed else None
    offsets = offsets_of(taps, dilation=dilation, causal=causal)
    actual = run_plain(values, filters, cotangent, ids, offsets, False)
    assert_close(actual, by_reference(values, filters, cotangent, ids, offsets), dtype)
