"""Position of a run in its data, as plain JSON in the checkpoint."""

from collections.abc import Mapping
from typing import Any

from convbert_jax.data.errors import DataError


def write(next_batch: int, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state that `read` reads.

    Args:
      identity: settings that determine the content of the batches; JSON values by name.
    """
    return {"next_batch": next_batch, **identity}


def read(state: Mapping[str, Any], identity: Mapping[str, Any]) -> int:
    """Returns the number of the next batch.

    Raises:
      DataError: the state has a different identity.
    """
    for name, here in identity.items():
        if state.get(name) != here:
            raise DataError(
                f"Cannot resume: the checkpoint has {name}={state.get(name)!r}, this run has "
                f"{name}={here!r}. Restore this setting, or start a new run.",
                field=name,
                value=here,
            )
    return int(state["next_batch"])
