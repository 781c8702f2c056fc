"""Attention by the TPU kernels of this package, interpreted, against the plain form; what dropout
keeps; and that the kernels compile.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.ops import attention as op
from convbert_jax.ops import dispatch
from convbert_jax.ops.attention import attention
from convbert_jax.ops.attention.kernels import KernelDropout
from convbert_jax.ops.dropout import Dropout
from convbert_jax.ops.tpu.attention import marks
from tests.ops.test_attention import assert_same, documents, inputs, run
from tests.running import needs_libtpu

KEPT = 230  # of 256
TARGETS = "tpu:v4", "tpu:v5e", "tpu:v5p", "tpu:v6e", "tpu:tpu7x"
kernels = functools.partial(op.pallas_tpu, interpret=True)


def unequal(length, keys, heads, width, dtype, batch=2):
    """Queries, keys, values and a cotangent of two lengths."""
    query, *_, cotangent = inputs(batch, length, heads, width, dtype)
    _, key, value, _ = inputs(batch, keys, heads, width, dtype)
    return query, key, value, cotangent


CASES = {
    "two heads of 64": (128, 128, 2, 64, False),
    "a decoder's": (256, 256, 2, 64, True),
    "a head that fills half the lanes": (128, 128, 1, 64, False),
    "three heads of 64, with one of zeros beside": (128, 128, 3, 64, False),
    "four of 32": (128, 256, 4, 32, False),
    "one of 128": (256, 128, 1, 128, False),
}


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.6])
@pytest.mark.parametrize(("length", "keys", "heads", "width", "causal"), CASES.values(), ids=CASES)
def test_kernels_are_the_plain_form(length, keys, heads, width, causal, rate):
    arrays = unequal(length, keys, heads, width, jnp.float32)
    ids, key_ids = documents(2, length), documents(2, keys)
    key = jax.random.key(3)
    ours = functools.partial(kernels, drop=Dropout(rate, key) if rate else None)
    plain = functools.partial(op.xla, drop=KernelDropout(rate, key) if rate else None)
    given = *arrays, ids, key_ids, causal
    assert_same(run(ours, *given), run(plain, *given), jnp.float32)


def test_the_plain_form_of_a_tpu_drops_the_same(monkeypatch):
    """What the tests on a TPU compare with: there it asks for its marks turned over."""
    arrays = unequal(128, 256, 2, 64, jnp.float32)
    given = *arrays, documents(2, 128), documents(2, 256)
    key = jax.random.key(3)
    actual = run(functools.partial(kernels, drop=Dropout(0.6, key)), *given)
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    wanted = run(functools.partial(op.xla, drop=KernelDropout(0.6, key)), *given)
    assert_same(actual, wanted, jnp.float32)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_longer_than_a_block(causal):
    """Of 1,024 positions scores are worked on in parts."""
    arrays, ids = inputs(1, 1024, 2, 64, jnp.bfloat16), documents(1, 1024)
    drop = Dropout(0.1, jax.random.key(3)), KernelDropout(0.1, jax.random.key(3))
    actual, wanted = (
        run(functools.partial(form, drop=one), *arrays, ids, ids, causal)
        for form, one in zip((kernels, op.xla), drop, strict=True)
    )
    assert_same(actual, wanted, jnp.bfloat16)


def test_a_query_without_a_key_is_silent():
    """A source that a packed target lacks: 0, and no gradient to what belongs to others."""
    query, key, value, cotangent = unequal(128, 384, 2, 64, jnp.float32)
    ids, key_ids = documents(2, 128), documents(2, 384)
    ids = jnp.where(jnp.arange(128) < 40, 9, ids)
    given = query, key, value, cotangent, ids, key_ids
    assert not np.asarray(run(kernels, *given)[0])[:, :40].any()
    assert_same(run(kernels, *given), run(op.xla, *given), jnp.float32)


def test_padding_alone_is_finite_and_its_values_reach_nothing():
    *arrays, cotangent = inputs(2, 128, 2, 64)
    ids = documents(2, 128).at[1].set(0)
    for found in run(kernels, *arrays, cotangent, ids):
        assert np.isfinite(found).all()
    out = kernels(*arrays, ids, ids, False)
    padding = (ids == 0)[..., None, None]
    other = [jnp.where(padding, 100.0, x) for x in arrays]
    real = np.asarray(ids != 0)
    np.testing.assert_array_equal(np.asarray(kernels(*other, ids, ids, False))[real], out[real])


@pytest.mark.parametrize("causal", [False, True])
def test_without_segments_all_is_one(causal):
    arrays, ones = inputs(2, 128, 2, 64), jnp.ones((2, 128), jnp.int32)

    def without(query, key, value, *_):
        return kernels(query, key, value, None, None, causal)

    assert_same(run(without, *arrays, ones), run(op.xla, *arrays, ones, causal=causal), jnp.float32)


def test_large_scores_do_not_overflow():
    """Scores of thousands: the backward pass takes them less the logarithm of a sum, so that what
    float32 rounds of them, a tenth of a thousandth, is in the weights.
    """
    arrays, ids = [30 * x for x in inputs(2, 128, 2, 64)], documents(2, 128)
    for one, other in zip(run(kernels, *arrays, ids), run(op.xla, *arrays, ids), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3 * abs(other).max())


def test_seeds_as_an_axis():
    *arrays, _ = inputs(2, 128, 2, 64)
    keys = jax.random.split(jax.random.key(5), 3)

    def one(key, query):
        return kernels(query, *arrays[1:], None, None, False, drop=Dropout(0.5, key))

    together = jax.vmap(one)(keys, jnp.stack([arrays[0]] * 3))
    for key, found in zip(keys, together, strict=True):
        np.testing.assert_allclose(found, one(key, arrays[0]), atol=1e-6)
    assert np.abs(together[0] - together[1]).max() > 0.1


# --- What is dropped ---


def test_what_is_dropped_is_the_same_on_any_mesh():
    *arrays, cotangent = inputs(4, 256, 2, 64)
    ids = documents(4, 256)
    dropping = functools.partial(kernels, drop=Dropout(0.3, jax.random.key(7)))
    wanted = run(dropping, *arrays, cotangent, ids)
    for sizes in ({"data": 2, "tensor": 2, "sequence": 2}, {"fsdp": 4}):
        mesh = jax.make_mesh(
            tuple(sizes.values()),
            tuple(sizes),
            axis_types=(jax.sharding.AxisType.Auto,) * len(sizes),
        )
        with jax.set_mesh(mesh):
            actual = jax.jit(functools.partial(run, dropping))(*arrays, cotangent, ids)
        assert_same(actual, wanted, jnp.float32)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 3), st.integers(1, 3), st.integers(0, 40), st.integers(1, 40),
    st.integers(-(2**31), 2**31 - 1), st.integers(1, 255),
)  # fmt: skip
def test_marks_do_not_depend_on_blocks(group, groups, query, queries, seed, kept):
    words = marks.of_head(jnp.asarray([seed, 17], jnp.int32), 5, 3)
    whole = marks.kept(words, (0, 6 * marks.GROUP), (0, 80), kept)
    part = marks.kept(words, (group * marks.GROUP, groups * marks.GROUP), (query, queries), kept)
    rows = slice(group * marks.GROUP, (group + groups) * marks.GROUP)
    np.testing.assert_array_equal(part, whole[rows, query : query + queries])


def drawn(seed, row, head, kept=KEPT, keys=512, queries=512):
    words = marks.of_head(jnp.asarray(seed, jnp.int32), row, head)
    return np.asarray(marks.kept(words, (0, keys), (0, queries), kept), float)


@pytest.mark.parametrize("kept", [1, 26, 128, KEPT, 255])
def test_as_many_are_kept_as_shall_be(kept):
    share = kept / 256
    for seed in range(4):
        found = drawn((seed, 0), seed, seed, kept)
        deviation = (share * (1 - share) / found.size) ** 0.5
        assert abs(found.mean() - share) < 5 * deviation
        # of every query and every key alike: chi-square, with its own deviations of 32 for 512
        for axis in (0, 1):
            sums = found.sum(axis=axis)
            squares = ((sums - 512 * share) ** 2).sum() / (512 * share * (1 - share))
            assert abs(squares - 512) < 6 * (2 * 512) ** 0.5


def test_marks_are_independent():
    """Of neighbors, of the four of a word, of heads, rows and seeds, also where these differ by one
    or change places.
    """
    base = drawn((11, 12), 3, 2)
    share = KEPT / 256
    others = {
        **{f"{n} keys on": np.roll(base, n, axis=0) for n in (1, 2, 32, 64, 96, 128, 256)},
        **{f"{n} queries on": np.roll(base, n, axis=1) for n in (1, 2, 4, 128, 256)},
        "turned over": base.T,
        "the next head": drawn((11, 12), 3, 3),
        "the next row": drawn((11, 12), 4, 2),
        "head and row changed": drawn((11, 12), 2, 3),
        "the next seed": drawn((12, 12), 3, 2),
        "the next second word": drawn((11, 13), 3, 2),
        "words changed": drawn((12, 11), 3, 2),
        "far rows": drawn((11, 12), 3 + 2**15, 2),
    }
    deviation = base.size**-0.5
    for name, other in others.items():
        correlation = ((base - share) * (other - share)).mean() / (share * (1 - share))
        assert abs(correlation) < 5 * deviation, name


# --- What is compiled ---


@pytest.mark.tpu_compile
@needs_libtpu
@pytest.mark.parametrize(
    ("length", "rate", "taken"), [(128, 0.1, "pallas"), (512, 0.0, "pallas"), (4096, 0.0, "splash")]
)
def test_auto_in_a_program_for_tpu(length, rate, taken):
    from convbert_jax.analysis.tpu import pricing as tpu_pricing
    from convbert_jax.analysis.tpu import program as tpu_program

    def both(cotangent, query, key, value, ids, seed):
        def by_auto(query, key, value, ids, key_ids, causal):
            drop = Dropout(rate, jax.random.wrap_key_data(seed)) if rate else None
            return attention(query, key, value, segment_ids=ids, causal=causal, drop=drop)

        return run(by_auto, query, key, value, cotangent, ids)

    arrays = [jax.ShapeDtypeStruct((2, length, 2, 64), jnp.bfloat16)] * 4
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32)
    seed = jax.ShapeDtypeStruct((2,), jnp.uint32)
    compiled = tpu_pricing.compile_for(both, *arrays, ids, seed, target="tpu:v5e")
    names = [o.name for o in tpu_program.scheduled(compiled.as_text()) if o.kernel]
    assert len(names) == 2
    assert all(("splash" in name) == (taken == "splash") for name in names)


@pytest.mark.tpu_compile
@needs_libtpu
def test_seeds_as_an_axis_compile():
    from convbert_jax.analysis.tpu import pricing as tpu_pricing

    def both(cotangent, query, key, value, ids, seed):
        drop = Dropout(0.1, jax.random.wrap_key_data(seed))
        form = functools.partial(op.pallas_tpu, drop=drop)
        return run(form, query, key, value, cotangent, ids)

    arrays = [jax.ShapeDtypeStruct((3, 4, 128, 2, 64), jnp.bfloat16)] * 4
    ids = jax.ShapeDtypeStruct((3, 4, 128), jnp.int32)
    seed = jax.ShapeDtypeStruct((3, 2), jnp.uint32)
    compiled = tpu_pricing.compile_for(jax.vmap(both), *arrays, ids, seed, target="tpu:v5e")
    assert compiled.as_text().count('"tpu_custom_call"') == 2


@pytest.mark.slow
@pytest.mark.tpu_compile
@needs_libtpu
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("batch", "length", "heads", "width", "dtype"),
    [
        (64, 128, 12, 64, jnp.bfloat16),
        (64, 128, 1, 64, jnp.bfloat16),
        (16, 512, 6, 64, jnp.bfloat16),
        (3, 384, 3, 64, jnp.bfloat16),
        (8, 512, 4, 32, jnp.float32),
        (2, 1408, 6, 64, jnp.bfloat16),  # longer than `longest` allows on a v4
        (2, 640, 6, 64, jnp.float32),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_compile(target, batch, length, heads, width, dtype, causal):
    from convbert_jax.analysis.tpu import pricing as tpu_pricing

    def both(cotangent, query, key, value, ids, seed):
        drop = Dropout(0.1, jax.random.wrap_key_data(seed))
        form = functools.partial(op.pallas_tpu, drop=drop)
        return run(form, query, key, value, cotangent, ids, causal=causal)

    arrays = [jax.ShapeDtypeStruct((batch, length, heads, width), dtype)] * 4
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    seed = jax.ShapeDtypeStruct((2,), jnp.uint32)
    tpu_pricing.compile_for(both, *arrays, ids, seed, target=target)


@pytest.mark.slow
@pytest.mark.tpu_compile
@needs_libtpu
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_the_longest_rows_compile(target, width, dtype):
    from convbert_jax.analysis.tpu import pricing as tpu_pricing
    from convbert_jax.ops.tpu.attention import longest

    with jax.set_mesh(tpu_pricing.make_mesh(target)):
        length = longest(dtype, width)
    heads = 2 * 128 // width

    def both(cotangent, query, key, value, ids, seed):
        drop = Dropout(0.1, jax.random.wrap_key_data(seed))
        form = functools.partial(op.pallas_tpu, drop=drop)
        return run(form, query, key, value, cotangent, ids, causal=True)

    arrays = [jax.ShapeDtypeStruct((2, length, heads, width), dtype)] * 4
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32)
    seed = jax.ShapeDtypeStruct((2,), jnp.uint32)
    tpu_pricing.compile_for(both, *arrays, ids, seed, target=target)


@pytest.mark.tpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("length", "keys", "heads", "width", "causal"), CASES.values(), ids=CASES)
def test_on_a_tpu(length, keys, heads, width, causal, dtype):
    arrays = unequal(length, keys, heads, width, dtype)
    key = jax.random.key(3)
    given = *arrays, documents(2, length), documents(2, keys), causal
    ours = functools.partial(op.pallas_tpu, drop=Dropout(0.1, key))
    plain = functools.partial(op.xla, drop=KernelDropout(0.1, key))
    with jax.default_matmul_precision("highest"):  # a TPU rounds factors of float32 to bfloat16
        wanted = run(plain, *given)
    assert_same(run(ours, *given), wanted, dtype)
