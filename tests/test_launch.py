"""The launch scripts: what they say of a Python that cannot be used."""

import os
import pathlib
import subprocess

import pytest

ENVIRONMENT = pathlib.Path(__file__).resolve().parents[1] / "launch" / "environment.sh"
SHIM = """#!/bin/sh
echo "pyenv: python3.12: command not found" >&2
echo "The python3.12 command exists in these Python versions: 3.12.1" >&2
exit 127
"""
OLD = """#!/bin/sh
case "$2" in *print*) echo 3.9;; *) exit 1;; esac
"""


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (SHIM, "does not run (pyenv: python3.12: command not found The python3.12 command exists"),
        (OLD, "is Python 3.9, not 3.11 or newer"),
        (None, "No such file or directory"),
    ],
    ids=["pyenv", "old", "absent"],
)
def test_a_python_that_cannot_be_used(tmp_path, script, says):
    python = tmp_path / "python3.12"
    if script:
        python.write_text(script)
        python.chmod(0o755)
    (tmp_path / "requirements.txt").write_text("")
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    result = subprocess.run(
        ["bash", "-c", f". {ENVIRONMENT}"],
        cwd=tmp_path,
        env={**environment, "PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {python} ")
    assert says in line
    assert not (tmp_path / ".venv").exists()
