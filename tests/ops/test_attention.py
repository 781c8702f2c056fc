"""XLA and kernel attention against the definition, and the choice of implementation."""

import functools
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.ops import attention as op
from convbert_jax.ops import dispatch
from convbert_jax.ops.attention import attention
from convbert_jax.ops.nn import Dropout, softmax
from tests.ops import definitions
from tests.ops.definitions import BF16, F32, assert_close, make_mesh, run
from tests.ops.test_convolutions import packed_rows
from tests.refusals import refused

TOLERANCE = {F32: 5e-6, BF16: 1.6e-2}
splash = functools.partial(op.splash, interpret=True)


def draw(length, keys=None, heads=2, width=8, dtype=F32, batch=2):
    """Return query, key, value and a cotangent of the output."""
    own, other = ((batch, n, heads, width) for n in (length, keys or length))
    return definitions.normal(0, own, other, other, own, dtype=dtype)


def documents(length):
    """Return a row of one document and padding, and a row of three documents and padding."""
    positions = np.arange(length)
    rows = np.stack([np.ones(length), 1 + 3 * positions // length])
    return np.where(positions < length - 9, rows, 0).astype(np.int32)


def ids_of(kind, length, keys):
    """Segments of queries and keys for "none", "packed" or "silent" (some queries see no key)."""
    if kind == "none":
        return None, None
    ids, key_ids = documents(length), documents(keys)
    return (np.where(np.arange(length) < 10, 9, ids) if kind == "silent" else ids), key_ids


def check(form, arrays, kind, causal, dtype=F32, window=0):
    """Compare output and gradients of an implementation with the definition."""
    *arrays, cotangent = arrays
    length, keys = arrays[0].shape[1], arrays[1].shape[1]
    ids, key_ids = ids_of(kind, length, keys)
    seen = definitions.visible(ids, key_ids, (length, keys), causal, window)
    expected = definitions.attend(*arrays, cotangent, seen)
    given = [None if x is None else jnp.asarray(x) for x in (ids, key_ids)]
    if keys == length and kind != "silent":
        given[1] = given[0]

    def attend(*arrays):
        return form(*arrays, *given, causal, window)

    actual = run(attend, arrays, cotangent)
    assert {x.dtype for x in actual} == {jnp.dtype(dtype)}
    assert_close(actual, expected, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("length", "keys", "kind", "causal", "window", "dtype"),
    [
        (24, 24, "packed", False, 0, F32),
        (24, 24, "packed", True, 0, BF16),
        (16, 40, "silent", False, 0, F32),
        (40, 16, "packed", True, 0, F32),
        (24, 24, "none", True, 3, F32),
        (24, 24, "packed", False, 5, F32),
        (24, 24, "packed", False, 7, F32),
        (24, 24, "packed", True, 5, BF16),
        (24, 24, "silent", False, 2, F32),
        (1, 24, "none", False, 0, BF16),
    ],
)
def test_the_form_of_xla_is_the_definition(length, keys, kind, causal, window, dtype):
    check(op.xla, draw(length, keys, dtype=dtype), kind, causal, dtype, window)


@pytest.mark.parametrize(
    ("length", "keys", "width", "kind", "causal", "window", "dtype"),
    [
        (128, 128, 48, "packed", False, 0, F32),
        (256, 256, 64, "none", True, 0, BF16),
        (128, 384, 64, "silent", False, 0, F32),
        (256, 256, 64, "silent", True, 0, F32),
        (384, 384, 64, "packed", False, 60, F32),
        (384, 384, 64, "none", True, 60, F32),
    ],
)
def test_splash_is_the_definition(length, keys, width, kind, causal, window, dtype):
    check(splash, draw(length, keys, width=width, dtype=dtype), kind, causal, dtype, window)


@pytest.mark.gpu
@pytest.mark.parametrize(("keys", "causal"), [(256, False), (256, True), (384, False)])
def test_cudnn_is_the_definition(keys, causal):
    check(op.cudnn, draw(256, keys, width=64, dtype=BF16), "packed", causal, BF16)


@pytest.mark.parametrize(
    ("form", "causal", "sizes"),
    [
        ("xla", True, {"tensor": 2, "sequence": 2}),
        ("splash", False, {"data": 2, "tensor": 2, "sequence": 2}),
        ("splash", True, {"fsdp": 2, "sequence": 2}),
        ("pallas_tpu", True, {"tensor": 2, "sequence": 2}),
    ],
)
def test_rows_and_heads_divided_over_devices(form, causal, sizes):
    length = 32 if form == "xla" else 256
    *arrays, cotangent = draw(length, width=4 if form == "xla" else 64)
    ids = np.repeat(packed_rows(), length // 32, axis=1)
    seen = definitions.visible(ids, ids, (length, length), causal)
    expected = definitions.attend(*arrays, cotangent, seen)
    function = getattr(op, form)
    if form != "xla":
        function = functools.partial(function, interpret=True)

    def attend(*arrays):
        return function(*arrays, jnp.asarray(ids), jnp.asarray(ids), causal, 0)

    with jax.set_mesh(make_mesh(**sizes)):
        assert_close(run(attend, arrays, cotangent), expected, TOLERANCE[F32])


def test_missing_segments_are_one_segment():
    query, key, value, _ = draw(16, 40)
    ones = {"segment_ids": jnp.ones((2, 16), int), "key_segment_ids": jnp.ones((2, 40), int)}
    wanted = attention(query, key, value, **ones)
    np.testing.assert_array_equal(attention(query, key, value), wanted)
    for name, ids in ones.items():
        np.testing.assert_array_equal(attention(query, key, value, **{name: ids}), wanted)
    ids = jnp.asarray(documents(16))  # with equal lengths, keys have the segments of queries
    equal = draw(16)[:3]
    wanted = attention(*equal, segment_ids=ids, key_segment_ids=ids)
    np.testing.assert_array_equal(attention(*equal, segment_ids=ids), wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_weights_and_scores(causal):
    """Weights sum to 1, or to 0 without a visible key; masked scores are 0."""
    query, key, _, _ = draw(16, 40)
    ids, key_ids = ids_of("silent", 16, 40)
    seen = definitions.visible(ids, key_ids, (16, 40), causal)
    given = {"segment_ids": jnp.asarray(ids), "causal": causal}
    weights = op.attention_weights(query, key, key_segment_ids=jnp.asarray(key_ids), **given)
    places = np.broadcast_to(np.eye(40)[None, :, None], (2, 40, 2, 40))
    expected, *_ = definitions.attend(query, key, places, np.zeros((2, 16, 2, 40)), seen)
    np.testing.assert_allclose(weights, expected.swapaxes(1, 2), atol=1e-6)
    key = key[:, :16]
    seen = definitions.visible(ids, ids, (16, 16), causal)
    scores = np.einsum("blhd,bshd->bhls", query, key) / 8**0.5
    found = op.attention_scores(query, key, **given)
    np.testing.assert_allclose(found, np.where(seen, scores, 0), atol=1e-5)


@pytest.mark.parametrize(("platform", "dtype"), [("cpu", F32), ("tpu", BF16)])
def test_dropout_is_the_definition(platform, dtype, monkeypatch):
    """Covers weights of 0: those of masked keys, and one that underflows."""
    on(monkeypatch, platform)
    *arrays, cotangent = draw(24, width=16, dtype=dtype)
    arrays[0], arrays[1] = arrays[0].at[0, 3].set(9), arrays[1].at[0, 5].set(-9)
    ids = documents(24)
    kept = np.random.default_rng(1).random((2, 2, 24, 24)) < 0.7
    seen = definitions.visible(ids, ids, (24, 24), causal=False)
    of_keys = kept.swapaxes(2, 3) if platform == "tpu" else kept  # drawn as [keys, queries]
    expected = definitions.attend(*arrays, cotangent, seen, 1.5 * of_keys)

    def dropping(*arrays):
        ids_of_both = [jnp.asarray(ids)] * 2
        return op.xla(*arrays, *ids_of_both, False, 0, drop=Given(jnp.asarray(kept)))

    assert_close(run(dropping, arrays, cotangent), expected, TOLERANCE[dtype])


class Given(Dropout):
    """Dropout that keeps the given entries, scaled by 1.5."""

    factor = 1.5

    def __init__(self, kept):
        object.__setattr__(self, "given", kept)

    def draw(self, shape):
        assert shape == self.given.shape
        return self.given


def test_dropout_keeps_one_array_of_all_weights():
    """Autodiff would keep three: weights, mask and dropped weights."""
    *arrays, _ = draw(64)
    marks = jnp.ones((2, 2, 64, 64), bool)

    def dropping(*arrays):
        return op.xla(*arrays, None, None, False, 0, drop=Given(marks))

    kept = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(dropping, *a)[1], *arrays))
    assert [x.dtype for x in kept if x.shape == marks.shape] == [jnp.float32]


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_attention_to_keys_that_decoding_kept(platform, queries, monkeypatch):
    monkeypatch.setattr(dispatch, "platform", lambda: platform)
    query, key, value, _ = draw(queries, 11, batch=3)
    seen = np.random.default_rng(0).random((3, 1, queries, 11)) < 0.6
    seen[..., 0] = True
    wanted, *_ = definitions.attend(query, key, value, np.zeros(query.shape), seen)
    found = op.decode_attention(
        query.swapaxes(1, 2), key.transpose(0, 2, 3, 1), value.swapaxes(1, 2), jnp.asarray(seen)
    )
    np.testing.assert_allclose(found.swapaxes(1, 2), wanted, atol=1e-6)


@pytest.mark.parametrize("visible", [None, np.asarray([[True, False, True], [False] * 3])])
def test_softmax_of_large_logits(visible):
    """If nothing is visible, output and gradient are 0."""
    logits = jnp.asarray([[1e30, 1e30, -1e30], [3e38, -3e38, 0.0]])
    out, back = jax.vjp(lambda x: softmax(x, visible, jnp.float32), logits)
    wanted = [[0.5, 0.5, 0], [1, 0, 0]] if visible is None else [[1, 0, 0], [0, 0, 0]]
    np.testing.assert_allclose(out, wanted, atol=1e-7)
    wanted = [[0.25, -0.25, 0], [0, 0, 0]] if visible is None else np.zeros((2, 3))
    np.testing.assert_allclose(back(jnp.asarray([[1.0, 0, 0]] * 2))[0], wanted, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("key", {"key": (2, 16, 3, 64)}),
        ("value", {"value": (2, 17, 2, 64)}),
        ("segment_ids", {"segment_ids": (2, 5)}),
        ("key_segment_ids", {"key_segment_ids": (2, 5)}),
    ],
)
def test_errors_name_the_argument(name, change):
    shapes = dict.fromkeys(("query", "key", "value"), (2, 16, 2, 64)) | change
    with refused(ValueError, f"attention: {name} ", list(change[name])):
        attention(**{name: jnp.zeros(shape, int) for name, shape in shapes.items()})


# --- Choice of implementation ---


def on(monkeypatch, platform, version="cuda 12"):
    """Simulate `platform`, without devices to verify a kernel on."""
    client = types.SimpleNamespace(platform_version=version)
    monkeypatch.setattr(dispatch, "platform", lambda: platform)
    device = types.SimpleNamespace(client=client, device_kind="TPU v5e", platform="cpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(jax, "devices", lambda: [device])


def choose(
    implementation,
    length,
    keys=None,
    width=64,
    dtype=BF16,
    ids=None,
    drop=None,
    value=None,
    window=0,
):
    query, key, values = (
        jax.ShapeDtypeStruct((2, n, 2, d), dtype)
        for n, d in ((length, width), (keys or length, width), (keys or length, value or width))
    )
    options = {} if drop is None else {"drop": drop}
    arguments = (query, key, values, ids, ids, False, window)
    chosen = dispatch.choose("attention", implementation, op.IMPLEMENTATIONS, *arguments, **options)
    return next(name for name, one in op.IMPLEMENTATIONS.items() if one.function is chosen)


DROP = Dropout(0.1, None)


@pytest.mark.parametrize(
    ("implementation", "platform", "given", "mentions"),
    [
        ("best", "cpu", {"length": 128}, ["best", "auto", "splash"]),
        ("splash", "cpu", {"length": 128}, ["splash", "cpu", "tpu"]),
        ("cudnn", "tpu", {"length": 128}, ["cudnn", "tpu", "gpu"]),
        ("splash", "tpu", {"length": 100}, [100, 128]),
        ("splash", "tpu", {"length": 128, "keys": 100}, [100, 128]),
        ("splash", "tpu", {"length": 128, "drop": DROP}, ["dropout"]),
        ("pallas_tpu", "tpu", {"length": 128, "dtype": "float16"}, ["float16"]),
        ("pallas_tpu", "tpu", {"length": 128, "width": 48}, [48]),
        ("pallas_tpu", "tpu", {"length": 128, "window": 8, "drop": DROP}, ["window"]),
        ("pallas_tpu", "tpu", {"length": 128, "keys": 256, "window": 8}, ["window"]),
        ("pallas_tpu", "tpu", {"length": 128, "keys": 100}, [100, 128]),
        ("cudnn", "gpu", {"length": 128, "dtype": F32}, ["float32"]),
        ("cudnn", "gpu", {"length": 128, "width": 12}, [12]),
        ("cudnn", "gpu", {"length": 128, "width": 136}, [136]),
        ("cudnn", "gpu", {"length": 128, "value": 32}, [32, 64]),
        ("cudnn", "gpu", {"length": 127, "ids": 1}, [127]),
        ("cudnn", "gpu", {"length": 128, "drop": DROP}, ["dropout"]),
    ],
)
def test_a_named_form_that_cannot_do_it_is_an_error(
    implementation, platform, given, mentions, monkeypatch
):
    on(monkeypatch, platform)
    with refused(ValueError, "attention", implementation, *mentions):
        choose(implementation, **given)


@pytest.mark.parametrize(
    ("platform", "given", "taken"),
    [
        ("tpu", {"length": 128}, "pallas_tpu"),
        ("tpu", {"length": 512, "drop": DROP}, "pallas_tpu"),
        ("tpu", {"length": 64}, "xla"),
        ("tpu", {"length": 64, "drop": DROP}, "xla"),
        ("tpu", {"length": 2048}, "pallas_tpu"),
        ("tpu", {"length": 8192, "window": 64}, "pallas_tpu"),
        ("tpu", {"length": 8192, "window": 4096}, "splash"),
        ("tpu", {"length": 2560}, "splash"),
        ("tpu", {"length": 2560, "drop": DROP}, "pallas_tpu"),
        ("tpu", {"length": 1 << 17}, "splash"),
        ("tpu", {"length": 1 << 17, "drop": DROP}, "xla"),
        ("tpu", {"length": 384, "width": 80}, "xla"),
        ("tpu", {"length": 512, "width": 80}, "splash"),
        ("gpu", {"length": 128}, "cudnn"),
        ("gpu", {"length": 127}, "cudnn"),
        ("gpu", {"length": 128, "width": 128, "ids": 1}, "cudnn"),
        ("cpu", {"length": 512}, "xla"),
    ],
)
def test_auto_takes_the_first_form_that_suits(platform, given, taken, monkeypatch):
    on(monkeypatch, platform)
    assert choose("auto", **given) == taken


def test_auto_says_once_what_it_takes_and_why_not_the_others(monkeypatch, caplog):
    on(monkeypatch, "gpu", "rocm 6")
    dispatch.say.cache_clear()
    with caplog.at_level(logging.INFO):
        assert [choose("auto", 128) for _ in range(2)] == ["xla"] * 2
    (record,) = caplog.records
    for name in ("attention", *op.IMPLEMENTATIONS, "gpu"):
        assert name in record.getMessage()


def test_cudnn_is_left_where_devices_divide_positions(monkeypatch):
    on(monkeypatch, "gpu")
    mesh = jax.sharding.AbstractMesh((2,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        assert choose("auto", 128) == "xla"
        assert choose("auto", 127) == "cudnn"  # not divisible by two devices
