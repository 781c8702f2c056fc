"""launch/environment.sh, quickstart.sh and test.sh, with a stub in place of Python."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.launch.hearing import hear
from tests.launch.shell import LAUNCH, wait_for, without_environment, write_program

TRAIN = "-m convbert_jax.main --config=configs/tiny.py"
ACTIVATE = "source .venv/bin/activate"
# Behaves like pyenv's wrapper of a version that is not installed.
WRAPPER = """#!/bin/sh
echo "pyenv: python3.12: command not found" >&2
echo "The python3.12 command exists in these Python versions: 3.12.1" >&2
exit 127
"""
OLD = """#!/bin/sh
case "$2" in *print*) echo 3.9;; *) exit 1;; esac
"""
# Answers the scripts' queries and records all other calls. If a file `offline` exists, pip fails.
STUB = """#!/bin/sh
here=$(dirname "$0")
case "$*" in
  --version) echo Python 3.11.0;;
  *sys.prefix*) dirname "$here";;
  *version_info*) echo 3.11;;
  *cpu_count*) echo 3;;
  "-m pip "*) echo "$*" >>"$here/../../calls"; test ! -e "$here/../../offline";;
  *) echo "$*" >>"$here/../../calls";;
esac
"""
# Creates an environment with the stub above.
CREATES = """#!/bin/sh
case "$*" in
  *version_info*) echo 3.11;;
  --version) echo Python 3.11.0;;
  "-m venv --clear .venv") rm -rf .venv; cp -r whole .venv;;
  *) exit 1;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """Copies the scripts and requirement lists into an empty folder."""
    shutil.copytree(LAUNCH, tmp_path / "launch")
    for name in ("requirements.txt", "requirements-test.txt"):
        (tmp_path / name).write_text("jax\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "expensive.tsv").write_text(
        "# quick\t50 tests\t700 CPU seconds\n# all\t70 tests\t4000 CPU seconds\n"
    )
    return tmp_path


