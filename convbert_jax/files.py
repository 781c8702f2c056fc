"""Files of ours, read and written one way: a damaged one is a sentence, a half written one is none.

Everything that this package stores and reads again (configs, settings, records, metrics, results)
goes through here, so that no kind of damage ends in a traceback and no kill leaves half a file.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from absl import logging

from convbert_jax.config import UserError

# What a field may be: a type, several, or an object with fields of its own.
Kinds = type | tuple[type, ...] | Mapping[str, Any]
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # escaped half of a pair


class DamagedFileError(UserError):
    """A file is there and is not what was written."""


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text from anywhere, a stranger's too.

    Raises:
      ValueError: it is not JSON, not UTF-8, nested too deep for the parser, has a number too long
        to read, or text that no file can hold (half of a surrogate pair). One short line.
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
        where = f"line {error.lineno} column {error.colno}"
        raise ValueError(f"it is not JSON: {error.msg} at {where}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError:
        raise ValueError("it has half of a surrogate pair, which is no character") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except ValueError as error:  # an integer of thousands of digits
        raise ValueError(str(error).partition(";")[0]) from None


def read_json(path: Path, *, remedy: str, fields: Mapping[str, Kinds] | None = None) -> Any:
    """A JSON file of ours.

    Args:
      remedy: what to do about a damaged one, as the end of a sentence.
      fields: what must be inside, by name, if it is an object; None takes any JSON value.

    Raises:
      FileNotFoundError: it is not there.
      DamagedFileError: it cannot be read, or is something else.
    """
    try:
        value = parse_json(path.read_bytes())
        _check_fields(value, fields)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise damaged(path, error, remedy) from None
    return value


def read_json_lines(
    path: Path, *, remedy: str, fields: Mapping[str, Kinds]
) -> list[dict[str, Any]]:
    """The objects of a file with one JSON object a line; a last line that a kill cut off is none.

    Raises:
      FileNotFoundError: it is not there.
      DamagedFileError: a line before the last cannot be read, or lacks one of `fields`.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise damaged(path, error, remedy) from None
    values = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is cut off
        try:
            value = parse_json(line)
            _check_fields(value, fields)
        except ValueError as error:
            raise damaged(path, f"line {number}: {error}", remedy) from None
        values.append(value)
    return values


def damaged(path: Path, what: object, remedy: str) -> DamagedFileError:
    """The one sentence for a file that is not what was written."""
    if isinstance(what, OSError):
        what = what.strerror or type(what).__name__
    return DamagedFileError(f"{path} is damaged ({str(what)[:200]}); {remedy}.")


@contextlib.contextmanager
def replacing(path: Path, mode: str = "wb", *, keep: bool = False) -> Iterator[IO]:
    """A file to write, which takes the place of `path` when the block ends, whole and on disk.

    After a kill, an error or a full disk `path` is what it was. Text is UTF-8.

    Args:
      keep: after an error what was written, if anything, stays as `unfinished_name(path)`, to
        which mode "ab" adds.

    Raises:
      OSError: it cannot be written; nothing is left behind, but with `keep`.
    """
    unfinished = unfinished_name(path)
    try:
        with open(unfinished, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        if not (keep and unfinished.is_file() and unfinished.stat().st_size):
            unfinished.unlink(missing_ok=True)
        raise


def unfinished_name(path: Path) -> Path:
    """Where `replacing` writes."""
    return path.with_name(f"{path.name}.unfinished")


def write_text(path: Path, text: str) -> None:
    """`text` as the whole of `path`, see `replacing`."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """`value` as the whole of `path`, see `replacing`."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def try_lock(file: IO, unlockable: str) -> bool:
    """Takes `file` for this process alone, until it is closed or the process dies.

    Args:
      unlockable: logged as a warning where the file system has no locks; the file is taken then.

    Returns:
      False if another process has it.

    Raises:
      OSError: it cannot be locked for another reason.
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
