"""A prepared folder in a bucket, and its copy on a disk of this machine.

Rows are read in any order, so from a disk. What is prepared for a bucket is made in the copy and
put there when it is whole, the list of its files last: without the list nothing is there yet. Every
other machine copies what it lacks, once; the list has size and checksum of each file.
"""

import hashlib
import shutil
import zlib
from collections.abc import Callable, Mapping
from concurrent import futures
from pathlib import Path, PurePosixPath

from absl import logging
from etils import epath

from convbert_jax import files
from convbert_jax.data.errors import DataError
from convbert_jax.data.records import read_record, write_record
from convbert_jax.data.units.changes import STAMPS
from convbert_jax.data.units.lock import lock
from convbert_jax.progress import show_progress

LIST = "files.json"
ROWS = ("train-", "validation-")  # how shards, and what lies beside them, are called
_OF_THIS_MACHINE = ("units/", "attempts-", "lock", LIST, STAMPS)
_AT_ONCE = 8  # files; a bucket serves several faster than one
_CHUNK = 1 << 22  # bytes
_REMEDY = "name a disk with room by --config.data.cache, then start again"

Listed = Mapping[str, list[int]]  # name of a file -> its bytes, its CRC-32


def copy_of(directory: epath.Path, cache: str) -> Path:
    """Where the copy of a folder in a bucket lies: a folder of its own for each."""
    digest = hashlib.sha256(str(directory).encode()).hexdigest()[:12]
    return files.expand(cache) / f"{directory.name}-{digest}"


def fetch(directory: epath.Path, cache: str, *, rows: bool = True) -> Path:
    """`directory`, if it is on a disk; of one in a bucket the copy, which is made what is there,
    or left as it is where nothing is whole there.

    Args:
      cache: `config.data.cache`.
      rows: False leaves the shards away, for who needs a vocabulary.

    Raises:
      DataError: it cannot be copied.
      DamagedFileError: a file is not what was put there.
    """
    if not files.is_remote(directory):
        return Path(directory)
    here = copy_of(directory, cache)
    with lock(here):
        listed = list_files(directory)
        if not listed:
            return here
        if list_files(here) != listed:
            _clear(here)
            try:  # the list first: a killed copy keeps what it had
                write_record(here / LIST, {"files": listed})
            except DataError as error:
                fault = str(error).partition(";")[0]
                raise DataError(f"{fault}; {_REMEDY}.", path=error.path) from None
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
    """Puts what was prepared in the copy `here` into the bucket, unless it is there.

    Raises:
      DataError: it cannot be written.
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
    """What a folder has, or a copy should have; None where it is not whole.

    Raises:
      DamagedFileError: the list is not what was written.
    """
    remedy = "delete it and prepare it again"
    try:
        found = read_record(directory / LIST, remedy=remedy, fields={"files": dict})["files"]
    except FileNotFoundError:
        return None
    for name in found:  # a list of a stranger's shall write nowhere else
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise files.damaged(directory / LIST, f"it names {name}", remedy)
    return found


def _has(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _clear(here: Path) -> None:
    """Removes a copy, or what was begun here, all but the lock that is held."""
    for path in here.iterdir():
        if path.is_dir():
            files.remove_tree(path)
        elif path.name != "lock":
            path.unlink()


def _measure(path: Path) -> list[int]:
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return [size, checksum]


def _each(listed: Listed, what: str, do: Callable[[str], object]) -> None:
    """Does it to every file, several at once; the first error ends all."""
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
        with source.open("rb") as read, files.replacing(target) as written:
            shutil.copyfileobj(read, written, _CHUNK)
    except FileNotFoundError:
        raise DataError(
            f"{source} is missing; delete {directory} and prepare it again.", path=source
        ) from None
    except OSError as error:
        raise DataError(
            f"{source} could not be copied to {target} ({error.strerror or error}); {_REMEDY}: "
            "what was copied is kept.",
            path=source,
        ) from None
    if _measure(target) != expected:
        target.unlink()
        raise files.damaged(source, "its checksum is another", "prepare the folder again")


def _put(here: Path, directory: epath.Path, name: str) -> None:
    target = directory / name
    try:
        files.copy(here / name, target)
    except OSError as error:
        raise DataError(
            f"{target} could not be written ({error.strerror or error}); may this account write "
            f"there? Start again: what was prepared is in {here}.",
            path=target,
        ) from None
