"""Mixers from outside: their faults are sentences, their names and fields are their own."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from convbert_jax import files
from convbert_jax.config import (
    ConfigError,
    MixerSettings,
    PluginError,
    StageSection,
    from_config_dict,
    mixers,
    to_dict,
)
from convbert_jax.config.checks import plugins
from convbert_jax.workdir import Workdir

HERE = "tests.models.test_own_mixers"


class Silent:
    """All that is asked of a mixer; it mixes nothing."""

    RULES = ()
    FAMILIES = ()
    NAMES: ClassVar[Mapping[str, tuple[str, str, str]]] = {}

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

    @property
    def reads_padding(self):
        return False

    def inexpressible(self, form, hidden_size):
        return "it is a test"


@dataclasses.dataclass(frozen=True)
class Whole(Silent):
    gain: float = 1.0
    attention: str = "mine"  # called like a field of the config, and not it


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
    @property
    def reads_padding(self):
        return True


class Outer:
    Inner = dataclasses.make_dataclass("Inner", [], bases=(Silent,), frozen=True)
    Inner.__module__, Inner.__qualname__ = HERE, "Outer.Inner"


Again = Whole


@pytest.fixture(autouse=True)
def _trust():
    with plugins.trusting(True):
        yield


def config_of(name: str, *own: str, **model):
    model = {"layers": 1, "mixer": f"{HERE}:{name}", "mixer_fields": own, **model}
    return from_config_dict({"recipe": "masked_lm", "model": model})


def mixer_of(config):
    return config.encoder.stages[0].layer.mixer


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("Optional", "gain=3"), "the field gain of its own, of type .*; make it an int, float"),
        (("Optional",), "the field gain of its own"),
        (("Thawed",), "is no mixer, it lacks dataclasses.dataclass.frozen=True"),
        (("Deaf", "gain=3"), "cannot be made .TypeError: .*gain"),
        (("Broken",), "cannot be made .ValueError: no root of -1.; mend its make"),
        (("Absent",), "makes a NoneType, not itself"),
        (("Outer.Nobody",), "cannot be imported .AttributeError"),
    ],
)
def test_faults_are_one_sentence(given, says):
    with pytest.raises(PluginError, match=f"config.model.mixer={HERE}:.*{says}") as error:
        config_of(*given)
    assert "\n" not in str(error.value)


def test_names_that_a_package_exports_twice_are_one():
    assert mixers.is_same(f"{HERE}:Whole", f"{HERE}:Again")
    assert not mixers.is_same(f"{HERE}:Whole", f"{HERE}:Outer.Inner")


def test_a_class_inside_another_comes_back():
    made = mixer_of(config_of("Outer.Inner"))
    assert mixers.describe(made, 256) == {"mixer": f"{HERE}:Outer.Inner", "mixer_fields": ()}


def test_own_fields_are_not_those_of_the_config():
    made = mixer_of(config_of("Whole", "gain=2"))
    assert mixers.change(made, attention="xla") == made == Whole(gain=2.0)


@pytest.mark.parametrize("mask_convolution", [True, False])
def test_one_that_reads_other_documents_is_named(mask_convolution):
    says = rf"config\.model\.stages\[1\]\.mixer={HERE}:Reader reads what follows"
    stages = [{"layers": 1}, {"layers": 1, "mixer": f"{HERE}:Reader"}]
    given = {"layers": 2, "stages": stages, "mask_convolution": mask_convolution}
    with pytest.raises(ConfigError, match=says) as error:
        config_of("Whole", **given)
    assert "mask_convolution" not in str(error.value)


def test_a_run_whose_mixer_is_not_here_is_not_damaged(tmp_path):
    values = to_dict(config_of("Whole"))
    workdir = Workdir(tmp_path)
    for fault in ({"mixer": "gone.away:Mixer"}, {"mixer_fields": ["gone=1"]}):
        files.write_text(workdir.config, json.dumps(values | {"model": values["model"] | fault}))
        with pytest.raises(PluginError, match=r"config\.json: config\.model\.mixer") as error:
            workdir.read_config()
        assert "damaged" not in str(error.value)
        assert fault != {"mixer": "gone.away:Mixer"} or "PYTHONPATH" in str(error.value)
    values["model"]["stages"] = [dataclasses.asdict(StageSection(layers=7))]
    files.write_text(workdir.config, json.dumps(values))
    with pytest.raises(files.DamagedFileError):
        workdir.read_config()
