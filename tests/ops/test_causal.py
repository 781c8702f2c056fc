"""Causal convolutions and attention, as a decoder has them: against a definition that materializes
the band of positions that each one reads, values and gradients.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.ops import dispatch
from convbert_jax.ops.attention import attention
from convbert_jax.ops.depthwise_conv import depthwise_conv
from convbert_jax.ops.dynamic_conv import dynamic_conv
from convbert_jax.ops.span_dynamic_conv import span_dynamic_conv

HEADS, WIDTH = 2, 3
CHANNELS = HEADS * WIDTH

any_case = given(
    length=st.sampled_from([1, 6, 11]),
    taps=st.integers(1, 7),
    dilation=st.integers(1, 3),
    documents=st.sampled_from(["none", "one", "packed"]),
    implementation=st.sampled_from(["auto", "reference"]),
    seed=st.integers(0, 99),
)
quickly = settings(deadline=None, max_examples=6, derandomize=True)


def normal(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def segments(documents, length, seed):
    """None, a row with padding behind it, or rows of several documents with padding."""
    if documents == "none":
        return None
    rng = np.random.default_rng(seed)
    ids = np.ones((2, length), np.int32)
    if documents == "packed":
        ids += np.cumsum(rng.random((2, length)) < 0.3, axis=1).astype(np.int32)
    ids[1, length - length // 3 :] = 0
    return jnp.asarray(ids)


def band(ids, length, taps, dilation):
    """[B or 1, L, K, L] 1 where tap i of position t reads s: t - (K - 1 - i) * dilation."""
    position = np.arange(length)
    reads = position[:, None] - (taps - 1 - np.arange(taps)) * dilation
    there = (reads[:, :, None] == position)[None]
    if ids is None:
        return jnp.asarray(there, jnp.float32)
    ids = np.asarray(ids)
    same = (ids[:, :, None] == ids[:, None, :]) & (ids != 0)[:, :, None]
    return jnp.asarray(there & same[:, :, None, :], jnp.float32)


def by_band(values, filters, reads):
    """values [B, L, H, D], filters [B, L, H, K]."""
    reads = jnp.broadcast_to(reads, (len(values), *reads.shape[1:]))
    return jnp.einsum("bthk,btks,bshd->bthd", filters, reads, values, precision="highest")


def check(op, definition, arrays, atol=2e-5):
    """Values and all gradients of two functions of the same arrays."""

    @jax.jit
    def both(*arrays):
        out, back = jax.vjp(op, *arrays)
        wanted, wanted_back = jax.vjp(definition, *arrays)
        (cotangent,) = normal(7, out.shape)
        return (out, *back(cotangent)), (wanted, *wanted_back(cotangent))

    for one, other in zip(*both(*arrays), strict=True):
        np.testing.assert_allclose(one, other, atol=atol)


@quickly
@any_case
def test_dynamic(length, taps, dilation, documents, implementation, seed):
    ids = segments(documents, length, seed)
    reads = band(ids, length, taps, dilation)
    op = functools.partial(
        dynamic_conv, segment_ids=ids, dilation=dilation, causal=True,
        implementation=implementation,
    )  # fmt: skip
    shape = (2, length, HEADS, WIDTH)
    values, filters, light = normal(seed, shape, (*shape[:3], taps), (HEADS, taps))
    check(op, lambda v, f: by_band(v, f, reads), (values, filters))

    def of_all_positions(values, filters):
        return by_band(values, jnp.broadcast_to(filters, (*shape[:3], taps)), reads)

    check(op, of_all_positions, (values, light))


@quickly
@any_case
def test_depthwise(length, taps, dilation, documents, implementation, seed):
    ids = segments(documents, length, seed)
    reads = band(ids, length, taps, dilation)
    op = functools.partial(
        depthwise_conv, segment_ids=ids, dilation=dilation, causal=True,
        implementation=implementation,
    )  # fmt: skip

    def definition(x, filters):
        of_positions = jnp.broadcast_to(filters.T, (2, length, CHANNELS, taps))
        return by_band(x[..., None], of_positions, reads)[..., 0]

    check(op, definition, normal(seed, (2, length, CHANNELS), (taps, CHANNELS)))


@quickly
@any_case
def test_span_dynamic(length, taps, dilation, documents, implementation, seed):
    """With a key of a span, and with filters and values of the token alone."""
    ids = segments(documents, length, seed)
    reads = band(ids, length, taps, dilation)
    rows = (2, length, CHANNELS)
    query, key, values, projection, bias = normal(
        seed, rows, rows, rows, (CHANNELS, HEADS * taps), (HEADS * taps,)
    )
    op = functools.partial(
        span_dynamic_conv, heads=HEADS, segment_ids=ids, dilation=dilation, causal=True,
        implementation=implementation,
    )  # fmt: skip

    def definition(query, key, values, projection, bias):
        logits = jnp.matmul(query * key, projection, precision="highest") + bias
        filters = jax.nn.softmax(logits.reshape(2, length, HEADS, taps))
        return by_band(values.reshape(2, length, HEADS, WIDTH), filters, reads).reshape(rows)

    check(op, definition, (query, key, values, projection, bias))
    check(
        lambda query, *rest: op(query, None, None, *rest),
        lambda query, *rest: definition(query, jnp.ones(rows), query, *rest),
        (query, projection, bias),
    )


@quickly
@given(
    length=st.sampled_from([1, 6, 11]),
    source=st.sampled_from([1, 9]),
    documents=st.sampled_from(["none", "one", "packed"]),
    seed=st.integers(0, 99),
)
def test_attention_of_a_decoder(length, source, documents, seed):
    """To itself, causal within documents; to a source of other length, the same document of it."""
    shape, other = (2, length, HEADS, WIDTH), (2, source, HEADS, WIDTH)
    query, key, value = normal(seed, shape, shape, shape)
    ids, of_source = segments(documents, length, seed), segments(documents, source, seed + 1)
    own = np.ones((2, length, length), bool)
    crossing = np.ones((2, length, source), bool)
    if ids is not None:
        ids, of_source = np.asarray(ids), np.asarray(of_source)
        seen = np.where(ids == 0, ids.max(axis=1, keepdims=True), ids)
        own = (seen[:, :, None] == ids[:, None]) & (ids != 0)[:, None]
        crossing = (seen[:, :, None] == of_source[:, None]) & (of_source != 0)[:, None]
    own = own & np.tri(length, dtype=bool)

    def definition(visible, query, key, value):
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest") * WIDTH**-0.5
        powers = jnp.where(visible[:, None], jnp.exp(scores), 0.0)
        total = powers.sum(axis=-1, keepdims=True)
        maps = powers / jnp.where(total == 0, 1.0, total)
        return jnp.einsum("bhqk,bkhd->bqhd", maps, value, precision="highest")

    ids = None if ids is None else jnp.asarray(ids)
    check(
        functools.partial(attention, segment_ids=ids, causal=True),
        functools.partial(definition, jnp.asarray(own)),
        (query, key, value),
    )
    key, value = normal(seed + 2, other, other)
    key_ids = None if of_source is None else jnp.asarray(of_source)
    check(
        functools.partial(attention, segment_ids=ids, key_segment_ids=key_ids),
        functools.partial(definition, jnp.asarray(crossing)),
        (query, key, value),
    )


@pytest.mark.parametrize("segment_ids", [None, jnp.ones((1, 9), jnp.int32)])
def test_no_gradient_flows_back_from_the_future(segment_ids):
    """What position 4 gives out hangs on positions 0 to 4, and of these on the last K alone."""
    x, filters = normal(0, (1, 9, CHANNELS), (4, CHANNELS))

    def of_position_4(x):
        return depthwise_conv(x, filters, segment_ids=segment_ids, causal=True)[0, 4].sum()

    read = np.flatnonzero(np.abs(jax.grad(of_position_4)(x)[0]).max(axis=-1))
    np.testing.assert_array_equal(read, [1, 2, 3, 4])


@pytest.mark.parametrize("on", ["tpu", "gpu"])
def test_every_row_of_the_tables_takes_causal_offsets(monkeypatch, on):
    """`auto` leaves no kernel because taps read the past alone: the reasons are those of a centered
    filter.
    """
    from convbert_jax.ops import depthwise_conv as depthwise
    from convbert_jax.ops import taps

    monkeypatch.setattr(dispatch, "platform", lambda: on)
    x, filters = normal(0, (2, 16, CHANNELS), (5, CHANNELS))
    for one in depthwise.IMPLEMENTATIONS.values():
        reasons = {
            (one.refuses(x, filters, None, offsets), one.left_by_auto(x, filters, None, offsets))
            for offsets in (taps.offsets(5), taps.offsets(5, causal=True))
        }
        assert len(reasons) == 1
