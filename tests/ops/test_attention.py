"""Attention: each form against the plain one, the choice between them, and what they refuse."""

import functools
import importlib.util
import logging
import os

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
        with pytest.raises(ValueError, match="3 rows do not divide over 4 devices"):
            splash(*(x[:3] for x in arrays[:3]), ids[:3])
    np.testing.assert_allclose(out, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("implementation", "length", "dtype", "message"),
    [
        ("best", 128, jnp.float32, "implementation is 'best', but must be auto, xla"),
        ("splash", 100, jnp.float32, "the length 100 is no multiple of 128"),
        ("cudnn", 128, jnp.bfloat16, "JAX runs on no NVIDIA GPU here"),
    ],
)
def test_refusals_name_the_reason(implementation, length, dtype, message):
    *arrays, _ = inputs(length=length, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        attention(*arrays, documents(2, length), implementation=implementation)


def test_a_named_kernel_never_gives_way():
    *arrays, _ = inputs(dtype=jnp.bfloat16)
    splash = functools.partial(attention, implementation="splash")
    with pytest.raises(NotImplementedError, match="platform cpu"):
        jax.jit(splash)(*arrays, documents(2, 128))
    with pytest.raises(ValueError, match="no attention dropout"):
        splash(*arrays, documents(2, 128), drop=lambda weights: weights)


def test_what_cudnn_cannot_do(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for dtype, width, reason in [
        (jnp.float32, 64, "it computes in bfloat16 and float16, not float32"),
        (jnp.bfloat16, 12, "the head width 12 is no multiple of 8"),
        (jnp.bfloat16, 64, ""),
    ]:
        assert op._cudnn_refusal(jnp.zeros((1, 8, 1, width), dtype)).startswith(reason)


def test_auto_says_once_what_it_took(caplog):
    op._say.cache_clear()
    *arrays, _ = inputs(length=128)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            out = attention(*arrays, documents(2, 128))
        attention(*arrays, documents(2, 128), drop=lambda weights: weights)
    short, dropping = (record.message for record in caplog.records)
    assert "xla everywhere" in short
    assert "not splash: it pays from length 512 on" in short
    assert dropping.count("it has no attention dropout") == 2
    np.testing.assert_allclose(out, op.xla(*arrays, documents(2, 128)), atol=1e-6)


@pytest.mark.parametrize(("platform", "name"), [("tpu", "splash"), ("cuda", "cudnn")])
def test_auto_takes_the_kernel_of_the_platform(platform, name, monkeypatch):
    for other in ("xla", "cudnn", "splash"):  # the form's name instead of its work
        monkeypatch.setitem(
            op.IMPLEMENTATIONS, other, lambda query, *_, mark=other: query + len(mark)
        )
    monkeypatch.setattr(op, "_cudnn_refusal", lambda query: "")  # else it asks for a GPU
    arrays = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in inputs(length=512)[:3]]
    ids = jax.ShapeDtypeStruct((2, 512), jnp.int32)
    lowered = jax.jit(attention).trace(*arrays, ids).lower(lowering_platforms=(platform,))
    assert f"dense<{len(name)}.0" in lowered.as_text()


@pytest.mark.tpu_compile
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the libtpu wheel")
def test_auto_is_splash_in_a_program_for_tpu():
    from benchmarks import tpu_pricing

    def both(cotangent, query, key, value, ids):
        return run(attention, query, key, value, cotangent, ids)

    arrays = [jax.ShapeDtypeStruct((2, 512, 2, 64), jnp.bfloat16)] * 4
    ids = jax.ShapeDtypeStruct((2, 512), jnp.int32)
    compiled = tpu_pricing.compile_for(both, *arrays, ids, target="tpu:v5e")
    names = [o.name for o in tpu_pricing.scheduled(compiled.as_text()) if o.kernel]
    assert len(names) == 2
    assert all("splash" in name for name in names)


@pytest.mark.gpu
@pytest.mark.skipif("CONVBERT_TEST_PLATFORM" not in os.environ, reason="needs a GPU")
def test_cudnn_is_the_plain_form():
    arrays, ids = inputs(length=256, dtype=jnp.bfloat16), documents(2, 256)
    for one, other in zip(run(op.cudnn, *arrays, ids), run(op.xla, *arrays, ids), strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(one, other, rtol=2e-2, atol=2e-2 * abs(other).max())
