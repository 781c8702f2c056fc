"""Compares the installed versions with requirements-3.11.lock or -3.12.lock, or writes that file.

    python launch/lock.py            prints the differences; exit code 1 if there are any
    python launch/lock.py --write    writes the file for this version of Python

The tests pass with the versions of these files: pip install -r requirements-3.12.lock, or as
constraints, pip install -c requirements-3.12.lock '.[test]'.
"""

import importlib.metadata
import pathlib
import sys
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
LOCKED_EXTRAS = ("test", "parity")  # the others belong to an accelerator or are optional tools
_CUDA_PACKAGES = ("nvidia-", "cuda-", "triton")  # dependencies of some builds of PyTorch


def read(file: pathlib.Path) -> dict[str, str]:
    """Returns {package: version}."""
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def compare(locked: dict[str, str]) -> list[str]:
    """Returns a line for each package with another version and each missing requirement."""
    lines = []
    required = find_installed(extras=())
    for name, version in locked.items():
        found = _installed_version(name)
        if found != version and (found or name in required):
            lines.append(f"{name}: installed {found or 'not at all'}, locked {version}")
    return lines


def declared(extras=LOCKED_EXTRAS) -> list[Requirement]:
    """Returns the requirements in requirements.txt and in extras of pyproject.toml."""
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    lines = [line.partition("#")[0].strip() for line in lines]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return [Requirement(line) for line in lines if line]


def find_installed(extras=LOCKED_EXTRAS) -> dict[str, str]:
    """Returns {package: version or ""} for the declared requirements and all they depend on."""
    found: dict[str, str] = {}
    waiting = [(requirement, "") for requirement in declared(extras)]
    seen = set()
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        found[name] = _installed_version(name)
        for wanted in {"", *requirement.extras} if found[name] else ():
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                lines = importlib.metadata.requires(name) or ()
                waiting += [(Requirement(line), wanted) for line in lines]
    return {name: found[name] for name in sorted(found) if not name.startswith(_CUDA_PACKAGES)}


def _installed_version(name: str) -> str:
    """Returns "" if not installed. No index has the label of a build: 2.13.0+cpu is 2.13.0."""
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""


def main(arguments: list[str]) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    file = REPOSITORY / f"requirements-{version}.lock"
    if arguments == ["--write"]:
        packages = find_installed()
        if missing := [name for name, found in packages.items() if not found]:
            sys.exit(f"error: Not installed: {', '.join(missing)}. Install '.[test,parity]' first.")
        title = f"# The tests pass with these on Python {version}. python launch/lock.py --write"
        lines = [f"{name}=={found}" for name, found in packages.items()]
        file.write_text("\n".join([title, *lines]) + "\n")
        print(f"Wrote {file.name}.")
    elif arguments:
        sys.exit(__doc__)
    elif not file.is_file():
        sys.exit(f"error: {file.name} does not exist. Use Python 3.11 or 3.12.")
    elif different := compare(read(file)):
        sys.exit("\n".join(different))


if __name__ == "__main__":
    main(sys.argv[1:])
