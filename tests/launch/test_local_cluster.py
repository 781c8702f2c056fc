"""launch/local_cluster.sh: with a stub in place of Python, and with the program itself."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests import compiling
from tests.conftest import REPOSITORY
from tests.end_to_end.test_command_line import SMALL, TINY, text_source
from tests.launch.hearing import hear
from tests.launch.shell import is_running, wait_for, write_program

__all__ = ["text_source"]  # the fixture
PATIENCE = 900  # seconds; a minute on an idle machine
# Precedes the real Python in PATH; reports the requirements of launch/environment.sh as installed.
PYTHON = """#!/bin/bash
case "$*" in
  *sys.prefix*) echo "{environment}";;
  *convbert_jax.main*) {program} ;;
  *) exec "{python}" "$@";;
esac
"""
REAL = 'exec "{python}" "$@"'
# Records its arguments and the signals that it receives, and runs the line of its process.
STUB = """
  index="${{@: -1}}"; index=${{index##*=}}
  trap 'echo "got INT"; exit 130' INT
  trap 'echo "got TERM"; exit 75' TERM
  echo "$*" >"{environment}/arguments-$index"
  echo "up $index"
  case "$index" in {lines} esac
"""
WAIT = "echo $$ >{environment}/pid-$index; for ((i = 0; i < 600; i++)); do sleep 0.1; done"


def make_python(folder: pathlib.Path, program: str) -> dict[str, str]:
    """Returns environment variables with which `python` is a script that runs `program`."""
    environment = folder / "environment"
    names = {"environment": environment, "python": sys.executable}
    text = PYTHON.format(**names, program=program.format(**names))
    write_program(environment / "bin" / "python", text)
    lists = b"".join(p.read_bytes() for p in sorted(REPOSITORY.glob("requirements*.txt")))
    total = subprocess.run(["cksum"], input=lists, capture_output=True, check=True)
    (environment / ".convbert_jax_requirements").write_text(total.stdout.decode().split()[0])
    return {
        **os.environ,
        "VIRTUAL_ENV": str(environment),
        "PATH": f"{environment}/bin:{os.environ['PATH']}",
        "LOCAL_CLUSTER_LOGS": str(folder / "logs"),
        "XLA_FLAGS": compiling.CHEAPLY,
    }


def stubs(folder: pathlib.Path, *lines: str) -> dict[str, str]:
    """Runs the shell line `lines[i]` as process i."""
    wait = WAIT.format(environment=folder / "environment")
    cases = "".join(f"{i}) {line.replace('WAIT', wait)};; " for i, line in enumerate(lines))
    return make_python(folder, STUB.replace("{lines}", cases.replace("{", "{{").replace("}", "}}")))


def start(environment, *arguments) -> subprocess.Popen:
    return subprocess.Popen(
        ["bash", "launch/local_cluster.sh", *map(str, arguments)],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=hear,
    )


def finish(process) -> tuple[int, str]:
    text, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, text


def start_waiting(folder) -> tuple[subprocess.Popen, list[int]]:
    """Two processes that wait for a signal, and their process ids."""
    process = start(stubs(folder, "WAIT", "WAIT"), 2)
    files = [folder / "environment" / f"pid-{i}" for i in range(2)]
    wait_for(lambda: all(f.exists() and f.read_text().strip() for f in files), process)
    return process, [int(f.read_text()) for f in files]


def test_an_invalid_number_of_processes_is_refused():
    for count in ("", "0", "two", "100", "--config=configs/tiny.py"):
        command = ["bash", "launch/local_cluster.sh", count]
        result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        assert result.returncode == 2
        (line,) = result.stderr.splitlines()
        assert f"'{count}'" in line


def test_one_process_prepares_then_all_get_the_arguments_and_one_port(tmp_path):
    environment = stubs(tmp_path, "exit 0", "exit 0", "exit 0")
    code, text = finish(start(environment, 3, "--config=configs/tiny.py", "--workdir=a b"))
    assert code == 0, text
    assert "up 0" in text
    assert "up 1" not in text
    assert (tmp_path / "logs" / "process-1.log").read_text() == "up 1\n"
    given = [(tmp_path / "environment" / f"arguments-{i}").read_text() for i in range(3)]
    assert len({line.rpartition(" ")[0] for line in given}) == 1
    assert "--config=configs/tiny.py --workdir=a b --coordinator=localhost:" in given[0]
    assert [line.rpartition(" ")[2] for line in given] == [f"--process={i}\n" for i in range(3)]
    prepared = (tmp_path / "environment" / "arguments-prepare").read_text()
    assert prepared == f"{given[0].partition(' --coordinator')[0]} --mode=prepare\n"


@pytest.mark.parametrize(("mode", "prepares"), [("train", 1), ("eval", 0)])
def test_only_training_prepares(tmp_path, mode, prepares):
    code, text = finish(start(stubs(tmp_path, "exit 0"), 1, f"--mode={mode}"))
    assert (code, text.count("up prepare")) == (0, prepares)


def test_an_error_while_preparing_ends_it(tmp_path):
    code, text = finish(start(make_python(tmp_path, "echo up; exit 7"), 2))
    assert (code, text.count("up")) == (7, 1)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("exit 75", "kill -KILL $$"), 75),  # for example, out of memory
        (("exit 2", "exit 75"), 2),
        (("exit 75", "exit 75", "echo its reason; exit 3", "exit 1"), 3),
    ],
)
def test_the_exit_code_is_that_of_the_first_error_else_75(tmp_path, lines, expected):
    code, text = finish(start(stubs(tmp_path, *lines), len(lines)))
    assert code == expected, text
    assert "rocess 1 exited" in text
    assert ("its reason" in text) == (expected == 3)


@pytest.mark.parametrize(
    ("number", "name", "expected"),
    [(signal.SIGINT, "INT", 130), (signal.SIGTERM, "TERM", 75), (signal.SIGHUP, "TERM", 75)],
)
def test_a_signal_reaches_every_process_once(tmp_path, number, name, expected):
    process, pids = start_waiting(tmp_path)
    process.send_signal(number)
    code, text = finish(process)
    assert code == expected, text
    for output in (text, (tmp_path / "logs" / "process-1.log").read_text()):
        assert output.count(f"got {name}") == 1
    assert not any(map(is_running, pids))


def test_a_script_that_is_killed_leaves_no_orphan(tmp_path):
    process, pids = start_waiting(tmp_path)
    process.kill()
    finish(process)
    limit = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < limit
        time.sleep(0.05)


@pytest.mark.slow
def test_two_processes_train_and_a_killed_one_ends_both(tmp_path, text_source):
    """Real processes: both end with 75 within a minute; the same command continues and finishes."""
    environment = make_python(tmp_path, REAL)
    flags = (TINY, *SMALL, text_source, f"--workdir={tmp_path}/run")
    process = start(environment, 2, *flags, "--config.train.steps=100000")
    checkpoints = tmp_path / "run" / "checkpoints"
    wait_for(lambda: any(p.name.isdecimal() for p in checkpoints.glob("*")), process, PATIENCE)
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    lines = {int(pid): pathlib.Path(f"/proc/{pid}/cmdline").read_text() for pid in children.split()}
    programs = {pid: line for pid, line in lines.items() if "convbert_jax.main" in line}
    assert len(programs) == 2, lines
    (second,) = (pid for pid, line in programs.items() if "--process=1" in line)
    began = time.monotonic()
    os.kill(second, signal.SIGKILL)
    code, text = finish(process)
    assert code == 75, text
    assert time.monotonic() - began < 60
    assert "rocess 1 of 2" in text
    assert not any(map(is_running, programs))
    step = max(int(p.name) for p in checkpoints.glob("*") if p.name.isdecimal())
    code, text = finish(start(environment, 2, *flags, f"--config.train.steps={step + 4}"))
    assert code == 0, text
    assert (tmp_path / "logs" / "process-1.log").stat().st_size > 0
    assert (checkpoints / str(step + 4)).exists()
