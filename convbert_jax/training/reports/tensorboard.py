"""TensorBoard event files."""

import contextlib
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from etils import epath

from convbert_jax import files


@contextlib.contextmanager
def _as_if_absent(package: str) -> Iterator[None]:
    """Makes imports of `package` fail within the block, unless it is already loaded."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # makes its import raise ImportError
    try:
        yield
    finally:
        del sys.modules[package]


# tensorboardX imports PyTorch if installed, only for type annotations. That takes two seconds.
with _as_if_absent("torch"):
    from tensorboardX import summary
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.record_writer import RecordWriter

_FLUSH_SECONDS = 60  # between flushes, which wait for the disk


class EventFile:
    """A TensorBoard event file, written synchronously.

    The thread of tensorboardX's `SummaryWriter` dies silently on a full disk or if the clock is set
    back. Its queue then fills up and blocks the caller forever.
    """

    def __init__(self, folder: epath.Path, *, purge_step: int):
        """Creates a file in `folder`; TensorBoard ignores events of older files from `purge_step`.

        Raises:
          OSError: the file cannot be written.
        """
        # Random: another run may start within the same second, and the name must not be a symlink.
        unique = f"{socket.gethostname()}.{secrets.token_hex(8)}"
        name = f"events.out.tfevents.{time.time():017.6f}.{unique}"
        self._local, self._place = folder / name, folder / name
        if files.is_remote(folder):  # RecordWriter needs a local file, which is copied
            self._folder = tempfile.TemporaryDirectory()
            self._local = Path(self._folder.name) / name
        self._file = RecordWriter(str(self._local))
        self._flushed = time.monotonic()
        self._write(Event(step=purge_step, file_version="brain.Event:2"))
        start = SessionLog(status=SessionLog.START)
        self._write(Event(step=purge_step, session_log=start))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Adds the values of a step by name; raises OSError if they cannot be written."""
        for name, value in values.items():
            self._write(Event(step=step, summary=summary.scalar(name, value)))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Flushes and closes the file; raises OSError if it cannot be written."""
        try:
            self._flush()
        finally:
            self._file.close()

    def _flush(self) -> None:
        self._file.flush()
        if self._local != self._place:
            files.copy(self._local, self._place)

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._file.write(event.SerializeToString())
