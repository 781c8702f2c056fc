"""The rules that checks are made of: each raises ConfigError with one sentence."""

import difflib

from convbert_jax.config.errors import ConfigError


def check(condition: bool, message: str) -> None:
    """Raises ConfigError(message) unless `condition`."""
    if not condition:
        raise ConfigError(message)


def check_choice(field: str, value: str, choices) -> None:
    """Raises ConfigError, with the nearest name, unless `value` is one of `choices`."""
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"did you mean '{near[0]}'? Choose" if near else "choose"
        raise ConfigError(
            f"config.{field}='{value}' is unknown; {hint} one of: {', '.join(choices)}."
        )


def check_positive(section: str, values, *names: str) -> None:
    """Raises ConfigError unless these fields of a section are greater than 0."""
    for name in names:
        value = getattr(values, name)
        check(value > 0, f"config.{section}.{name}={value} must be greater than 0.")


def check_fraction(section: str, values, *names: str) -> None:
    """Raises ConfigError unless these fields of a section are in [0, 1)."""
    for name in names:
        value = getattr(values, name)
        check(
            0.0 <= value < 1.0, f"config.{section}.{name}={value} must be at least 0 and below 1."
        )
