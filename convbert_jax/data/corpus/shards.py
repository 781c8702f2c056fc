"""The files of a prepared folder: their names, what to say of a damaged one, and who finds it.

A row is verified when it is read: ArrayRecord keeps a hash of it. That can be days after the damage
was done, so `Verification` compares whole files with their checksums while training starts.
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
    """The one sentence for a shard that is not what was written.

    Args:
      gone: why there is no source to prepare it from, where that is known.
    """
    if gone:
        reason = str(gone).rstrip(".")
        return damaged(path, what, f"put a copy back, as it cannot be prepared anew: {reason}")
    remedy = "delete it and start again: that part is prepared anew, if its source is still there"
    return damaged(path, what, f"{remedy}, else put a copy back")


def checksum(path: Path, stop: threading.Event | None = None) -> int:
    """CRC-32 of a file, read to its end or until `stop`."""
    result = 0
    with open(path, "rb") as file:
        while data := file.read(READ_BYTES):
            if stop and stop.is_set():
                break
            result = zlib.crc32(data, result)
    return result


class Verification:
    """Compares shards with their checksums in a thread of its own, at the speed of the disk."""

    def __init__(self, shards: Sequence[tuple[Path, int | None]]):
        """Starts at once; `shards` are (file, CRC-32 of when it was prepared)."""
        self._shards = [(path, expected) for path, expected in shards if expected is not None]
        if len(self._shards) < len(shards):
            logging.warning(
                "%s was prepared before checksums were kept: its rows are verified only as they "
                "are read.",
                shards[0][0].parent,
            )
        self._stop = threading.Event()
        self._damage: DamagedFileError | None = None
        self._thread = threading.Thread(target=self._verify, name="verify", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises DamagedFileError, at every call, once a damaged shard was found."""
        if self._damage:
            raise self._damage

    def wait(self) -> None:
        """Waits until all is verified, then as `check`."""
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
                self._damage = damaged_shard(path, "its checksum is not that of its preparation")
                return
        if self._shards:
            seconds = time.monotonic() - started
            logging.info("Verified %.1f MB of shards in %.1f s.", size / 1e6, seconds)
