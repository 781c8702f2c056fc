"""What layers have of T5's and of Tay et al.'s beside their mixers: dropout in more places, gates,
one layer of attention among convolutions.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.config import StageSection
from convbert_jax.config.sequences import derive_encoder_decoder
from convbert_jax.models.encoder import FeedForward
from convbert_jax.models.layers import initializers
from convbert_jax.models.sequences.networks import EncoderDecoder
from tests.models.test_sequences import LENGTH, WORDS, draw, sections, translator


@pytest.mark.parametrize(("stages", "reach"), [((), 3), ((2, 1), LENGTH)])
def test_one_layer_of_attention_in_a_convolutional_encoder_reads_the_whole_source(stages, reach):
    """What Tay et al. 2021 add for questions about a text: three layers of windows of 3 see three
    positions to each side, one of attention among them all.
    """
    model, sequence = sections("convolutions and a layer of attention")
    sections_of = tuple(
        StageSection(layers=layers, mixer=mixer)
        for layers, mixer in zip(stages, ("light", "attention"), strict=False)
    )
    config = derive_encoder_decoder(
        dataclasses.replace(model, stages=sections_of), sequence, WORDS, WORDS
    )
    assert [type(stage.layer.mixer).__name__ for stage in config.decoder.stages] == ["Light"]
    net = EncoderDecoder(config, nnx.Rngs(0))
    source = draw(0, 1, LENGTH)
    changed = source.at[0, 0].set((source[0, 0] + 1) % (WORDS - 3))
    ids = jnp.ones_like(source)
    moved = jnp.abs(net.encode(source, ids) - net.encode(changed, ids)).max(axis=-1)[0]
    np.testing.assert_array_equal(moved > 1e-7, np.arange(LENGTH) <= reach)


@pytest.mark.parametrize("field", ["activation_dropout", "last_dropout"])
def test_each_dropout_of_t5s_is_where_it_says(field):
    """With a key alone; behind the last norm it leaves whole channels of what is given out at 0."""
    model, sequence = sections("T5's layers")
    none = {"activation_dropout": 0.0, "last_dropout": 0.0}
    sequence = dataclasses.replace(sequence, **none | {field: 0.5})
    model = dataclasses.replace(model, dropout=0.0, attention_dropout=0.0)
    net = EncoderDecoder(derive_encoder_decoder(model, sequence, WORDS, WORDS), nnx.Rngs(0))
    source, ids = draw(0, 2, LENGTH), jnp.ones((2, LENGTH), int)
    plain, dropped = (net.encode(source, ids, key=key) for key in (None, jax.random.key(0)))
    gone = float((dropped == 0).mean())
    assert gone == pytest.approx(0.5, abs=0.1) if field == "last_dropout" else gone == 0
    assert float(jnp.abs(dropped - plain).max()) > 1e-3
    decoded = [net(source, ids, source, ids, key=key) for key in (None, jax.random.key(0))]
    assert float(jnp.abs(decoded[0] - decoded[1]).max()) > 1e-3


def test_a_gated_block_multiplies_two_dense_layers():
    config = translator("T5's layers").encoder.stages[0].layer
    block = FeedForward(config, initializers("glorot", 0.02), nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (1, 4, 32))
    first, gate, last = (getattr(block, n).kernel[...] for n in ("intermediate", "gate", "output"))
    wanted = (jax.nn.gelu(x @ first, approximate=True) * (x @ gate)) @ last
    np.testing.assert_allclose(block(x), wanted, atol=1e-5)
