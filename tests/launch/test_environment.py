"""The launch scripts, with a Python that only notes what it is asked for."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.launch.hearing import hear

LAUNCH = pathlib.Path(__file__).resolve().parents[2] / "launch"
SHIM = """#!/bin/sh
echo "pyenv: python3.12: command not found" >&2
echo "The python3.12 command exists in these Python versions: 3.12.1" >&2
exit 127
"""
OLD = """#!/bin/sh
case "$2" in *print*) echo 3.9;; *) exit 1;; esac
"""
# Answers what the scripts ask, notes the rest; it installs nothing where a file `offline` is.
NOTES = """#!/bin/sh
here=$(dirname "$0")
case "$*" in
  --version) echo Python 3.11.0;;
  *sys.prefix*) dirname "$here";;
  *version_info*) echo 3.11;;
  *cpu_count*) echo 3;;
  "-m pip "*) echo "$*" >>"$here/../../asked"; test ! -e "$here/../../offline";;
  *) echo "$*" >>"$here/../../asked";;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """The scripts and the lists of requirements, in an empty folder."""
    shutil.copytree(LAUNCH, tmp_path / "launch")
    for name in ("requirements.txt", "requirements-test.txt"):
        (tmp_path / name).write_text("jax\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "expensive.tsv").write_text(
        "# quick\t50 tests\t700 CPU seconds\n# all\t70 tests\t4000 CPU seconds\n"
    )
    return tmp_path


def start(checkout, command, *arguments, cwd=None, **environment) -> subprocess.CompletedProcess:
    ours = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    return subprocess.run(
        ["bash", *command, *arguments],
        cwd=cwd or checkout,
        env={**ours, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def make_environment(folder) -> None:
    """What `python -m venv` makes, as far as the scripts look."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text(NOTES)
    (folder / "bin" / "python").chmod(0o755)
    (folder / "bin" / "activate").write_text(f"PATH={folder}/bin:$PATH")


def asked(checkout) -> list[str]:
    """What Python was asked since the last call."""
    notes = checkout / "asked"
    lines = notes.read_text().splitlines() if notes.exists() else []
    notes.unlink(missing_ok=True)
    return lines


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (SHIM, "does not run (pyenv: python3.12: command not found The python3.12 command exists"),
        (OLD, "is Python 3.9, not 3.11 or newer"),
        (None, "No such file or directory"),
    ],
    ids=["pyenv", "old", "absent"],
)
def test_a_python_that_cannot_be_used(checkout, script, says):
    python = checkout / "python3.12"
    if script:
        python.write_text(script)
        python.chmod(0o755)
    result = start(checkout, ["-c", ". launch/environment.sh"], PYTHON=str(python))
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {python} ")
    assert says in line
    assert not (checkout / ".venv").exists()


def test_an_active_environment_of_an_old_python(checkout, tmp_path_factory):
    """The base environment of conda, say, which is active without being asked for."""
    active = tmp_path_factory.mktemp("conda")
    make_environment(active)
    (active / "bin" / "python").write_text(OLD)
    path = f"{active}/bin:{os.environ['PATH']}"
    result = start(checkout, ["launch/quickstart.sh"], CONDA_PREFIX=str(active), PATH=path)
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: python, with {active} active, is Python 3.9, not 3.11 or newer")


# Makes an environment that answers as NOTES.
MAKES = """#!/bin/sh
case "$*" in
  *version_info*) echo 3.11;;
  --version) echo Python 3.11.0;;
  "-m venv --clear .venv") rm -rf .venv; cp -r whole .venv;;
  *) exit 1;;
