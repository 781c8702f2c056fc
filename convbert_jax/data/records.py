"""Records of a prepared folder: JSON files with a checksum of their own.

So a changed digit, which is still JSON, is damage and no other number.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convbert_jax import files
from convbert_jax.data.errors import DataError


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """`content` as the whole of `path`, or `path` stays as it was.

    Raises:
      DataError: it cannot be written.
    """
    try:
        files.write_json(path, files.seal(content))
    except OSError as error:
        raise DataError(
            f"{path} could not be written ({error.strerror}); free some space or name another "
            "config.data.directory, then run again: what was finished is kept.",
            field="config.data.directory",
            path=path,
        ) from None


def read_record(path: Path, *, remedy: str, fields: Mapping[str, files.Kinds]) -> dict[str, Any]:
    """Reads what `write_record` wrote.

    Raises:
      FileNotFoundError: it is not there.
      DamagedFileError: it is not what was written, or lacks one of `fields`, see `files.read_json`.
    """
    return files.read_json(path, remedy=remedy, fields=fields)
