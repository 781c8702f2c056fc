"""Reads and writes the package's own files: configs, settings, records, metrics, results.

Errors in files are reported in one sentence, writes are atomic, and symbolic links, which may be
from an untrusted source, are not followed. A path may be in a bucket (gs://, an `etils.epath`),
which has no locks, links, renames or appending; a file appears there when it is complete.
"""

import atexit
import contextlib
import errno
import fcntl
import importlib.util
import json
import os
import re
import secrets
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from absl import logging
from etils import epath

from convbert_jax.config import UserError

_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.unfinished$")


def temporary_name(path: Path) -> Path:
    """Returns a unique name in the folder of `path`, for a file that is later renamed to `path`."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.unfinished")


def no_follow(path: str, flags: int) -> int:
    """Opens a file without following symbolic links; an `opener` for `open`.

    Raises:
      UserError: `path` is a symbolic link.
    """
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(
                f"{path} is a symbolic link. Replace it by the file itself, or remove it.",
                path=path,
            ) from None
        raise


def check_links(folder: Path) -> None:
    """Checks that no symbolic link in a run folder leads out of it, except to a file.

    A link to a file is harmless: `files.replacing` replaces it and `no_follow` refuses it. The run
    folder itself may be a link.

    Raises:
      UserError: such a link exists.
    """
    root = os.path.realpath(folder)
    for entry in _walk(folder):
        if entry.is_symlink():
            target = os.path.realpath(entry.path)
            if os.path.commonpath((root, target)) != root and not os.path.isfile(target):
                raise UserError(
                    f"{entry.path} is a symbolic link to {target}, outside the run folder, where "
                    "nothing may be written. Remove the link, or replace it by a folder.",
                    path=entry.path,
                )


def remove_temporary(folder: Path, older_than: float = 0.0) -> None:
    """Removes files below `folder` that a killed process did not rename.

    Args:
      older_than: seconds since the last write.
    """
    for entry in _walk(folder):
        if _TEMPORARY.search(entry.name):
            with contextlib.suppress(OSError):
                age = time.time() - entry.stat(follow_symlinks=False).st_mtime
                if age >= older_than:
                    os.unlink(entry.path)


def _walk(folder: str | os.PathLike) -> Iterator[os.DirEntry]:
    """Yields the readable entries below a local folder, without following links."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path)


# Scheme -> package that `epath` uses without TensorFlow. Other schemes, as s3, are not supported,
# because Orbax does not mark complete checkpoints there, so partial ones would be restored.
_BUCKETS = {"gs": "gcsfs"}

# Allowed types of a JSON field: one type, several, or the fields of an object.
Kinds = type | tuple[type, ...] | Mapping[str, Any]

CHECKSUM = "crc32"  # key of `seal`
_SEND_EVERY = 60.0  # seconds between two writes of `Lines` into a bucket
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # an escaped surrogate


def to_path(name: epath.PathLike) -> epath.Path:
    """Returns a local path, with "~" replaced, or a path in a bucket.

    Raises:
      UserError: the bucket is not supported, or the name is not UTF-8; and as `expand`.
    """
    scheme, _, rest = os.fspath(name).partition("://")
    if not rest:
        path = expand(name)
        place = os.path.abspath(path)
        shown = place.encode("utf-8", "backslashreplace").decode()
        if shown != place:
            raise UserError(
                "the path is not UTF-8, which checkpoints and vocabularies need. Rename the folder "
                "or choose another one.",
                path=shown,
            )
        return path
    if scheme not in _BUCKETS:
        known = ", ".join(f"{scheme}://" for scheme in _BUCKETS)
        raise UserError(f"{name} is not a supported path; buckets start with one of {known}.")
    package = _BUCKETS[scheme]
    if not any(importlib.util.find_spec(found) for found in (package, "tensorflow")):
        raise UserError(f"{name} is in a bucket, which needs a package: pip install {package}.")
    return epath.Path(name)


