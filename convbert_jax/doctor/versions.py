"""Versions of what is installed, and whether they fit together; read off the packages' own
requirements, so that a jax that cannot be loaded is found too.
"""

import importlib
import importlib.metadata
import pathlib
import platform

from packaging.requirements import Requirement

import convbert_jax
from convbert_jax.doctor.finding import Finding, good, warning, wrong
from convbert_jax.machine.packages import installed, unmet

_REQUIREMENTS = pathlib.Path(convbert_jax.__file__).resolve().parents[1] / "requirements.txt"
# What jax computes with -> the extra of jax that says which version it must have.
LIBRARIES = {
    "jaxlib": "",
    "libtpu": "tpu",
    "jax-cuda12-plugin": "cuda12",
    "jax-cuda13-plugin": "cuda13",
}


def check_versions(*, tpu_here: bool) -> list[Finding]:
    """Python, our requirements, and jax with its libraries.

    Args:
      tpu_here: whether the machine has a TPU; a libtpu that does not fit only warns without one.
    """
    python = platform.python_version()
    findings = [good("Python", f"{python}, convbert_jax {convbert_jax.__version__}")]
    missing = unmet(_requirements(), "")
    if missing:
        text = "; ".join(
            f"{wanted} is asked for, {found} is installed" for wanted, found in missing
        )
        names = " ".join(f"'{wanted}'" for wanted, _ in missing)
        findings.append(wrong("packages", text, f"pip install {names}"))
    else:
        findings.append(good("packages", "all that requirements.txt asks for"))
    return [*findings, *_check_jax(tpu_here)]


def fault_of_jax() -> Finding | None:
    """Why jax cannot be loaded, if it cannot."""
    try:
        importlib.import_module("jax")
    except Exception as error:
        what = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        return wrong(
            "jax",
            f"it cannot be loaded ({what})",
            "pip install -U 'jax[tpu]', 'jax[cuda12]' or jax, for this machine",
        )
    return None


def _check_jax(tpu_here: bool) -> list[Finding]:
    jax = installed("jax")
    if jax is None:
        return []  # said of the packages
    there = {name: installed(name) for name in LIBRARIES}
    findings = []
    for name, extra in LIBRARIES.items():
        if there[name] is None:
            continue
        asked = (text for text in importlib.metadata.requires("jax") or () if _is_of(text, name))
        for wanted, found in unmet(asked, extra):
            text = f"jax {jax} asks for {wanted}, {found} is installed"
            fix = f"pip install -U 'jax{f'[{extra}]' if extra else ''}=={jax}'"
            idle = name == "libtpu" and not tpu_here
            findings.append((warning if idle else wrong)("jax", text, fix))
    if not findings:
        have = [f"{name} {version}" for name, version in there.items() if version]
        findings = [good("jax", f"jax {jax} and {', '.join(have)} fit together")]
    return findings


def _requirements() -> list[str]:
    """Ours, of a checkout or of an installed package."""
    if _REQUIREMENTS.is_file():
        lines = (line.partition("#")[0].strip() for line in _REQUIREMENTS.open(encoding="utf-8"))
        return [line for line in lines if line]
    return importlib.metadata.requires("convbert_jax") or []


def _is_of(requirement: str, name: str) -> bool:
    return Requirement(requirement).name.replace("_", "-").lower() == name
