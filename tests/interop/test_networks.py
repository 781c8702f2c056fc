"""Splitting a model into networks and joining them again."""

import dataclasses
import itertools
import shlex

import jax
import numpy as np
import pytest
from flax import nnx

from convbert_jax.command_line import overrides
from convbert_jax.config import ConfigError, StageSection, from_config_dict, to_dict
from convbert_jax.interop import matching, networks, sources
from convbert_jax.interop.networks import ConversionError
from convbert_jax.models import build
from convbert_jax.recipes.finetuning import _encoder_weights
from tests.interop.conftest import MODERN, make_config, random_params, random_parts
from tests.refusals import refused

KINDS = {
    "mixed": {},
    "uniform": {"generator": {"kind": "uniform"}},
    "shared": {"generator": {"kind": "shared"}},
    "untied": {"generator": {"tie_embeddings": False}},
    # with 16 channels this would equal an untied generator with 16 channels
    "disentangled": {"embedding_size": 32, "generator": {"disentangle_embeddings": True}},
    "disentangled, narrow": {"generator": {"disentangle_embeddings": True, "size": 0.25}},
    "small generator": {"generator": {"size": 0.25, "release_heads": True}},
    "narrow generator": {"generator": {"size": 0.25, "release_heads": False}},
    "grouped": {"ffn_groups": 2, "kernel_size": 5},
    "electra": {"mixer": "attention"},
    "bert": {"recipe": "masked_lm", "mixer": "attention", "embedding_size": 32},
    "mlm": {"recipe": "masked_lm"},
    "modern": {"recipe": "masked_lm", "layers": 5, **MODERN},
    "modern discriminator": {
        "layers": 5,
        **MODERN,
        "qk_norm": True,
        "global_every": 2,
        "canon": "BD",
    },
    "bottleneck": {"mixer": "bottleneck"},
    "bottleneck 4": {"mixer": "bottleneck", "head_ratio": 4, "recipe": "masked_lm"},
    "ratio 4": {"head_ratio": 4, "generator": {"size": 1.0, "layers": 0.5}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_networks_give_parameters_and_config_back(kind):
    config = make_config(**KINDS[kind])
    params = random_params(config)
    parts = networks.split(config, params)
    zeros = jax.tree.map(np.zeros_like, params)
    back, report = networks.join(config, parts, zeros)
    # Unfolding the sum of embeddings rounds.
    most = 1e-6 if kind.startswith("disentangled") else 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=most), params, back)
    assert not report.initialized
    assert not report.ignored
    # Starting from another config, fields that the networks do not determine stay.
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


def test_disentangled_embeddings_are_read_as_their_sum():
    """Exports, fine-tuning and `load` all use the result of `split`."""
    config = make_config(**KINDS["disentangled"])
    params = random_params(config)
    parts = networks.split(config, params)
    path = "embeddings/word/embedding"
    shared, own = (params[n]["word"]["embedding"] for n in ("embeddings", networks.OWN))
    np.testing.assert_array_equal(parts["main"].parameters[path], shared + own)
    np.testing.assert_array_equal(parts["generator"].parameters[path], shared)
    graphdef, _ = build(networks.MODELS[config.recipe], config)
    tokens = np.random.default_rng(0).integers(5, 60, (2, 16))
    given = tokens, np.ones_like(tokens), np.zeros_like(tokens)
    hidden = jax.jit(lambda p: nnx.merge(graphdef, p).encode(*given))(params)
    alone = networks.forward(parts["main"])(*given)["hidden"]
    np.testing.assert_allclose(alone, hidden, atol=1e-5)
    source = sources.Source("run", parts)
    tuned = make_config(recipe="finetune", embedding_size=32)
    weights = _encoder_weights(source, tuned)
    np.testing.assert_array_equal(weights["embeddings"]["word"]["embedding"], shared + own)


def test_weights_of_other_runs_start_disentangled_ones():
    """The main network computes the same; without a generator nothing is subtracted."""
    config = make_config(**KINDS["disentangled"])
    for kind in ("mixed", "uniform"):
        _, parts = random_parts(**KINDS[kind], embedding_size=32)
        params, _ = networks.join(config, parts)
        main = networks.split(config, params)["main"].parameters
        for path, leaf in parts["main"].parameters.items():
            np.testing.assert_array_equal(main[path], leaf)


def test_disentangled_embeddings_need_tied_ones():
    for generator in ({"tie_embeddings": False}, {"kind": "uniform"}, {"kind": "shared"}):
        with refused(ConfigError, "disentangle_embeddings"):
            make_config(generator={"disentangle_embeddings": True} | generator)


def test_layers_are_counted_out():
    config = make_config(layers=3)
    params = random_params(config)
    main = networks.split(config, params)["main"]
    stacked = params["discriminator"]["stages"]["0"]["mixer"]["query"]["kernel"]
    np.testing.assert_array_equal(main.parameters["layers/2/mixer/query/kernel"], stacked[2])


def test_missing_parameters_are_initialized_and_others_ignored():
    config, parts = random_parts()
    start = random_params(config, seed=1)
    params, report = networks.join(config, {"main": parts["main"]}, start)
    np.testing.assert_array_equal(
        params["generator_head"]["dense"]["kernel"], start["generator_head"]["dense"]["kernel"]
    )
    assert "generator_head/dense/kernel" in report.initialized
    assert all(path.startswith("generator") for path in report.initialized)
    assert len(report.loaded) + len(report.initialized) == len(jax.tree.leaves(params))
    assert "generator_head/output_bias" in "".join(report.lines())
    mlm = make_config(recipe="masked_lm")
    _, report = networks.join(mlm, parts, random_params(mlm, seed=1))
    assert "main:rtd_head/dense/kernel" in report.ignored
    assert any(name.startswith("generator:") for name in report.ignored)
    assert "head/dense/kernel" in report.initialized


