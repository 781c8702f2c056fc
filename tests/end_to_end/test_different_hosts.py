"""Processes with different data are refused before compilation.

A signal during the comparison is not lost.
"""

import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest

from tests import compiling
from tests.end_to_end.test_command_line import REPOSITORY, SMALL, TINY, refused, text_source

__all__ = ["text_source"]  # fixture
PATIENCE = 600  # seconds; about 30 on an idle machine
# The same on all hosts; text and shards under these names differ.
OF_HOST = ("--config.data.source=text:text.txt", "--config.data.directory=data")


def start(host: pathlib.Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "convbert_jax.main", TINY, *SMALL, *OF_HOST, *arguments],
        cwd=host,
        env=os.environ
        | {"XLA_FLAGS": compiling.CHEAPLY, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*processes: subprocess.Popen) -> list[subprocess.CompletedProcess]:
    ends = [process.communicate(timeout=PATIENCE) for process in processes]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *end)
        for process, end in zip(processes, ends, strict=True)
    ]


def start_both(hosts, run: pathlib.Path) -> list[subprocess.Popen]:
    """Start a process on each host."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = (f"--workdir={run}", f"--coordinator=localhost:{port}", "--processes=2")
    return [start(host, *shared, f"--process={index}") for index, host in enumerate(hosts)]


@pytest.fixture(scope="module")
def hosts(text_source, tmp_path_factory):
    """Two hosts with prepared data; the second has one more paragraph."""
    text = pathlib.Path(text_source.partition("text:")[2]).read_text()
    made = [tmp_path_factory.mktemp("host") for _ in range(2)]
    for host, more in zip(made, ("", "\n\nA paragraph that one host alone has."), strict=True):
        (host / "text.txt").write_text(text + more)
    for end in finish(*(start(h, f"--workdir={h / 'run'}", "--mode=prepare") for h in made)):
        assert end.returncode == 0, end.stderr
    return made


@pytest.mark.slow
def test_other_shards_are_refused_on_both(hosts, tmp_path):
    errors = set()
    for end in finish(*start_both(hosts, tmp_path / "run")):
        refused(end, "rocess 1 has data=")
        assert end.returncode == 1
        errors |= {line for line in end.stderr.splitlines() if line.startswith("error:")}
    assert len(errors) == 1
    assert not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.slow
def test_a_signal_during_the_comparison_is_not_lost(hosts, tmp_path):
    """Regression: jax's preemption service swallowed the signal and the run continued."""
    both = start_both(hosts, tmp_path / "run")
    assert any(" on 2 x cpu" in line for line in both[0].stderr)
    both[0].send_signal(signal.SIGTERM)
    first, second = finish(*both)
    assert first.returncode == 75, first.stderr
    assert second.returncode == 75, second.stderr
    refused(second, "rocess 0 of 2")
