"""Detection of sources that changed after a folder was prepared from them.

Each unit is hashed while it is tokenized. Later starts compare sizes and modification times of the
source files, which is fast, and read the units again only if one of these differs.
"""

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from convbert_jax.data.errors import DataError, shorten
from convbert_jax.data.records import read_record, write_record
from convbert_jax.data.units.processes import Processes
from convbert_jax.data.units.work import Source, Work

# Newer stamps of unchanged content, as seen from this machine; metadata.json keeps the first ones.
STAMPS = "stamps.json"
# Path relative to the common folder of all files -> [size in bytes, modification time in ns].
Stamps = Mapping[str, Sequence[int]]


def new_digest():
    """Returns an empty hash for the content of one unit."""
    return hashlib.blake2b(digest_size=16)


def hashed(items: Iterable[Any], digest) -> Iterator[Any]:
    """Yields `items` (texts, or pairs with their numbers) and adds each to `digest`."""
    for item in items:
        digest.update(ascii(item).encode())  # repr depends on the version of Python
        yield item


def take_stamps(sources: Mapping[str, Source]) -> dict[str, list[int]]:
    """Returns size and modification time of every file of `sources`, by relative path."""
    paths, stats = _list_files(sources), {}
    for name in paths:
        stat = paths[name].stat()
        stats[name] = [stat.st_size, stat.st_mtime_ns]
    return stats


def elsewhere(directory: Path) -> str:
    """Returns the flag that prepares a new directory instead of `directory`."""
    names = (directory.with_name(f"{directory.name}-{number}") for number in range(2, 1000))
    free = next((path for path in names if not path.exists()), directory.with_name("other"))
    return f"--config.data.directory={free}"


def _list_files(sources: Mapping[str, Source]) -> dict[str, Path]:
    paths = sorted({path.absolute() for source in sources.values() for path in source.files})
    root = os.path.commonpath([path.parent for path in paths]) if paths else ""
    return {os.path.relpath(path, root): path for path in paths}


def list_changed(
    directory: Path, sources: Mapping[str, Source] | None, recorded: Stamps
) -> list[str]:
    """Returns the paths of files whose stamp differs from `recorded` and the last comparison.

    Raises:
      DamagedFileError: the stamps of the last comparison are not in the form that was written.
    """
    if not sources:
        return []
    try:
        remedy = "delete it to compare the sources by content"
        newer = read_record(directory / STAMPS, remedy=remedy, fields={"files": dict})["files"]
    except FileNotFoundError:
        newer = {}
    paths = _list_files(sources)
    return [
        str(paths[name])
        for name, stamp in take_stamps(sources).items()
        if stamp not in (recorded.get(name), newer.get(name))
    ]


def check_content(
    directory: Path,
    sources: Mapping[str, Source],
    stamps: Stamps,
    units: Mapping[int, Mapping[str, Any]],
    workers: int,
    *,
    always: bool,
) -> None:
    """Compares units with their recorded digests if the stamp of a file differs.

    Args:
      stamps: stamps of the source files when they were prepared.
      units: records with a "digest", by unit index; other units are not read.
      workers: number of processes; 0: one per core.
      always: compare even if all stamps are equal.

    Raises:
      DataError: the content of a unit differs.
      DamagedFileError: the stamps in `directory` are not in the form that was written.
    """
    changed = list_changed(directory, sources, stamps)
    if not changed and not always:
        return
    digests = {index: unit["digest"] for index, unit in units.items()}
    job = _Comparison(directory, digests, tuple(changed))
    work = Work(job, sources, _compare_unit)
    assignments = [each for each in work.list_assignments() if each.index in digests]
    if len(assignments) < len(digests):
        raise job.error(changed or [source.name for source in sources.values()])
    why = f"size or modification time of {shorten(', '.join(changed))} changed"
    logging.info(
        "Comparing the content of the sources with the digests in %s: %s.",
        directory,
        why if changed else "--mode=prepare always does",
    )
    present = take_stamps(sources)
    Processes(workers, "Comparing").run(work, assignments)
    try:
        write_record(directory / STAMPS, {"files": present})
    except DataError as error:  # for example a folder of another user
        logging.warning("%s The next start will compare the sources again.", error)


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """The `Job` that compares units."""

    directory: Path
    digests: Mapping[int, str]
    changed: tuple[str, ...]

    def error(self, paths: Sequence[str]) -> DataError:
        return DataError(
            f"The source of {self.directory} changed after it was prepared: the content of "
            f"{shorten(', '.join(paths))} differs. Restore the original files, or prepare the new "
            f"ones with {elsewhere(self.directory)}.",
            field="config.data.directory",
            path=paths[0],
        )


def _compare_unit(job: _Comparison, index: int, source: Any, unit: Any, split: str = "") -> dict:
    digest = new_digest()
    read = source.documents if hasattr(source, "documents") else source.pairs
    for _ in hashed(read(unit), digest):
        pass
    if digest.hexdigest() != job.digests[index]:
        files_of = getattr(source, "files_of", lambda unit: source.files)
        paths = sorted(str(path.absolute()) for path in files_of(unit))
        raise job.error([path for path in paths if path in job.changed] or paths)
    return {}
