"""The head on [CLS] and the mean of all tokens, for encoders without attention."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from convbert_jax.config import ConfigError
from convbert_jax.config.mixers import MIXERS
from convbert_jax.config.model import StageSection
from convbert_jax.finetuning import classification
from convbert_jax.models.networks import FinetunedModel
from tests.finetuning.conftest import make_source
from tests.refusals import refused


def test_the_head_follows_from_what_the_layers_read(make_config, vocabulary, caplog):
    """A [CLS] head on an encoder without attention logs a warning."""
    stages = (StageSection(layers=1, mixer="light"), StageSection(layers=1, mixer="attention"))
    readers = {"attention", "bottleneck", "mixed"}
    configs = {name: make_config(model__mixer=name) for name in MIXERS}
    whole = {name for name, config in configs.items() if config.encoder.reads_whole_row}
    assert whole == readers
    assert make_config(model__stages=stages).encoder.reads_whole_row
    for name, asked, made, hints in (
        ("light", "auto", "first_and_mean", 0),
        ("light", "sequence", "sequence", 1),
        ("attention", "auto", "sequence", 0),
    ):
        caplog.clear()
        config = make_config(model__mixer=name, finetune__head=asked)
        task = classification.make_task(make_source(), config, vocabulary)
        assert task.outputs.head == made
        assert caplog.text.count("--config.finetune.head=first_and_mean") == hints
    tagging = dataclasses.replace(make_source(), kind="tagging")
    with refused(ConfigError, "head=first_and_mean", "toy"):
        classification.make_task(tagging, make_config(finetune__head="first_and_mean"), vocabulary)


def test_the_mean_is_of_real_tokens_and_shows_the_end_of_a_text(make_config):
    """Two layers of kernel size 3 show [CLS] two tokens. Rows of padding give finite outputs."""
    config = make_config(model__mixer="light", model__kernel_size=3)
    models = []
    for head in ("first_and_mean", "sequence"):
        outputs = dataclasses.replace(config.outputs, head=head, labels=("a", "b"))
        models.append(FinetunedModel(dataclasses.replace(config, outputs=outputs), nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 5, 50)
    rows = jnp.stack([*tokens, tokens[0].at[8].set(4), jnp.zeros(9, int)])
    beside = jnp.pad(rows, ((0, 0), (0, 5)), constant_values=7)
    segments = jnp.pad(jnp.ones_like(rows), ((0, 0), (0, 5))).at[3].set(0)

    @jax.jit
    def run():
        types = jnp.zeros_like(beside)
        found = [model.classify(beside, segments, types) for model in models]
        hidden = models[0].encode(beside, segments, types)
        both = jnp.concatenate([hidden[:, 0], hidden[:, :9].mean(1)], -1)
        alone = models[0].classify(rows[:2], segments[:2, :9], types[:2, :9])
        return *found, models[0].head(both[:, None]), alone

    found, of_first, wanted, alone = run()
    np.testing.assert_allclose(found[:3], wanted[:3], atol=1e-6)
    np.testing.assert_allclose(found[:2], alone, atol=1e-6)
    assert np.isfinite(found).all()
    assert np.abs(found[2] - found[0]).max() > 1e-6
    np.testing.assert_array_equal(of_first[2], of_first[0])