def test_other_sizes_and_tied_embeddings_are_refused():
    other, (_, parts) = make_config(ffn_size=128), random_parts()
    with refused(ConversionError, "(2, 64)", "(2, 128)"):
        networks.join(other, parts, random_params(other))
    different = matching.differences(matching.derive_fields(parts, other), other)
    assert different == {"model.ffn_size": (64, 128)}
    # The same width as the discriminator, so only the values differ.
    _, parts = random_parts(embedding_size=16, generator={"tie_embeddings": False})
    tied = make_config(embedding_size=16)
    with refused(ConversionError, "tie_embeddings=false"):
        networks.join(tied, parts, random_params(tied))


def test_a_generator_that_no_config_describes_is_refused():
    config, parts = random_parts()
    stage = parts["generator"].encoder.stages[0]
    odd = stage.map(lambda layer: dataclasses.replace(layer, ffn_size=99))
    encoder = dataclasses.replace(parts["generator"].encoder, stages=(odd,))
    parts["generator"] = dataclasses.replace(parts["generator"], encoder=encoder)
    with refused(ConversionError, 99, field="config.generator"):
        matching.derive_fields(parts, config)


SPELLINGS = {
    "cut elsewhere": {"stages": (StageSection(layers=1), StageSection(layers=3))},
    "said by the stage": {"mixer": "attention", "stages": (StageSection(layers=4, mixer="mixed"),)},
    "an idle field": {
        "mixer": "attention",
        "stages": (StageSection(layers=2, kernel_size=3), StageSection(layers=2)),
    },
}


@pytest.mark.parametrize("kind", SPELLINGS)
def test_another_spelling_of_the_same_layers_fits(kind):
    spelled = make_config(layers=4, **SPELLINGS[kind])
    parts = networks.outline(spelled)
    derived = matching.derive_fields(parts, make_config())
    assert derived["model.stages"] == ()
    flat = matching.replace(make_config(), derived)
    assert flat.encoder.depth == 4
    for config in (spelled, flat):
        for other in (parts, networks.outline(flat)):
            sources.check_fits(sources.Source("run", other), config)
    # Other sizes are derived too if only the stages were set.
    wide = make_config(layers=4, hidden_size=64, **SPELLINGS[kind])
    given = ("model.stages", "model.layers")
    fields = matching.derive_fields(networks.outline(wide), spelled)
    kept = {path: value for path, value in fields.items() if path not in given}
    sources.check_fits(
        sources.Source("run", networks.outline(wide)), matching.replace(spelled, kept)
    )


@pytest.mark.parametrize("kind", SPELLINGS)
def test_weights_of_equal_stages_are_fine_tuned(kind):
    run = make_config(layers=4, recipe="masked_lm", **SPELLINGS[kind])
    parts = networks.split(run, random_params(run))
    start = make_config(recipe="finetune")
    config = matching.replace(start, matching.derive_fields(parts, start))
    weights = _encoder_weights(sources.Source("run", parts), config)
    wanted = networks.abstract_params(config)
    for part in ("embeddings", "encoder"):
        jax.tree.map(
            lambda a, b: np.testing.assert_equal(a.shape, b.shape), wanted[part], weights[part]
        )


def test_other_stages_are_refused_with_flags_for_a_shell():
    stages = (StageSection(layers=1, mixer="attention"), StageSection(layers=1))
    source = sources.Source("run", networks.outline(make_config(stages=stages)))
    config = make_config()
    with refused(ConversionError, "config.model.") as error:
        sources.check_fits(source, config)
    assert "StageSection" not in str(error.value)
    flags = [word for word in shlex.split(str(error.value)) if word.startswith("--config.")]
    values, rest = overrides.take(flags)
    assert not rest
    changed = from_config_dict(to_dict(matching.replace(config, values)))
    sources.check_fits(source, changed)


@pytest.mark.parametrize("layers", [0.25, 0.5, 0.75])
def test_the_depth_of_each_stage_of_a_generator_comes_back(layers):
    for first, second in itertools.product(range(1, 5), repeat=2):
        stages = (StageSection(layers=first, mixer="attention"), StageSection(layers=second))
        run = make_config(layers=first + second, stages=stages, generator={"layers": layers})
        start = make_config()
        derived = matching.replace(start, matching.derive_fields(networks.outline(run), start))
        assert derived.generator_encoder == run.generator_encoder


def test_a_ratio_that_only_other_mixers_read_is_none_of_attention():
    electra = networks.outline(make_config(mixer="attention"))
    start = make_config(head_ratio=4, generator={"size": 1.0})
    derived = matching.replace(start, matching.derive_fields(electra, start))
    assert from_config_dict(to_dict(derived)).encoder == electra["main"].encoder
    assert derived.generator_encoder == electra["generator"].encoder


def test_layers_that_differ_in_what_a_config_says_of_all():
    stages = (StageSection(layers=1, mixer="attention"), StageSection(layers=1))
    main = networks.outline(make_config(stages=stages))["main"]
    first, second = main.encoder.stages
    layer = dataclasses.replace(second.layer, layer_norm_epsilon=1e-5)
    odd = (first, second.map(lambda _: layer))
    main = dataclasses.replace(main, encoder=dataclasses.replace(main.encoder, stages=odd))
    with refused(ConversionError, 1e-12, 1e-05, field="config.model.layer_norm_epsilon"):
        matching.derive_fields({"main": main}, make_config())
