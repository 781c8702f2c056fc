"""Attention: each form against the plain one, the choice between them, and what they refuse."""

import importlib.util
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.ops import attention as op
from convbert_jax.ops.attention import attention


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


def run(function, query, key, value, cotangent, ids):
    out, back = jax.vjp(lambda *arrays: function(*arrays, ids), query, key, value)
    return out, *back(cotangent)


def test_padding_sees_the_last_document():
    visible = np.asarray(op.visible_keys(documents(2, 24)))
    np.testing.assert_array_equal(visible[0, 20], visible[0, 0])  # one document: all real tokens
    np.testing.assert_array_equal(visible[1, 20], visible[1, 14])
    assert not visible[:, :, 15:].any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("width", [48, 64])
def test_splash_is_the_plain_form(width, dtype):
    arrays, ids = inputs(width=width, dtype=dtype), documents(2, 128)

    def splash(query, key, value, ids):
        return op.splash(query, key, value, ids, interpret=True)

    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    for one, other in zip(run(splash, *arrays, ids), run(op.xla, *arrays, ids), strict=True):
        assert one.dtype == other.dtype
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * abs(other).max())


def test_sharded_splash_is_the_same():
    arrays, ids = inputs(batch=4), documents(4, 128)

    def splash(query, key, value, ids):
        return op.splash(query, key, value, ids, interpret=True)

    expected = jax.jit(splash)(*arrays[:3], ids)
    axes = ("data", "fsdp", "tensor")
    mesh = jax.make_mesh((2, 2, 2), axes, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        place = jax.NamedSharding(mesh, jax.P(("data", "fsdp"), None, "tensor"))
        rows = jax.NamedSharding(mesh, jax.P(("data", "fsdp")))
        given = [jax.device_put(x, place) for x in arrays[:3]]
        out = jax.jit(splash)(*given, jax.device_put(ids, rows))
        assert out.sharding.spec == place.spec
    np.testing.assert_allclose(out, expected, atol=1e-6)


def on(monkeypatch, platform, version="cuda 12"):
    """As if the program were for `platform`."""
    client = types.SimpleNamespace(platform_version=version)
    monkeypatch.setattr(op.dispatch, "platform", lambda: platform)
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(client=client)])


@pytest.mark.parametrize(
    ("implementation", "platform", "length", "width", "dtype", "message"),
    [
        ("best", "cpu", 128, 64, jnp.float32, "implementation is 'best', but must be one of auto"),
        ("splash", "cpu", 128, 64, jnp.float32, "it needs a tpu, this program is for cpu"),
        ("cudnn", "tpu", 128, 64, jnp.bfloat16, "it needs a gpu, this program is for tpu"),
        ("splash", "tpu", 100, 64, jnp.float32, "the length 100 is no multiple of 128"),
        ("cudnn", "gpu", 128, 64, jnp.float32, "it computes in bfloat16 and float16, not float32"),
        ("cudnn", "gpu", 128, 12, jnp.bfloat16, "the head width 12 is no multiple of 8"),
    ],
)
def test_refusals_name_the_reason(
    implementation, platform, length, width, dtype, message, monkeypatch
):
    on(monkeypatch, platform)
    *arrays, _ = inputs(length=length, width=width, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        attention(*arrays, documents(2, length), implementation=implementation)


@pytest.mark.parametrize(("implementation", "platform"), [("cudnn", "gpu"), ("splash", "tpu")])
def test_a_named_kernel_never_drops_its_dropout(implementation, platform, monkeypatch):
    on(monkeypatch, platform)
    *arrays, _ = inputs(dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="no attention dropout"):
        attention(
            *arrays, documents(2, 128), implementation=implementation, drop=lambda weights: weights
        )


@pytest.mark.parametrize(
    ("platform", "version", "length", "dropping", "taken", "said"),
    [
        ("tpu", "", 512, False, "splash", "takes splash."),
        ("tpu", "", 128, False, "xla", "not splash: it pays from length 512 on, this is 128"),
        ("tpu", "", 512, True, "xla", "not splash: it has no attention dropout"),
        ("gpu", "cuda 12", 128, False, "cudnn", "takes cudnn."),
        ("gpu", "rocm 6", 128, False, "xla", "not cudnn: cuDNN is for NVIDIA's GPUs"),
        ("cpu", "", 512, False, "xla", "takes xla."),
    ],
)
def test_auto_says_once_what_it_takes(
    platform, version, length, dropping, taken, said, monkeypatch, caplog
):
    on(monkeypatch, platform, version)
    op._say.cache_clear()
    query = jax.ShapeDtypeStruct((2, length, 2, 64), jnp.bfloat16)
    with caplog.at_level(logging.INFO):
        names = [op._choose(query, "auto", dropping) for _ in range(2)]
    assert names == [taken] * 2
    (record,) = caplog.records
    assert said in record.message


@pytest.mark.tpu_compile
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the libtpu wheel")
def test_auto_is_splash_in_a_program_for_tpu():
    from benchmarks import tpu_pricing, tpu_program

    def both(cotangent, query, key, value, ids):
        return run(attention, query, key, value, cotangent, ids)

    arrays = [jax.ShapeDtypeStruct((2, 512, 2, 64), jnp.bfloat16)] * 4
    ids = jax.ShapeDtypeStruct((2, 512), jnp.int32)
    compiled = tpu_pricing.compile_for(both, *arrays, ids, target="tpu:v5e")
    names = [o.name for o in tpu_program.scheduled(compiled.as_text()) if o.kernel]
    assert len(names) == 2
    assert all("splash" in name for name in names)


@pytest.mark.gpu
def test_cudnn_is_the_plain_form():
    arrays, ids = inputs(length=256, dtype=jnp.bfloat16), documents(2, 256)
    for one, other in zip(run(op.cudnn, *arrays, ids), run(op.xla, *arrays, ids), strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(one, other, rtol=2e-2, atol=2e-2 * abs(other).max())
