"""Opens document sources by their spec, for example "text:corpus/*.txt".

A source is split into units of about 16 MB of text. One process reads a whole unit, so units are
the granularity of parallel work and of resuming.
"""

import ast
import dataclasses
import functools
import hashlib
import os
import re
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from convbert_jax.config import DataSection
from convbert_jax.data.errors import DataError
from convbert_jax.data.readers import indexed_rows, parquet_files, text_files
from convbert_jax.data.readers.text_files import Unit, UnitFiles, clean, group_units

SOURCE_BYTES = 24_000_000  # of Python source; about a fifth of it is docstrings
UNIT_SOURCE_BYTES = 6_000_000
SHORTEST = 80  # characters; shorter docstrings are one-liners
# Packages whose docstrings are mostly prose come first, then the others by name.
PROSE = ("numpy", "scipy", "matplotlib", "jax", "flax", "optax")
SKIPPED = {"__pycache__", "site-packages", "test", "tests", "idlelib", "lib2to3", "_vendor"}
DOCTEST = re.compile(r"^>>>.*(\n.+)*", re.MULTILINE)  # from the prompt to a blank line
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclasses.dataclass(frozen=True)
class Docstrings(UnitFiles):
    name: str
    fingerprint: str
    units: tuple[Unit, ...]

    def files_of(self, unit: Unit) -> set[Path]:
        """Returns the files of one unit."""
        return set(map(Path, unit.parts))

    def documents(self, unit: Unit, tally: Counter | None = None) -> Iterator[str]:
        """Yields docstrings without doctests and without duplicates within the unit."""
        seen = set()
        for path in unit.parts:
            for text in _docstrings(path):
                text = DOCTEST.sub("", "\n".join(map(str.strip, text.split("\n"))))
                if len(text.strip()) >= SHORTEST and text not in seen:
                    seen.add(text)
                    yield from clean(text)


def open_docstrings(rest: str, section: DataSection) -> Docstrings:
    """Opens modules in a fixed order up to `SOURCE_BYTES`; they are parsed, never imported."""
    del rest, section
    folders = sysconfig.get_paths()
    modules = [*_modules(Path(folders["stdlib"]), ()), *_modules(Path(folders["purelib"]), PROSE)]
    parts, total = [], 0
    digest = hashlib.sha256(f"docstrings {sys.version}".encode())
    for name, path, length in modules:
        if total + length > SOURCE_BYTES:
            break
        digest.update(f"{name} {length}\n".encode())
        parts.append((str(path), length))
        total += length
    groups = group_units(parts, UNIT_SOURCE_BYTES + 1)
    units = tuple(Unit(group.parts, group.size // 5) for group in groups)
    return Docstrings("docstrings", digest.hexdigest(), units)


def _modules(root: Path, first: tuple[str, ...]) -> list[tuple[str, Path, int]]:
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED]
        for file in files:
            if file.endswith(".py"):
                path = Path(folder, file)
                found.append((path.relative_to(root).as_posix(), path, path.stat().st_size))
    rank = {name: i for i, name in enumerate(first)}
    return sorted(found, key=lambda m: (rank.get(m[0].split("/")[0], len(rank)), m[0]))


@functools.cache  # parsing takes seconds, and training the vocabulary reads all modules twice
def _docstrings(path: str) -> Sequence[str]:
    source = Path(path).read_bytes()
    if b'"""' not in source and b"'''" not in source:
        return ()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's code
            todo = [ast.parse(source)]
    except (SyntaxError, ValueError, RecursionError):
        return ()
    found = []
    while todo:
        body = todo.pop().body
        first = body[0].value if body and isinstance(body[0], ast.Expr) else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            found.append(first.value)
        todo += [node for node in reversed(body) if isinstance(node, DEFINITIONS)]
    return found


class Source(Protocol):
    """A corpus split into units of documents; picklable.

    A unit is small, picklable and the same on every run. Its `size` is in bytes of text, estimated
    for compressed files.

    Attributes:
      fingerprint: hash of the names, sizes and both ends of the files and of the reading options,
        not of the folder or the modification times. It is cheap to compute; the content of units
        is hashed when they are read.
      files: all local files of the corpus.
    """

    name: str
    fingerprint: str
    files: Collection[Path]
    units: Sequence[Any]

    def documents(self, unit: Any, tally: Counter | None = None) -> Iterator[str]:
        """Yields the documents of a unit.

        Args:
          tally: counts "undecodable" byte sequences and the documents "skipped" because of them.
        """


OPENERS = {
    "docstrings": open_docstrings,
    "text": text_files.open_text,
    "parquet": parquet_files.open_parquet,
    "hub": parquet_files.open_hub,
    "tfds": indexed_rows.open_tfds,
    "datasets": indexed_rows.open_datasets,
}
REMOTE = ("hub", "datasets")  # may need the network


def open_source(section: DataSection, spec: str) -> Source:
    """Opens the source `spec`, for example "text:corpus/**/*.txt", with the options of `section`.

    Raises:
      DataError: unknown kind of source, or a source without text.
    """
    kind, _, rest = spec.partition(":")
    if kind not in OPENERS or (kind != "docstrings" and not rest):
        if os.path.exists(spec) or re.search(r"[*?/]|\.\w+$", spec):
            hint = f"Use text:{spec} for text files"
        else:
            kinds = ", ".join(f"{name}:…" for name in OPENERS if name != "docstrings")
            hint = f"Choose one of: docstrings, {kinds}"
        raise DataError(f"Unknown source '{spec}'. {hint}.", value=spec)
    source = OPENERS[kind](rest, section)
    if not source.units:
        raise DataError(f"Source '{spec}' has no text. Check its files.", value=spec)
    return source


def refuse_shared_text(source, validation, *, section: str) -> None:
    """Raises DataError if training and validation data share files, for example by a broad glob.

    Args:
      source: training data with a name and a fingerprint, and optionally `files`.
      validation: validation data with the same attributes.
      section: the config section whose fields name them.
    """
    trained, held = (
        {os.path.realpath(path) for path in getattr(each, "files", ())}
        for each in (source, validation)
    )
    shared = sorted(trained & held)
    if not shared and source.fingerprint != validation.fingerprint:
        return
    what = f"reads {shared[0]}, which is part of" if shared else "has the same text as"
    raise DataError(
        f"{what} the training data config.{section}.source='{source.name}'. Use other files, or "
        f"leave it empty to hold out config.{section}.heldout_fraction of the training data.",
        field=f"config.{section}.validation_source",
        value=validation.name,
    )
