"""Every mixer under every head of fine-tuning, by being in the table."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.config import StageConfig
from convbert_jax.config.mixers import MIXERS
from convbert_jax.models.encoder import Encoder
from convbert_jax.models.finetuned import HEADS, FinetunedModel
from convbert_jax.objectives import classification, span_extraction

LOSSES = {
    "sequence": classification.text_losses,
    "first_and_mean": classification.text_losses,
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
    """(f(params, shares [heads], key) -> loss and gradients, parameters): an encoder with a layer
    of each mixer, and every head on top of it, each with its share of the loss. One program.
    """
    configs = [make_config(embedding_size=32, mixer=mixer) for mixer in MIXERS]
    stages = tuple(StageConfig(1, config.encoder.stages[0].layer) for config in configs)
    encoder = dataclasses.replace(configs[0].encoder, stages=stages)
    graphdefs, params, heads = {}, {}, {}
    for head in HEADS:
        outputs = dataclasses.replace(configs[0].outputs, head=head, labels=("a", "b"))

        def model(rngs, outputs=outputs):
            whole = FinetunedModel(dataclasses.replace(configs[0], outputs=outputs), rngs)
            whole.encoder = Encoder(encoder, rngs)
            return whole

        graphdefs[head], params = randomize(model)
        heads[head] = params.pop("head")

    def loss(params, shares, key):
        def merged(head):
            return nnx.merge(graphdefs[head], {**params["body"], "head": params["heads"][head]})

        rows = (batch[name] for name in ("tokens", "segment_ids", "type_ids"))
        hidden = merged("sequence").encode(*rows, key=key)
        total = 0.0
        for share, head in zip(shares, HEADS, strict=True):
            on_top = merged(head)
            on_top.encode = lambda *_, **__: hidden  # computed once for all heads
            losses, _ = LOSSES[head](on_top, batch, key, dtype=jnp.float32)
            total += share * losses.sum()
        return total

    return jax.jit(jax.value_and_grad(loss)), {"body": params, "heads": heads}


def key_biases(path: str) -> bool:
    """The same is added to all scores of a query: a softmax does not see it."""
    return path.endswith("mixer/key/bias")


@pytest.mark.slow
def test_a_step_under_each_head_reaches_all_parameters_of_every_mixer(step):
    run, params = step
    for number, head in enumerate(HEADS):
        shares = jnp.zeros(len(HEADS)).at[number].set(1.0)
        loss, gradients = run(params, shares, jax.random.key(0))
        assert np.isfinite(loss), head
        reached = {"body": gradients["body"], "head": gradients["heads"][head]}
        for place, gradient in jax.tree_util.tree_leaves_with_path(reached):
            path = jax.tree_util.keystr(place, simple=True, separator="/")
            assert np.isfinite(gradient).all(), (head, path)
            assert np.any(gradient) or key_biases(path), (head, path)
        assert len(gradients["body"]["encoder"]["stages"]) == len(MIXERS)


@pytest.mark.slow
def test_seeds_as_an_axis_are_seeds_in_turn(step):
    """With dropout, of each seed its own."""
    run, params = step
    shares = jnp.zeros(len(HEADS)).at[list(HEADS).index("sequence")].set(1.0)
    keys = jax.random.split(jax.random.key(1), 2)
    starts = [jax.tree.map(lambda p, s=scale: s * p, params) for scale in (1.0, 0.9)]
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *starts)
    losses, gradients = jax.jit(jax.vmap(run, in_axes=(0, None, 0)))(together, shares, keys)
    for number, (start, key) in enumerate(zip(starts, keys, strict=True)):
        loss, alone = run(start, shares, key)
        np.testing.assert_allclose(losses[number], loss, rtol=1e-5)

        def check(path, many, one, number=number):
            scale = max(1e-3, float(np.abs(one).max()))
            np.testing.assert_allclose(many[number], one, atol=1e-4 * scale, err_msg=str(path))

        jax.tree_util.tree_map_with_path(check, gradients, alone)
    assert losses[0] != losses[1]
