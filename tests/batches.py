"""Checks batches against their descriptions in `interfaces.py`, and evaluates outputs."""

import functools
from typing import get_type_hints

from jaxtyping import jaxtyped


def check_batch(batch, description) -> None:
    """Asserts that `batch` matches `description`.

    All required fields are present, no unknown ones, and each has the described dtype and axes;
    axes of one name have the same length.
    """
    hints = get_type_hints(description)
    assert description.__required_keys__ <= batch.keys() <= hints.keys()
    with jaxtyped("context"):
        for name, array in batch.items():
            assert isinstance(array, hints[name]), f"{name}: {array.dtype} {array.shape}"


def metrics_of(evaluator, outputs) -> dict[str, float]:
    """Returns the metrics of an `Evaluator` for the outputs of some batches."""
    return evaluator.finish(functools.reduce(evaluator.update, outputs, evaluator.init()))
