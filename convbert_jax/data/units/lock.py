"""One process that prepares holds the folder."""

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
    """Holds `directory` alone, made with a folder for units if it is not there; waits while another
    process has it, and says so.

    The operating system releases the lock of a process that dies. Raises DataError where it cannot
    be made, and after `LOCK_PATIENCE` seconds.
    """
    try:
        (directory / "units").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{directory} could not be made ({error.strerror}); set config.data.directory.",
            field="config.data.directory",
            path=directory,
        ) from None
    with open(directory / "lock", "w", opener=links.no_follow) as file:
        started = logged = time.monotonic()
        while not files.try_lock(
            file, f"{directory} cannot be locked; let one process prepare it."
        ):
            now = time.monotonic()
            if now - started > LOCK_PATIENCE:
                raise DataError(
                    f"{directory} has been in use by another process for {LOCK_PATIENCE // 3600} "
                    "hours; end that one or name another config.data.directory.",
                    field="config.data.directory",
                    path=directory,
                )
            if logged == started or now - logged > 60:
                logging.info("Waiting: another process prepares %s.", directory)
                logged = now
            time.sleep(0.2)
        links.remove_temporary(directory)
        yield