esac
"""


@pytest.mark.parametrize("left", ["no activate", "a dead link"])
def test_what_a_failed_venv_left_is_made_anew(checkout, left):
    """As on Debian without python3-venv, at the start after that was installed; and of a Python
    that the system has replaced since.
    """
    make_environment(checkout / "whole")
    make_environment(checkout / ".venv")
    (checkout / ".venv" / "pyvenv.cfg").touch()
    if left == "no activate":
        (checkout / ".venv" / "bin" / "activate").unlink()
    else:
        (checkout / ".venv" / "bin" / "python").unlink()
        (checkout / ".venv" / "bin" / "python").symlink_to("/no/such/python")
    (checkout / "maker").write_text(MAKES)
    (checkout / "maker").chmod(0o755)
    result = start(checkout, ["launch/quickstart.sh"], PYTHON=str(checkout / "maker"))
    assert result.returncode == 0, result.stderr
    assert asked(checkout)[-1] == "-m convbert_jax.main --config=configs/tiny.py"


def test_another_thing_of_that_name_is_left_alone(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "notes").touch()
    result = start(checkout, ["launch/quickstart.sh"])
    assert result.returncode == 1
    assert result.stderr.startswith(
        f"error: {checkout}/.venv is there and is no virtual environment"
    )
    assert (checkout / ".venv" / "notes").exists()


def test_a_checkout_that_was_moved_keeps_its_environment(checkout):
    make_environment(checkout / ".venv")
    (checkout / ".venv" / "bin" / "activate").write_text("PATH=/where/it/was/bin:$PATH")
    result = start(checkout, ["launch/quickstart.sh"])
    assert result.returncode == 0, result.stderr
    assert asked(checkout)[-1] == "-m convbert_jax.main --config=configs/tiny.py"


def test_requirements_are_installed_once_and_again_when_they_change(checkout):
    make_environment(checkout / ".venv")
    source = ["-c", ". launch/environment.sh"]
    install = [
        "-m pip install --quiet --disable-pip-version-check "
        "-r requirements.txt -r requirements-test.txt"
    ]
    (checkout / "offline").touch()
    for _ in range(2):  # an install that failed is not taken for one that is done
        assert start(checkout, ["-e", *source]).returncode != 0
        assert asked(checkout) == install
    (checkout / "offline").unlink()
    for expected in (install, []):
        result = start(checkout, ["-e", *source])
        assert result.returncode == 0, result.stderr
        assert ("Installing" in result.stdout) == bool(expected)
        assert asked(checkout) == expected
    for name in ("requirements.txt", "requirements-test.txt"):
        (checkout / name).write_text("jax\nflax\n")
        for expected in (install, []):
            assert start(checkout, ["-e", *source]).returncode == 0
            assert asked(checkout) == expected


def test_an_active_environment_is_used_as_it_is(checkout, tmp_path_factory):
    active = tmp_path_factory.mktemp("active") / "env" / "it"
    make_environment(active)
    path = f"{active}/bin:{os.environ['PATH']}"
    script = ["launch/quickstart.sh"]
    result = start(checkout, script, PYTHON="/no/such/python", VIRTUAL_ENV=str(active), PATH=path)
    assert result.returncode == 0, result.stderr
    assert not (checkout / ".venv").exists()
    assert asked(active.parent)[-1] == "-m convbert_jax.main --config=configs/tiny.py"


@pytest.mark.parametrize(
    ("script", "arguments", "command"),
    [
        ("quickstart.sh", [], ["-m", "convbert_jax.main", "--config=configs/tiny.py"]),
        (
            "quickstart.sh",
            ["--config.train.steps=5", "--workdir=a b"],
            ["-m", "convbert_jax.main", "--config=configs/tiny.py", "--config.train.steps=5"],
        ),
        ("test.sh", [], ["-m", "pytest", "--numprocesses=3", "--dist=loadfile"]),
        ("test.sh", ["-k", "mask", "tests/ops"], ["-m", "pytest", "--numprocesses=3"]),
    ],
)
def test_arguments_go_to_the_program(checkout, tmp_path_factory, script, arguments, command):
    """From any folder, and after ours, so that they win."""
    make_environment(checkout / ".venv")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    result = start(checkout, [str(checkout / "launch" / script)], *arguments, cwd=elsewhere)
    assert result.returncode == 0, result.stderr
    line = asked(checkout)[-1]
    assert line.startswith(" ".join(command))
    assert line.endswith(" ".join(arguments))
    if script == "test.sh":
        assert "--tier=quick -m not gpu and not tpu" in line
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("argument", "tier", "tests"), [([], "quick", "50 tests"), (["--all"], "all", "70 tests")]
)
def test_the_tests_say_first_how_many_and_how_long(checkout, argument, tier, tests):
    make_environment(checkout / ".venv")
    result = start(checkout, ["launch/test.sh"], *argument, "-x")
    line = result.stdout.splitlines()[-1]
    assert tests in line.partition(";")[0]
    assert "minutes" in line.partition(";")[0]
    assert "launch/test.sh" in line.partition(";")[2]
    command = asked(checkout)[-1]
    assert f"--tier={tier}" in command
    assert command.endswith(" -x")


def test_what_the_program_ends_with_is_what_the_script_ends_with(checkout):
    make_environment(checkout / ".venv")
    python = checkout / ".venv" / "bin" / "python"
    python.write_text(NOTES.replace('*) echo "$*" >>"$here/../../asked";;', "*) exit 7;;"))
    assert "exit 7" in python.read_text()
    for script in ("quickstart.sh", "test.sh"):
        assert start(checkout, [f"launch/{script}"]).returncode == 7


ACTIVATE = "source .venv/bin/activate"


def test_quickstart_ends_with_how_to_activate_its_environment(checkout, tmp_path_factory):
    make_environment(checkout / ".venv")
    result = start(checkout, ["launch/quickstart.sh"])
    assert result.stdout.splitlines()[-1].strip() == ACTIVATE
    elsewhere = tmp_path_factory.mktemp("else where")
    result = start(checkout, [str(checkout / "launch" / "quickstart.sh")], cwd=elsewhere)
    command = result.stdout.splitlines()[-1].replace("source", ".") + " && pwd"
    shown = subprocess.run(["bash", "-c", command], cwd=elsewhere, capture_output=True, text=True)
    assert shown.stdout.strip() == str(checkout)
    active = {"VIRTUAL_ENV": str(checkout / ".venv")}
    active["PATH"] = f"{checkout}/.venv/bin:{os.environ['PATH']}"
    assert ACTIVATE not in start(checkout, ["launch/quickstart.sh"], **active).stdout


def test_a_quickstart_that_fails_does_not_go_on_to_activation(checkout):
    make_environment(checkout / ".venv")
    python = checkout / ".venv" / "bin" / "python"
    python.write_text(NOTES.replace('*) echo "$*" >>"$here/../../asked";;', "*) exit 75;;"))
    result = start(checkout, ["launch/quickstart.sh"])
    assert (result.returncode, ACTIVATE in result.stdout) == (75, False)


# Saves when it is interrupted, and ends with the code of `main.py`.
SAVES = """#!/bin/sh
here=$(dirname "$0")
case "$*" in *convbert_jax.main*) ;; *) exec "$here/notes" "$@";; esac
trap 'echo saved >"$here/../../saved"; exit CODE' NAME
echo $$ >"$here/../../pid"
while :; do sleep 0.05; done
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(
            signal.SIGTERM,
            75,
            marks=pytest.mark.skipif(not shutil.which("setpriv"), reason="needs setpriv"),
        ),
    ],
)
def test_quickstart_hands_signals_on(checkout, number, code):
    """Ctrl-C of a terminal goes to the group; SIGTERM of a supervisor to the script alone."""
    make_environment(checkout / ".venv")
    folder = checkout / ".venv" / "bin"
    (folder / "python").rename(folder / "notes")
    name = number.name.removeprefix("SIG")
    (folder / "python").write_text(SAVES.replace("CODE", str(code)).replace("NAME", name))
    (folder / "python").chmod(0o755)
    ours = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "CONDA_PREFIX")}
    process = subprocess.Popen(
        ["bash", "launch/quickstart.sh"],
        cwd=checkout,
        env=ours,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear,
    )
    wait_for(checkout / "pid")
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    said = process.communicate(timeout=30)[0]
    wait_for(checkout / "saved")
    assert ACTIVATE not in said
    assert process.returncode == (code if number == signal.SIGINT else -number)


def wait_for(file: pathlib.Path) -> None:
    end = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < end, file
        time.sleep(0.02)


@pytest.mark.parametrize("inside", [True, False], ids=["in the checkout", "elsewhere"])
@pytest.mark.parametrize("made", [True, False], ids=["with .venv", "without"])
def test_a_missing_package_names_the_environment_that_has_it(checkout, made, inside):
    (checkout / "convbert_jax").mkdir()
    shutil.copy(LAUNCH.parent / "convbert_jax" / "absent.py", checkout / "convbert_jax")
    if made:
        make_environment(checkout / ".venv")
    code = "from convbert_jax import absent\nwith absent.told():\n import no_such_package"
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
    assert line.endswith(f"source {folder}/bin/activate") == made


def test_an_active_environment_that_lacks_a_package_is_not_told_to_be_activated(
    checkout, monkeypatch
):
    from convbert_jax import absent

    make_environment(checkout / ".venv")
    monkeypatch.setattr(absent, "_CHECKOUT", checkout)
    monkeypatch.setattr(sys, "prefix", str(checkout / ".venv"))
    with pytest.raises(SystemExit, match=r"requirements\.txt"), absent.told():
        raise ModuleNotFoundError(name="no_such_package")
