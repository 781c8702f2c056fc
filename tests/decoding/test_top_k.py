"""The largest entries of long rows are those of `jax.lax.top_k`, equal ones in their order."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.decoding.top_k import BLOCK, top_k


@settings(deadline=None, max_examples=30)
@given(
    entries=st.integers(1, 700),
    count=st.integers(1, 9),
    kinds=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_they_are_those_of_a_whole_sort(entries, count, kinds, seed):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, kinds, (3, entries)).astype(np.float32)  # many are equal
    scores[1, rng.random(entries) < 0.7] = -np.inf
    count = min(count, entries)
    for ours, theirs in zip(top_k(scores, count), jax.lax.top_k(scores, count), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("entries", "blocked"), [(BLOCK * 16, False), (BLOCK * 16 + 1, True)])
def test_long_rows_are_not_sorted_whole(entries, blocked):
    program = jax.make_jaxpr(lambda x: top_k(x, 8))(np.zeros((2, entries), np.float32))
    sorted_entries = {
        e.invars[0].aval.shape[-1] for e in program.eqns if e.primitive.name == "top_k"
    }
    assert (entries in sorted_entries) != blocked
