"""Versions of installed packages, and what they ask of each other; needs none of them, nor jax."""

import importlib.metadata
from collections.abc import Iterable

from packaging.requirements import Requirement


def installed(name: str) -> str | None:
    """The version of a package, None where it is absent."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def unmet(requirements: Iterable[str], extra: str) -> list[tuple[str, str]]:
    """(what is asked for, version that is installed or "none") of those that do not hold.

    Args:
      requirements: as a package declares them; those of other extras and Pythons do not count.
    """
    missing = []
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        found = installed(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            missing.append((f"{requirement.name}{requirement.specifier}", found or "none"))
    return missing
