"""Mixers by name, custom mixers, stages and schedules: configs, and conversion to other formats."""

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from convbert_jax import config_files, storage
from convbert_jax.analysis import flops
from convbert_jax.command_line import overrides
from convbert_jax.config import (
    Config,
    ConfigError,
    MeshSection,
    MixerSettings,
    PluginError,
    StageSection,
    from_config_dict,
    mixers,
    network,
    plugins,
    to_config_dict,
    to_dict,
    to_text,
)
from convbert_jax.config.mixers import MIXERS, Mixer, change, check_causal, describe
from convbert_jax.config.sequences import SequenceSection
from convbert_jax.interop import huggingface, matching, networks, sources, tables, tensorflow1
from convbert_jax.interop.networks import ConversionError
from convbert_jax.models import build
from convbert_jax.models.networks import PretrainingModel, sharding_rules
from convbert_jax.training import partitioning
from convbert_jax.training.partitioning import flatten_params
from convbert_jax.workdir import Workdir
from tests.models.definitions import KINDS
from tests.models.mean_mixer import NAME, Mean
from tests.refusals import refused

HERE = "tests.models.test_mixer_config"
OWN = ("mixer", "mixer_fields", "kernel_size", "dilation", "heads", "head_ratio")
STAGES = (
    StageSection(layers=1, mixer="attention", heads=2),
    StageSection(layers=2, kernel_size=3, ffn_size=96, ffn_groups=2),
    StageSection(layers=1, mixer=NAME, mixer_fields=("gain=0.5", "centered=true")),
)


def mixers_of(config):
    return [stage.layer.mixer for stage in config.encoder.stages]


def through_json(config):
    return from_config_dict(json.loads(json.dumps(to_dict(config))))


@pytest.fixture(scope="module")
def staged(make_config):
    return through_json(make_config(layers=4, stages=STAGES))


@pytest.fixture(scope="module")
def draw(randomize):
    """Return draw(config) -> the parameters of a model, as numpy."""
    return lambda config: jax.device_get(randomize(lambda rngs: PretrainingModel(config, rngs))[1])


# --- Names, fields and stages ---


@pytest.mark.parametrize("name", [*MIXERS, NAME])
def test_a_mixer_describes_itself_completely(make_config, name):
    config = make_config(mixer=name)
    (mixer,) = mixers_of(config)
    assert isinstance(mixer, Mixer)
    assert hash(mixer) == hash(dataclasses.replace(mixer))
    described = {f"model.{field}": value for field, value in describe(mixer, 32).items()}
    assert described["model.mixer"] == name
    assert matching.replace(make_config(), described).encoder == config.encoder


def test_a_stage_takes_from_the_model_what_it_leaves_out(staged):
    attention, mixed, mean = mixers_of(staged)
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
    *means, _ = mixers_of(through_json(config))
    assert [mean.gain for mean in means] == [7, 7, 3]


def test_one_stage_that_says_everything_is_the_flat_config(make_config):
    flat = make_config(mixer="attention", kernel_size=5)
    section = StageSection(layers=2, mixer="attention", heads=4, ffn_size=64, ffn_groups=1)
    written = make_config(stages=(section,))
    assert written.encoder == flat.encoder
    assert written.generator_encoder == flat.generator_encoder


def test_stages_in_files_and_on_the_command_line(staged):
    of_file = to_config_dict(staged)
    of_file.model.stages = [{"layers": 4, "mixer": "attention"}]
    assert from_config_dict(of_file.to_dict()).model.stages == (
        StageSection(layers=4, mixer="attention"),
    )
    (flag,) = overrides.to_flags({"model.stages": STAGES})
    given, rest = overrides.take([flag])
    assert not rest
    assert overrides.to_flags(given) == [flag]  # as passed to another process
    assert from_config_dict(config_files.change(to_dict(staged), given)) == staged
    assert json.loads(to_text(STAGES))[0] == {"layers": 1, "heads": 2, "mixer": "attention"}


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


