"""The manifest of an exported folder: settings for convbert_jax and checksums of the other files.

The safetensors format has no checksums, so a flipped bit would be read as a weight.
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
    """Returns whether a folder was exported by convbert_jax."""
    return (folder / FILE).is_file()


def write(folder: Path, source: str = "", **said: Any) -> None:
    """Writes the manifest of a complete folder.

    Args:
      source: path of the weights that were exported, kept as a checksum; "" if unknown.
      said: further JSON values, which `read` returns.
    """
    sums = {path.relative_to(folder).as_posix(): _checksum(path) for path in _all_files(folder)}
    content = {"format": _FORMAT, _CHECKSUMS: sums, **said}
    if source:
        content[_SOURCE] = google_crc32c.value(source.encode())
    (folder / FILE).write_text(json.dumps(content, indent=1) + "\n")


def check_own(folder: Path, source: str) -> None:
    """Checks that an export from `source` may replace `folder` without loss.

    Raises:
      ConversionError: `folder` holds the export of another source, or files in it were added or
        changed after the export.
    """
    if not is_in(folder):
        return
    said, own = read_json(folder / FILE), google_crc32c.value(source.encode())
    if said.get(_SOURCE, own) != own:
        raise ConversionError(
            f"{folder} holds the export of another model. Remove it or use another --output.",
            path=folder,
        )
    sums = said.get(_CHECKSUMS, {})
    # Format 1 has checksums only of the files that `_files` lists.
    for path in _all_files(folder) if said.get("format") == _FORMAT else _files(folder):
        name = path.relative_to(folder).as_posix()
        if sums.get(name) != _checksum(path):
            raise ConversionError(
                f"Cannot replace {folder}: {name} was added or changed after the export. Move that "
                "file and remove the folder, or use another --output.",
                value=name,
                path=folder,
            )


def read(folder: Path) -> dict[str, Any]:
    """Reads the manifest of a folder and verifies the checksums.

    A changed JSON file is only a warning, because settings may be edited by hand.

    Returns:
      the content of the manifest; empty if the folder has none.

    Raises:
      ConversionError: the manifest is damaged, or the weights or the vocabulary were changed.
    """
    if not is_in(folder):
        return {}
    said = read_json(folder / FILE)
    sums = said.get(_CHECKSUMS, {})
    if not isinstance(sums, dict):
        raise ConversionError(
            f"{folder / FILE} has {_CHECKSUMS}={shown(sums)}, expected an object. Copy it again.",
            field=_CHECKSUMS,
            value=sums,
            path=folder / FILE,
        )
    for path in _files(folder):
        wanted = sums.get(path.relative_to(folder).as_posix())
        if wanted is None or wanted == _checksum(path):
            continue
        if path.suffix == ".json":
            logging.warning("%s was edited or damaged after the export (wrong checksum).", path)
            continue
        raise ConversionError(
            f"{path} is damaged or was changed after the export (wrong checksum). Copy it again, "
            f"or remove {FILE} if you changed it on purpose.",
            path=path,
        )
    return said


def _files(folder: Path) -> list[Path]:
    """Returns the files that are parsed, without documentation such as the model card."""
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
