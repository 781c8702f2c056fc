"""launch/local_cluster.sh: with a Python that plays the program, and with the program itself."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests import compiling
from tests.end_to_end.test_command_line import REPOSITORY, SMALL, TINY, text_source
from tests.launch.hearing import hear

__all__ = ["text_source"]  # the fixture
PATIENCE = 900  # seconds; a minute on a machine that is not busy
# Stands in front of the real Python: launch/environment.sh finds its requirements installed.
PYTHON = """#!/bin/bash
case "$*" in
  *sys.prefix*) echo "{environment}";;
  *convbert_jax.main*) {program} ;;
  *) exec "{python}" "$@";;
esac
"""
REAL = 'exec "{python}" "$@"'
# Does what `does` says for its number, and notes the signals that it gets.
PLAYED = """
  index="${{@: -1}}"; index=${{index##*=}}
  trap 'echo "got INT"; exit 130' INT
  trap 'echo "got TERM"; exit 75' TERM
  echo "$*" >"{environment}/arguments-$index"
  echo "up $index"
  case "$index" in {does} esac
"""
WAIT = "echo $$ >{environment}/pid-$index; for ((i = 0; i < 600; i++)); do sleep 0.1; done"


def make_python(folder: pathlib.Path, program: str) -> dict[str, str]:
    """The environment in which `python` is one of ours."""
    environment = folder / "environment"
    (environment / "bin").mkdir(parents=True)
    python = environment / "bin" / "python"
    names = {"environment": environment, "python": sys.executable}
    python.write_text(PYTHON.format(**names, program=program.format(**names)))
    python.chmod(0o755)
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


def play(folder: pathlib.Path, *does: str) -> dict[str, str]:
    """Process i does `does[i]`, a line of shell."""
    wait = WAIT.format(environment=folder / "environment")
    lines = "".join(f"{i}) {line.replace('WAIT', wait)};; " for i, line in enumerate(does))
    program = PLAYED.replace("{does}", lines.replace("{", "{{").replace("}", "}}"))
    return make_python(folder, program)


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


def wait_for(what, process) -> None:
    """Until `what()` is true."""
    limit = time.monotonic() + PATIENCE
    while not what():
        assert process.poll() is None, process.communicate()[0]
        if time.monotonic() > limit:
            process.terminate()
            raise AssertionError(process.communicate()[0])
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("count", ["", "0", "two", "100", "--config=configs/tiny.py"])
def test_a_count_that_is_none(count):
    result = subprocess.run(
        ["bash", "launch/local_cluster.sh", count], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert f"error: '{count}' is not a number of processes" in line


def test_all_processes_get_the_arguments_and_one_port(tmp_path):
    environment = play(tmp_path, "exit 0", "exit 0", "exit 0")
    code, text = finish(start(environment, 3, "--config=configs/tiny.py", "--workdir=a b"))
    assert code == 0, text
    assert "up 0" in text
    assert "up 1" not in text
    assert (tmp_path / "logs" / "process-1.log").read_text() == "up 1\n"
    said = [(tmp_path / "environment" / f"arguments-{i}").read_text() for i in range(3)]
    assert len({line.rpartition(" ")[0] for line in said}) == 1
    assert "--config=configs/tiny.py --workdir=a b --coordinator=localhost:" in said[0]
    assert [line.rpartition(" ")[2] for line in said] == [f"--process={i}\n" for i in range(3)]
    prepared = (tmp_path / "environment" / "arguments-prepare").read_text()
    assert prepared == f"{said[0].partition(' --coordinator')[0]} --mode=prepare\n"


@pytest.mark.parametrize(
    ("flags", "prepares"), [((), 1), (("--mode=train",), 1), (("--mode=eval",), 0)]
)
def test_one_prepares_before_all_begin_and_its_error_ends_it(tmp_path, flags, prepares):
    environment = play(tmp_path, "exit 0", "exit 0", "exit 0")
    code, text = finish(start(environment, 2, "--config=configs/tiny.py", *flags))
    assert code == 0, text
    assert text.count("up prepare") == prepares
    (tmp_path / "failing").mkdir()
    environment = make_python(tmp_path / "failing", "echo up; exit 7")
    code, text = finish(start(environment, 2, "--config=configs/tiny.py"))
    assert (code, text.count("up")) == (7, 1)
    assert "Starting" not in text


@pytest.mark.parametrize(
    ("does", "expected"),
    [
        (("exit 75", "exit 75"), 75),
        (("exit 75", "kill -KILL $$"), 75),  # out of memory, for one
        (("exit 75", "echo 'error: its own reason'; exit 1"), 1),
        (("exit 2", "exit 75"), 2),
        (("exit 75", "exit 75", "exit 1", "exit 75"), 1),
    ],
)
def test_the_exit_code_is_that_of_the_run(tmp_path, does, expected):
    code, text = finish(start(play(tmp_path, *does), len(does)))
    assert code == expected, text
    assert "process 1 ended with exit code" in text
    if "its own reason" in does[1]:
        assert "error: its own reason" in text
    assert ("start the same command again" in text) == (expected == 75)


@pytest.mark.parametrize(
    ("number", "name", "expected"),
    [
        (signal.SIGINT, "INT", 130),
        (signal.SIGTERM, "TERM", 75),
        (signal.SIGHUP, "TERM", 75),
    ],
)
def test_a_signal_goes_to_all_once(tmp_path, number, name, expected):
    process = start(play(tmp_path, "WAIT", "WAIT"), 2)
    pids = [tmp_path / "environment" / f"pid-{i}" for i in range(2)]
    wait_for(lambda: all(p.exists() and p.read_text().strip() for p in pids), process)
    process.send_signal(number)
    code, text = finish(process)
    assert code == expected, text
    assert "a process was lost" not in text
    for said in (text, (tmp_path / "logs" / "process-1.log").read_text()):
        assert said.count(f"got {name}") == 1
    assert not any(is_running(int(p.read_text())) for p in pids)


def test_a_script_that_is_killed_leaves_no_orphan(tmp_path):
    process = start(play(tmp_path, "WAIT", "WAIT"), 2)
    pids = [tmp_path / "environment" / f"pid-{i}" for i in range(2)]
    wait_for(lambda: all(p.exists() and p.read_text().strip() for p in pids), process)
    process.kill()
    finish(process)
    limit = time.monotonic() + 10
    while any(is_running(int(p.read_text())) for p in pids):
        assert time.monotonic() < limit
        time.sleep(0.05)


@pytest.mark.slow
def test_two_processes_train_and_a_killed_one_ends_both(tmp_path, text_source):
    """Real processes: all have ended, with 75, within a minute of the death of one; the same
    command goes on and finishes.
    """
    environment = make_python(tmp_path, REAL)
    flags = (TINY, *SMALL, text_source, f"--workdir={tmp_path}/run")
    process = start(environment, 2, *flags, "--config.train.steps=100000")
    checkpoints = tmp_path / "run" / "checkpoints"
    wait_for(lambda: any(p.name.isdecimal() for p in checkpoints.glob("*")), process)
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    of_pid = {
        int(pid): pathlib.Path(f"/proc/{pid}/cmdline").read_text() for pid in children.split()
    }
    programs = {pid: line for pid, line in of_pid.items() if "convbert_jax.main" in line}
    assert len(programs) == 2, of_pid
    (second,) = (pid for pid, line in programs.items() if "--process=1" in line)
    began = time.monotonic()
    os.kill(second, signal.SIGKILL)
    code, text = finish(process)
    assert code == 75, text
    assert time.monotonic() - began < 60
    assert "process 1 of 2 has ended" in text
    assert "start the same command again" in text
    assert not any(map(is_running, programs))
    step = max(int(p.name) for p in checkpoints.glob("*") if p.name.isdecimal())
    code, text = finish(start(environment, 2, *flags, f"--config.train.steps={step + 4}"))
    assert code == 0, text
    assert "Process 0 of 2." in text
    assert "Process 1 of 2." in (tmp_path / "logs" / "process-1.log").read_text()
    assert (checkpoints / str(step + 4)).exists()