def test_a_schedule_makes_a_stage_of_equal_layers_in_a_row(scheduled, make_config):
    assert sizes(through_json(scheduled).encoder) == [(2, 3, 1), (1, 3, 2), (1, 5, 2)]
    stages = (
        StageSection(layers=2, kernel_size=3),
        StageSection(layers=1, kernel_size=3, dilation=2),
        StageSection(layers=1, kernel_size=5, dilation=2),
    )
    written = make_config(layers=4, mixer="dilated", stages=stages, ffn_groups=2)
    assert written.encoder == scheduled.encoder
    assert written.generator_encoder == scheduled.generator_encoder
    config = make_config(layers=3, mixer="dilated", kernel_size=7, dilations=(1, 2, 4))
    assert sizes(config.encoder) == [(1, 7, 1), (1, 7, 2), (1, 7, 4)]
    config = make_config(layers=3, mixer="dilated", dilation=3, kernel_sizes=(3, 5, 5))
    assert sizes(config.encoder) == [(1, 3, 3), (2, 5, 3)]
    given, rest = overrides.take(["--config.model.kernel_sizes=3,7,15,31"])
    assert (given, rest) == ({"model.kernel_sizes": (3, 7, 15, 31)}, [])
    assert overrides.to_flags(given) == ["--config.model.kernel_sizes=3,7,15,31"]


def test_a_generator_has_the_same_stages_cut_by_its_size(make_config, scheduled):
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
    config = matching.replace(scheduled, {"generator.layers": 0.5})
    assert sizes(config.generator_encoder) == [(1, 3, 1), (1, 3, 2), (1, 5, 2)]