def start(checkout, command, *arguments, cwd=None, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", *command, *arguments],
        cwd=cwd or checkout,
        env={**without_environment(), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def make_environment(folder, python: str = STUB) -> dict[str, str]:
    """Creates an environment for the scripts; returns variables that activate it."""
    write_program(folder / "bin" / "python", python)
    (folder / "bin" / "activate").write_text(f"PATH={folder}/bin:$PATH")
    return {"VIRTUAL_ENV": str(folder), "PATH": f"{folder}/bin:{os.environ['PATH']}"}


def calls(checkout) -> list[str]:
    """Returns the Python calls since the previous call."""
    file = checkout / "calls"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return lines


@pytest.mark.parametrize(
    ("python", "mentions"),
    [(WRAPPER, "pyenv: python3.12"), (OLD, "3.9"), (None, "No such file")],
    ids=["pyenv", "old", "absent"],
)
def test_an_unusable_python_is_refused(checkout, python, mentions):
    file = checkout / "python3.12"
    if python:
        write_program(file, python)
    result = start(checkout, ["-c", ". launch/environment.sh"], PYTHON=str(file))
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert str(file) in line
    assert mentions in line
    assert not (checkout / ".venv").exists()


def test_an_active_environment_with_an_old_python_is_refused(checkout, tmp_path_factory):
    """For example conda's base environment, which is active by default."""
    conda = tmp_path_factory.mktemp("conda")
    path = make_environment(conda, OLD)["PATH"]
    result = start(checkout, ["launch/quickstart.sh"], CONDA_PREFIX=str(conda), PATH=path)
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert str(conda) in line
    assert "3.9" in line


@pytest.mark.parametrize("broken", ["no activate", "a dead link"])
def test_a_broken_environment_is_created_anew(checkout, broken):
    """Debian without python3-venv, and a removed system Python, leave such environments."""
    make_environment(checkout / "whole")
    make_environment(checkout / ".venv")
    (checkout / ".venv" / "pyvenv.cfg").touch()
    if broken == "no activate":
        (checkout / ".venv" / "bin" / "activate").unlink()
    else:
        (checkout / ".venv" / "bin" / "python").unlink()
        (checkout / ".venv" / "bin" / "python").symlink_to("/no/such/python")
    write_program(checkout / "creates", CREATES)
    result = start(checkout, ["launch/quickstart.sh"], PYTHON=str(checkout / "creates"))
    assert result.returncode == 0, result.stderr
    assert calls(checkout)[-1] == TRAIN


def test_a_folder_of_that_name_which_is_no_environment_is_left_alone(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "notes").touch()
    result = start(checkout, ["launch/quickstart.sh"])
    assert result.returncode == 1
    assert f"{checkout}/.venv" in result.stderr
    assert (checkout / ".venv" / "notes").exists()


def test_a_checkout_that_was_moved_keeps_its_environment(checkout):
    make_environment(checkout / ".venv")
    (checkout / ".venv" / "bin" / "activate").write_text("PATH=/where/it/was/bin:$PATH")
    result = start(checkout, ["launch/quickstart.sh"])
    assert result.returncode == 0, result.stderr
    assert calls(checkout)[-1] == TRAIN


def test_requirements_are_installed_once_and_again_when_they_change(checkout):
    make_environment(checkout / ".venv")
    source = ["-e", "-c", ". launch/environment.sh"]
    install = [
        "-m pip install --quiet --disable-pip-version-check "
        "-r requirements.txt -r requirements-test.txt"
    ]
    (checkout / "offline").touch()
    for _ in range(2):  # a failed installation is repeated
        assert start(checkout, source).returncode != 0
        assert calls(checkout) == install
    (checkout / "offline").unlink()
    for name in (None, "requirements.txt", "requirements-test.txt"):
        if name:
            (checkout / name).write_text("jax\nflax\n")
        for expected in (install, []):
            assert start(checkout, source).returncode == 0
            assert calls(checkout) == expected


def test_an_active_environment_is_used(checkout, tmp_path_factory):
    active = tmp_path_factory.mktemp("active") / "env" / "it"
    variables = make_environment(active)
    result = start(checkout, ["launch/quickstart.sh"], PYTHON="/no/such/python", **variables)
    assert result.returncode == 0, result.stderr
    assert not (checkout / ".venv").exists()
    assert calls(active.parent)[-1] == TRAIN
    assert ACTIVATE not in result.stdout


def test_quickstart_passes_arguments_and_tells_how_to_activate(checkout, tmp_path_factory):
    """Works from any folder; later arguments win."""
    make_environment(checkout / ".venv")
    elsewhere = tmp_path_factory.mktemp("else where")
    script = [str(checkout / "launch" / "quickstart.sh")]
    result = start(checkout, script, "--config.train.steps=5", "--workdir=a b", cwd=elsewhere)
    assert result.returncode == 0, result.stderr
    assert calls(checkout)[-1] == f"{TRAIN} --config.train.steps=5 --workdir=a b"
    assert list(elsewhere.iterdir()) == []
    command = result.stdout.splitlines()[-1]
    assert ACTIVATE in command
    command = command.replace("source", ".") + " && pwd"
    shown = subprocess.run(["bash", "-c", command], cwd=elsewhere, capture_output=True, text=True)
    assert shown.stdout.strip() == str(checkout)


@pytest.mark.parametrize(
    ("flag", "tier", "tests"), [((), "quick", "50"), (("--all",), "all", "70")]
)
def test_the_tests_start_with_their_number_and_pass_arguments(checkout, flag, tier, tests):
    make_environment(checkout / ".venv")
    result = start(checkout, ["launch/test.sh"], *flag, "-k", "mask", "tests/ops")
    assert result.returncode == 0, result.stderr
    assert f" {tests} " in result.stdout.splitlines()[-1].partition(";")[0]
    command = calls(checkout)[-1]
    assert command.startswith("-m pytest --numprocesses=3 --dist=loadfile")
    assert command.endswith(f"--tier={tier} -m not gpu and not tpu -k mask tests/ops")


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh"])
def test_a_script_exits_with_the_code_of_the_program(checkout, script):
    python = STUB.replace('*) echo "$*" >>"$here/../../calls";;', "*) exit 75;;")
    make_environment(checkout / ".venv", python)
    result = start(checkout, [f"launch/{script}"])
    assert (result.returncode, ACTIVATE in result.stdout) == (75, False)


# Saves on a signal and exits with the code of the program.
SAVES = """#!/bin/sh
here=$(dirname "$0")
case "$*" in *convbert_jax.main*) ;; *) exec "$here/stub" "$@";; esac
trap 'echo saved >"$here/../../saved"; exit CODE' NAME
echo $$ >"$here/../../pid"
while :; do sleep 0.05; done
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_quickstart_forwards_signals(checkout, number, code):
    """Ctrl-C in a terminal reaches the process group; a supervisor's SIGTERM only the script."""
    if number == signal.SIGTERM and not shutil.which("setpriv"):
        pytest.skip("needs setpriv")
    folder = checkout / ".venv" / "bin"
    make_environment(checkout / ".venv")
    (folder / "python").rename(folder / "stub")
    name = number.name.removeprefix("SIG")
    write_program(folder / "python", SAVES.replace("CODE", str(code)).replace("NAME", name))
    process = subprocess.Popen(
        ["bash", "launch/quickstart.sh"],
        cwd=checkout,
        env=without_environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear,
    )
    wait_for((checkout / "pid").exists, process)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    output = process.communicate(timeout=30)[0]  # returns once Python has ended too
    assert (checkout / "saved").exists()
    assert ACTIVATE not in output
    assert process.returncode == (code if number == signal.SIGINT else -number)


@pytest.mark.parametrize(
    ("exists", "inside"), [(True, True), (True, False), (False, True)],
    ids=["in the checkout", "elsewhere", "without .venv"],
)  # fmt: skip
def test_a_missing_package_names_the_environment_that_has_it(checkout, exists, inside):
    (checkout / "convbert_jax").mkdir()
    shutil.copy(LAUNCH.parent / "convbert_jax" / "console.py", checkout / "convbert_jax")
    if exists:
        make_environment(checkout / ".venv")
    block = "with console.missing_package_message():\n import no_such_package"
    code = f"from convbert_jax import console\n{block}"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=checkout if inside else checkout.parent,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "no_such_package" in line
    folder = ".venv" if inside else checkout / ".venv"
    assert line.endswith(f"source {folder}/bin/activate") == exists


def test_an_active_environment_without_a_package_is_told_to_install_it(checkout, monkeypatch):
    from convbert_jax import console

    make_environment(checkout / ".venv")
    monkeypatch.setattr(console, "_CHECKOUT", checkout)
    monkeypatch.setattr(sys, "prefix", str(checkout / ".venv"))
    with pytest.raises(SystemExit, match=r"requirements\.txt"), console.missing_package_message():
        raise ModuleNotFoundError(name="no_such_package")
