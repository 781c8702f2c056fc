"""The best tokens behind a place, without the probabilities of all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.decoding import prompts


@pytest.mark.parametrize("words", [11, 3_000])
@pytest.mark.parametrize("place", [0, 2, 5])
def test_the_best_are_those_of_all_probabilities(words, place):
    """Of rows that the prompt still speaks for, that go on as they like, and that have to end."""
    rng = np.random.default_rng(place)
    logits = jnp.asarray(rng.standard_normal((4, words)), jnp.float32)
    given = jnp.asarray(rng.integers(0, words, (4, 4))), jnp.asarray([1, 2, 4, 1]), place, 1
    last, never = jnp.asarray([False, False, False, True]), (0, 5)

    every = prompts.force(prompts.log_probabilities(logits, never), *given, last)
    wanted, tokens = jax.lax.top_k(every, 6)
    found, chosen = prompts.best(logits, 6, *given, last, never)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    possible = np.asarray(wanted) > -np.inf  # of what cannot be, any token does
    np.testing.assert_array_equal(np.asarray(chosen)[possible], np.asarray(tokens)[possible])
