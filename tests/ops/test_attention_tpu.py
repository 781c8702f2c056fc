"""TPU attention kernels in the Pallas interpreter, and their dropout masks.

tests/end_to_end/test_tpu_compile.py tests that they compile for TPUs.
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
from convbert_jax.ops.attention import KernelDropout
from convbert_jax.ops.nn import Dropout
from convbert_jax.ops.tpu import attention as tpu
from tests.ops import definitions
from tests.ops.definitions import BF16, F32, assert_close, make_mesh, run
from tests.ops.test_attention import TOLERANCE, documents, draw, ids_of

KEPT = 230  # of 256
CASES = {
    "two heads of 64": (128, 128, 2, 64, "none", False, 0.0),
    "a decoder's": (256, 256, 2, 64, "packed", True, 0.1),
    "a head that fills half the lanes": (128, 128, 1, 64, "none", True, 0.6),
    "three heads of 64, with one of zeros beside": (128, 128, 3, 64, "packed", False, 0.1),
    "four of 32, some queries without a key": (128, 384, 4, 32, "silent", False, 0.0),
    "one of 128": (256, 128, 1, 128, "packed", False, 0.6),
}


def check(length, keys, heads, width, kind, causal, rate, *, window=0, dtype=F32, interpret=True):
    """Compare the kernels with the definition, using the same dropout mask."""
    *arrays, cotangent = draw(length, keys, heads, width, dtype)
    ids, key_ids = ids_of(kind, length, keys)
    seen = definitions.visible(ids, key_ids, (length, keys), causal, window)
    drop, kept = None, 1.0
    if rate:
        drop = Dropout(rate, jax.random.key(3))
        kept = KernelDropout(rate, drop.key).draw((2, heads, length, keys)) * drop.factor
    expected = definitions.attend(*arrays, cotangent, seen, kept)
    given = [None if x is None else jnp.asarray(x) for x in (ids, key_ids)]

    def attend(*arrays):
        return op.pallas_tpu(*arrays, *given, causal, window, drop=drop, interpret=interpret)

    tolerance = TOLERANCE[dtype] * (1 if interpret else 2)
    assert_close(run(attend, arrays, cotangent), expected, tolerance)


@pytest.mark.parametrize("case", CASES)
def test_kernels_are_the_definition(case):
    check(*CASES[case])


@pytest.mark.parametrize("causal", [False, True])
def test_rows_longer_than_a_block(causal):
    """Scores of 1,024 positions are computed in blocks."""
    check(1024, 1024, 2, 64, "packed", causal, 0.1, dtype=BF16)


# Blocks of 256 and 64 on each side, of 128 and 128, of 256 and 192; whole rows.
WINDOWS = {(1280, 64, "packed"), (1152, 100, "none"), (1536, 130, "silent"), (256, 64, "packed")}


@pytest.mark.parametrize(("length", "window", "kind"), sorted(WINDOWS))
def test_windows(length, window, kind):
    check(length, length, 2, 64, kind, False, 0.0, window=window)


@pytest.mark.parametrize(
    ("length", "window"), [(8192, 64), (8192, 512), (8320, 64), (4096, 100), (4096, 1024)]
)
def test_the_check_of_a_kernel_has_the_blocks_of_its_call(length, window):
    x = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16)
    checked = op.pallas_tpu_check_length(x, x, x, None, None, False, window)
    assert checked <= min(length, 4096)
    small = jax.ShapeDtypeStruct((1, checked, 2, 64), jnp.bfloat16)
    assert op._window_block(small, window) == op._window_block(x, window)
    assert op._window_block(x, window)[1] > 0


def test_a_row_that_does_not_fit_whole_is_cut(monkeypatch):
    x = jax.ShapeDtypeStruct((1, 1024, 2, 64), jnp.bfloat16)
    for longest, expected in ((3456, (1024, 0)), (896, (256, 64))):  # TPU v5e, v4
        monkeypatch.setattr(tpu, "longest", lambda *_, most=longest: most)
        assert op._window_block(x, 64) == expected
    assert op.pallas_tpu_refuses(x, x, x, None, None, False, 64) == ""


@pytest.mark.tpu
@pytest.mark.parametrize(("length", "window", "kind"), sorted(WINDOWS))
def test_windows_on_a_tpu(length, window, kind):
    check(length, length, 2, 64, kind, False, 0.0, window=window, dtype=BF16, interpret=False)


@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 2, "sequence": 2}, {"fsdp": 2}])
def test_the_same_weights_are_dropped_on_any_mesh(sizes):
    with jax.set_mesh(make_mesh(**sizes)):
        check(256, 256, 2, 64, "packed", False, 0.3)


def test_windows_on_a_mesh():
    with jax.set_mesh(make_mesh(data=2, tensor=2, sequence=2)):
        check(512, 512, 2, 64, "packed", False, 0.0, window=20)


def test_padding_alone_is_finite_and_its_values_reach_nothing():
    *arrays, cotangent = draw(128, width=64)
    ids = jnp.asarray(documents(128)).at[1].set(0)

    def attend(*arrays):
        return op.pallas_tpu(*arrays, ids, ids, False, 0, interpret=True)

    out, *gradients = run(attend, arrays, cotangent)
    assert all(np.isfinite(found).all() for found in (out, *gradients))
    padding = (ids == 0)[..., None, None]
    other, *_ = run(attend, [jnp.where(padding, 100.0, x) for x in arrays], cotangent)
    real = np.asarray(ids != 0)
    np.testing.assert_array_equal(np.asarray(other)[real], np.asarray(out)[real])


def test_scores_of_thousands_do_not_overflow():
    """The backward pass subtracts the log-sum-exp from the scores in float32.

    The rounding error of the scores, about 1e-4, therefore appears in the weights.
    """
    *arrays, cotangent = [30 * x for x in draw(128, width=64)]
    expected = definitions.attend(
        *arrays, cotangent, definitions.visible(None, None, (128,) * 2, 0)
    )

    def attend(*arrays):
        return op.pallas_tpu(*arrays, None, None, False, 0, interpret=True)

    assert_close(run(attend, arrays, cotangent), expected, 1e-3)


def test_seeds_as_an_axis():
    *arrays, _ = draw(128, width=64)
    keys = jax.random.split(jax.random.key(5), 2)

    def one(key):
        drop = Dropout(0.5, key)
        return op.pallas_tpu(*arrays, None, None, False, 0, drop=drop, interpret=True)

    together = jax.jit(jax.vmap(one))(keys)
    for key, found in zip(keys, together, strict=True):
        np.testing.assert_allclose(found, jax.jit(one)(key), atol=1e-6)
    assert np.abs(together[0] - together[1]).max() > 0.1


@pytest.mark.tpu
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("case", CASES)
def test_on_a_tpu(case, dtype):
    check(*CASES[case], dtype=dtype, interpret=False)


# --- Dropout masks ---


def test_xla_on_a_tpu_drops_the_same(monkeypatch):
    """On a TPU, XLA attention requests the mask with keys before queries."""
    drop = KernelDropout(0.6, jax.random.key(3))
    wanted = drop.draw((2, 3, 128, 256))
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    np.testing.assert_array_equal(drop.draw((2, 3, 256, 128)).swapaxes(2, 3), wanted)


@settings(max_examples=8)
@given(
    st.integers(0, 3), st.integers(1, 3), st.integers(0, 40), st.integers(1, 40),
    st.integers(-(2**31), 2**31 - 1), st.integers(1, 255),
)  # fmt: skip
def test_marks_do_not_depend_on_blocks(group, groups, query, queries, seed, kept):
    words = tpu.head_words(jnp.asarray([seed, 17], jnp.int32), 5, 3)
    whole = tpu.dropout_mask(words, (0, 6 * tpu.GROUP), (0, 80), kept)
    part = tpu.dropout_mask(words, (group * tpu.GROUP, groups * tpu.GROUP), (query, queries), kept)
    rows = slice(group * tpu.GROUP, (group + groups) * tpu.GROUP)
    np.testing.assert_array_equal(part, whole[rows, query : query + queries])


@functools.partial(jax.jit, static_argnums=3)
def marks_of(seed, row, head, kept):
    return tpu.dropout_mask(tpu.head_words(seed, row, head), (0, 512), (0, 512), kept)


def drawn(seed, row, head, kept=KEPT):
    """Return [512 keys, 512 queries], 1 where a weight is kept."""
    return np.asarray(marks_of(jnp.asarray(seed, jnp.int32), row, head, kept), float)


@pytest.mark.parametrize("kept", [1, 128, KEPT, 255])
def test_as_many_are_kept_as_shall_be(kept):
    share = kept / 256
    for seed in range(4):
        found = drawn((seed, 0), seed, seed, kept)
        deviation = (share * (1 - share) / found.size) ** 0.5
        assert abs(found.mean() - share) < 5 * deviation
        # Uniform over queries and keys: chi-square with 512 degrees of freedom.
        for axis in (0, 1):
            sums = found.sum(axis=axis)
            squares = ((sums - 512 * share) ** 2).sum() / (512 * share * (1 - share))
            assert abs(squares - 512) < 6 * (2 * 512) ** 0.5


def test_marks_are_independent():
    """Masks of neighbors, of one random word, of heads, rows and seeds are uncorrelated."""
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
