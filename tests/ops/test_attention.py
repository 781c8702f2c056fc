"""Attention: each form against the plain one, the choice between them, and what they refuse."""

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
from convbert_jax.ops.dropout import Dropout


def inputs(batch=2, length=128, heads=2, width=64, dtype=jnp.float32):
    return [
        x.astype(dtype)
        for x in jax.random.normal(jax.random.key(0), (4, batch, length, heads, width))
    ]


def documents(batch, length):
    """The first row: one document and padding; the others: three documents and padding."""
    positions = np.arange(length)
    real = positions < length - 9
    rows = [np.where(real, 1, 0)] + [np.where(real, 1 + 3 * positions // length, 0)] * (batch - 1)
    return jnp.asarray(np.stack(rows), jnp.int32)


def run(function, query, key, value, cotangent, ids, key_ids=None, causal=False):
    key_ids = ids if key_ids is None else key_ids
    out, back = jax.vjp(lambda *arrays: function(*arrays, ids, key_ids, causal), query, key, value)
    return out, *back(cotangent)


def test_padding_sees_the_last_document():
    visible = np.asarray(op.visible_keys(documents(2, 24)))
    np.testing.assert_array_equal(visible[0, 20], visible[0, 0])  # one document: all real tokens
    np.testing.assert_array_equal(visible[1, 20], visible[1, 14])
    assert not visible[:, :, 15:].any()


splash = functools.partial(op.splash, interpret=True)


def assert_same(actual, expected, dtype):
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * abs(other).max())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("width", [48, 64])
def test_splash_is_the_plain_form(width, dtype):
    arrays, ids = inputs(width=width, dtype=dtype), documents(2, 128)
    assert_same(run(splash, *arrays, ids), run(op.xla, *arrays, ids), dtype)


def test_sharded_splash_is_the_same():
    arrays, ids = inputs(batch=4), documents(4, 128)

    def attend(query, key, value, ids):
        return splash(query, key, value, ids, ids, causal=False)

    expected = jax.jit(attend)(*arrays[:3], ids)
    axes = ("data", "fsdp", "tensor")
    mesh = jax.make_mesh((2, 2, 2), axes, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        place = jax.NamedSharding(mesh, jax.P(("data", "fsdp"), None, "tensor"))
        rows = jax.NamedSharding(mesh, jax.P(("data", "fsdp")))
        given = [jax.device_put(x, place) for x in arrays[:3]]
        out = jax.jit(attend)(*given, jax.device_put(ids, rows))
        assert out.sharding.spec == place.spec
    np.testing.assert_allclose(out, expected, atol=1e-6)


def on(monkeypatch, platform, version="cuda 12"):
    """As if the program were for `platform`, whose devices are not here to verify a kernel on."""
    client = types.SimpleNamespace(platform_version=version)
    monkeypatch.setattr(dispatch, "platform", lambda: platform)
    device = types.SimpleNamespace(client=client, device_kind="TPU v5e", platform="cpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(jax, "devices", lambda: [device])


@pytest.mark.parametrize(
    ("implementation", "platform", "length", "width", "dtype", "message"),
    [
        ("best", "cpu", 128, 64, jnp.float32, "implementation is 'best', but must be one of auto"),
        ("splash", "cpu", 128, 64, jnp.float32, "'splash' on cpu, but it needs a tpu"),
        ("cudnn", "tpu", 128, 64, jnp.bfloat16, "'cudnn' on tpu, but it needs a gpu"),
        ("splash", "tpu", 100, 64, jnp.float32, "the length 100 is no multiple of 128"),
        ("cudnn", "gpu", 128, 64, jnp.float32, "it computes in bfloat16 and float16, not float32"),
        ("cudnn", "gpu", 128, 12, jnp.bfloat16, "the head width 12 is no multiple of 8"),
        ("cudnn", "gpu", 127, 64, jnp.bfloat16, "with segments it needs even lengths, not 127"),
    ],
)
def test_refusals_name_the_reason(
    implementation, platform, length, width, dtype, message, monkeypatch
):
    on(monkeypatch, platform)
    *arrays, _ = inputs(length=length, width=width, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        attention(*arrays, segment_ids=documents(2, length), implementation=implementation)


class Marks(Dropout):
    """Drops what is not marked, whatever is drawn."""

    factor = 1.5

    def __init__(self, marks):
        object.__setattr__(self, "marks", marks)

    def draw(self, shape):
        return self.marks


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_dropout_is_autodiff_of_its_formula(platform, dtype, monkeypatch):
    """Of weights that are 0 too: those of keys that are not seen, and one that underflows."""
    on(monkeypatch, platform)
    *arrays, cotangent = inputs(length=24, width=16, dtype=dtype)
    arrays[0], arrays[1] = arrays[0].at[0, 3].set(9), arrays[1].at[0, 5].set(-9)
    ids = documents(2, 24)
    marks = jax.random.bernoulli(jax.random.key(1), 0.7, (2, 2, 24, 24))

    def formula(query, key, value, ids, key_ids, causal):
        weights = op.attention_weights(query, key, segment_ids=ids).astype(dtype)
        turned = marks.swapaxes(2, 3) if platform == "tpu" else marks
        dropped = jnp.where(turned, weights * 1.5, 0)
        return jnp.einsum(
            "bhqk,bkhd->bqhd", dropped, value, preferred_element_type=jnp.float32
        ).astype(dtype)

    dropping = functools.partial(op.xla, drop=Marks(marks))
    assert_same(
        run(dropping, *arrays, cotangent, ids), run(formula, *arrays, cotangent, ids), dtype
    )


def test_dropout_keeps_one_array_of_all_weights():
    """Of 3 that autodiff would keep: weights, marks, and weights that are left."""
    *arrays, _ = inputs(length=64, width=8)
    marks = jnp.ones((2, 2, 64, 64), bool)

    def dropping(*arrays):
        return op.xla(*arrays, None, None, False, drop=Marks(marks))

    kept = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(dropping, *a)[1], *arrays))
    assert [x.dtype for x in kept if x.shape == marks.shape] == [jnp.float32]


@pytest.mark.parametrize(("implementation", "platform"), [("cudnn", "gpu"), ("splash", "tpu")])
def test_a_named_kernel_never_drops_its_dropout(implementation, platform, monkeypatch):
    on(monkeypatch, platform)
    *arrays, _ = inputs(dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="no attention dropout"):
        attention(*arrays, implementation=implementation, drop=Dropout(0.1, jax.random.key(0)))


@pytest.mark.parametrize(
    ("platform", "version", "length", "dropping", "taken", "said"),
    [
        ("tpu", "", 128, False, "pallas_tpu", "takes pallas_tpu on tpu."),
        ("tpu", "", 512, True, "pallas_tpu", "takes pallas_tpu on tpu."),
        ("tpu", "", 64, False, "xla", "not splash: the length 64 is no multiple of 128"),
        ("tpu", "", 64, True, "xla", "not splash: it has no attention dropout"),
        ("tpu", "", 2560, False, "splash", "splash costs less beyond length 2048, this is 2560."),
        (
            "gpu",
            "cuda 12",
            128,
            False,
            "cudnn",
            "takes cudnn on gpu; not pallas_tpu: it needs a tpu",
        ),
        ("gpu", "rocm 6", 128, False, "xla", "not cudnn: cuDNN is for NVIDIA's GPUs"),
        ("cpu", "", 512, False, "xla", "takes xla on cpu; not pallas_tpu: it needs a tpu"),
    ],
)
def test_auto_says_once_what_it_takes(
    platform, version, length, dropping, taken, said, monkeypatch, caplog
):
    on(monkeypatch, platform, version)
    dispatch.say.cache_clear()
    query = jax.ShapeDtypeStruct((2, length, 2, 64), jnp.bfloat16)
    arguments = (query, query, query, None, None, False)
    given = {"drop": lambda weights: weights} if dropping else {}
    with caplog.at_level(logging.INFO):
        found = [
            dispatch.choose("attention", "auto", op.IMPLEMENTATIONS, *arguments, **given)
            for _ in range(2)
        ]
    assert found == [op.IMPLEMENTATIONS[taken].function] * 2
    (record,) = caplog.records
    assert said in record.message


@pytest.mark.gpu
@pytest.mark.parametrize(("keys", "causal"), [(256, False), (256, True), (384, False)])
def test_cudnn_is_the_plain_form(keys, causal):
    query, *_, cotangent = inputs(length=256, dtype=jnp.bfloat16)
    _, key, value, _ = inputs(length=keys, dtype=jnp.bfloat16)
    given = (query, key, value, cotangent, documents(2, 256), documents(2, keys), causal)
    assert_same(run(op.cudnn, *given), run(op.xla, *given), jnp.bfloat16)


# --- A decoder: keys of another row, and no look ahead ---


def by_hand(query, key, value, ids, key_ids, causal):
    """In numpy, position by position, in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    out = np.zeros((*query.shape[:3], value.shape[3]))
    for b, t in np.ndindex(query.shape[:2]):
        own = ids[b, t] or max(ids[b])
        seen = [
            s
            for s in range(key.shape[1])
            if key_ids[b, s] == own and own != 0 and (s <= t or not causal)
        ]
        if seen:
            for h in range(query.shape[2]):
                powers = np.exp(key[b, seen, h] @ query[b, t, h] * query.shape[3] ** -0.5)
                out[b, t, h] = powers / powers.sum() @ value[b, seen, h]
    return out


def unequal(length, keys, dtype=jnp.float32):
    """Queries and keys of two lengths, with their segments."""
    query, *_, cotangent = inputs(length=length, dtype=dtype)
    _, key, value, _ = inputs(length=keys, dtype=dtype)
    return query, key, value, cotangent, documents(2, length), documents(2, keys)


@pytest.mark.parametrize(("length", "keys", "causal"), [(24, 24, True), (16, 40, False)])
def test_the_plain_form_is_the_formula(length, keys, causal):
    query, key, value, _, ids, key_ids = unequal(length, keys)
    out = attention(
        query, key, value, segment_ids=ids, key_segment_ids=key_ids, causal=causal,
        implementation="xla",
    )  # fmt: skip
    wanted = by_hand(query, key, value, np.asarray(ids), np.asarray(key_ids), causal)
    np.testing.assert_allclose(out, wanted, atol=1e-5)


@pytest.mark.parametrize(("length", "keys", "causal"), [(256, 256, True), (128, 384, False)])
def test_splash_of_a_decoder_is_the_plain_form(length, keys, causal):
    given = (*unequal(length, keys), causal)
    assert_same(run(splash, *given), run(op.xla, *given), jnp.float32)


@pytest.mark.parametrize("causal", [False, True])
def test_a_query_without_a_key_is_silent(causal):
    """A source that a packed target lacks: 0, and no gradient to what belongs to others."""
    query, key, value, cotangent, ids, key_ids = unequal(128, 384)
    ids = jnp.where(jnp.arange(128) < 40, 9, ids)  # a segment that no key has
    given = (query, key, value, cotangent, ids, key_ids, causal)
    assert not np.asarray(run(splash, *given)[0])[:, :40].any()
    assert_same(run(splash, *given), run(op.xla, *given), jnp.float32)


@pytest.mark.parametrize("causal", [False, True])
def test_without_segments_all_is_one(causal):
    query, key, value, cotangent = inputs(length=128)
    ones = jnp.ones((2, 128), jnp.int32)
    wanted = run(op.xla, query, key, value, cotangent, ones, causal=causal)
    for form in (op.xla, splash):

        def without(*arrays, form=form):
            return form(*arrays, None, None, causal)

        out, back = jax.vjp(without, query, key, value)
        assert_same((out, *back(cotangent)), wanted, jnp.float32)


def test_keys_without_segments_are_one():
    query, key, value, *_ = unequal(16, 40)
    ones = {"segment_ids": jnp.ones((2, 16), int), "key_segment_ids": jnp.ones((2, 40), int)}
    wanted = attention(query, key, value, **ones)
    np.testing.assert_array_equal(attention(query, key, value), wanted)
    for name, ids in ones.items():
        np.testing.assert_array_equal(attention(query, key, value, **{name: ids}), wanted)


def test_causal_never_reads_the_future():
    query, key, value, _ = inputs(length=16)
    future = [x.at[:, 9:].add(1) for x in (key, value)]
    out, same = (attention(query, *given, causal=True) for given in (future, (key, value)))
    np.testing.assert_array_equal(out[:, :9], same[:, :9])
    assert (attention(query, *future) != attention(query, key, value))[:, :9].all()


@pytest.mark.parametrize("causal", [False, True])
def test_weights_add_up_to_one_and_give_the_output(causal):
    query, key, value, _, ids, key_ids = unequal(16, 40)
    given = {"segment_ids": ids, "key_segment_ids": key_ids, "causal": causal}
    weights = op.attention_weights(query, key, **given)
    visible = np.asarray(op.visible_pairs(query, key, ids, key_ids, causal))
    assert weights.shape == (2, 2, 16, 40)
    np.testing.assert_array_equal(np.where(visible, 0, weights), 0)
    np.testing.assert_allclose(
        weights.sum(-1), np.broadcast_to(visible.any(-1), (2, 2, 16)), atol=1e-6
    )
    out = attention(query, key, value, **given)
    np.testing.assert_allclose(jnp.einsum("bhls,bshd->blhd", weights, value), out, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("key", {"key": jnp.zeros((2, 16, 3, 64))}),
        ("value", {"value": jnp.zeros((2, 17, 2, 64))}),
        ("segment_ids", {"segment_ids": jnp.ones((2, 5), int)}),
        ("key_segment_ids", {"key_segment_ids": jnp.ones((2, 5), int)}),
    ],
)
def test_errors_name_the_argument(name, change):
    query, key, value, _ = inputs(length=16)
    with pytest.raises(ValueError, match=f"attention: {name} is "):
        attention(**{"query": query, "key": key, "value": value} | change)


@pytest.mark.parametrize("queries", [1, 4])
def test_a_query_to_what_is_kept_is_the_same_on_a_tpu(queries, monkeypatch):
    keys = jax.random.split(jax.random.key(0), 4)
    query = jax.random.normal(keys[0], (3, 2, queries, 8))
    key = jax.random.normal(keys[1], (3, 2, 8, 11))
    value = jax.random.normal(keys[2], (3, 2, 11, 8))
    visible = jax.random.bernoulli(keys[3], 0.6, (3, 1, queries, 11)).at[..., 0].set(True)
    wanted = op.attention_to_kept(query, key, value, visible)
    on(monkeypatch, "tpu")
    found = op.attention_to_kept(query, key, value, visible)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
