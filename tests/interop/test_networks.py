"""A model taken apart into networks and put together again."""

import dataclasses

import jax
import numpy as np
import pytest

from convbert_jax.interop import matching, networks
from convbert_jax.interop.networks import ConversionError
from tests.interop.conftest import make_config, random_params

KINDS = {
    "mixed": {},
    "uniform": {"generator": {"kind": "uniform"}},
    "shared": {"generator": {"kind": "shared"}},
    "untied": {"generator": {"tie_embeddings": False}},
    "small generator": {"generator": {"size": 0.25, "release_heads": True}},
    "narrow generator": {"generator": {"size": 0.25, "release_heads": False}},
    "grouped": {"ffn_groups": 2, "kernel_size": 5},
    "electra": {"mixer": "attention"},
    "bert": {"recipe": "masked_lm", "mixer": "attention", "embedding_size": 32},
    "mlm": {"recipe": "masked_lm"},
    "bottleneck": {"mixer": "bottleneck"},
    "bottleneck 4": {"mixer": "bottleneck", "head_ratio": 4, "recipe": "masked_lm"},
    "ratio 4": {"head_ratio": 4, "generator": {"size": 1.0, "layers": 0.5}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_split_and_join_give_everything_back(kind):
    config = make_config(**KINDS[kind])
    params = random_params(config)
    zeros = jax.tree.map(np.zeros_like, params)
    back, report = networks.join(config, networks.split(config, params), zeros)
    jax.tree.map(np.testing.assert_array_equal, params, back)
    assert not report.initialized
    assert not report.ignored


@pytest.mark.parametrize("kind", KINDS)
def test_the_config_follows_from_the_networks(kind):
    config = make_config(**KINDS[kind])
    parts = networks.split(config, random_params(config))
    # Starting from another model; what no network tells stays.
    start = dataclasses.replace(make_config(layers=3, recipe=config.recipe))
    fields = matching.derive_fields(parts, start)
    derived = matching.replace(start, fields)
    assert derived.encoder.stages[0].depth == config.encoder.stages[0].depth
    assert derived.model == dataclasses.replace(
        config.model, head_ratio=derived.model.head_ratio, kernel_size=derived.model.kernel_size
    )
    if "generator" in parts and config.generator.kind == "separate":
        assert derived.generator_encoder == config.generator_encoder
        kept = matching.replace(config, matching.derive_fields(parts, config))
        assert kept.generator == config.generator
    if config.generator.kind != "uniform":
        assert derived.generator.kind == config.generator.kind
    assert not matching.differences(fields, config)


def test_layers_are_counted_out():
    config = make_config(layers=3)
    params = random_params(config)
    main = networks.split(config, params)["main"]
    stacked = params["discriminator"]["stages"]["0"]["mixer"]["query"]["kernel"]
    np.testing.assert_array_equal(main.parameters["layers/2/mixer/query/kernel"], stacked[2])


def test_what_is_missing_is_initialized_and_said():
    config = make_config()
    parts = networks.split(config, random_params(config))
    start = random_params(config, seed=1)
    params, report = networks.join(config, {"main": parts["main"]}, start)
    np.testing.assert_array_equal(
        params["generator_head"]["dense"]["kernel"], start["generator_head"]["dense"]["kernel"]
    )
    assert "generator_head/dense/kernel" in report.initialized
    assert all(path.startswith("generator") for path in report.initialized)
    assert len(report.loaded) + len(report.initialized) == len(jax.tree.leaves(params))
    assert "generator_head/output_bias" in "".join(report.lines())


def test_what_has_no_place_is_ignored_and_said():
    config = make_config()
    parts = networks.split(config, random_params(config))
    mlm = make_config(recipe="masked_lm")
    _, report = networks.join(mlm, parts, random_params(mlm, seed=1))
    assert "main:rtd_head/dense/kernel" in report.ignored
    assert any(name.startswith("generator:") for name in report.ignored)
    assert "head/dense/kernel" in report.initialized


def test_other_sizes_are_refused():
    config, other = make_config(), make_config(ffn_size=128)
    parts = networks.split(config, random_params(config))
    with pytest.raises(ConversionError, match=r"shape \(2, 64\).*\(2, 128\)"):
        networks.join(other, parts, random_params(other))
    different = matching.differences(matching.derive_fields(parts, other), other)
    assert different == {"model.ffn_size": (64, 128)}


def test_untied_embeddings_do_not_fit_a_tied_run():
    # As wide as the discriminator's, so only the values tell them apart.
    untied = make_config(embedding_size=16, generator={"tie_embeddings": False})
    parts = networks.split(untied, random_params(untied))
    tied = make_config(embedding_size=16)
    with pytest.raises(ConversionError, match="tie_embeddings=false"):
        networks.join(tied, parts, random_params(tied))


def test_a_generator_that_no_config_describes():
    config = make_config()
    parts = networks.split(config, random_params(config))
    stage = parts["generator"].encoder.stages[0]
    odd = dataclasses.replace(stage, layer=dataclasses.replace(stage.layer, ffn_size=99))
    encoder = dataclasses.replace(parts["generator"].encoder, stages=(odd,))
    parts["generator"] = dataclasses.replace(parts["generator"], encoder=encoder)
    with pytest.raises(ConversionError, match="feed-forward 99"):
        matching.derive_fields(parts, config)
