"""The rule of direction: which package of ours may import which, read off the source."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "convbert_jax"
ALLOWED = {
    "config": set(),
    "command_line": {"config", "files"},
    "files": {"config"},
    "console": set(),
    "ops": {"config"},
    "data": {"config", "files"},
    "models": {"config", "ops"},
    "training": {"config", "files"},
    "objectives": {"config"},
    "analysis": {"config", "files", "ops", "data", "models", "training", "objectives"},
    "interop": {"config", "files", "ops", "data", "models", "training", "objectives"},
    "finetuning": {"config", "files", "ops", "data", "models", "training", "objectives"},
    "recipes": {
        *("config", "files", "ops", "data", "models", "training", "objectives"),
        *("analysis", "interop", "finetuning"),
    },
}


def _imports(path: pathlib.Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("convbert_jax.")}


def _part(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_imports_point_the_right_way(path):
    part = _part(path)
    if part in ("main", "__init__"):
        return
    assert part in ALLOWED, f"{path.name}: add '{part}' to the table"
    wrong = _imports(path) - ALLOWED[part] - {part}
    assert not wrong, f"{path.relative_to(PACKAGE)} imports {sorted(wrong)}"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_files_are_short(path):
    lines = len(path.read_text().splitlines())
    assert lines <= 400, f"{path.name} has {lines} lines"
