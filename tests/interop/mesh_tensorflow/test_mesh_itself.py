"""What Mesh TensorFlow itself saved and computed (make_mesh_checkpoint.py) is the same here."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.config.sequences import derive_encoder_decoder
from convbert_jax.decoding import greedy
from convbert_jax.interop.mesh_tensorflow.model import END, PAD, forms, read

FOLDER = Path(__file__).parent / "mesh"
FORMS = ("light", "dynamic")


@pytest.fixture(scope="module", params=FORMS)
def saved(request):
    """(what is read of a folder, what Mesh TensorFlow computed of it)"""
    folder = FOLDER / request.param
    with np.load(folder / "expected.npz") as expected:
        return read(folder), dict(expected)


def test_outputs_are_the_same(saved):
    found, expected = saved
    sources, targets = (jnp.asarray(expected[name]) for name in ("sources", "targets"))
    seen, real = sources != PAD, targets != PAD
    tokens = jnp.where(real, jnp.roll(targets, 1, axis=1), PAD).at[:, 0].set(PAD)
    model = found.build()
    encoded = model.encode(sources, seen.astype(jnp.int32))
    logits = model(sources, seen.astype(jnp.int32), tokens, real.astype(jnp.int32))
    assert np.abs(expected["logits"]).max() > 1
    np.testing.assert_allclose(encoded[seen], expected["encoded"][seen], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(logits[real], expected["logits"][real], atol=1e-5, rtol=1e-5)
    assert found.step == 524_288


def test_it_writes_the_same_where_it_reads_the_beginning_as_there(saved):
    """Its search lets the convolutions read what they did not in training."""
    found, expected = saved
    fields = forms(found.sequence)[1]
    sequence = dataclasses.replace(found.sequence, decoder_mixer_fields=fields)
    config = derive_encoder_decoder(found.model, sequence, found.words, found.words)
    model = dataclasses.replace(found, config=config).build()
    sources = jnp.asarray(expected["sources"])
    length = expected["written"].shape[1]
    state, source = model.start(sources, (sources != PAD).astype(int), copies=1, length=length + 2)
    texts = greedy(
        lambda *step: model.step(*step, source), state, jnp.full((len(sources), 1), PAD),
        length=length + 2, end=END, pad=PAD, never=[],
    )  # fmt: skip
    np.testing.assert_array_equal(texts.tokens[:, 1 : length + 1], expected["written"])
