"""Whether a batch is what its description in `interfaces.batch` says."""

from typing import get_type_hints

from jaxtyping import jaxtyped


def check_batch(batch, description) -> None:
    """Asserts all fields that `description` requires, none that it does not know, and of each the
    dtype and the axes, equal ones of equal length."""
    hints = get_type_hints(description)
    assert description.__required_keys__ <= batch.keys() <= hints.keys()
    with jaxtyped("context"):
        for name, array in batch.items():
            assert isinstance(array, hints[name]), f"{name}: {array.dtype} {array.shape}"
