"""The wheel and the source distribution: what they contain, and that the wheel works elsewhere."""

import email
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pydoc_data import topics

import pytest

import convbert_jax

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
ADDRESS = "https://github.com/someone/something"
SOURCES = (
    *("pyproject.toml", "setup.py", "MANIFEST.in", "requirements.txt", "README.md", "LICENSE"),
    *("CHANGELOG.md", "CITATION.cff"),
)
BUILD = "import sys; from setuptools import build_meta; print(build_meta.{}(sys.argv[1]))"


def build(kind: str, folder: pathlib.Path, address: str = "") -> pathlib.Path:
    """Builds a "wheel" or "sdist" from a copy of the repository, with the installed setuptools."""
    copy = folder / f"copy-{kind}"
    for name in ("convbert_jax", "configs"):
        unused = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, copy / name, ignore=unused)
    for name in SOURCES:
        shutil.copy(REPOSITORY / name, copy / name)
    for name in ("tests", "benchmarks", "docs", "data", "build"):  # not to be packed
        (copy / name).mkdir()
        (copy / name / "test_it.py").write_text("")
    if address:
        settings = copy / "pyproject.toml"
        text, line = settings.read_text(), f'[project.urls]\nRepository = "{address}"'
        settings.write_text(text.replace("[project.urls]", line))
    command = [sys.executable, "-c", BUILD.format(f"build_{kind}"), str(folder)]
    said = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=True)
    assert "is absent from the `packages`" not in said.stderr
    return folder / said.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"), ADDRESS)


def files(folder: str, prefix: str = "") -> set[str]:
    found = (path for path in (REPOSITORY / folder).rglob("*") if path.is_file())
    return {
        prefix + path.relative_to(REPOSITORY).as_posix()
        for path in found
        if "__pycache__" not in path.parts
    }


def test_the_wheel_has_the_package_and_the_configs_alone(wheel):
    version = convbert_jax.__version__
    assert wheel.name == f"convbert_jax-{version}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    about = {name for name in names if name.startswith(f"convbert_jax-{version}.dist-info/")}
    assert names - about == files("convbert_jax") | files("configs", "convbert_jax/")
    assert f"convbert_jax-{version}.dist-info/licenses/LICENSE" in about
    assert "convbert_jax/recipes/reports/templates/pretraining.html" in names


def test_the_metadata_of_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Version"] == convbert_jax.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Project-URL"] == f"Repository, {ADDRESS}"
    assert metadata["Description-Content-Type"] == "text/markdown"
    required = metadata.get_all("Requires-Dist")
    assert any(line.startswith("jax<") for line in required)
    text = metadata.get_payload()
    assert "](docs/" not in text  # a package index has no such files
    assert f"]({ADDRESS}/blob/main/docs/" in text
    assert f"]({ADDRESS}/raw/main/benchmarks/figures/" in text


def test_the_source_distribution_builds_the_same_wheel(tmp_path, wheel):
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path, filter="data")
    assert {name for name in names if name.startswith(("tests", "docs", "data"))} == set()
    assert {*SOURCES, "PKG-INFO"} <= names
    (folder,) = tmp_path.glob("convbert_jax-*/")
    command = [sys.executable, "-c", BUILD.format("build_wheel"), str(tmp_path)]
    subprocess.run(command, cwd=folder, capture_output=True, check=True)
    (again,) = tmp_path.glob("*.whl")
    one, other = (set(zipfile.ZipFile(file).namelist()) for file in (wheel, again))
    assert one == other


def run(wheel, folder, *arguments) -> str:
    """Runs the program of the unpacked wheel in an empty folder."""
    site = folder / "site"
    zipfile.ZipFile(wheel).extractall(site)
    (folder / "empty").mkdir()
    said = subprocess.run(
        [sys.executable, "-m", "convbert_jax.main", *arguments],
        cwd=folder / "empty",
        env={**os.environ, "PYTHONPATH": str(site), "XLA_FLAGS": ""},  # one device
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    return said.stdout


def test_the_wheel_finds_its_configs(wheel, tmp_path):
    said = run(wheel, tmp_path, "--config=configs/tiny.py:paper", "--help")
    assert "--config.name=tiny" in said


@pytest.mark.slow
def test_the_wheel_trains(wheel, tmp_path):
    small = (
        *("model.layers=1", "model.hidden_size=32", "model.embedding_size=32", "model.heads=2"),
        *("model.ffn_size=64", "train.steps=4", "train.batch_size=8", "train.eval_rows=8"),
        *("tokenizer.vocab_size=300", "tokenizer.max_unknown_rate=0.5", "data.length=32"),
        *("data.heldout_fraction=0.1", "data.workers=1", f"data.source=text:{tmp_path}/*.txt"),
    )
    (tmp_path / "a.txt").write_text("\n\n".join(topics.topics.values())[:100_000])
    fields = [f"--config.{field}" for field in small]
    said = run(wheel, tmp_path, "--config=configs/tiny.py", *fields)
    assert "tiny, step 4, on held-out text:" in said
    assert (tmp_path / "empty" / "runs" / "tiny" / "report.html").is_file()
