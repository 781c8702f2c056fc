"""Decoding by the models: with what they keep as without it, in a batch as alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.config import ModelSection
from convbert_jax.config.sequences import (
    SequenceSection,
    derive_encoder_decoder,
    derive_language_model,
)
from convbert_jax.decoding import sample, search
from convbert_jax.decoding import state as states
from convbert_jax.models.sequences.networks import EncoderDecoder, LanguageModel

WORDS, END, LENGTH, BEAM = 12, 1, 9, 3
SOURCE_IDS = jnp.asarray([[1] * 6, [1] * 4 + [0] * 2])
SOURCE = jnp.asarray(np.random.default_rng(0).integers(2, WORDS, (2, 6)), jnp.int32)


@functools.cache
def models(mixer):
    """A translator and a language model whose weights are large and all different."""
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


def translate(model, source, source_ids):
    state, read = model.start(source, source_ids, copies=BEAM, length=LENGTH)

    def step(tokens, state, place):
        return model.step(tokens, state, place, read)

    prompt = jnp.full((len(source), 1), END)  # texts begin with the end of the one before
    return search(step, state, prompt, beam=BEAM, length=LENGTH, end=END)


def translate_without_memory(model, source, source_ids):
    """The state is the tokens so far; the whole target is made again for each."""
    source, source_ids = (jnp.repeat(x, BEAM, axis=0) for x in (source, source_ids))

    def step(tokens, state, place):
        state = state.at[:, place].set(tokens)
        logits = model(source, source_ids, state, jnp.ones_like(state))
        return logits[:, place], state

    rows = len(source)
    state = jnp.zeros((rows, LENGTH), jnp.int32)
    prompt = jnp.full((rows // BEAM, 1), END)
    return search(step, state, prompt, beam=BEAM, length=LENGTH, end=END)


@pytest.mark.parametrize("room", [LENGTH, 2])
@pytest.mark.parametrize("mixer", ["attention", "dynamic", "light", "mixed"])
def test_with_what_is_kept_as_without_it(mixer, room, monkeypatch):
    """Also where what is kept has to be given room on the way."""
    monkeypatch.setattr(states, "FIRST", room)
    monkeypatch.setattr(states, "TIMES", 2)
    model, _ = models(mixer)
    kept = jax.jit(functools.partial(translate, model))(SOURCE, SOURCE_IDS)
    again = jax.jit(functools.partial(translate_without_memory, model))(SOURCE, SOURCE_IDS)
    np.testing.assert_array_equal(kept.tokens, again.tokens)
    np.testing.assert_allclose(kept.scores, again.scores, atol=1e-5)
    assert np.abs(kept.scores[0] - kept.scores[1]).min() > 1e-3  # the source is read


@pytest.mark.parametrize("mixer", ["attention", "dynamic", "light"])
def test_a_row_alone_and_with_more_padding_is_the_same(mixer, monkeypatch):
    """Also where room is given, to all rows at once, as the row beside it needs it."""
    monkeypatch.setattr(states, "FIRST", 4)
    model, _ = models(mixer)
    run = jax.jit(functools.partial(translate, model))
    together = run(SOURCE, SOURCE_IDS)
    short = run(SOURCE[1:, :4], SOURCE_IDS[1:, :4])
    long = run(jnp.pad(SOURCE[1:], ((0, 0), (0, 5))), jnp.pad(SOURCE_IDS[1:], ((0, 0), (0, 5))))
    for alone in (short, long):
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[1])
        np.testing.assert_allclose(alone.scores[0], together.scores[1], atol=1e-5)


@pytest.mark.parametrize("room", [LENGTH, 2])
@pytest.mark.parametrize("mixer", ["attention", "dynamic", "light", "mixed"])
def test_what_is_given_is_read_at_once_as_token_by_token(mixer, room, monkeypatch):
    """By a beam, behind beginnings of three, one and two tokens; also where room is short."""
    monkeypatch.setattr(states, "FIRST", room)
    _, model = models(mixer)
    prompt, first = jnp.asarray([[5, 6, 7], [0, 0, 8], [0, 9, 4]]), jnp.asarray([0, 2, 1])

    def write(prompt, first):
        state, read = model.start(prompt, first, copies=BEAM, length=LENGTH)

        def step(tokens, state, place):
            return model.step(tokens, state, place, read)

        return search(step, state, prompt, first, beam=BEAM, length=LENGTH, end=END)

    def write_without_memory(prompt):
        begun = prompt.shape[1]
        tokens = jnp.zeros((BEAM, LENGTH), jnp.int32).at[:, :begun].set(prompt)

        def step(tokens, state, place):
            state = state.at[:, place].set(tokens)
            return model(state, jnp.ones_like(state))[:, place], state

        return search(step, tokens, prompt, beam=BEAM, length=begun + 6, end=END)

    found = jax.jit(write)(prompt, first)
    for row in range(3):
        alone = jax.jit(write_without_memory)(prompt[row : row + 1, int(first[row]) :])
        length = alone.tokens.shape[2]
        np.testing.assert_array_equal(found.tokens[row, :, :length], alone.tokens[0])
        np.testing.assert_allclose(found.scores[row], alone.scores[0], atol=1e-5)


def test_a_language_model_goes_on_from_prompts_of_its_own():
    _, model = models("dynamic")
    prompt = jnp.asarray([[5, 6, 7], [0, 0, 8]])
    first = jnp.asarray([0, 2])
    keys = jax.random.split(jax.random.key(0), 2)

    def write(prompt, first, keys, length):
        state, read = model.start(prompt, first, copies=1, length=length)

        def step(tokens, state, place):
            return model.step(tokens, state, place, read)

        return sample(step, state, prompt, first, keys=keys, length=length, end=END)

    write = jax.jit(write, static_argnames="length")
    together = write(prompt, first, keys, LENGTH)
    alone = write(prompt[1:, 2:], first[:1], keys[1:], LENGTH - 2)
    np.testing.assert_array_equal(together.tokens[1, : LENGTH - 2], alone.tokens[0])
    np.testing.assert_allclose(together.scores[1], alone.scores[0], atol=1e-5)
    np.testing.assert_array_equal(together.tokens[0, :3], prompt[0])
    length = int(together.lengths[0])
    text = together.tokens[:1, :length]
    logits = jax.nn.log_softmax(model(text, jnp.ones_like(text)))[0]
    told = [float(logits[t, text[0, t + 1]]) for t in range(2, min(length, LENGTH - 1) - 1)]
    if length < LENGTH:
        np.testing.assert_allclose(together.scores[0], sum(told), atol=1e-4)
