"""The best tokens behind a place, without the probabilities of all; rows moved to the front."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.decoding import prompts


@pytest.mark.parametrize("words", [11, 3_000])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_best_are_those_of_all_probabilities(words, seed):
    """Of rows that go on as they like, and of one that has to end."""
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(rng.standard_normal((4, words)), jnp.float32)
    end, last, never = 1, jnp.asarray([False, False, False, True]), (0, 5)

    every = prompts.only_end(prompts.log_probabilities(logits, never), end, last)
    wanted, tokens = jax.lax.top_k(every, 6)
    found, chosen = prompts.best(logits, 6, end, last, never)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    possible = np.asarray(wanted) > -np.inf  # of what cannot be, any token does
    np.testing.assert_array_equal(np.asarray(chosen)[possible], np.asarray(tokens)[possible])


def test_rows_are_moved_to_the_front():
    tokens = jnp.asarray([[7, 7, 2, 3], [2, 3, 4, 5], [7, 2, 3, 4]])
    first, wanted = jnp.asarray([2, 0, 1]), [[2, 3, 9, 9], [2, 3, 4, 5], [2, 3, 4, 9]]
    np.testing.assert_array_equal(prompts.to_front(tokens, first, 9), wanted)
    beams = jnp.stack([tokens, tokens + 10], axis=1)
    moved = prompts.to_front(beams, first, 9)
    np.testing.assert_array_equal(moved[:, 0], wanted)
    np.testing.assert_array_equal(moved[0, 1], [12, 13, 9, 9])
