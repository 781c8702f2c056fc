"""Prepared folders in buckets, and their copies on a local disk.

Rows need random access, so they are read from a local disk. Data for a bucket is prepared in the
local copy and uploaded when complete, the list of files last; a folder without the list is
incomplete. Other machines download missing files once. The list has the size and checksum of each
file.
"""

import hashlib
import shutil
import zlib
from collections.abc import Callable, Mapping
from concurrent import futures
from pathlib import Path, PurePosixPath

from absl import logging
from etils import epath

from convbert_jax import storage
from convbert_jax.console import show_progress
from convbert_jax.data.errors import DataError
from convbert_jax.data.prepared import STAMPS, lock
from convbert_jax.data.units import write_record

LIST = "files.json"
ROWS = ("train-", "validation-")  # prefixes of shards and of their files of lengths
_OF_THIS_MACHINE = ("units/", "attempts-", "lock", LIST, STAMPS)
_AT_ONCE = 8  # concurrent file transfers
_CHUNK = 1 << 22  # bytes
_REMEDY = "Set --config.data.cache to a disk with enough space and start again"

Listed = Mapping[str, list[int]]  # file name -> [bytes, CRC-32]


def copy_of(directory: epath.Path, cache: str) -> Path:
    """Returns the path of the local copy of a folder in a bucket, unique for each folder."""
    digest = hashlib.sha256(str(directory).encode()).hexdigest()[:12]
    return storage.expand(cache) / f"{directory.name}-{digest}"


def fetch(directory: epath.Path, cache: str, *, rows: bool = True) -> Path:
    """Downloads a folder from a bucket and returns its local path.

    A local `directory` is returned unchanged. If the folder in the bucket is incomplete, the local
    copy is left unchanged.

    Args:
      cache: `config.data.cache`.
      rows: False skips the shards, if only the vocabulary is needed.

    Raises:
      DataError: the folder cannot be copied.
      DamagedFileError: a file does not match its checksum.
    """
    if not storage.is_remote(directory):
        return Path(directory)
    here = copy_of(directory, cache)
    with lock(here):
        listed = list_files(directory)
        if not listed:
            return here
        if list_files(here) != listed:
            _clear(here)
            # The list is written first, so that an interrupted download is continued.
            write_record(here / LIST, {"files": listed}, field="config.data.cache", remedy=_REMEDY)
        wanted = [name for name in listed if rows or not name.startswith(ROWS)]
        missing = {n: listed[n] for n in wanted if not _has(here / n, listed[n][0])}
        if missing:
            _each(
                missing,
                f"Copying {directory} to {here}",
                lambda name: _bring(directory, here, name, listed[name]),
            )
    return here


def publish(here: Path, directory: epath.Path) -> None:
    """Uploads the local copy `here` to the bucket, unless the bucket has the same files.

    Raises:
      DataError: a file cannot be written.
    """
    with lock(here):
        kept = list_files(here)
        if kept and kept == list_files(directory):
            return
        names = sorted(
            path.relative_to(here).as_posix() for path in here.rglob("*") if path.is_file()
        )
        found = {n: _measure(here / n) for n in names if not n.startswith(_OF_THIS_MACHINE)}
        _each(found, f"Copying {here} to {directory}", lambda name: _put(here, directory, name))
        write_record(directory / LIST, {"files": found})
        write_record(here / LIST, {"files": found})


def list_files(directory: epath.Path) -> Listed | None:
    """Reads the list of files of a folder; None if the folder is incomplete.

    Raises:
      DamagedFileError: the list is not in the form that was written.
    """
    remedy = "delete it and prepare it again"
    try:
        found = storage.read_json(directory / LIST, remedy=remedy, fields={"files": dict})["files"]
    except FileNotFoundError:
        return None
    for name in found:  # a malicious list must not write outside the copy
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise storage.damaged(directory / LIST, f"it names {name}", remedy)
    return found


def _has(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _clear(here: Path) -> None:
    """Removes the files of a local copy, except the lock."""
    for path in here.iterdir():
        if path.is_dir():
            storage.remove_tree(path)
        elif path.name != "lock":
            path.unlink()


def _measure(path: Path) -> list[int]:
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return [size, checksum]


def _each(listed: Listed, what: str, do: Callable[[str], object]) -> None:
    """Calls `do` for every file, concurrently; the first error cancels the rest."""
    total = sum(size for size, _ in listed.values())
    logging.info("%s: %d files, %.1f MB.", what, len(listed), total / 1e6)
    with show_progress(total, "Copying") as advance, futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        begun = {pool.submit(do, name): size for name, (size, _) in listed.items()}
        try:
            for done in futures.as_completed(begun):
                done.result()
                advance(begun[done])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _bring(directory: epath.Path, here: Path, name: str, expected: list[int]) -> None:
    source, target = directory / name, here / name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as read, storage.replacing(target) as written:
            shutil.copyfileobj(read, written, _CHUNK)
    except FileNotFoundError:
        raise DataError(
            f"{source} is missing. Delete {directory} and prepare it again.", path=source
        ) from None
    except OSError as error:
        raise DataError(
            f"Cannot copy {source} to {target} ({error.strerror or error}). {_REMEDY}. "
            "Copied files are kept.",
            field="config.data.cache",
            path=source,
        ) from None
    if _measure(target) != expected:
        target.unlink()
        raise storage.damaged(source, "checksum mismatch", "prepare the folder again")


def _put(here: Path, directory: epath.Path, name: str) -> None:
    target = directory / name
    try:
        storage.copy(here / name, target)
    except OSError as error:
        raise DataError(
            f"Cannot write {target}: {error.strerror or error}. Check the write permission of this "
            f"account and start again; the prepared data is kept in {here}.",
            path=target,
        ) from None
