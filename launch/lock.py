"""The exact versions that the tests pass with, one file for each Python: requirements-3.12.lock.

    python launch/lock.py            says how the installed versions differ from those of the lock
    python launch/lock.py --write    makes the lock of this Python from what is installed

Exit code 1 where they differ. To install them: pip install -r requirements-3.12.lock, or take them
as limits of what is asked for: pip install -c requirements-3.12.lock '.[test]'.
"""

import importlib.metadata
import pathlib
import sys
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
LOCKED_EXTRAS = ("test", "parity")  # the others are of one accelerator, or the user's own tools
_OF_CUDA = ("nvidia-", "cuda-", "triton")  # come along with some builds of PyTorch


def main() -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    file = REPOSITORY / f"requirements-{version}.lock"
    if sys.argv[1:] == ["--write"]:
        file.write_text(describe(version, find_installed()))
        print(f"Wrote {file.name}.")
        return
    if sys.argv[1:]:
        sys.exit(__doc__)
    if not file.is_file():
        sys.exit(f"error: there is no {file.name}; the tests are run with Python 3.11 and 3.12.")
    different = compare(read(file))
    for line in different:
        print(line)
    sys.exit(f"{len(different)} versions are not those of {file.name}." if different else 0)


def read(file: pathlib.Path) -> dict[str, str]:
    """Package -> version."""
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def compare(locked: dict[str, str]) -> list[str]:
    """What is installed in another version, or, but for what only parity tests need, is absent."""
    lines = []
    needed = find_installed(extras=())
    for name, version in locked.items():
        try:
            found = _version_of(name)
        except importlib.metadata.PackageNotFoundError:
            if name in needed:
                lines.append(f"{name}: not installed, {version} in the lock")
            continue
        if found != version:
            lines.append(f"{name}: {found} installed, {version} in the lock")
    return lines


def declared(extras=LOCKED_EXTRAS) -> list[Requirement]:
    """The lines of requirements.txt, and of extras."""
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    lines = [line.partition("#")[0].strip() for line in lines]
    of_extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for extra in extras:
        lines += of_extras["optional-dependencies"][extra]
    return [Requirement(line) for line in lines if line]


def find_installed(extras=LOCKED_EXTRAS) -> dict[str, str]:
    """Package -> installed version, of what is declared and all that it needs in turn."""
    found: dict[str, str] = {}
    waiting = [(requirement, "") for requirement in declared(extras)]
    seen = set()
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        found.setdefault(name, "")
        for asked in ("", *requirement.extras):
            if (name, asked) in seen:
                continue
            seen.add((name, asked))
            try:
                found[name] = _version_of(name)
            except importlib.metadata.PackageNotFoundError:
                continue
            needs = importlib.metadata.requires(name) or ()
            waiting += [(Requirement(line), asked) for line in needs]
    return {name: found[name] for name in sorted(found) if not name.startswith(_OF_CUDA)}


def describe(version: str, packages: dict[str, str]) -> str:
    """The content of a lock."""
    missing = [name for name, found in packages.items() if not found]
    if missing:
        sys.exit(f"error: not installed: {', '.join(missing)}; install '.[test,parity]' first.")
    title = (
        f"# What the tests pass with on Python {version}; made by: python launch/lock.py --write"
    )
    return "\n".join([title, *(f"{name}=={found}" for name, found in packages.items())]) + "\n"


def _version_of(name: str) -> str:
    """Without the label of a build, which no index has: 2.13.0+cpu is 2.13.0."""
    return importlib.metadata.version(name).partition("+")[0]


if __name__ == "__main__":
    main()
