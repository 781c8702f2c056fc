"""A number for each layer: schedules of kernel size and dilation, and the stages they make."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.command_line import overrides
from convbert_jax.config import StageSection, from_config_dict, network, sequences, to_dict
from convbert_jax.config.sequences import SequenceSection
from convbert_jax.interop import matching, networks
from convbert_jax.models.encoder import Encoder


def sizes(encoder):
    return [
        (stage.depth, stage.layer.mixer.kernel_size, stage.layer.mixer.dilation)
        for stage in encoder.stages
    ]


@pytest.fixture
def scheduled(make_config):
    return make_config(
        layers=4, mixer="dilated", kernel_sizes=(3, 3, 3, 5), dilations=(1, 1, 2, 2), ffn_groups=2
    )


def test_equal_layers_in_a_row_are_a_stage(scheduled, make_config):
    assert sizes(from_config_dict(to_dict(scheduled)).encoder) == [(2, 3, 1), (1, 3, 2), (1, 5, 2)]
    stages = (
        StageSection(layers=2, kernel_size=3),
        StageSection(layers=1, kernel_size=3, dilation=2),
        StageSection(layers=1, kernel_size=5, dilation=2),
    )
    written = make_config(layers=4, mixer="dilated", stages=stages, ffn_groups=2)
    assert written.encoder == scheduled.encoder
    assert written.generator_encoder == scheduled.generator_encoder


def test_one_schedule_alone_leaves_the_other_field_to_all(make_config):
    config = make_config(layers=3, mixer="dilated", kernel_size=7, dilations=(1, 2, 4))
    assert sizes(config.encoder) == [(1, 7, 1), (1, 7, 2), (1, 7, 4)]
    config = make_config(layers=3, mixer="dilated", dilation=3, kernel_sizes=(3, 5, 5))
    assert sizes(config.encoder) == [(1, 3, 3), (2, 5, 3)]


def test_a_generator_has_every_stage(scheduled):
    config = matching.replace(scheduled, {"generator.layers": 0.5})
    assert sizes(config.generator_encoder) == [(1, 3, 1), (1, 3, 2), (1, 5, 2)]


def test_on_the_command_line():
    given, rest = overrides.take(["--config.model.kernel_sizes=3,7,15,31"])
    assert given == {"model.kernel_sizes": (3, 7, 15, 31)}
    assert not rest
    assert overrides.to_flags(given) == ["--config.model.kernel_sizes=3,7,15,31"]


def test_what_no_mixer_reads_is_known(make_config, scheduled):
    assert network.idle_fields(scheduled.model) == ["heads", "kernel_size"]
    config = make_config(layers=2, mixer="light", dilations=(1, 2), dilation=3)
    assert network.idle_fields(config.model) == ["dilation", "dilations"]
    config = make_config(layers=2, mixer="attention", kernel_sizes=(3, 5))
    assert network.idle_fields(config.model) == ["kernel_size", "kernel_sizes"]


def test_a_run_with_a_schedule_is_a_source_of_weights(scheduled, make_config):
    parts = networks.outline(scheduled)
    assert not matching.differences(matching.derive_fields(parts, scheduled), scheduled)
    start = make_config(layers=2, kernel_sizes=(9, 7))
    derived = matching.derive_fields(parts, start)
    assert derived["model.kernel_sizes"] == ()
    assert matching.replace(start, derived).encoder == scheduled.encoder
    assert "model.kernel_sizes" in matching.differences(derived, start)


def test_dilation_reaches_further(make_config, randomize):
    """Two layers of three taps, 1 and 2 apart, read three positions to either side, no further."""
    config = make_config(
        layers=2, mixer="dilated", kernel_size=3, dilations=(1, 2), embedding_size=32
    )
    graphdef, params = randomize(lambda rngs: Encoder(config.encoder, rngs))

    def middle(x):
        return nnx.merge(graphdef, params)(x, jnp.ones((1, 15), jnp.int32))[0, 7].sum()

    gradient = jax.jit(jax.grad(middle))(jax.random.normal(jax.random.key(0), (1, 15, 32)))
    read = np.flatnonzero(np.abs(gradient[0]).max(axis=-1))
    np.testing.assert_array_equal(read, range(4, 11))


@pytest.mark.parametrize(
    ("model", "sequence", "idle"),
    [
        ({"mixer": "attention"}, {}, ["kernel_size"]),
        ({"mixer": "attention"}, {"decoder_mixer": "light"}, []),
        ({"mixer": "dilated", "dilations": (1, 2)}, {}, []),
        ({"mixer": "light", "kernel_sizes": (3, 5), "dilations": (1, 2)}, {}, ["dilations"]),
        # What the encoder's stages have otherwise is the decoder's.
        ({"stages": (StageSection(layers=2, mixer="light", ffn_size=96),)}, {}, []),
        ({"mixer": "mixed", "head_ratio": 4}, {"decoder_mixer": "attention"}, []),
    ],
)
def test_fields_of_an_encoder_decoder_that_neither_reads(make_config, model, sequence, idle):
    model = make_config(embedding_size=32, **model).model
    assert sequences.idle_fields(model, SequenceSection(**sequence)) == idle
