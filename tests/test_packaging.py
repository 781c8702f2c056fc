"""Declared dependencies of the package, and its lock files."""

import ast
import importlib.metadata
import pathlib
import re
import runpy
import subprocess
import sys
import tomllib

import pytest
from packaging.utils import canonicalize_name

import convbert_jax

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
OURS = {"convbert_jax", "configs"}
# Optional imports; a missing package is an error with installation instructions.
OPTIONAL = {
    *("torch", "transformers", "datasets", "optuna", "submitit", "mlflow", "wandb", "apache_beam"),
    *("onnx", "onnxruntime", "usearch", "mteb"),
    "coverage",  # used by tests.mutation
}
LOCK = runpy.run_path(str(REPOSITORY / "launch" / "lock.py"))
LOCKS = sorted(REPOSITORY.glob("requirements-*.lock"))


def _imported(folder: str) -> dict[str, str]:
    """Returns top-level module -> a file that imports it."""
    found = {}
    for path in sorted((REPOSITORY / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module] if isinstance(node, ast.ImportFrom) else []
            found |= {name.partition(".")[0]: path.name for name in names}
    return {n: p for n, p in found.items() if n not in OURS | {*sys.stdlib_module_names}}


def _names(extras=()) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in LOCK["declared"](extras)}


@pytest.mark.parametrize(
    ("folder", "extras"), [("convbert_jax", ("serve",)), ("tests", ("test", "parity"))]
)
def test_every_import_is_declared(folder, extras):
    providers = importlib.metadata.packages_distributions()
    declared = _names(extras)
    made_here = {"tests", "benchmarks", "tensorflow", "tf_values"}  # make_tf_bundle.py, by hand
    for module, file in _imported(folder).items():
        if module in OPTIONAL | made_here:
            continue
        known = {canonicalize_name(name) for name in providers.get(module, ())}
        assert known & declared, f"{file} imports {module}; add its package to requirements.txt"


def test_the_extra_for_tests_is_the_file_for_tests():
    lines = (REPOSITORY / "requirements-test.txt").read_text().splitlines()
    lines = [line.partition("#")[0].strip() for line in lines]
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert settings["optional-dependencies"]["test"] == [line for line in lines if line]


def test_locks_are_of_both_stacks():
    assert [path.name for path in LOCKS] == ["requirements-3.11.lock", "requirements-3.12.lock"]


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_a_lock_has_a_version_for_all_that_is_declared(path):
    locked = LOCK["read"](path)
    environment = {"python_version": path.name.removeprefix("requirements-")[:4]}
    for requirement in LOCK["declared"]():
        if requirement.marker and not requirement.marker.evaluate(environment):
            continue
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} is not {version}"
    assert all("+" not in version for version in locked.values()), "a label of one build"


def test_what_differs_from_a_lock_is_said():
    numpy = importlib.metadata.version("numpy")
    assert LOCK["compare"]({"numpy": numpy, "torch-of-no-index": "1.0"}) == []
    (line,) = LOCK["compare"]({"numpy": "0.1"})
    assert line.startswith("numpy: ")
    assert numpy in line
    assert "0.1" in line


def test_the_version_stands_in_the_changelog():
    changelog = (REPOSITORY / "CHANGELOG.md").read_text()
    assert f"\n## {convbert_jax.__version__} " in changelog


def test_importing_the_package_loads_no_jax():
    code = "import sys, convbert_jax; print(sorted({'jax', 'numpy', 'absl'} & {*sys.modules}))"
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert said.stdout == "[]\n"


@pytest.mark.parametrize(
    "program",
    ["-m convbert_jax.main --help", "-m convbert_jax.serve --workdir=a", "launch/sweep.py"],
)
def test_a_checkout_into_which_nothing_was_installed(program):
    """-S leaves out site-packages."""
    said = subprocess.run(
        [sys.executable, "-S", *program.split()],
        cwd=REPOSITORY,
        env={},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 1
    (line,) = said.stderr.splitlines()
    assert re.match(r"error: the package (absl|tqdm) is not installed in ", line)
    has_environment = (REPOSITORY / ".venv" / "bin" / "activate").exists()
    assert ("bin/activate" if has_environment else "pip install -r requirements.txt") in line
