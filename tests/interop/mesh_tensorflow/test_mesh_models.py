"""Checkpoints with the names of Mesh TensorFlow's, of random weights and computed in PyTorch, are
read and give the same: outputs of the encoder, logits, and what is decoded, token for token.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.decoding import greedy
from convbert_jax.interop.mesh_tensorflow.model import END, PAD, read
from convbert_jax.training.state import flatten

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")

from tests.interop.mesh_tensorflow.published import STEP, Published, write  # noqa: E402

SOURCES, TARGETS = [13, 6, 4, 9], [5, 12, 8, 3]  # lengths of the rows
FORMS = {
    "light": {},
    "dynamic": {"kind": "dynamic"},
    "light, places, no tied logits": {"places": 20, "tied": False, "layers": (3, 2)},
    "dynamic, places, T5 1.1's block": {
        "kind": "dynamic",
        "places": 16,
        "gated": True,
        "taps": (5, 4),
    },
    "light, norms of newer code": {"norms": ("rms_norm", "rms_norm"), "d_kv": 16},
}


def rows(lengths, seed):
    """Texts with the end mark behind them, padded on the right."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, 128, (len(lengths), max(lengths)))
    places = np.arange(max(lengths))
    ids[places == np.array(lengths)[:, None] - 1] = END
    return np.where(places < np.array(lengths)[:, None], ids, PAD)


@pytest.mark.parametrize("form", FORMS)
def test_it_gives_the_same(form, tmp_path):
    theirs = Published(**FORMS[form])
    found = read(write(tmp_path, theirs))
    assert (found.step, found.words) == (STEP, 128)
    sources, targets = rows(SOURCES, 1), rows(TARGETS, 2)
    tokens = np.roll(targets, 1, axis=1)
    tokens[:, 0] = PAD
    real = np.arange(max(TARGETS)) < np.array(TARGETS)[:, None]
    tokens = np.where(real, tokens, PAD)
    memory, logits = theirs(sources, tokens)
    written = theirs.greedy(sources, 12)
    seen = (sources != PAD).astype(np.int32)
    model = found.build()

    @jax.jit
    def run():
        state, source = model.start(jnp.asarray(sources), jnp.asarray(seen), copies=1, length=12)
        texts = greedy(
            lambda *step: model.step(*step, source), state, jnp.full((len(sources), 1), PAD),
            length=12, end=END, pad=PAD, never=[PAD],
        )  # fmt: skip
        return (
            model.encode(jnp.asarray(sources), jnp.asarray(seen)),
            model(jnp.asarray(sources), seen, jnp.asarray(tokens), real.astype(jnp.int32)),
            texts.tokens,
        )

    encoded, ours, texts = run()
    np.testing.assert_allclose(encoded[seen == 1], memory[seen == 1], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(ours[real], logits[real], atol=1e-5, rtol=1e-5)
    # Their search ends rows one by one, but the beginning is as in training, where it is not read.
    np.testing.assert_array_equal(texts, written)


def count(folder, theirs):
    """(parameters that are read, numbers of the checkpoint's variables)"""
    found = read(write(folder, theirs))
    ours = sum(leaf.size for leaf in flatten(found.params).values())
    return ours, sum(array.size for array in theirs.variables.values())


@pytest.mark.parametrize("form", FORMS)
def test_every_number_of_it_is_a_parameter(form, tmp_path):
    ours, theirs = count(tmp_path, Published(**FORMS[form]))
    assert ours == theirs
