"""Shards of a prepared folder: file names, checksums and errors for damaged files.

ArrayRecord verifies the hash of each row when it is read, which can be days after the damage.
`Verification` therefore compares whole files with their checksums while training starts.
"""

import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

from absl import logging

from convbert_jax.files import DamagedFileError, damaged

READ_BYTES = 1 << 22


def shard_path(directory: Path, split: str, index: int) -> Path:
    return directory / f"{split}-{index:05d}.array_record"


def damaged_shard(path: Path, what: object, gone: object = None) -> DamagedFileError:
    """Returns the error for a damaged shard.

    Args:
      gone: reason why the source is unavailable; None if it is not known to be.
    """
    if gone:
        reason = str(gone).rstrip(".")
        return damaged(path, what, f"restore a copy; it cannot be prepared again: {reason}")
    remedy = "delete it and start again to prepare this part from its source"
    return damaged(path, what, f"{remedy}, or restore a copy")


def checksum(path: Path, stop: threading.Event | None = None) -> int:
    """Computes the CRC-32 of a file; stops early if `stop` is set."""
    result = 0
    with open(path, "rb") as file:
        while data := file.read(READ_BYTES):
            if stop and stop.is_set():
                break
            result = zlib.crc32(data, result)
    return result


class Verification:
    """Compares shards with their checksums in a background thread."""

    def __init__(self, shards: Sequence[tuple[Path, int | None]]):
        """Starts the thread.

        Args:
          shards: (file, CRC-32 at its preparation; None if unknown) of each.
        """
        self._shards = [(path, expected) for path, expected in shards if expected is not None]
        if len(self._shards) < len(shards):
            logging.warning(
                "%s has no checksums for some shards; their rows are verified only when read.",
                shards[0][0].parent,
            )
        self._stop = threading.Event()
        self._damage: DamagedFileError | None = None
        self._thread = threading.Thread(target=self._verify, name="verify", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises DamagedFileError if a damaged shard was found."""
        if self._damage:
            raise self._damage

    def wait(self) -> None:
        """Waits until all shards are verified, then calls `check`."""
        self._thread.join()
        self.check()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _verify(self) -> None:
        started, size = time.monotonic(), 0
        for path, expected in self._shards:
            try:
                found = checksum(path, self._stop)
                size += path.stat().st_size
            except OSError as error:
                self._damage = damaged_shard(path, error)
                return
            if self._stop.is_set():
                return
            if found != expected:
                self._damage = damaged_shard(path, "checksum mismatch")
                return
        if self._shards:
            seconds = time.monotonic() - started
            logging.info("Verified %.1f MB of shards in %.1f s.", size / 1e6, seconds)