@pytest.mark.parametrize(
    ("model", "idle"),
    [
        ({}, []),
        ({"mixer": "attention"}, ["kernel_size"]),
        ({"mixer": "attention", "kernel_sizes": (3, 5)}, ["kernel_size", "kernel_sizes"]),
        ({"mixer": "light", "dilations": (1, 2), "dilation": 3}, ["dilation", "dilations"]),
        ({"mixer": "dilated", "kernel_sizes": (3, 5)}, ["heads", "kernel_size"]),
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


@pytest.mark.parametrize(
    ("model", "sequence", "idle"),
    [
        ({"mixer": "attention"}, {}, ["kernel_size"]),
        ({"mixer": "attention"}, {"decoder_mixer": "light"}, []),
        ({"mixer": "light", "kernel_sizes": (3, 5), "dilations": (1, 2)}, {}, ["dilations"]),
        # The decoder takes the fields that the encoder's stages override.
        ({"stages": (StageSection(layers=2, mixer="light", ffn_size=96),)}, {}, []),
        ({"mixer": "mixed", "head_ratio": 4}, {"decoder_mixer": "attention"}, []),
    ],
)
def test_fields_of_an_encoder_decoder_that_neither_takes_are_known(
    make_config, model, sequence, idle
):
    model = make_config(embedding_size=32, **model).model
    assert network.idle_fields(model, SequenceSection(**sequence)) == idle


def test_flops_add_up_over_stages(staged, make_config):
    def of_stages(config):
        bare = dataclasses.replace(config.encoder, stages=())
        return flops._encoder(config.encoder, 24, True) - flops._encoder(bare, 24, True)

    def alone(**model):
        return of_stages(make_config(layers=1, generator={"kind": "uniform"}, **model))

    assert of_stages(staged) == (
        alone(mixer="attention", heads=2)
        + 2 * alone(kernel_size=3, ffn_size=96, ffn_groups=2)
        + alone(mixer=NAME, mixer_fields=("gain=0.5",))
    )
    mean = flops._layer_products(make_config(mixer=NAME).encoder.stages[0].layer, 24)
    assert mean == 2 * 32**2 + 2 * 2 * 32 * 64


def test_every_parameter_of_every_stage_has_a_rule(staged):
    _, init = build(PretrainingModel, staged)
    mesh = partitioning.make_mesh(MeshSection(fsdp=2, tensor=2))
    rules = (*sharding_rules(staged.encoder), *partitioning.RULES)
    shapes = flatten_params(jax.eval_shape(init, jax.random.key(0)))
    weight = "discriminator/stages/2/mixer/weight"
    assert weight in shapes
    for path, leaf in shapes.items():
        partitioning.partition_spec(path, leaf.shape, mesh, rules)

    def spec_of_output(stage):
        path = f"encoder/stages/{stage}/mixer/output/kernel"
        return partitioning.partition_spec(path, (1, 256, 256), mesh, rules)

    assert spec_of_output(2) == jax.sharding.PartitionSpec(None, "fsdp", "tensor")  # of Mean
    assert spec_of_output(1) == jax.sharding.PartitionSpec(None, "tensor", "fsdp")
    with refused(partitioning.ShardingError, weight):
        partitioning.partition_spec(weight, (1, 32), mesh, partitioning.RULES)


# --- Weights from and for other formats ---


def test_stages_and_schedules_come_back_from_their_weights(staged, scheduled, make_config, draw):
    params = draw(staged)
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

    parts = networks.outline(scheduled)
    assert not matching.differences(matching.derive_fields(parts, scheduled), scheduled)
    start = make_config(layers=2, kernel_sizes=(9, 7))
    fields = matching.derive_fields(parts, start)
    assert fields["model.kernel_sizes"] == ()
    assert matching.replace(start, fields).encoder == scheduled.encoder
    assert "model.kernel_sizes" in matching.differences(fields, start)

    stages = (  # defaults with one explicit field
        StageSection(layers=1, mixer=NAME, mixer_fields=("gain=0.5",)),
        StageSection(layers=1, mixer=NAME),
    )
    config = make_config(layers=2, stages=stages, generator={"kind": "uniform"})
    fields = matching.derive_fields(networks.outline(config), config)
    assert matching.replace(config, fields).encoder == config.encoder


def test_equal_stages_are_one_elsewhere(make_config, draw):
    """Equal stages are the same layers: weights transfer between them and to Hugging Face."""
    cut = make_config(layers=3, stages=(StageSection(layers=1), StageSection(layers=2)))
    parts = networks.split(cut, draw(cut))
    assert parts["main"].family == "convbert"
    huggingface.check_expressible(parts["main"])
    assert matching.derive_fields(parts, cut)["model.stages"] == cut.model.stages
    plain = make_config(layers=3)
    whole = matching.replace(plain, matching.derive_fields(parts, plain))
    assert whole.model.stages == ()
    params, report = networks.join(whole, parts)
    assert not report.initialized
    assert not report.ignored
    kernel = params["discriminator"]["stages"]["0"]["mixer"]["query"]["kernel"]
    assert kernel.shape == (3, 32, 16)


def test_formats_take_or_refuse_each_mixer(make_config, staged, tmp_path):
    for kind, fields in {**KINDS, "mean": {"mixer": NAME}, "staged": None}.items():
        config = make_config(generator={"kind": "uniform"}, **fields) if fields else staged
        parts = networks.outline(config)
        (mixer, *others) = mixers_of(config)
        if not others and not tables.export_error(mixer, "huggingface", 32):
            assert parts["main"].family, kind
            huggingface.check_expressible(parts["main"])
            continue
        with refused(ConversionError, "stablehlo") as error:
            huggingface.check_expressible(parts["main"])
        assert "\n" not in str(error.value)
        if others or tables.export_error(mixer, "tensorflow1", 32):
            with refused(ConversionError, "stablehlo"):
                tensorflow1.write_checkpoint(tmp_path / "it", parts, step=0)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_a_mixer_do_not_fit_another_one_silently(make_config, kind):
    """The config follows the weights; check_fits names the fields that differ."""
    config = make_config(**KINDS[kind])
    main = networks.outline(config)
    source = sources.Source("run", main, step=1)
    for other, fields in KINDS.items():
        start = make_config(layers=3, **fields)
        derived = matching.derive_fields(main, start)
        assert matching.replace(start, derived).encoder == config.encoder, other
        named = {path.partition(".")[2] for path in matching.differences(derived, start)}
        start = make_config(**fields)
        if other != kind:
            assert named & {"mixer", "mixer_fields", "kernel_size", "dilation"}, other
        if start.encoder == config.encoder:
            sources.check_fits(source, start)
            continue
        with refused(ConversionError, "config.model.") as error:
            sources.check_fits(source, start)
        assert any(f"--config.model.{name}=" in str(error.value) for name in OWN), other


# --- Custom mixers ---


class Silent:
    """Complete mixer interface, without a module."""

    RULES = ()
    reads_padding = False

    @classmethod
    def make(cls, settings: MixerSettings, **own: Any):
        return cls(**own)

    def fields(self, hidden_size):
        return {}

    def module(self, hidden_size, initializers, rngs):
        raise NotImplementedError

    def products(self, hidden_size, length):
        return 0.0

    def elementwise(self, hidden_size, length):
        return 0.0


@dataclasses.dataclass(frozen=True)
class Whole(Silent):
    gain: float = 1.0
    attention: str = "mine"  # same name as a config field, but independent of it


@dataclasses.dataclass(frozen=True)
class Optional(Silent):
    gain: float | None = None


@dataclasses.dataclass
class Thawed(Silent):
    pass


@dataclasses.dataclass(frozen=True)
class Deaf(Silent):
    gain: float = 1.0

    @classmethod
    def make(cls, settings):
        return cls()


@dataclasses.dataclass(frozen=True)
class Broken(Silent):
    @classmethod
    def make(cls, settings, **own):
        raise ValueError("no root of -1\nat all")


@dataclasses.dataclass(frozen=True)
class Absent(Silent):
    @classmethod
    def make(cls, settings, **own):
        return None


@dataclasses.dataclass(frozen=True)
class Reader(Silent):
    reads_padding = True


class Half:
    """Incomplete mixer interface."""

    @classmethod
    def make(cls, settings):
        return cls()


class Outer:
    Inner = dataclasses.make_dataclass("Inner", [], bases=(Silent,), frozen=True)
    Inner.__module__, Inner.__qualname__ = HERE, "Outer.Inner"


Again = Whole


@pytest.fixture
def trusting():
    with plugins.trusting(True):
        yield


def config_of(name: str, *own: str, **model):
    model = {"layers": 1, "mixer": f"{HERE}:{name}", "mixer_fields": own, **model}
    return from_config_dict({"recipe": "masked_lm", "model": model})


@pytest.mark.parametrize(
    ("given", "mentions"),
    [
        (("Optional", "gain=3"), ["gain", "float"]),
        (("Thawed",), ["frozen=True"]),
        (("Half",), ["reads_padding"]),
        (("Deaf", "gain=3"), ["TypeError", "gain"]),
        (("Broken",), ["ValueError", "no root of -1"]),
        (("Absent",), ["NoneType"]),
        (("Outer.Nobody",), ["AttributeError"]),
    ],
)
def test_faults_of_a_mixer_of_the_user_are_one_sentence(trusting, given, mentions):
    with refused(PluginError, f"config.model.mixer={HERE}:{given[0]}", *mentions) as error:
        config_of(*given)
    assert "\n" not in str(error.value)


def test_a_mixer_of_the_user_keeps_its_name_and_fields(trusting, make_config):
    assert mixers.is_same(f"{HERE}:Whole", f"{HERE}:Again")
    assert not mixers.is_same(f"{HERE}:Whole", f"{HERE}:Outer.Inner")
    (inner,) = mixers_of(config_of("Outer.Inner"))
    assert describe(inner, 256) == {"mixer": f"{HERE}:Outer.Inner", "mixer_fields": ()}
    (whole,) = mixers_of(config_of("Whole", "gain=2"))
    assert change(whole, attention="xla") == whole == Whole(gain=2.0)
    (mixed,) = mixers_of(make_config())
    assert change(mixed, attention="xla").attention == "xla"
    with refused(PluginError, "config.model.mixer=mine"):
        check_causal(Mean(), "config.model.mixer=mine")


@pytest.mark.parametrize("mask_convolution", [True, False])
def test_a_mixer_that_reads_other_documents_is_refused(trusting, mask_convolution):
    stages = [{"layers": 1}, {"layers": 1, "mixer": f"{HERE}:Reader"}]
    given = {"layers": 2, "stages": stages, "mask_convolution": mask_convolution}
    with refused(ConfigError, f"config.model.stages[1].mixer={HERE}:Reader") as error:
        config_of("Whole", **given)
    assert "mask_convolution" not in str(error.value)


def test_a_run_whose_mixer_is_not_installed_is_not_damaged(trusting, tmp_path):
    values = to_dict(config_of("Whole"))
    workdir = Workdir(tmp_path)
    for fault, mention in (
        ({"mixer": "gone.away:Mixer"}, "PYTHONPATH"),
        ({"mixer_fields": ["gone=1"]}, "gone=1"),
    ):
        storage.write_text(workdir.config, json.dumps(values | {"model": values["model"] | fault}))
        with refused(PluginError, "config.json", "config.model.mixer", mention):
            workdir.read_config()
    values["model"]["stages"] = [dataclasses.asdict(StageSection(layers=7))]
    storage.write_text(workdir.config, json.dumps(values))
    with refused(storage.DamagedFileError):
        workdir.read_config()


# --- Errors ---


@pytest.mark.parametrize(
    ("stages", "mentions"),
    [
        ([{"layers": 3}], ["config.model.stages", 3, "config.model.layers=4"]),
        ([{"layers": 0}], ["config.model.stages[0].layers=0"]),
        ([{"kernel": 3}], ["config.model.stages[0].kernel", "kernel_size"]),
        ([{"layers": "2"}], ["config.model.stages[0].layers", 2, "int"]),
        ([3], ["config.model.stages", 3]),
        ("mixed", ["config.model.stages", "mixed", "list"]),
        ([{"layers": 4, "heads": 5}], ["config.model.stages[0].heads=5"]),
        ([{"layers": 4, "head_ratio": 3}], ["config.model.stages[0].head_ratio=3"]),
        ([{"layers": 4, "ffn_groups": 3}], ["config.model.stages[0].ffn_groups=3"]),
        ([{"layers": 4, "heads": -1}], ["config.model.stages[0].heads=-1"]),
        ([{"layers": 4, "mixer": "mixd"}], ["config.model.stages[0].mixer", "mixd", "'mixed'"]),
        ([{"layers": 4, "mixer_fields": ["a=1"]}], ["stages[0].mixer_fields=a=1"]),
        ([{"layers": 4, "mixer": "attention", "head_ratio": 4}],
         ["config.model.stages[0].head_ratio=4", "config.model.stages[0].mixer=attention"]),
        ([{"layers": 4, "heads": 1}, {"heads": 2, "layers": 0}], ["stages[1].layers=0"]),
    ],
)  # fmt: skip
def test_faults_of_stages_are_one_sentence(staged, stages, mentions):
    values = to_dict(staged)
    values["model"]["stages"] = stages
    with refused(ConfigError, *mentions) as error:
        from_config_dict(values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mixer", ["mixed", NAME])
def test_fields_of_a_mixer_that_no_stage_takes_are_refused(staged, mixer):
    values = to_dict(staged)
    values["model"] |= {"mixer": mixer, "mixer_fields": ["junk=7"]}
    values["model"]["stages"][1]["mixer"] = "mixed"
    if mixer == "mixed":
        values["model"]["stages"] = [{"layers": 4, "mixer": "attention"}]
    with refused(ConfigError, "config.model.mixer_fields=junk=7"):
        from_config_dict(values)


@pytest.mark.parametrize(
    ("given", "mentions"),
    [
        ({"mixer": "convolution"}, ["config.model.mixer", "convolution"]),
        ({"mixer": "nobody.has:This"}, ["ModuleNotFoundError"]),
        ({"mixer": "json:nothing"}, ["AttributeError"]),
        ({"mixer": "json:loads"}, ["make"]),
        ({"mixer": NAME, "mixer_fields": ["gian=1"]}, ["gian=1", "gain, centered"]),
        ({"mixer": NAME, "mixer_fields": ["gain"]}, ["NAME=VALUE"]),
        ({"mixer": NAME, "mixer_fields": ["gain=much"]}, ["gain=much", "float"]),
        ({"mixer": NAME, "mixer_fields": ["gain=1", "gain=2"]}, ["mixer_fields", "gain"]),
        ({"mixer": NAME, "mixer_fields": ["gain=0"]}, ["gain=0"]),
        ({"mixer_fields": ["gain=1"]}, ["gain=1", "mixed", "filters, own"]),
        ({"mixer_fields": ["filters=lite"]}, ["config.model.mixer_fields", "lite", "'light'"]),
        ({"mixer_fields": ["convolution_share=0.3"]}, ["share=0.3", "4 heads", "1/4"]),
        ({"mixer_fields": ["convolution_share=1"]}, ["share=1.0", "4 heads"]),
        ({"kernel_sizes": [3, 5, 7]}, ["kernel_sizes", 3, "config.model.layers=2"]),
        ({"mixer": "dilated", "dilations": [1]}, ["dilations", 1, "config.model.layers=2"]),
        ({"kernel_sizes": [3, 0]}, ["config.model.kernel_sizes=0"]),
        ({"kernel_sizes": [3, 5], "stages": [{"layers": 2}]},  # as in a variant, tiny:light
         ["config.model.stages", "--config.model.kernel_sizes="]),
        *(({"mixer": name, "mixer_fields": ["grain=1"]}, ["mixer_fields=grain=1", name])
          for name in MIXERS),
        *(({"mixer": name, "head_ratio": 4}, ["head_ratio=4", f"mixer={name}"])
          for name in ("attention", "span_dynamic", "dynamic", "light")),
    ],
)  # fmt: skip
def test_faults_of_mixers_are_one_sentence(make_config, given, mentions):
    values = to_dict(make_config())
    values["model"] |= given
    with refused(ConfigError, *mentions) as error, plugins.trusting(True):
        from_config_dict(values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "ask",
    [
        lambda config: config.encoder,
        flops.training_flops_per_token,
        networks.outline,
        lambda config: nnx.eval_shape(lambda: PretrainingModel(config, nnx.Rngs(0))),
    ],
    ids=["encoder", "flops", "interop", "model"],
)
def test_an_unknown_mixer_is_an_error_without_a_check_of_the_config(make_config, ask):
    with refused(ConfigError, "config.model.mixer", "nonesuch"):
        ask(make_config(mixer="nonesuch"))


def test_a_jax_that_does_not_start_is_not_a_fault_of_the_mixer():
    ended = subprocess.run(
        [sys.executable, "-c", "from convbert_jax.config import mixers; mixers.find('mixed')"],
        env=os.environ | {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "pigeons"},
        capture_output=True,
        text=True,
    )
    last = ended.stderr.splitlines()[-1]
    assert "PluginError" in last
    assert "pigeons" in last
    assert "import jax, flax" in last
    assert "PYTHONPATH" not in last


def test_finding_mixers_starts_no_backend():
    """jax.distributed must be able to initialize later."""
    code = (
        "from convbert_jax.config import Config; from jax._src import xla_bridge as b;"
        "Config().encoder, Config().generator_encoder; assert not b._backends"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
