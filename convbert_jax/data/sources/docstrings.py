"""Built-in corpus: docstrings of the standard library and the installed packages."""

import ast
import dataclasses
import hashlib
import os
import re
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from convbert_jax.config import DataSection
from convbert_jax.data.sources.documents import clean

SOURCE_BYTES = 24_000_000  # of Python source; about a fifth of it is docstrings
UNIT_SOURCE_BYTES = 6_000_000
SHORTEST = 80  # characters; shorter docstrings are one-liners
# Packages whose docstrings are mostly prose come first, then the others by name.
PROSE = ("numpy", "scipy", "matplotlib", "jax", "flax", "optax")
SKIPPED = {"__pycache__", "site-packages", "test", "tests", "idlelib", "lib2to3", "_vendor"}
DOCTEST = re.compile(r"^>>>.*(\n.+)*", re.MULTILINE)  # from the prompt to a blank line
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclasses.dataclass(frozen=True)
class Modules:
    paths: tuple[str, ...]
    size: int  # bytes of text, estimated


@dataclasses.dataclass(frozen=True)
class Docstrings:
    name: str
    fingerprint: str
    units: tuple[Modules, ...]

    @property
    def files(self) -> set[Path]:
        """All files of the corpus."""
        return {path for unit in self.units for path in self.files_of(unit)}

    def files_of(self, unit: Modules) -> set[Path]:
        """Returns the files of one unit."""
        return set(map(Path, unit.paths))

    def documents(self, unit: Modules, tally: Counter | None = None) -> Iterator[str]:
        """Yields docstrings without doctests and without duplicates within the unit."""
        seen = set()
        for path in unit.paths:
            for text in _docstrings(Path(path).read_bytes()):
                text = DOCTEST.sub("", "\n".join(map(str.strip, text.split("\n"))))
                if len(text.strip()) >= SHORTEST and text not in seen:
                    seen.add(text)
                    yield from clean(text)


def open_docstrings(rest: str, section: DataSection) -> Docstrings:
    """Opens modules in a fixed order up to `SOURCE_BYTES`; they are parsed, never imported."""
    del rest, section
    folders = sysconfig.get_paths()
    modules = [*_modules(Path(folders["stdlib"]), ()), *_modules(Path(folders["purelib"]), PROSE)]
    units, group, size, total = [], [], 0, 0
    digest = hashlib.sha256(f"docstrings {sys.version}".encode())
    for name, path, length in modules:
        if total + length > SOURCE_BYTES:
            break
        digest.update(f"{name} {length}\n".encode())
        group.append(str(path))
        size, total = size + length, total + length
        if size > UNIT_SOURCE_BYTES:
            units.append(Modules(tuple(group), size // 5))
            group, size = [], 0
    if group:
        units.append(Modules(tuple(group), size // 5))
    return Docstrings("docstrings", digest.hexdigest(), tuple(units))


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


def _docstrings(source: bytes) -> Iterator[str]:
    if b'"""' not in source and b"'''" not in source:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's code
            todo = [ast.parse(source)]
    except (SyntaxError, ValueError, RecursionError):
        return
    while todo:
        body = todo.pop().body
        first = body[0].value if body and isinstance(body[0], ast.Expr) else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value
        todo += [node for node in reversed(body) if isinstance(node, DEFINITIONS)]
