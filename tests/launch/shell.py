"""Starts the scripts of launch/ with a stub in place of Python."""

import os
import pathlib
import subprocess
import time

from tests.conftest import REPOSITORY

LAUNCH = REPOSITORY / "launch"


def without_environment() -> dict[str, str]:
    """Returns this process's environment variables without an active virtual environment."""
    return {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "CONDA_PREFIX")}


def write_program(file: pathlib.Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)


def wait_for(condition, process: subprocess.Popen, seconds: float = 60) -> None:
    """Polls until `condition()` is true; fails if the process exits before."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        if time.monotonic() > end:
            process.terminate()
            raise AssertionError(process.communicate()[0])
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
