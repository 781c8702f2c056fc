"""Two processes of which the second has something else than the first, as two hosts may: refused in
one sentence on both, before anything is compiled. And one that is stopped while they compare.
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

__all__ = ["text_source"]  # the fixture
PATIENCE = 600  # seconds; half a minute on a machine that is not busy
# The same on all hosts, each of which has its own text and shards under these names.
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


def start_both(hosts, run: pathlib.Path, *of_second: str) -> list[subprocess.Popen]:
    """A process on each host; `of_second` are flags of the second alone."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = (f"--workdir={run}", f"--coordinator=localhost:{port}", "--processes=2")
    return [
        start(hosts[0], *shared, "--process=0"),
        start(hosts[1], *shared, "--process=1", *of_second),
    ]


def both_refused(hosts, run: pathlib.Path, *of_second: str) -> list[str]:
    """What each of them is told."""
    ends = finish(*start_both(hosts, run, *of_second))
    for end in ends:
        refused(end)
        assert end.returncode == 1
        assert "Starting from" not in end.stderr
    assert not list(run.glob("checkpoints/*"))
    return [next(li for li in end.stderr.splitlines() if "error:" in li) for end in ends]


@pytest.fixture(scope="module")
def hosts(text_source, tmp_path_factory):
    """Two of them; a paragraph more lies on the second, and both have prepared theirs."""
    text = pathlib.Path(text_source.partition("text:")[2]).read_text()
    made = [tmp_path_factory.mktemp("host") for _ in range(2)]
    for host, more in zip(made, ("", "\n\nA paragraph that one host alone has."), strict=True):
        (host / "text.txt").write_text(text + more)
    for end in finish(*(start(h, f"--workdir={h / 'run'}", "--mode=prepare") for h in made)):
        assert end.returncode == 0, end.stderr
    return made


@pytest.mark.slow
def test_other_shards(hosts, tmp_path):
    first, second = both_refused(hosts, tmp_path / "run")
    assert first == second
    assert "rocess 1 has data=" in first


@pytest.mark.slow
def test_another_config(hosts, tmp_path):
    first, second = both_refused(hosts, tmp_path / "run", "--config.seed=7")
    assert first == second
    assert "rocess 1 has config.seed=7" in first


@pytest.mark.slow
def test_a_signal_during_the_comparison_is_not_lost(hosts, tmp_path):
    """jax's preemption service once kept it, and the run went on to its end."""
    both = start_both(hosts, tmp_path / "run")
    assert any(" on 2 x cpu" in line for line in both[0].stderr)
    both[0].send_signal(signal.SIGTERM)
    first, second = finish(*both)
    assert first.returncode == 75, first.stderr
    assert second.returncode == 75, second.stderr
    refused(second, "rocess 0 of 2")
