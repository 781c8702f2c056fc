"""--mode=doctor as a whole: output, exit code and side effects, with one and two processes."""

import concurrent.futures
import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest
from absl.testing import flagsaver
from hypothesis import given
from hypothesis import strategies as st

from convbert_jax import command_line, doctor, main
from convbert_jax.config import ConfigError
from convbert_jax.doctor import checks, run_checks
from convbert_jax.doctor.checks import Finding, wrong
from convbert_jax.training import distributed
from convbert_jax.workdir import Workdir
from tests.refusals import refused

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
LINE = re.compile(r"(good   |warning|wrong  ) [\w ,]+: .+\.")


def read(*arguments: str) -> command_line.Request:
    with flagsaver.flagsaver():
        return command_line.read(["main.py", "--mode=doctor", *arguments])


def examine(capsys, *arguments: str) -> tuple[int, dict[str, str], str]:
    """Returns (exit code, check name -> line, standard error)."""
    try:
        main.main(read(*arguments))
        code = 0
    except SystemExit as error:
        code = error.code
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert all(LINE.fullmatch(line) for line in lines), lines
    return code, {line[8:].partition(":")[0]: line for line in lines}, said.err


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def tree(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.rglob("*"))


def test_without_a_config_only_what_needs_none(capsys, tmp_path):
    code, lines, _ = examine(capsys)
    assert code == 0
    assert lines.keys() == {
        *("Python", "packages", "jax", "accelerators", "devices", "memory", "CPUs"),
    }
    code, lines, _ = examine(capsys, f"--workdir={tmp_path}/a/run")
    assert {"workdir", "locks"} <= lines.keys()
    assert not tree(tmp_path)


def test_a_config_is_examined_whole_and_nothing_is_left(capsys, tmp_path):
    cache = f"--config.train.compile_cache={tmp_path}/cache"
    code, lines, _ = examine(capsys, "--config=configs/tiny.py", cache)
    assert code == 0
    assert {"start", "data", "space", "workdir", "compile cache", "platform"} <= lines.keys()
    assert "runs/tiny" in lines["workdir"]
    assert re.search(r"start: 1,\d{3},\d{3} parameters", lines["start"])
    assert not tree(tmp_path)


def test_faults_are_named_together_and_the_code_is_one(capsys, tmp_path):
    (tmp_path / "file").touch()
    code, lines, error = examine(
        capsys,
        "--config=configs/tiny.py",
        "--config.data.source=text:/nowhere/*.txt",
        f"--workdir={tmp_path}/file/run",
    )
    assert code == 1
    assert "/nowhere/*.txt" in lines["data"]
    assert f"{tmp_path}/file/run" in lines["workdir"]
    assert error.startswith("error: ")
    assert "(data, workdir)" in error


def test_faults_of_other_recipes_name_the_setting(capsys):
    for arguments, name, mention in (
        (("--config=configs/translation.py",), "data", "config.parallel.source"),
        (("--config=configs/glue.py",), "start", "config.init_from"),
        (("--config=configs/base.py",), "data", "hub"),
        (
            ("--config=configs/tiny.py", "--config.tokenizer.path=/no/vocab.txt"),
            "start",
            "/no/vocab.txt",
        ),
    ):
        _, lines, _ = examine(capsys, *arguments)
        assert mention in lines[name]


def test_the_config_of_a_run_is_taken(capsys, tmp_path):
    config = read("--config=configs/tiny.py").config
    with Workdir(tmp_path / "run").open(config):
        pass
    before = tree(tmp_path)
    code, lines, _ = examine(capsys, f"--workdir={tmp_path}/run")
    assert code == 0
    assert "data" in lines
    assert tree(tmp_path) == before


def test_an_override_without_a_config_is_refused():
    with refused(ConfigError, "--config.seed"):
        read("--config.seed=1")


def test_a_jax_that_cannot_be_loaded_ends_the_list(capsys, monkeypatch):
    fault = wrong("jax", "it cannot be loaded (jaxlib is too old)", "pip install -U jax")
    monkeypatch.setattr(checks, "fault_of_jax", lambda: fault)
    monkeypatch.setattr(doctor, "fault_of_jax", lambda: fault)
    code, lines, error = examine(capsys, "--config=configs/tiny.py", "--multihost")
    assert code == 1
    assert "jaxlib is too old" in lines["jax"]
    assert "devices" not in lines
    assert "(jax)" in error


def test_a_fault_of_a_check_does_not_hide_the_others(capsys, monkeypatch):
    def broken(*_, **__):
        raise AssertionError("my own fault")

    monkeypatch.setattr(checks, "check_host", broken)
    code, lines, _ = examine(capsys, "--config=configs/tiny.py")
    assert code == 1
    assert "AssertionError: my own fault" in lines["host"]
    assert "workdir" in lines


