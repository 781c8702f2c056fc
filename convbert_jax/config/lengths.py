"""Lengths of a run as texts, "100M words" or "3 epochs", and their conversion to steps.

A field of type `Length` holds a number of steps or such a text. A run replaces the texts once its
corpus is prepared, so training and the stored config have numbers only. A new run measures its
speed to replace config.train.steps="24 hours"; a resumed run reads the number from its config.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction

from convbert_jax.config import fields
from convbert_jax.config.errors import ConfigError
from convbert_jax.config.run import Config

SHARE = "%"  # of config.train.steps
HOURS = "hours"
_MULTIPLES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_LENGTH = re.compile(
    r"(\d{1,15}(?:\.\d{1,15})?)\s*([kmbt]?)\s*(steps?|tokens?|words?|epochs?|hours?|minutes?|%)",
    re.I | re.ASCII,
)


def parse(text: str, field: str) -> tuple[Fraction, str]:
    """Parses "100M words" to its amount and unit: steps, tokens, words, epochs, `HOURS` or `SHARE`.

    Minutes are converted to hours.

    Raises:
      ConfigError: the text has another form, or is zero.
    """
    match = _LENGTH.fullmatch(text.strip())
    if not match or not (amount := Fraction(match[1]) * _MULTIPLES[match[2].lower()]):
        raise ConfigError(
            "is not a length; write a number of steps, or as '100M words', '50M tokens', "
            "'3 epochs' or '10%' (of config.train.steps); config.train.steps also as '24 hours'.",
            field=field,
            value=text,
        )
    unit = match[3].lower()
    if unit.startswith("minute"):
        return amount / 60, HOURS
    return amount, unit if unit == SHARE else unit.rstrip("s") + "s"


def hours_of(config: Config) -> Fraction | None:
    """Returns the budget of a run with config.train.steps in hours or minutes, or None."""
    if isinstance(config.train.steps, int):
        return None
    amount, unit = parse(config.train.steps, "config.train.steps")
    return amount if unit == HOURS else None


def find_texts(section, path: str = "config") -> Iterator[tuple[str, str]]:
    """Yields (field, text) of the lengths of a section, or of a config, that are texts."""
    for name, field in fields.describe(type(section)).items():
        value = getattr(section, name)
        if dataclasses.is_dataclass(value):
            yield from find_texts(value, f"{path}.{name}")
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            for i, item in enumerate(value):
                yield from find_texts(item, f"{path}.{name}[{i}]")
        elif field.type == fields.INT_OR_TEXT and isinstance(value, str):
            yield f"{path}.{name}", value


def tokens_of_step(config: Config) -> dict[str, Fraction]:
    """Returns the rate that needs no corpus: input positions of a step, with padding."""
    tokens = config.spec.tokens_per_step(config)
    return {"tokens": Fraction(tokens)} if tokens else {}


def to_steps(config: Config, rates: Callable[[Config], Mapping[str, Fraction]]) -> Config:
    """Replaces texts by numbers of steps, rounded down but at least 1.

    With phases, `train.steps` becomes the sum of their lengths, and other texts are converted with
    the batches of the first phase.

    Args:
      rates: config of a phase -> unit -> amount in a step, for the units that are known.

    Raises:
      ConfigError: the rate of a unit is unknown, or `train.steps` is in hours.
    """

    def convert(length: int | str, field: str, of_phase: Config, whole=(Fraction(0), "steps")):
        if isinstance(length, int):
            return length
        amount, unit = parse(length, field)
        if unit == SHARE:
            amount, unit = whole[0] * amount / 100, whole[1]
        known = {"steps": Fraction(1), **rates(of_phase)}
        if unit == HOURS:
            raise ConfigError(
                "is converted to steps when a run starts, by its measured speed; give a number of "
                "steps or tokens.",
                field=field,
                value=length,
            )
        if unit not in known:
            raise ConfigError(
                f"needs the number of {unit} of the corpus; prepare it first with --mode=prepare, "
                "or give a number of steps or tokens.",
                field=field,
                value=length,
            )
        return max(1, int(amount / known[unit]))

    steps, first = config.train.steps, config.phase_configs[0]
    if config.phases:
        whole = parse(f"{steps} steps" if isinstance(steps, int) else steps, "config.train.steps")
        lengths = [
            convert(phase.length, f"config.phases[{i}].length", of_phase, whole)
            for i, (phase, of_phase) in enumerate(
                zip(config.phases, config.phase_configs, strict=True)
            )
        ]
        phases = zip(config.phases, lengths, strict=True)
        phases = tuple(dataclasses.replace(phase, length=length) for phase, length in phases)
        config, steps = dataclasses.replace(config, phases=phases), sum(lengths)
    steps = convert(steps, "config.train.steps", first)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))
    whole = (Fraction(steps), "steps")
    for field, text in list(find_texts(config)):
        section, name = field.removeprefix("config.").split(".")
        changed = {name: convert(text, field, first, whole)}
        changed = {section: dataclasses.replace(getattr(config, section), **changed)}
        config = dataclasses.replace(config, **changed)
    return config
