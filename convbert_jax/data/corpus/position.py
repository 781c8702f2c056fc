"""Where a run stands in its data, as plain JSON in its checkpoint."""

from collections.abc import Mapping
from typing import Any

from convbert_jax.data.errors import DataError


def write(next_batch: int, identity: Mapping[str, Any]) -> dict[str, Any]:
    """What `read` takes.

    Args:
      identity: what decides which batch is which; JSON values by name.
    """
    return {"next_batch": next_batch, **identity}


def read(state: Mapping[str, Any], identity: Mapping[str, Any]) -> int:
    """The number of the next batch.

    Raises:
      DataError: the state is of batches with another identity.
    """
    for name, here in identity.items():
        if state.get(name) != here:
            raise DataError(
                f"The position in the data was saved with {name}={state.get(name)!r} but this "
                f"run has {name}={here!r}; set it back, or start a new run.",
                field=name,
                value=here,
            )
    return int(state["next_batch"])