def expand(name: epath.PathLike) -> Path:
    """Returns a local path with "~" replaced by the home folder.

    Raises:
      UserError: the user of "~name" does not exist, or this user has no home folder.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError:
        user = os.fspath(name).partition("/")[0]
        fix = f"write ./{name} if the name itself starts with ~"
        if user == "~":  # in a container with a user id that has no user entry
            user, fix = "this user", "set the environment variable HOME"
        raise UserError(
            f"the home folder of {user} is unknown. Write the absolute path, or {fix}.", path=name
        ) from None


def absolute(path: epath.Path) -> epath.Path:
    """Returns the absolute path; paths in a bucket are returned unchanged."""
    return path if is_remote(path) else path.absolute()


def is_remote(path: epath.PathLike) -> bool:
    """Returns whether a path is in a bucket."""
    return "://" in os.fspath(path)


class DamagedFileError(UserError):
    """A file is corrupt or has unexpected content."""


class JsonError(ValueError):
    """Text that `parse_json` rejects; `reason` completes "is not JSON: "."""

    def __init__(self, reason: str, message: str = ""):
        super().__init__(message or reason)
        self.reason = reason


def parse_json(text: str | bytes) -> Any:
    """Parses a JSON text, which may be from an untrusted source.

    Raises:
      JsonError: it is not JSON, not UTF-8, nested too deep for the parser, has a number with too
        many digits, or an unpaired surrogate, which UTF-8 cannot encode. One short line.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        elif not text.isascii():
            text.encode("utf-8")
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at line {error.lineno} column {error.colno}"
        raise JsonError(reason, f"it is not JSON: {reason}") from None
    except UnicodeDecodeError as error:
        raise JsonError(f"it is not UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError:
        raise JsonError("it contains an unpaired surrogate, which UTF-8 cannot encode") from None
    except RecursionError:
        raise JsonError("it is nested too deep") from None
    except ValueError as error:  # an integer of thousands of digits
        raise JsonError(str(error).partition(";")[0]) from None


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Adds a checksum to a JSON object; `read_json` and `read_json_lines` check and remove it."""
    return {**content, CHECKSUM: _checksum(content)}


def _unseal(value: Any) -> Any:
    """Removes the checksum of `seal`, or raises ValueError if it does not match.

    Values without a checksum are returned unchanged.
    """
    if not isinstance(value, dict) or CHECKSUM not in value:
        return value
    content = {name: part for name, part in value.items() if name != CHECKSUM}
    if value[CHECKSUM] != _checksum(content):
        raise ValueError(
            f'its content does not match its "{CHECKSUM}"; to keep a manual edit, remove '
            f'"{CHECKSUM}"'
        )
    return content


def _checksum(content: Mapping[str, Any]) -> int:
    as_read = json.loads(json.dumps(content))  # converts keys to text, as in the file
    return zlib.crc32(json.dumps(as_read, sort_keys=True).encode())


def read_json(path: epath.Path, *, remedy: str, fields: Mapping[str, Kinds] | None = None) -> Any:
    """Reads a JSON file of this package.

    Args:
      remedy: how to fix a damaged file, as the end of a sentence.
      fields: required fields of the object -> types; None accepts any JSON value.

    Raises:
      FileNotFoundError: the file does not exist.
      DamagedFileError: it cannot be read, or has other content.
    """
    try:
        value = _unseal(parse_json(path.read_bytes()))
        _check_fields(value, fields)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise damaged(path, error, remedy) from None
    return value


def read_json_lines(
    path: epath.Path, *, remedy: str, fields: Mapping[str, Kinds]
) -> list[dict[str, Any]]:
    """Reads a file with one JSON object per line, ignoring a last line that a kill truncated.

    Args:
      remedy, fields: as in `read_json`.

    Raises:
      FileNotFoundError: the file does not exist.
      DamagedFileError: a complete line cannot be read, or lacks one of `fields`.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise damaged(path, error, remedy) from None
    values = []
    for number, line in enumerate(lines[:-1], start=1):  # text after the last newline is truncated
        try:
            value = _unseal(parse_json(line))
            _check_fields(value, fields)
        except ValueError as error:
            raise damaged(path, f"line {number}: {error}", remedy) from None
        values.append(value)
    return values


def damaged(path: epath.Path, what: object, remedy: str) -> DamagedFileError:
    """Returns the error for a damaged file."""
    if isinstance(what, OSError):
        what = what.strerror or type(what).__name__
    return DamagedFileError(f"{path} is damaged ({str(what)[:200]}); {remedy}.", path=path)


@contextlib.contextmanager
def replacing(path: epath.Path, mode: str = "wb", *, keep: bool = False) -> Iterator[IO]:
    """Yields a file that atomically replaces `path` when the block ends.

    After a kill, an error or a full disk `path` is unchanged. Text is UTF-8. If `path` is a
    symbolic link, the link is replaced and its target is unchanged.

    Args:
      keep: after an error, keep the written part as `unfinished_name(path)`; mode "ab" appends to
        it.

    Raises:
      OSError: the file cannot be written; without `keep` no temporary file remains.
    """
    unfinished = unfinished_name(path) if keep else temporary_name(path)
    if is_remote(path):
        with tempfile.NamedTemporaryFile("w" + mode[1:], encoding=_encoding(mode)) as file:
            yield file
            file.flush()
            copy(Path(file.name), path)
        return
    try:
        mode = mode if keep else "x" + mode[1:]
        with open(unfinished, mode, encoding=_encoding(mode), opener=no_follow) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        if not (keep and unfinished.is_file() and unfinished.stat().st_size):
            unfinished.unlink(missing_ok=True)
        raise


def _encoding(mode: str) -> str | None:
    return None if "b" in mode else "utf-8"


def unfinished_name(path: epath.Path) -> epath.Path:
    """Returns the temporary name of a file that `replacing` keeps after an error."""
    return path.with_name(f"{path.name}.unfinished")


def write_text(path: epath.Path, text: str) -> None:
    """Writes a text file atomically, see `replacing`."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


class Lines:
    """A file that lines are appended to; in a bucket it is rewritten at most once a minute."""

    def __init__(self, path: epath.Path):
        """Appends to an existing file. Raises OSError if it cannot be written, as `append`."""
        self._path = path
        self._file = self._text = None
        if is_remote(path):
            self._text = self._sent = path.read_text() if path.exists() else ""
            self._last = time.monotonic()
        else:
            self._file = open(path, "a", encoding="utf-8", opener=no_follow)  # noqa: SIM115

    def append(self, line: str) -> None:
        """Appends `line` and a newline.

        Local files are written at once, files in a bucket by a later call after `_SEND_EVERY`
        seconds.
        """
        if self._file is None:
            self._text += line + "\n"
            if time.monotonic() - self._last > _SEND_EVERY:
                self.flush()
            return
        self._file.write(line + "\n")
        self._file.flush()

    def flush(self) -> None:
        """Writes pending lines to the bucket."""
        if self._file is None and self._text != self._sent:
            self._path.write_text(self._text)
            self._sent, self._last = self._text, time.monotonic()

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()


def remove_tree(folder: epath.Path) -> None:
    """Removes a folder with its content; ignores files on a disk that cannot be removed."""
    if not is_remote(folder):
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.exists():
        folder.rmtree()


def copy(source: epath.Path, target: epath.Path) -> None:
    """Copies a file to `target`, whose folder must exist."""
    if is_remote(target):
        target.write_bytes(source.read_bytes())
        return
    with source.open("rb") as read, replacing(target) as written:
        shutil.copyfileobj(read, written)


def local_copy(path: epath.Path) -> Path:
    """Returns `path`, or for a bucket a local copy that is removed when this process exits.

    For libraries that read only local files.
    """
    if not is_remote(path):
        return path
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    target = Path(folder.name) / path.name
    copy(path, target)
    return target


@contextlib.contextmanager
def written_locally(folder: epath.Path) -> Iterator[Path]:
    """Yields `folder`, or for a bucket a local folder that is copied to it at the end of the block.

    For libraries that write only local files. After an error nothing is copied.
    """
    if not is_remote(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)
        for path in sorted(Path(name).rglob("*")):
            if path.is_file():
                target = folder / path.relative_to(name).as_posix()
                target.parent.mkdir(parents=True, exist_ok=True)
                copy(path, target)


def write_json(path: epath.Path, value: Any) -> None:
    """Writes a JSON file atomically, see `replacing`."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def try_lock(file: IO, unlockable: str) -> bool:
    """Locks `file` for this process, until it is closed or the process ends.

    Args:
      unlockable: warning to log if the file system does not support locks; returns True then.

    Returns:
      False if another process holds the lock.

    Raises:
      OSError: locking failed for another reason.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        logging.warning("%s", unlockable)
    return True


def _check_fields(value: Any, fields: Mapping[str, Kinds] | None) -> None:
    if fields is None:
        return
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not an object")
    for name, kinds in fields.items():
        if name not in value:
            raise ValueError(f"it has no '{name}'")
        if isinstance(kinds, Mapping):
            try:
                _check_fields(value[name], kinds)
            except ValueError as error:
                raise ValueError(f"in its '{name}': {error}") from None
        elif not isinstance(value[name], kinds):
            raise ValueError(f"its '{name}' is of type {type(value[name]).__name__}")
