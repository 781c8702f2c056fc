"""Bounds of config fields: every number has them, and no value causes a traceback."""

import dataclasses
import math
import typing

from hypothesis import example, given, settings
from hypothesis import strategies as st

from convbert_jax import config_files
from convbert_jax.command_line import overrides
from convbert_jax.command_line.fields import field_types
from convbert_jax.config import Config, ConfigError, from_config_dict, to_dict
from convbert_jax.config.fields import describe
from tests.refusals import refused

TYPES = field_types()
BOUNDS = {
    path: field.bounds
    for section, about in {"": Config, **{k: v.type for k, v in describe(Config).items()}}.items()
    if dataclasses.is_dataclass(about)
    for name, field in describe(about).items()
    if field.bounds
    for path in (f"{section}.{name}".lstrip("."),)
}
NUMBERS = [path for path, kind in TYPES.items() if {kind, *typing.get_args(kind)} & {int, float}]
TEXTS = [
    *("1e400", "-1e400", "1e18", "1e19", "1e15", "1e-400", "1e999999999", "9" * 5000, "-5", "-1"),
    *("0", "-0", "inf", "nan", "Infinity", "0x10", "1_", "1__0", "\u00b2", "\uff11", "1e", "e5"),
    *("1e6", "1.5", ".5", "3,3", "1,,2", ",", "()", "[]", "", " ", "--", "=", "None", "True", "no"),
    *("a\0b", "\udc80", "1" * 300 + "k"),
]
TEXT = st.text(st.characters(exclude_categories=("Cc",)), max_size=8)
NASTY_TEXT = st.sampled_from(TEXTS) | TEXT
NASTY_VALUE = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 2**31, 2**32, 2**63, math.inf, math.nan])
    | st.floats()
    | TEXT
    | st.lists(st.integers() | st.floats() | TEXT, max_size=3)
    | st.dictionaries(TEXT, st.none(), max_size=1)
)


def is_config_or_one_sentence(make) -> None:
    try:
        config = make()
    except ConfigError as error:
        sentence = str(error)
    else:
        sentence = ""
        check_valid(config)
    assert "\n" not in sentence


def check_valid(config: Config) -> None:
    for path in NUMBERS:
        section, _, field = path.rpartition(".")
        value = getattr(getattr(config, section) if section else config, field)
        for item in value if isinstance(value, tuple) else (value,):
            assert math.isfinite(item), path
    assert from_config_dict(to_dict(config)) == config
    assert config.encoder.depth
    assert config.generator_encoder.depth
    assert 0 < config.max_predictions <= config.prediction_slots
    assert config.embeddings.vocab_size == config.generator_embeddings.vocab_size


def test_every_number_has_bounds_and_defaults_are_inside():
    assert set(NUMBERS) == set(BOUNDS)
    from_config_dict(to_dict(Config()))


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(TYPES)), NASTY_TEXT, st.sampled_from(["replaced_token", "finetune"]))
@example("train.steps", "1e400", "replaced_token")
@example("seed", "1e19", "finetune")
@example("generator.size", "1e-300", "replaced_token")
def test_any_override_is_a_config_or_one_sentence(path, text, recipe):
    def make():
        values, _ = overrides.take([f"--config.recipe={recipe}", f"--config.{path}={text}"])
        return from_config_dict(config_files.change({}, values))

    is_config_or_one_sentence(make)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(TYPES)), NASTY_VALUE, max_size=2))
def test_any_json_is_a_config_or_one_sentence(values):
    is_config_or_one_sentence(lambda: from_config_dict(config_files.change({}, values)))


def test_both_ends_hold():
    """One step beyond each bound is an error that names field, value and range."""
    for path, bounds in BOUNDS.items():
        many = typing.get_origin(TYPES[path]) is tuple
        step = 1 if isinstance(bounds.low, int) else 0.0
        for end, direction in ((bounds.low, -1), (bounds.high, 1)):
            beyond = end + direction * step if step else math.nextafter(end, direction * math.inf)
            for value in (beyond, math.copysign(1e400, direction), math.nan):
                if step and not math.isfinite(value):
                    continue
                with refused(ConfigError, field=f"config.{path}"):
                    from_config_dict(config_files.change({}, {path: (value,) if many else value}))


def test_an_impossible_number_of_steps_is_not_the_fault_of_the_warm_up():
    with refused(ConfigError, field="config.train.steps", value=-5):
        from_config_dict({"train": {"steps": -5}})
