"""Numbers for TensorBoard, in files of its own format beside the run's."""

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
    """Imports within do not load `package`, unless it is loaded already."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # an import is an ImportError now
    try:
        yield
    finally:
        del sys.modules[package]


# tensorboardX imports PyTorch where it is installed, for a type in signatures of what is not used
# here: two seconds of every start.
with _as_if_absent("torch"):
    from tensorboardX import summary
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.record_writer import RecordWriter

_FLUSH_SECONDS = 60  # from one flush to the next: each waits for the disk


class EventFile:
    """One event file, written where it is called.

    tensorboardX's `SummaryWriter` leaves it to a thread, which a full disk or a clock that is set
    back ends without a word; the queue before it then fills, and whoever writes waits for ever.
    """

    def __init__(self, folder: epath.Path, *, purge_step: int):
        """Begins a file in `folder`, in front of which the older ones end at `purge_step`.

        Raises:
          OSError: it cannot be written.
        """
        # Random, as a second run may begin within the same second, and so that no link is there.
        unique = f"{socket.gethostname()}.{secrets.token_hex(8)}"
        name = f"events.out.tfevents.{time.time():017.6f}.{unique}"
        self._local, self._place = folder / name, folder / name
        if files.is_remote(folder):  # its writer needs a file on a disk, which is copied
            self._folder = tempfile.TemporaryDirectory()
            self._local = Path(self._folder.name) / name
        self._file = RecordWriter(str(self._local))
        self._flushed = time.monotonic()
        self._write(Event(step=purge_step, file_version="brain.Event:2"))
        start = SessionLog(status=SessionLog.START)
        self._write(Event(step=purge_step, session_log=start))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Adds numbers of one step by name; raises OSError if they cannot be written."""
        for name, value in values.items():
            self._write(Event(step=step, summary=summary.scalar(name, value)))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Writes what is left; raises OSError if it cannot be written."""
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
