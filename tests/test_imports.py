"""Import rules: which package may import which, read from the source."""

import ast
import pathlib
import re

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "convbert_jax"
# Packages that all higher layers may import.
BELOW = {
    *("config", "interfaces", "storage", "console", "drawing", "workdir", "machine"),
    *("ops", "data", "models", "training", "objectives", "decoding"),
}
ALLOWED = {
    "config": set(),
    "interfaces": set(),
    "console": set(),
    "interrupts": set(),
    "machine": set(),
    "storage": {"config"},
    "drawing": {"storage"},
    "workdir": {"config", "storage"},
    "config_files": {"config", "storage"},
    "command_line": {"config", "config_files", "interrupts", "storage", "workdir"},
    "ops": {"config", "storage", "machine"},
    "data": {"config", "storage", "interfaces", "console"},
    "models": {"config", "interfaces", "ops"},
    "training": {
        *("config", "storage", "interrupts", "console", "workdir", "interfaces"),
        "machine",
    },
    "objectives": {"config", "interfaces", "ops"},
    "decoding": set(),
    "analysis": BELOW,
    "interop": BELOW,
    "finetuning": {*BELOW, "interrupts"},
    "inference": {*BELOW, "interop", "finetuning"},
    "recipes": {*BELOW, "interrupts", "analysis", "interop", "finetuning", "inference"},
    "vectors": {*BELOW, "inference"},
    "minimal_pairs": {*BELOW, "inference"},
    "serve": {*BELOW, "inference"},
    "doctor": {*BELOW, "interop", "recipes"},
    "sweeps": {
        *(*BELOW, "analysis", "interop", "finetuning", "recipes"),
        *("config_files", "command_line", "main"),
    },
}
# Rules within a package; modules outside its subpackages are unrestricted.
ROOMS = {
    "data": {"readers": set(), "tokenizer": set(), "tasks": {"readers", "tokenizer"}},
}


def _imports(path: pathlib.Path) -> set[tuple[str, ...]]:
    """Returns the package's modules that a file imports, as name parts."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {tuple(n.split(".")[1:]) for n in names if n.startswith("convbert_jax.")}


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


def _wrong_imports(path: pathlib.Path) -> list[str]:
    """Returns violations of the tables in a file, as sentences."""
    package, *folders = path.relative_to(PACKAGE).with_suffix("").parts
    if package not in ALLOWED:
        return [f"{package}: has no row in ALLOWED"]
    imported = _imports(path)
    wrong = {name[0] for name in imported} - ALLOWED[package] - {package}
    rooms = ROOMS.get(package, {})
    if len(folders) > 1 and rooms:
        if folders[0] not in rooms:
            return [f"{package}/{folders[0]}: has no row in ROOMS"]
        others = {name[1] for name in imported if name[0] == package and name[1] in rooms}
        wrong |= {f"{package}.{name}" for name in others - rooms[folders[0]] - {folders[0]}}
    return [f"{path.relative_to(PACKAGE)} imports {name}" for name in sorted(wrong)]


def test_imports_point_the_right_way():
    paths = {*PACKAGE.rglob("*.py")} - {PACKAGE / "main.py", PACKAGE / "__init__.py"}
    assert not [sentence for path in sorted(paths) for sentence in _wrong_imports(path)]
