"""Versions and requirements of installed packages, read without importing them."""

import importlib.metadata
from collections.abc import Iterable

from packaging.requirements import Requirement


def installed(name: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def unmet(requirements: Iterable[str], extra: str) -> list[tuple[str, str]]:
    """Returns (requirement, installed version or "none") of each requirement that is not met.

    Args:
      requirements: requirements in the form of package metadata.
      extra: extra whose requirements are included; markers that do not apply are ignored.
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