def test_a_device_that_does_not_answer_does_not_keep_the_program():
    """Simulates a library that waits for a TPU while it holds JAX's locks."""
    code = (
        "import threading, jax, sys\n"
        "from jax._src import xla_bridge\n"
        "from convbert_jax import command_line, main\n"
        "from convbert_jax.doctor import checks, run_checks\n"
        "def hang(*_):\n"
        "    with xla_bridge._backend_lock:\n"
        "        threading.Event().wait()\n"
        "run_checks.check_devices = hang\n"
        "(devices,) = [c for c in checks.CHECKS if c.name == 'devices']\n"
        "(host,) = [c for c in checks.CHECKS if c.name == 'host']\n"
        "checks.CHECKS = (devices._replace(limit=0.5), host)\n"
        "main.main(command_line.read(['main.py', '--mode=doctor']))\n"
    )
    end = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert end.returncode == 1, end.stderr
    assert "wrong   devices: " in end.stdout
    cores = "good   " if len(os.sched_getaffinity(0)) > 1 else "warning"
    assert f"{cores} CPUs" in end.stdout
    assert "(devices)" in end.stderr


# Several processes


def record(**changed):
    base = {"findings": [], "versions": {"jax": "1"}, "command": {"a": 1}, "workdir": True}
    return {**base, **changed}


RECORDS = st.lists(
    st.none()
    | st.builds(
        record,
        workdir=st.sampled_from([True, False, None]),
        versions=st.sampled_from([{"jax": "1"}, {"jax": "2"}]),
        findings=st.just([])
        | st.just([{"name": "disk", "state": "wrong", "text": "full", "fix": "free some"}]),
    ),
    min_size=1,
    max_size=5,
).filter(lambda records: records[0])


@given(RECORDS)
def test_what_is_judged_wrong_is_what_is(records):
    found = run_checks._compare_records(records, workdir="W")
    found = [Finding(**each) for each in found]
    said = [str(each) for each in found if each.state != "good"]
    ill = [i for i, each in enumerate(records) if i and each and each["findings"]]
    assert (
        any(f"disk of {distributed.name_processes(ill)}: full" in s for s in said) if ill else True
    )
    here = [each for each in records if each]
    same = len(here) == len(records) and all(r["versions"] == here[0]["versions"] for r in here)
    assert any(s.startswith("wrong   processes:") for s in said) != same
    apart = [i for i, each in enumerate(records) if each and each["workdir"] is False]
    of_workdir = [s for s in said if s.startswith("wrong   workdir:")]
    assert len(of_workdir) == bool(apart)
    assert not apart or distributed.name_processes(apart) in of_workdir[0]


def test_processes_that_agree_are_good():
    found = run_checks._compare_records([record(), record()], workdir="W")
    assert [(f["name"], f["state"]) for f in found] == [
        (name, "good") for name in ("processes", "workdir")
    ]


def run_two(
    *flags: tuple[str, ...], modes: tuple[str, ...] = ("doctor", "doctor")
) -> list[subprocess.CompletedProcess]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = (f"--coordinator=localhost:{port}", "--processes=2")
    command = [sys.executable, "-m", "convbert_jax.main", *shared]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(
                subprocess.run,
                [*command, *own, f"--mode={modes[index]}", f"--process={index}"],
                cwd=REPOSITORY,
                env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
                capture_output=True,
                text=True,
                timeout=200,
            )
            for index, own in enumerate(flags)
        ]
        return [process.result() for process in both]


@pytest.mark.slow
def test_two_processes_with_one_folder(tmp_path):
    flags = ("--config=configs/tiny.py", f"--workdir={tmp_path}/run")
    first, second = run_two(flags, flags)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    for name in ("processes", "workdir"):
        assert f"good    {name}: " in first.stdout
    assert not second.stdout
    assert not tree(tmp_path)


@pytest.mark.slow
def test_two_processes_that_differ(tmp_path):
    (tmp_path / "file").touch()
    config = "--config=configs/tiny.py"
    first, second = run_two(
        (config, f"--workdir={tmp_path}/a"),
        (config, f"--workdir={tmp_path}/file/b", "--config.seed=3"),
    )
    assert (first.returncode, second.returncode) == (1, 1)
    lines = first.stdout.splitlines()
    (line,) = [each for each in lines if "workdir of process 1" in each]
    assert "/file/b" in line
    (line,) = [each for each in lines if each.startswith("wrong   processes")]
    assert "rocess 1 has config.seed=3, process 0 has 0" in line
    (line,) = [each for each in lines if each.startswith("wrong   workdir:")]
    assert "process 1" in line
    assert f"{tmp_path}/a" in line
    for end in (first, second):
        (line,) = [each for each in end.stderr.splitlines() if each.startswith("error: ")]
        assert "(workdir of process 1, processes, workdir)" in line
        assert "Traceback" not in end.stderr
    assert tree(tmp_path) == [tmp_path / "file"]


@pytest.mark.slow
def test_a_doctor_does_not_wait_for_a_run(tmp_path):
    flags = ("--config=configs/tiny.py", f"--workdir={tmp_path}/a")
    for end in run_two(flags, flags, modes=("doctor", "train")):
        assert end.returncode == 1
        (line,) = [each for each in end.stderr.splitlines() if each.startswith("error: ")]
        assert "rocess 1 has --mode=train, process 0 has doctor" in line
    assert not tree(tmp_path)
