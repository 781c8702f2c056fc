"""The file in every folder that was written here: what only we ask for, and checksums of the rest.

safetensors has none, so that a flipped bit would be read as a weight.
"""

import json
from pathlib import Path
from typing import Any

import google_crc32c
from absl import logging

from convbert_jax.interop.claims import read_json, shown
from convbert_jax.interop.networks import ConversionError

FILE = "exported_by_convbert_jax.json"
_CHECKSUMS, _SOURCE = "crc32c", "source"
_FORMAT = 2
_CHUNK = 1 << 24  # bytes


def is_in(folder: Path) -> bool:
    return (folder / FILE).is_file()


def write(folder: Path, source: str = "", **said: Any) -> None:
    """Marks a folder that is complete.

    Args:
      source: where it was made from, of which a number is kept; "" is not known.
      said: JSON, for `read`.
    """
    sums = {path.relative_to(folder).as_posix(): _checksum(path) for path in _all_files(folder)}
    content = {"format": _FORMAT, _CHECKSUMS: sums, **said}
    if source:
        content[_SOURCE] = google_crc32c.value(source.encode())
    (folder / FILE).write_text(json.dumps(content, indent=1) + "\n")


def check_own(folder: Path, source: str) -> None:
    """Raises ConversionError if `folder` has what would be lost: the export of another source, or
    files that were put there, or changed, since it was written.
    """
    if not is_in(folder):
        return
    said, own = read_json(folder / FILE), google_crc32c.value(source.encode())
    if said.get(_SOURCE, own) != own:
        raise ConversionError(
            f"{folder} has the export of another model; remove it or name another --output.",
            path=folder,
        )
    sums = said.get(_CHECKSUMS, {})
    # Format 1 has no checksums of what is for people.
    for path in _all_files(folder) if said.get("format") == _FORMAT else _files(folder):
        name = path.relative_to(folder).as_posix()
        if sums.get(name) != _checksum(path):
            raise ConversionError(
                f"{folder} has {name}, which is not as it was written there; keep it elsewhere and "
                "remove the folder, or name another --output.",
                value=name,
                path=folder,
            )


def read(folder: Path) -> dict[str, Any]:
    """What is said of a folder; empty if it was not written here.

    Raises:
      ConversionError: the mark is damaged, or weights or vocabulary are not those that were
        written. Settings may be changed by hand: for them it is a warning.
    """
    if not is_in(folder):
        return {}
    said = read_json(folder / FILE)
    sums = said.get(_CHECKSUMS, {})
    if not isinstance(sums, dict):
        raise ConversionError(
            f"{folder / FILE} has {_CHECKSUMS}={shown(sums)}; copy it again.",
            field=_CHECKSUMS,
            value=sums,
            path=folder / FILE,
        )
    for path in _files(folder):
        wanted = sums.get(path.relative_to(folder).as_posix())
        if wanted is None or wanted == _checksum(path):
            continue
        if path.suffix == ".json":
            logging.warning("%s is not as it was written: changed by hand, or damaged.", path)
            continue
        raise ConversionError(
            f"{path} is not the file that was written (wrong checksum); copy it again, or, if you "
            f"changed it yourself, take {FILE} away.",
            path=path,
        )
    return said


def _files(folder: Path) -> list[Path]:
    """What a reader reads, not what is for people."""
    kinds = (".json", ".safetensors", ".model", ".txt")
    return [path for path in _all_files(folder) if path.suffix in kinds]


def _all_files(folder: Path) -> list[Path]:
    found = (path for pattern in ("*", "*/*") for path in folder.glob(pattern))
    return sorted(path for path in found if path.name != FILE and path.is_file())


def _checksum(path: Path) -> int:
    total = google_crc32c.Checksum()
    with path.open("rb") as file:
        for _ in total.consume(file, _CHUNK):
            pass
    return int.from_bytes(total.digest(), "big")
