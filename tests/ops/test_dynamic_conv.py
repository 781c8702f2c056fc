"""Dynamic convolution: every form against the definition, the definition against loops."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.ops import depthwise_conv, dispatch, reference, span_dynamic_conv
from convbert_jax.ops.dynamic_conv import IMPLEMENTATIONS, dynamic_conv
from convbert_jax.ops.taps import offsets as offsets_of

# The kernels run on their own devices only: tests/ops/test_pallas_tpu.py and test_pallas_gpu.py.
HERE = ["reference", "xla"]
FAST = ["xla"]


def inputs(seed=0, batch=2, length=16, heads=2, width=8, taps=9, dtype=jnp.float32):
    """Values, softmax-normalized filters, and a cotangent for the output."""
    keys = jax.random.split(jax.random.key(seed), 3)
    shape = (batch, length, heads, width)
    values = jax.random.normal(keys[0], shape).astype(dtype)
    filters = jax.nn.softmax(jax.random.normal(keys[1], (*shape[:3], taps))).astype(dtype)
    return values, filters, jax.random.normal(keys[2], shape).astype(dtype)


def segments(batch, length, seed=0):
    """Rows of a few documents in a random order of lengths; the last row ends in padding."""
    rng = np.random.default_rng(seed)
    starts = rng.random((batch, length)) < 4 / length
    ids = 1 + np.cumsum(starts, axis=1)
    ids[-1, length - length // 3 :] = 0
    return jnp.asarray(ids, jnp.int32)


@functools.partial(jax.jit, static_argnames=("dilation", "causal", "implementation"))
def run(values, filters, cotangent, segment_ids=None, **arguments):
    """Output and both gradients."""
    function = functools.partial(dynamic_conv, segment_ids=segment_ids, **arguments)
    out, back = jax.vjp(function, values, filters)
    return out, *back(cotangent)


def loops(values, filters, ids, dilation, causal):
    batch, length, heads, _ = values.shape
    taps = filters.shape[-1]
    out = np.zeros(values.shape, np.float64)
    for b in range(batch):
        for t in range(length):
            for i in range(taps):
                back = (taps - 1 - i) if causal else (taps // 2 - i)
                s = t - back * dilation
                if not 0 <= s < length:
                    continue
                if ids is not None and (ids[b, s] != ids[b, t] or ids[b, t] == 0):
                    continue
                for h in range(heads):
                    out[b, t, h] += filters[b, t, h, i] * values[b, s, h]
    return out


@settings(deadline=None, max_examples=12, derandomize=True)
@given(
    length=st.integers(1, 12),
    taps=st.integers(1, 7),
    dilation=st.integers(1, 3),
    causal=st.booleans(),
    packed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_reference_is_the_definition(length, taps, dilation, causal, packed, seed):
    values, filters, _ = inputs(seed, length=length, taps=taps, width=3)
    ids = segments(2, length, seed) if packed else None
    offsets = offsets_of(taps, dilation=dilation, causal=causal)
    out = jax.jit(reference.dynamic_conv, static_argnums=3)(values, filters, ids, offsets)
    expected = loops(
        np.asarray(values), np.asarray(filters), None if ids is None else np.asarray(ids),
        dilation, causal,
    )  # fmt: skip
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_reference_is_exact_in_float64():
    values, filters, _ = inputs(1, length=9, taps=5, width=3)
    ids, offsets = segments(2, 9, 1), offsets_of(5)
    exact = [np.asarray(x, np.float64) for x in (values, filters)]
    exact[0] += 1e-9  # what float32 does not have
    with jax.enable_x64(True):
        out = np.asarray(reference.dynamic_conv(*exact, ids, offsets))
        x, of_channels = exact[0].reshape(2, 9, -1), np.tile(exact[1][0, 0, :1].T, (1, 6))
        depthwise = np.asarray(reference.depthwise_conv(x, of_channels, ids, offsets))
    assert out.dtype == np.float64
    expected = loops(*exact, np.asarray(ids), 1, False)
    np.testing.assert_allclose(out, expected, atol=1e-14)
    everywhere = np.broadcast_to(exact[1][:1, :1, :1], exact[1].shape)
    expected = loops(exact[0], everywhere, np.asarray(ids), 1, False)
    np.testing.assert_allclose(depthwise, expected.reshape(x.shape), atol=1e-14)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_hand_written_gradient_is_that_of_autodiff(packed, causal):
    values, filters, cotangent = inputs(length=20)
    ids = segments(2, 20) if packed else None
    offsets = offsets_of(9, dilation=2, causal=causal)
    _, *autodiff = run(
        values, filters, cotangent, ids, dilation=2, causal=causal, implementation="reference"
    )
    by_hand = jax.jit(reference.gradient, static_argnums=3)(
        values, filters, ids, offsets, cotangent
    )
    for expected, actual in zip(autodiff, by_hand, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


# (taps, length, width, dilation, causal, packed): each value of the matrix a few times.
MATRIX = [
    (1, 1, 48, 1, False, False),
    (1, 129, 64, 1, False, True),
    (2, 7, 64, 1, False, True),
    (3, 9, 80, 1, False, True),
    (3, 512, 64, 2, False, False),
    (9, 1, 64, 1, False, True),
    (9, 9, 64, 1, True, True),
    (9, 127, 80, 1, False, True),
    (9, 129, 64, 4, False, True),
    (9, 512, 64, 1, False, True),
    (15, 7, 64, 1, False, False),
    (15, 127, 48, 1, True, False),
    (15, 512, 80, 1, False, True),
]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize(("taps", "length", "width", "dilation", "causal", "packed"), MATRIX)
def test_numerics(implementation, dtype, taps, length, width, dilation, causal, packed):
    values, filters, cotangent = inputs(0, 2, length, 3, width, taps, dtype)
    arguments = dict(
        segment_ids=segments(2, length) if packed else None, dilation=dilation, causal=causal
    )
    actual = run(values, filters, cotangent, **arguments, implementation=implementation)
    # The reference in float32 of the same rounded inputs: what is left is the output's rounding.
    exact = [x.astype(jnp.float32) for x in (values, filters, cotangent)]
    expected = run(*exact, **arguments, implementation="reference")
    relative = 1e-5 if dtype == jnp.float32 else 2**-8
    for ours, wanted, like in zip(actual, expected, (values, values, filters), strict=True):
        assert ours.dtype == like.dtype
        np.testing.assert_allclose(np.asarray(ours, np.float32), wanted, rtol=relative, atol=2e-5)


@pytest.mark.parametrize("implementation", HERE)
class TestProperties:
    @pytest.fixture
    def conv(self, implementation):
        return jax.jit(
            functools.partial(dynamic_conv, implementation=implementation),
            static_argnames=("dilation", "causal"),
        )

    def test_a_delta_filter_is_the_identity(self, conv):
        values, filters, _ = inputs()
        delta = jnp.zeros_like(filters).at[..., 4].set(1)
        out = conv(values, delta)
        np.testing.assert_array_equal(out, values)

    def test_a_delta_on_tap_i_reads_i_minus_the_center_away(self, conv):
        values, filters, _ = inputs()
        delta = jnp.zeros_like(filters).at[..., 7].set(1)
        out = conv(values, delta, dilation=2)
        np.testing.assert_array_equal(out[:, :-6], values[:, 6:])
        np.testing.assert_array_equal(out[:, -6:], 0)

    def test_a_shift_of_the_input_shifts_the_output(self, conv):
        values, filters, _ = inputs(length=16)
        inside = slice(5, 9)
        out = conv(values, filters)
        rolled = conv(jnp.roll(values, 3, axis=1), jnp.roll(filters, 3, axis=1))
        np.testing.assert_allclose(rolled[:, 8:12], out[:, inside], atol=1e-6)

    def test_causal_never_reads_the_future(self, conv):
        values, filters, _ = inputs()
        future = values.at[:, 10:].set(jnp.nan)
        out = conv(future, filters, causal=True)
        same = conv(values, filters, causal=True)
        np.testing.assert_array_equal(out[:, :10], same[:, :10])

    def test_nan_in_other_segments_never_leaks(self, implementation):
        values, filters, cotangent = inputs(length=15)
        ids = jnp.asarray([[1] * 4 + [2] * 5 + [3] * 3 + [0] * 3] * 2)
        outside = (ids != 2)[:, :, None, None]
        clean = run(values, filters, cotangent, segment_ids=ids, implementation=implementation)
        spoiled = [jnp.where(outside, jnp.nan, x) for x in (values, filters, cotangent)]
        dirty = run(*spoiled, segment_ids=ids, implementation=implementation)
        for one, other in zip(clean, dirty, strict=True):
            assert jnp.isfinite(one[:, 4:9]).all()
            np.testing.assert_array_equal(one[:, 4:9], other[:, 4:9])
            np.testing.assert_array_equal(other[:, 12:], 0)  # padding: outputs and gradients 0

    def test_packed_segments_are_what_they_are_alone(self, implementation):
        values, filters, cotangent = inputs(length=15)
        ids = jnp.asarray([[1] * 4 + [2] * 11] * 2)
        packed = run(values, filters, cotangent, segment_ids=ids, implementation=implementation)
        for part in (slice(0, 4), slice(4, 15)):
            alone = run(
                *(x[:, part] for x in (values, filters, cotangent)), implementation=implementation
            )
            for one, other in zip(alone, packed, strict=True):
                np.testing.assert_allclose(other[:, part], one, atol=1e-6)


def test_bfloat16_accumulates_in_float32():
    values = jnp.concatenate([jnp.full((1, 1, 1, 1), 256.0), jnp.ones((1, 8, 1, 1))], axis=1)
    filters = jnp.ones((1, 9, 1, 9), jnp.bfloat16)
    out = dynamic_conv(values.astype(jnp.bfloat16), filters)
    assert float(out[0, 4, 0, 0]) == 264.0  # eight additions of 1 to 256 in bfloat16 would stay 256


def test_sharded_over_the_batch_is_the_same():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    values, filters, cotangent = inputs(batch=8)
    ids = segments(8, 16)
    expected = run(values, filters, cotangent, ids)
    with jax.set_mesh(mesh):
        spec = jax.NamedSharding(mesh, jax.P("data"))
        args = [jax.device_put(x, spec) for x in (values, filters, cotangent)]
        actual = run(*args, ids)
    for one, other in zip(expected, actual, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-6)


VALUES, FILTERS = jnp.zeros((2, 4, 1, 3)), jnp.zeros((2, 4, 1, 9))


@pytest.mark.parametrize(
    ("name", "values", "filters", "arguments"),
    [
        ("values", VALUES[0], FILTERS, {}),
        ("values", VALUES.astype(jnp.int32), FILTERS, {}),
        ("filters", VALUES, FILTERS[:, :3], {}),
        ("filters", VALUES, FILTERS[..., :0], {}),
        ("segment_ids", VALUES, FILTERS, {"segment_ids": jnp.ones((2, 5), jnp.int32)}),
        ("segment_ids", VALUES, FILTERS, {"segment_ids": jnp.ones((2, 4))}),
        ("dilation", VALUES, FILTERS, {"dilation": 0}),
        ("implementation", VALUES, FILTERS, {"implementation": "cuda"}),
        ("implementation", VALUES, FILTERS, {"implementation": "pallas_tpu"}),
        ("implementation", VALUES, FILTERS, {"implementation": "pallas_gpu"}),
    ],
)
def test_errors_name_the_argument(name, values, filters, arguments):
    with pytest.raises(ValueError, match=f"dynamic_conv: {name} is "):
        dynamic_conv(values, filters, **arguments)


@pytest.mark.parametrize("implementation", HERE)
@pytest.mark.parametrize(
    ("taps", "dilation", "causal"), [(9, 1, False), (4, 2, True), (31, 3, False)]
)
def test_one_filter_for_all_positions(implementation, taps, dilation, causal):
    values, filters, cotangent = inputs(taps=taps)
    shared = filters[0, 0]
    arguments = dict(
        segment_ids=segments(*values.shape[:2]), dilation=dilation, causal=causal,
        implementation=implementation,
    )  # fmt: skip
    out, back = jax.vjp(functools.partial(dynamic_conv, **arguments), values, shared)
    everywhere = jnp.broadcast_to(shared, filters.shape)
    wanted, wanted_back = jax.vjp(functools.partial(dynamic_conv, **arguments), values, everywhere)
    np.testing.assert_allclose(out, wanted, atol=2e-6)
    d_values, d_shared = back(cotangent)
    wanted_values, wanted_weights = wanted_back(cotangent)
    np.testing.assert_allclose(d_values, wanted_values, atol=2e-6)
    np.testing.assert_allclose(d_shared, wanted_weights.sum(axis=(0, 1)), atol=1e-4)


def test_auto_says_what_it_takes(caplog):
    dispatch.say.cache_clear()
    with caplog.at_level("INFO", logger="convbert_jax.ops.dispatch"):
        dynamic_conv(VALUES, FILTERS)
        dynamic_conv(VALUES, FILTERS)
    assert [r.message for r in caplog.records] == [
        "dynamic_conv: auto takes xla on cpu; not pallas_tpu: it needs a tpu; "
        "not pallas_gpu: it needs a gpu."
    ]


@pytest.mark.parametrize(
    ("dtype", "capability", "version", "said"),
    [
        (jnp.bfloat16, "9.0", "cuda 13000", "auto takes pallas_gpu on gpu"),
        (jnp.float32, "9.0", "cuda 13000", "not pallas_gpu: it was measured in bfloat16, not in"),
        (jnp.bfloat16, "7.5", "cuda 13000", "it needs compute capability 8.0 or newer, not 7.5"),
        (jnp.bfloat16, "gfx90a", "rocm 6", "it was measured on NVIDIA's GPUs alone"),
    ],
)
@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("dynamic_conv", IMPLEMENTATIONS),
        ("span_dynamic_conv", span_dynamic_conv.IMPLEMENTATIONS),
        ("depthwise_conv", depthwise_conv.IMPLEMENTATIONS),
    ],
)
def test_auto_takes_the_kernels_where_a_gpu_has_measured_them(
    caplog, monkeypatch, name, table, dtype, capability, version, said
):
    client = types.SimpleNamespace(platform_version=version)
    device = types.SimpleNamespace(
        client=client, compute_capability=capability, device_kind="H100", platform="cpu"
    )
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    dispatch.say.cache_clear()
    with caplog.at_level("INFO", logger="convbert_jax.ops.dispatch"):
        dispatch.choose(name, "auto", table, jnp.zeros((1, 4, 2, 8), dtype))
    assert said in caplog.text


def test_vmap_and_checkpoint():
    values, filters, cotangent = inputs()
    many = [jnp.stack([x, 2 * x]) for x in (values, filters)]
    out = jax.vmap(dynamic_conv)(*many)
    np.testing.assert_allclose(out[1], 4 * dynamic_conv(values, filters), atol=1e-5)

    def total(function):
        return jax.grad(lambda v, w: jnp.vdot(function(v, w), cotangent), argnums=(0, 1))

    plain = total(dynamic_conv)(values, filters)
    again = total(jax.checkpoint(dynamic_conv))(values, filters)
    for one, other in zip(plain, again, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
