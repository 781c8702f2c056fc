"""Records of a prepared folder: JSON files with a checksum of their own.

So a changed digit, which is still JSON, is damage and no other number.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convbert_jax import files
from convbert_jax.data.errors import DataError

CHECKSUM = "crc32"


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """`content` as the whole of `path`, or `path` stays as it was.

    Raises:
      DataError: it cannot be written.
    """
    try:
        files.write_json(path, {**content, CHECKSUM: _checksum(content)})
    except OSError as error:
        raise DataError(
            f"{path} could not be written ({error.strerror}); free some space or name another "
            "config.data.directory, then run again: what was finished is kept."
        ) from None


def read_record(path: Path, *, remedy: str, fields: Mapping[str, files.Kinds]) -> dict[str, Any]:
    """What `write_record` wrote; records without a checksum, as there once were, are taken too.

    Raises:
      FileNotFoundError: it is not there.
      DamagedFileError: it is not what was written, or lacks one of `fields`, see `files.read_json`.
    """
    content = files.read_json(path, remedy=remedy, fields=fields)
    if content.pop(CHECKSUM, None) not in (None, _checksum(content)):
        raise files.damaged(path, "its checksum is another", remedy)
    return content


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
