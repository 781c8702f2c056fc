"""Decoding with stateful models: scores equal those of a full forward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.config import ModelSection
from convbert_jax.config.network import derive_encoder_decoder, derive_language_model
from convbert_jax.config.sequences import SequenceSection
from convbert_jax.decoding import sample, search
from convbert_jax.decoding import state as states
from convbert_jax.models.networks import EncoderDecoder, LanguageModel

WORDS, END, LENGTH, BEAM = 12, 1, 9, 3
# (mixer, initial spare capacity of caches); a small one forces them to grow and to be packed.
CASES = [("attention", LENGTH), ("attention", 2), ("dynamic", LENGTH), ("light", 4), ("mixed", 2)]


@functools.cache
def models(mixer):
    """Build a translator and a language model with large, distinct weights."""
    model = ModelSection(
        layers=2, hidden_size=32, embedding_size=32, heads=4, mixer=mixer, kernel_sizes=(3, 5),
        ffn_size=48, layer_norm_epsilon=1e-5,
    )  # fmt: skip
    sequence = SequenceSection(decoder_kernel_sizes=(4, 3))
    made = (
        lambda rngs: EncoderDecoder(derive_encoder_decoder(model, sequence, WORDS, WORDS), rngs),
        lambda rngs: LanguageModel(derive_language_model(model, sequence, WORDS), rngs),
    )
    return [randomized(make) for make in made]


def randomized(make):
    graphdef, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        center = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(center + 0.3 * rng.standard_normal(leaf.shape), jnp.float32)

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(state)))


def scores_of(logits, texts, prompts):
    """Sum log probabilities of texts [N, L] after their prompts, up to their ends."""
    scores = jax.nn.log_softmax(logits)[:, :-1]
    scores = jnp.take_along_axis(scores, texts.tokens[:, 1:, None], axis=2)[:, :, 0]
    place = jnp.arange(1, texts.tokens.shape[1])
    counted = (place >= prompts[:, None]) & (place < texts.lengths[:, None])
    return jnp.where(counted, scores, 0).sum(axis=1)


def flat(found):
    """Concatenate the hypotheses of all rows."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)


@pytest.mark.parametrize(("mixer", "room"), CASES)
def test_translations_have_the_scores_of_whole_texts(mixer, room, monkeypatch):
    """Other rows and trailing padding do not change a translation."""
    monkeypatch.setattr(states, "FIRST", room)
    model, _ = models(mixer)
    source = jnp.asarray(np.random.default_rng(0).integers(2, WORDS, (2, 6)), jnp.int32)
    ids = jnp.asarray([[1] * 6, [1] * 4 + [0] * 2])

    @jax.jit
    def translate(source):
        padded, padded_ids = (jnp.pad(x, ((0, 0), (0, 5))) for x in (source, ids))
        state, read = model.start(padded, padded_ids, copies=BEAM, length=LENGTH)

        def step(tokens, state, place):
            return model.step(tokens, state, place, read)

        prompt = jnp.full((2, 1), END)  # texts begin with the end token
        found = search(step, state, prompt, beam=BEAM, length=LENGTH, end=END)
        texts = flat(found)
        whole = model(
            *(jnp.repeat(x, BEAM, axis=0) for x in (source, ids)),
            texts.tokens,
            jnp.ones_like(texts.tokens),
        )
        prompts = jnp.ones_like(texts.lengths)
        return found, scores_of(whole, texts, prompts) / (texts.lengths - 1)

    found, wanted = translate(source)
    np.testing.assert_allclose(found.scores.reshape(-1), wanted, atol=1e-5)
    assert np.abs(found.scores[0] - found.scores[1]).min() > 1e-3  # the source matters
    others, _ = translate(source.at[0].set(source[0, ::-1]))
    np.testing.assert_array_equal(found.tokens[1], others.tokens[1])
    np.testing.assert_allclose(found.scores[1], others.scores[1], atol=1e-5)


@pytest.mark.parametrize(("mixer", "room"), CASES)
def test_prompts_are_read_at_once(mixer, room, monkeypatch):
    """Prompts of three, one and two tokens, continued by beam search and by sampling."""
    monkeypatch.setattr(states, "FIRST", room)
    _, model = models(mixer)
    prompt, first = jnp.asarray([[5, 6, 7], [0, 0, 8], [0, 9, 4]]), jnp.asarray([0, 2, 1])
    keys = jax.random.split(jax.random.key(0), 3)

    def make_step(copies):
        state, read = model.start(prompt, first, copies=copies, length=LENGTH)
        return lambda *given: model.step(*given, read), state

    @jax.jit
    def write():
        found = search(*make_step(BEAM), prompt, first, beam=BEAM, length=LENGTH, end=END)
        drawn = sample(*make_step(1), prompt, first, keys=keys, length=LENGTH, end=END)
        wanted = []
        for texts, copies in ((flat(found), BEAM), (drawn, 1)):
            prompts = jnp.repeat(3 - first, copies)
            whole = model(texts.tokens, jnp.ones_like(texts.tokens))
            total = scores_of(whole, texts, prompts)
            wanted.append(total / (texts.lengths - prompts) if copies > 1 else total)
        return found, drawn, wanted

    found, drawn, (of_beams, of_drawn) = write()
    np.testing.assert_allclose(found.scores.reshape(-1), of_beams, atol=1e-5)
    np.testing.assert_allclose(drawn.scores, of_drawn, atol=1e-4)
    for row, begun in enumerate(np.asarray(3 - first)):
        for tokens in (*found.tokens[row], drawn.tokens[row]):
            np.testing.assert_array_equal(tokens[:begun], prompt[row, 3 - begun :])
