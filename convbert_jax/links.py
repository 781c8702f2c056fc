"""Symbolic links and temporary files in a run folder, which may be from an untrusted source.

The functions do nothing for a folder in a bucket, which has no links.
"""

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

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


def check(folder: Path) -> None:
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
