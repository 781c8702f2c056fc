"""The rule of direction: which package of ours may import which, read off the source."""

import ast
import pathlib
import re

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "convbert_jax"
# The first rows: what everything above them may use.
BELOW = {
    *("config", "files", "drawing", "html_page", "workdir", "interfaces", "ops", "machine"),
    *("data", "models", "training", "objectives", "decoding"),
}
ALLOWED = {
    "config": set(),
    "interfaces": set(),
    "config_files": {"config", "files"},
    "command_line": {"config", "config_files", "files", "workdir"},
    "files": {"config"},
    "workdir": {"config", "files", "ownership"},
    "ownership": {"config"},
    "absent": set(),
    "console": set(),
    "interrupts": set(),
    "ending": set(),
    "machine": set(),
    "drawing": {"files"},
    "html_page": {"config"},
    "ops": {"config", "machine"},
    "data": {"config", "files", "interfaces"},
    "models": {"config", "interfaces", "ops"},
    "training": {*("config", "files", "interrupts", "ending", "workdir", "interfaces", "machine")},
    "objectives": {"config", "interfaces", "ops"},
    "decoding": set(),
    "analysis": BELOW,
    "interop": BELOW,
    "finetuning": {*BELOW, "interrupts"},
    "inference": {*BELOW, "interop", "finetuning"},
    "recipes": {*BELOW, "interrupts", "analysis", "interop", "finetuning", "inference"},
    "demo": {*BELOW, "absent", "console", "inference"},
    "doctor": {*BELOW, "interop", "recipes"},
    "sweeps": {
        *(*BELOW, "analysis", "interop", "finetuning", "recipes"),
        *("config_files", "command_line", "main"),
    },
}
# The same between the rooms of a package; what stands outside of them is free.
ROOMS = {
    "data": {
        "tables": set(),
        "sources": {"tables"},
        "tokenizer": set(),
        "units": set(),
        "corpus": {"sources", "tokenizer", "units"},
        "parallel": {"tables", "sources", "tokenizer", "units", "corpus"},
        "tasks": {"tables", "sources", "tokenizer"},
        "inputs": {"tables", "tasks"},
    },
    "finetuning": {
        "scores": set(),
        "predictions": {"scores"},
        "tasks": {"scores", "predictions"},
    },
    "training": {"checkpoints": {"environment"}, "environment": set(), "reports": set()},
    "interop": {
        "huggingface": set(),
        "tensorflow1": set(),
        "pytorch": set(),
        "fairseq": {"pytorch"},
        "mesh_tensorflow": {"tensorflow1"},
        "runs": {"tensorflow1", "fairseq", "mesh_tensorflow"},
    },
    "ops": {
        "mesh": set(),
        "xla": {"mesh"},
        "tpu": {"xla"},
        "gpu": set(),
        "attention": {"mesh", "tpu"},
    },
}
MOST_FILES = 12


def _imports(path: pathlib.Path) -> set[tuple[str, ...]]:
    """Modules of ours that a file imports, as the parts of their names."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {tuple(n.split(".")[1:]) for n in names if n.startswith("convbert_jax.")}


def _part(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_the_page_of_the_architecture_says_the_same():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", page, flags=re.MULTILINE)
    said = {name: set(re.findall(r"`(\w+)`", may)) for name, may in rows}
    for name, may in rows:
        if may.startswith("the lower rows"):
            said[name] |= BELOW
    assert said == ALLOWED
    there = {path.stem for path in PACKAGE.glob("[a-z]*") if path.suffix in ("", ".py")}
    assert there - {"main"} == set(ALLOWED)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_imports_point_the_right_way(path):
    part = _part(path)
    if part in ("main", "__init__"):
        return
    assert part in ALLOWED, f"{path.name}: add '{part}' to the table"
    wrong = {name[0] for name in _imports(path)} - ALLOWED[part] - {part}
    assert not wrong, f"{path.relative_to(PACKAGE)} imports {sorted(wrong)}"
    rooms = ROOMS.get(part, {})
    room = path.relative_to(PACKAGE).parts[1] if len(path.relative_to(PACKAGE).parts) > 2 else ""
    if room:
        assert part not in ROOMS or room in rooms, f"{path}: add the room '{room}' to the table"
        others = {name[1] for name in _imports(path) if name[0] == part and name[1] in rooms}
        wrong = others - rooms.get(room, others) - {room}
        assert not wrong, f"{path.relative_to(PACKAGE)} imports from {sorted(wrong)}"


@pytest.mark.parametrize("folder", sorted({p.parent for p in PACKAGE.rglob("*.py")}))
def test_folders_can_be_taken_in_at_a_glance(folder):
    files = sorted(path.name for path in folder.glob("*.py"))
    assert len(files) <= MOST_FILES, f"{folder.relative_to(PACKAGE)} has {len(files)} files"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_files_are_short(path):
    lines = len(path.read_text().splitlines())
    assert lines <= 400, f"{path.name} has {lines} lines"
