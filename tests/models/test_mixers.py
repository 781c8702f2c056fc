"""Mixers by name, from outside too, and stages of several: what a config makes of them."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax import config_files
from convbert_jax.analysis import flops
from convbert_jax.command_line import overrides
from convbert_jax.config import (
    Config,
    ConfigError,
    MeshSection,
    StageSection,
    from_config_dict,
    network,
    to_config_dict,
    to_dict,
    to_text,
)
from convbert_jax.config.checks import plugins
from convbert_jax.config.mixers import MIXERS, Mixer, change, describe
from convbert_jax.interop import matching, networks
from convbert_jax.interop.huggingface import config as huggingface_config
from convbert_jax.interop.networks import ConversionError
from convbert_jax.interop.tensorflow1 import checkpoint as tensorflow1
from convbert_jax.models.build import build
from convbert_jax.models.layers import initializers
from convbert_jax.models.mixers import sharding_rules
from convbert_jax.models.pretraining import PretrainingModel
from convbert_jax.training import sharding
from convbert_jax.training.state import flatten
from tests.models.mean_mixer import NAME, Mean

STAGES = (
    StageSection(layers=1, mixer="attention", heads=2),
    StageSection(layers=2, kernel_size=3, ffn_size=96, ffn_groups=2),
    StageSection(layers=1, mixer=NAME, mixer_fields=("gain=0.5", "centered=true")),
)


@pytest.fixture(scope="module")
def staged(make_config):
    config = make_config(layers=4, stages=STAGES)
    return from_config_dict(to_dict(config))


def mixers_of(encoder):
    return [stage.layer.mixer for stage in encoder.stages]


@pytest.mark.parametrize("name", [*MIXERS, NAME])
def test_every_mixer_says_all_that_is_asked_and_comes_back_from_what_it_says(make_config, name):
    config = make_config(mixer=name)
    mixer = config.encoder.stages[0].layer.mixer
    assert isinstance(mixer, Mixer)
    assert hash(mixer) == hash(dataclasses.replace(mixer))
    said = {f"model.{field}": value for field, value in describe(mixer, 32).items()}
    assert said["model.mixer"] == name
    assert matching.replace(make_config(), said).encoder == config.encoder


def test_own_fields_of_a_mixer_are_not_those_of_a_config(make_config):
    @dataclasses.dataclass(frozen=True)
    class Own(Mean):
        attention: str = "soft"

    assert change(Own(attention="hard"), attention="xla") == Own(attention="hard")
    mixed = make_config().encoder.stages[0].layer.mixer
    assert change(mixed, attention="xla").attention == "xla"


def test_a_stage_takes_from_the_model_what_it_leaves_out(staged):
    attention, mixed, mean = mixers_of(staged.encoder)
    assert (attention.attention_heads, attention.head_size) == (2, 16)
    assert (mixed.attention_heads, mixed.head_size, mixed.kernel_size) == (2, 8, 3)
    assert mean == Mean(gain=0.5, centered=True)
    layers = [stage.layer for stage in staged.encoder.stages]
    assert [(layer.ffn_size, layer.ffn_groups) for layer in layers] == [(64, 1), (96, 2), (64, 1)]
    assert staged.encoder.depth == staged.model.layers == 4


def test_the_fields_of_the_models_mixer_are_those_of_its_stages_too(make_config):
    stages = (
        StageSection(layers=1),
        StageSection(layers=1, mixer=NAME),
        StageSection(layers=1, mixer=NAME, mixer_fields=("gain=3",)),
        StageSection(layers=1, mixer="attention"),
    )
    config = make_config(layers=4, mixer=NAME, mixer_fields=("gain=7",), stages=stages)
    *means, _ = mixers_of(from_config_dict(to_dict(config)).encoder)
    assert [mean.gain for mean in means] == [7, 7, 3]


def test_a_stage_with_defaults_beside_one_without_comes_back(make_config):
    stages = (
        StageSection(layers=1, mixer=NAME, mixer_fields=("gain=0.5",)),
        StageSection(layers=1, mixer=NAME),
    )
    config = make_config(layers=2, stages=stages, generator={"kind": "uniform"})
    params = jax.device_get(build(PretrainingModel, config)[1](jax.random.key(0)))
    fields = matching.derive_fields(networks.split(config, params), config)
    assert matching.replace(config, fields).encoder == config.encoder


@pytest.mark.parametrize(
    ("model", "idle"),
    [
        ({}, []),
        ({"mixer": "attention"}, ["kernel_size"]),
        ({"stages": (StageSection(layers=2, mixer="attention", heads=2),), "mixer": "nothere:X"},
         ["heads", "mixer", "kernel_size"]),
        ({"stages": (StageSection(layers=1, kernel_size=3), StageSection(mixer="attention"))},
         ["kernel_size"]),
        ({"stages": (StageSection(ffn_size=96), StageSection(layers=1, ffn_size=32))},
         ["ffn_size"]),
        ({"stages": (StageSection(ffn_size=96), StageSection(layers=1))}, []),
    ],
)  # fmt: skip
def test_fields_of_the_model_that_no_stage_takes_are_known(make_config, model, idle):
    assert network.idle_fields(make_config(layers=2, **model).model) == idle


def test_the_generator_has_the_same_stages_cut_by_its_size(make_config):
    config = make_config(
        layers=4,
        stages=(StageSection(layers=3, mixer="attention"), StageSection(layers=1, kernel_size=3)),
        generator={"size": 0.5, "layers": 0.5},
    )
    attention, mixed = config.generator_encoder.stages
    assert (attention.depth, mixed.depth) == (2, 1)  # rounded, but at least one
    assert (attention.layer.mixer.attention_heads, attention.layer.mixer.head_size) == (2, 8)
    assert (mixed.layer.mixer.attention_heads, mixed.layer.mixer.kernel_size) == (1, 3)
    assert {stage.layer.ffn_size for stage in (attention, mixed)} == {4 * 16}


def test_one_stage_that_says_everything_is_the_flat_config(make_config):
    flat = make_config(mixer="attention", kernel_size=5)
    section = StageSection(layers=2, mixer="attention", heads=4, ffn_size=64, ffn_groups=1)
    assert make_config(stages=(section,)).encoder == flat.encoder
    _, init = build(PretrainingModel, flat)
    _, init_staged = build(PretrainingModel, make_config(stages=(section,)))
    jax.tree.map(
        np.testing.assert_array_equal, init(jax.random.key(0)), init_staged(jax.random.key(0))
    )


def test_stages_in_files_and_on_the_command_line(staged):
    assert from_config_dict(json.loads(json.dumps(to_dict(staged)))) == staged
    of_file = to_config_dict(staged)
    of_file.model.stages = [{"layers": 4, "mixer": "attention"}]
    assert from_config_dict(of_file.to_dict()).model.stages == (
        StageSection(layers=4, mixer="attention"),
    )
    (flag,) = overrides.to_flags({"model.stages": STAGES})
    given, rest = overrides.take([flag])
    assert not rest
    assert overrides.to_flags(given) == [flag]  # as another process gets it
    values = config_files.change(to_dict(staged), given)
    assert from_config_dict(values) == staged
    assert json.loads(to_text(STAGES))[0] == {"layers": 1, "heads": 2, "mixer": "attention"}


def test_configs_without_stages_mean_what_they_did(make_config):
    old = to_dict(make_config())
    del old["model"]["stages"], old["model"]["mixer_fields"]  # as written before there were any
    assert from_config_dict(old) == make_config()


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ([{"layers": 3}], "config.model.stages has 3 layers, but config.model.layers=4"),
        ([{"layers": 0}], r"config.model.stages\[0\].layers=0 must be at least 1"),
        ([{"kernel": 3}], r"config.model.stages\[0\].kernel does not exist; did you mean"),
        ([{"layers": "2"}], r"config.model.stages\[0\].layers='2' must be of type int"),
        ([3], "config.model.stages has 3, no object"),
        ("mixed", "config.model.stages='mixed' must be a list"),
        ([{"layers": 4, "heads": 5}], r"not divisible by config.model.stages\[0\].heads=5"),
        ([{"layers": 4, "head_ratio": 3}], r"config.model.stages\[0\].head_ratio=3"),
        ([{"layers": 4, "ffn_groups": 3}], r"config.model.stages\[0\].ffn_groups=3"),
        ([{"layers": 4, "heads": -1}], r"config.model.stages\[0\].heads=-1 must be"),
        ([{"layers": 4, "mixer": "mixd"}], r"stages\[0\].mixer='mixd' is unknown; .*'mixed'"),
        ([{"layers": 4, "mixer_fields": ["a=1"]}], r"stages\[0\].mixer_fields=a=1 is of no mixer"),
        (
            [{"layers": 4, "mixer": "attention", "head_ratio": 4}],
            r"config.model.stages\[0\].head_ratio=4 does nothing with config.model.stages\[0\].m",
        ),
        ([{"layers": 4, "heads": 1}, {"heads": 2, "layers": 0}], r"stages\[1\].layers=0"),
    ],
)
def test_faults_of_stages_are_one_sentence(staged, stages, says):
    values = to_dict(staged)
    values["model"]["stages"] = stages
    with pytest.raises(ConfigError, match=says) as error:
        from_config_dict(values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mixer", ["mixed", NAME])
def test_fields_of_a_mixer_that_no_stage_takes_are_refused(staged, mixer):
    values = to_dict(staged)
    values["model"] |= {"mixer": mixer, "mixer_fields": ["junk=7"]}
    values["model"]["stages"][1]["mixer"] = "mixed"
    if mixer == "mixed":
        values["model"]["stages"] = [{"layers": 4, "mixer": "attention"}]
    with pytest.raises(ConfigError, match=r"config\.model\.mixer_fields=junk=7 is of no stage"):
        from_config_dict(values)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"mixer": "convolution"}, "config.model.mixer='convolution' is unknown"),
        ({"mixer": "nobody.has:This"}, "cannot be imported .ModuleNotFoundError"),
        ({"mixer": "json:nothing"}, "cannot be imported .AttributeError"),
        ({"mixer": "json:loads"}, "is no mixer, it lacks .*make"),
        ({"mixer": "tests.models.test_mixers:Half"}, "lacks .*reads_padding"),
        ({"mixer": NAME, "mixer_fields": ["gian=1"]}, "gian=1 is no field .* gain, centered"),
        ({"mixer": NAME, "mixer_fields": ["gain"]}, "write NAME=VALUE"),
        ({"mixer": NAME, "mixer_fields": ["gain=much"]}, "must be of type float"),
        ({"mixer": NAME, "mixer_fields": ["gain=1", "gain=2"]}, "names gain twice"),
        ({"mixer": NAME, "mixer_fields": ["gain=0"]}, "mixes nothing"),
        ({"mixer_fields": ["gain=1"]}, "the mixer mixed; its fields are filters, own"),
        ({"mixer": "separable", "mixer_fields": ["gain=1"]}, "it has no fields of its own"),
        ({"mixer_fields": ["filters=lite"]}, "mixer_fields: filters='lite' is unknown; .*'light'"),
        ({"mixer_fields": ["convolution_share=0.3"]}, "share=0.3 of 4 heads .* multiple of 1/4"),
        ({"mixer_fields": ["convolution_share=1"]}, "share=1.0 of 4 heads .* of both kinds"),
        ({"kernel_sizes": [3, 5, 7]}, "kernel_sizes has 3 numbers, but config.model.layers=2"),
        ({"mixer": "dilated", "dilations": [1]}, "dilations has 1 numbers, but config.model.la"),
        ({"kernel_sizes": [3, 0]}, "config.model.kernel_sizes=0 must be at least 1"),
        (
            {"kernel_sizes": [3, 5], "stages": [{"layers": 2}]},  # as of a variant, tiny:light
            "kernel_sizes and config.model.stages .*the other: --config.model.kernel_sizes=$",
        ),
    ],
)
def test_faults_of_mixers_are_one_sentence(make_config, given, says):
    values = to_dict(make_config())
    values["model"] |= given
    with pytest.raises(ConfigError, match=says) as error, plugins.trusting(True):
        from_config_dict(values)
    assert "\n" not in str(error.value)


def test_a_jax_that_does_not_start_is_not_a_fault_of_the_mixer():
    """A variable that jax refuses; it said to set PYTHONPATH or to name another mixer."""
    program = "from convbert_jax.config import mixers; mixers.find('mixed')"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "pigeons"},
        capture_output=True,
        text=True,
    )
    said = ended.stderr.splitlines()[-1]
    assert "pigeons" in said
    assert said.endswith("see what `python -c 'import jax, flax'` says here.")


class Half:
    """No mixer: most is missing."""

    @classmethod
    def make(cls, settings):
        return cls()


@pytest.mark.parametrize(
    "ask",
    [
        lambda config: config.encoder,
        flops.training_flops_per_token,
        networks.outline,
        lambda config: build(PretrainingModel, config),
    ],
    ids=["encoder", "flops", "interop", "model"],
)
def test_an_unknown_mixer_is_an_error_everywhere(make_config, ask):
    """Where no check of the config was before it, too."""
    with pytest.raises(ConfigError, match="mixer='nonesuch' is unknown"):
        ask(make_config(mixer="nonesuch"))


def test_flops_add_up_over_stages(staged, make_config):
    def alone(**model):
        config = make_config(layers=1, generator={"kind": "uniform"}, **model)
        return flops._encoder(config.encoder, 24, True) - flops._encoder(
            dataclasses.replace(config.encoder, stages=()), 24, True
        )

    total = flops._encoder(staged.encoder, 24, True) - flops._encoder(
        dataclasses.replace(staged.encoder, stages=()), 24, True
    )
    parts = [
        alone(mixer="attention", heads=2),
        2 * alone(kernel_size=3, ffn_size=96, ffn_groups=2),
        alone(mixer=NAME, mixer_fields=("gain=0.5",)),
    ]
    assert total == sum(parts)
    mean = flops._layer_products(make_config(mixer=NAME).encoder.stages[0].layer, 24)
    assert mean == 2 * 32**2 + 2 * 2 * 32 * 64


def test_every_parameter_of_every_stage_has_a_rule(staged):
    _, init = build(PretrainingModel, staged)
    mesh = sharding.make_mesh(MeshSection(fsdp=2, tensor=2))
    rules = (*sharding_rules(staged.encoder), *sharding.RULES)
    shapes = flatten(jax.eval_shape(init, jax.random.key(0)))
    assert "discriminator/stages/2/mixer/weight" in shapes
    for path, leaf in shapes.items():
        sharding.partition_spec(path, leaf.shape, mesh, rules)
    wide = sharding.partition_spec(
        "encoder/stages/2/mixer/output/kernel", (1, 256, 256), mesh, rules
    )
    assert wide == jax.sharding.PartitionSpec(None, "fsdp", "tensor")  # as Mean has it
    wide = sharding.partition_spec(
        "encoder/stages/1/mixer/output/kernel", (1, 256, 256), mesh, rules
    )
    assert wide == jax.sharding.PartitionSpec(None, "tensor", "fsdp")
    with pytest.raises(sharding.ShardingError, match="stages/2/mixer/weight"):
        sharding.partition_spec(
            "discriminator/stages/2/mixer/weight", (1, 32), mesh, sharding.RULES
        )


def test_other_software_refuses_what_it_cannot_hold(staged, make_config, tmp_path):
    parts = networks.outline(staged)
    with pytest.raises(ConversionError, match=r"layers of this encoder differ.*stablehlo"):
        huggingface_config.check_expressible(parts["main"])
    with pytest.raises(ConversionError, match=r"layers of this encoder differ.*stablehlo"):
        tensorflow1.write_checkpoint(tmp_path / "it", parts, step=0)
    parts = networks.outline(make_config(mixer=NAME))
    with pytest.raises(ConversionError, match="huggingface has no mean over a segment"):
        huggingface_config.check_expressible(parts["main"])
    with pytest.raises(ConversionError, match="tensorflow1 has no mean over a segment"):
        tensorflow1.write_checkpoint(tmp_path / "it", parts, step=0)


def test_a_run_of_several_stages_is_a_source_of_weights(staged):
    _, init = build(PretrainingModel, staged)
    params = jax.device_get(init(jax.random.key(0)))
    parts = networks.split(staged, params)
    start = Config(tokenizer=staged.tokenizer, data=staged.data)
    derived = matching.replace(start, matching.derive_fields(parts, start))
    assert derived.encoder == staged.encoder
    assert derived.generator_encoder == staged.generator_encoder
    assert not matching.differences(matching.derive_fields(parts, derived), derived)
    back, report = networks.join(derived, parts)
    assert not report.initialized
    assert not report.ignored
    jax.tree.map(np.testing.assert_array_equal, params, back)


def test_equal_stages_are_one_elsewhere(make_config):
    """They are only another cut of the same layers: weights go over, and to Hugging Face too."""
    cut = make_config(layers=3, stages=(StageSection(layers=1), StageSection(layers=2)))
    params = jax.device_get(build(PretrainingModel, cut)[1](jax.random.key(0)))
    parts = networks.split(cut, params)
    assert parts["main"].family == "convbert"
    huggingface_config.check_expressible(parts["main"])
    assert (
        matching.derive_fields(parts, cut)["model.stages"] == cut.model.stages
    )  # as it is spelled
    plain = make_config(layers=3)
    whole = matching.replace(plain, matching.derive_fields(parts, plain))
    assert whole.model.stages == ()
    params, report = networks.join(whole, parts)
    assert not report.initialized
    assert not report.ignored
    kernel = params["discriminator"]["stages"]["0"]["mixer"]["query"]["kernel"]
    assert kernel.shape == (3, 32, 16)


def test_finding_mixers_starts_no_backend():
    """Processes that meet later must find their devices together."""
    code = (
        "from convbert_jax.config import Config; from jax._src import xla_bridge as b;"
        "Config().encoder, Config().generator_encoder; assert not b._backends"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_mean_keeps_segments_apart(make_config, randomize, packed):
    config = make_config(mixer=NAME)
    mixer = config.encoder.stages[0].layer.mixer
    graphdef, params = randomize(lambda rngs: mixer.module(32, initializers("release", 0.02), rngs))
    x = jax.random.normal(jax.random.key(0), (2, 24, 32))
    module = nnx.merge(graphdef, params)
    alone = module(x[:1, :5], jnp.ones((1, 5), jnp.int32))
    np.testing.assert_allclose(module(x, packed)[0, :5], alone[0], atol=1e-5)
