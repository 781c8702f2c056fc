"""Checks that the installed versions are compatible, according to package metadata.

Reading metadata instead of importing packages also finds a jax that cannot be imported.
"""

import importlib
import importlib.metadata
import pathlib
import platform

from packaging.requirements import Requirement

import convbert_jax
from convbert_jax.doctor.finding import Finding, good, warning, wrong
from convbert_jax.machine import installed, unmet

_REQUIREMENTS = pathlib.Path(convbert_jax.__file__).resolve().parents[1] / "requirements.txt"
# Libraries of jax -> extra of jax that declares the required version.
LIBRARIES = {
    "jaxlib": "",
    "libtpu": "tpu",
    "jax-cuda12-plugin": "cuda12",
    "jax-cuda13-plugin": "cuda13",
}


def check_versions(*, tpu_here: bool) -> list[Finding]:
    """Checks Python, the requirements of this package, and jax with its libraries.

    Args:
      tpu_here: whether the machine has a TPU; if not, an incompatible libtpu is only a warning.
    """
    python = platform.python_version()
    findings = [good("Python", f"{python}, convbert_jax {convbert_jax.__version__}")]
    missing = unmet(_requirements(), "")
    if missing:
        text = "; ".join(f"{wanted} is required, {found} is installed" for wanted, found in missing)
        names = " ".join(f"'{wanted}'" for wanted, _ in missing)
        findings.append(wrong("packages", text, f"pip install {names}"))
    else:
        findings.append(good("packages", "all requirements of requirements.txt are met"))
    return [*findings, *_check_jax(tpu_here)]


def fault_of_jax() -> Finding | None:
    """Imports jax; returns a finding if this fails."""
    try:
        importlib.import_module("jax")
    except Exception as error:
        what = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        return wrong(
            "jax",
            f"cannot import jax ({what})",
            "pip install -U 'jax[tpu]', 'jax[cuda12]' or jax, depending on the machine",
        )
    return None


def _check_jax(tpu_here: bool) -> list[Finding]:
    jax = installed("jax")
    if jax is None:
        return []  # reported by the finding on packages
    there = {name: installed(name) for name in LIBRARIES}
    findings = []
    for name, extra in LIBRARIES.items():
        if there[name] is None:
            continue
        asked = (text for text in importlib.metadata.requires("jax") or () if _is_of(text, name))
        for wanted, found in unmet(asked, extra):
            text = f"jax {jax} requires {wanted}, {found} is installed"
            fix = f"pip install -U 'jax{f'[{extra}]' if extra else ''}=={jax}'"
            idle = name == "libtpu" and not tpu_here
            findings.append((warning if idle else wrong)("jax", text, fix))
    if not findings:
        have = [f"{name} {version}" for name, version in there.items() if version]
        findings = [good("jax", f"jax {jax} and {', '.join(have)} are compatible")]
    return findings


def _requirements() -> list[str]:
    """Returns the requirements of this package, from a checkout or an installed package."""
    if _REQUIREMENTS.is_file():
        lines = (line.partition("#")[0].strip() for line in _REQUIREMENTS.open(encoding="utf-8"))
        return [line for line in lines if line]
    return importlib.metadata.requires("convbert_jax") or []


def _is_of(requirement: str, name: str) -> bool:
    return Requirement(requirement).name.replace("_", "-").lower() == name
