"""Records of a prepared folder: JSON files that contain a checksum.

The checksum detects damage that is still valid JSON, for example a changed digit.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convbert_jax import files
from convbert_jax.data.errors import DataError


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """Atomically writes `content` to `path`.

    Raises:
      DataError: the file cannot be written; an existing file is unchanged.
    """
    try:
        files.write_json(path, files.seal(content))
    except OSError as error:
        raise DataError(
            f"{path} could not be written ({error.strerror}). Free some space or use another "
            "config.data.directory, then run again; completed work is kept.",
            field="config.data.directory",
            path=path,
        ) from None


def read_record(path: Path, *, remedy: str, fields: Mapping[str, files.Kinds]) -> dict[str, Any]:
    """Reads a record written by `write_record`.

    Raises:
      FileNotFoundError: the file does not exist.
      DamagedFileError: the checksum is wrong or one of `fields` is missing, see `files.read_json`.
    """
    return files.read_json(path, remedy=remedy, fields=fields)
