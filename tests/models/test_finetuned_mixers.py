"""Every mixer under every head of fine-tuning, by being in the table; see definitions.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.config import StageConfig
from convbert_jax.models.encoder import Encoder
from convbert_jax.models.finetuned import HEADS, FinetunedModel
from convbert_jax.objectives import classification, span_extraction
from tests.models.definitions import KINDS

LOSSES = {
    "sequence": classification.text_losses,
    "first_token": classification.text_losses,
    "token": classification.tag_losses,
    "span": span_extraction.plain_losses,
    "span_beam": span_extraction.beam_losses,
}
ROWS, LENGTH = 3, 12


@pytest.fixture(scope="module")
def batch():
    """Rows of different lengths, the second half of each its second text."""
    rng = np.random.default_rng(0)
    lengths = np.asarray([LENGTH, 9, 7])[:, None]
    places = np.arange(LENGTH)
    row = np.zeros(ROWS, np.int32)
    return {
        "tokens": rng.integers(5, 50, (ROWS, LENGTH)),
        "segment_ids": (places < lengths).astype(np.int32),
        "type_ids": ((places >= lengths // 2) & (places < lengths)).astype(np.int32),
        "label": np.asarray([0, 1, 0]),
        "value": row * 1.0,
        "is_regression": np.asarray(False),
        "outputs": np.ones(2, bool),
        "tags": np.where((places > 0) & (places < lengths - 1), places % 2, -1),
        "start": np.asarray([6, 5, 4]),
        "end": np.asarray([8, 6, 4]),
        "impossible": row,
    }


@pytest.fixture(scope="module")
def step(make_config, randomize, batch):
    """step(head) -> (f(params, key) -> loss and gradients, parameters), of an encoder that has a
    layer of each kind: one program for all.
    """
    made = {name: make_config(embedding_size=32, **fields) for name, fields in KINDS.items()}
    stages = tuple(StageConfig(1, config.encoder.stages[0].layer) for config in made.values())
    config = next(iter(made.values()))

    @functools.cache
    def make(head):
        outputs = dataclasses.replace(config.outputs, head=head, labels=("a", "b"))

        def model(rngs):
            whole = FinetunedModel(dataclasses.replace(config, outputs=outputs), rngs)
            whole.encoder = Encoder(dataclasses.replace(config.encoder, stages=stages), rngs)
            return whole

        graphdef, params = randomize(model)

        def loss(params, key):
            losses, _ = LOSSES[head](nnx.merge(graphdef, params), batch, key, dtype=jnp.float32)
            return losses.sum()

        return jax.value_and_grad(loss), params

    return make


def key_biases(path) -> bool:
    """The same is added to all scores of a query: a softmax does not see it."""
    return jax.tree_util.keystr(path, simple=True, separator="/").endswith("mixer/key/bias")


@pytest.mark.parametrize("head", HEADS)
def test_a_step_reaches_all_parameters_of_every_mixer(step, head):
    run, params = step(head)
    loss, gradients = jax.jit(run)(params, jax.random.key(0))
    assert np.isfinite(loss)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.isfinite(gradient).all(), path
        assert np.any(gradient) or key_biases(path), path
    assert len(gradients["encoder"]["stages"]) == len(KINDS)


def test_seeds_as_an_axis_are_seeds_in_turn(step):
    """With dropout, of each seed its own."""
    run, params = step("sequence")
    keys = jax.random.split(jax.random.key(1), 2)
    starts = [jax.tree.map(lambda p, s=scale: s * p, params) for scale in (1.0, 0.9)]
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *starts)
    losses, gradients = jax.jit(jax.vmap(run))(together, keys)
    single = jax.jit(run)
    for number, (start, key) in enumerate(zip(starts, keys, strict=True)):
        loss, alone = single(start, key)
        np.testing.assert_allclose(losses[number], loss, rtol=1e-5)

        def check(path, many, one, number=number):
            scale = max(1e-3, float(np.abs(one).max()))
            np.testing.assert_allclose(many[number], one, atol=1e-4 * scale, err_msg=str(path))

        jax.tree_util.tree_map_with_path(check, gradients, alone)
    assert losses[0] != losses[1]
