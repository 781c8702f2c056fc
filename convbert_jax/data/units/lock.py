"""Exclusive lock of a folder during its preparation."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from absl import logging

from convbert_jax import files, links
from convbert_jax.data.errors import DataError

LOCK_PATIENCE = 12 * 3600  # seconds


@contextlib.contextmanager
def lock(directory: Path) -> Iterator[None]:
    """Locks `directory`, after creating it and its folder "units"; waits while it is locked.

    The operating system releases the lock of a process that dies.

    Raises:
      DataError: the folder cannot be created, or is still locked after `LOCK_PATIENCE` seconds.
    """
    try:
        (directory / "units").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"Cannot create {directory}: {error.strerror}. Set config.data.directory.",
            field="config.data.directory",
            path=directory,
        ) from None
    with open(directory / "lock", "w", opener=links.no_follow) as file:
        started = logged = time.monotonic()
        while not files.try_lock(
            file, f"{directory} cannot be locked; prepare it with one process only."
        ):
            now = time.monotonic()
            if now - started > LOCK_PATIENCE:
                raise DataError(
                    f"{directory} has been locked by another process for {LOCK_PATIENCE // 3600} "
                    "hours. Stop that process or use another config.data.directory.",
                    field="config.data.directory",
                    path=directory,
                )
            if logged == started or now - logged > 60:
                logging.info("Waiting for another process that prepares %s.", directory)
                logged = now
            time.sleep(0.2)
        links.remove_temporary(directory)
        yield
