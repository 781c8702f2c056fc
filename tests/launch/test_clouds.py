"""launch/sky.yaml, jobset.yaml and slurm.sbatch: their structure and their shell parts.

The tools of SkyPilot and Slurm are replaced by stubs that record their arguments.
"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest
import yaml
from absl.testing import flagsaver

from convbert_jax import command_line
from tests.conftest import REPOSITORY

LAUNCH = REPOSITORY / "launch"
RESTART = 75  # the exit code after which the same command continues the run


def read_yaml(name: str) -> dict:
    return yaml.safe_load((LAUNCH / name).read_text())


def check_arguments(words: list[str]) -> command_line.Request:
    """Parses the arguments of `python -m convbert_jax.main`; a bucket is read as a local path."""
    assert words[:2] == ["-m", "convbert_jax.main"]
    with flagsaver.flagsaver():
        return command_line.read(["main.py", *(word.replace("gs:/", "") for word in words[2:])])


def stub(file: pathlib.Path, code: int = 0) -> None:
    """Writes a program that appends its name and arguments to the file `calls` next to it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'#!/bin/bash\necho "${{0##*/}} ${{*@Q}}" >>{file.parent}/calls\nexit {code}\n')
    file.chmod(0o755)


def calls(folder: pathlib.Path) -> list[list[str]]:
    return [shlex.split(line) for line in (folder / "calls").read_text().splitlines()]


def run(script: str, folder: pathlib.Path, **environment: str) -> int:
    path = f"{folder}/bin:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={"PATH": path, "HOME": str(folder), **environment},
        check=False,
    ).returncode


def test_shellcheck():
    if not shutil.which("shellcheck"):
        pytest.skip("needs shellcheck")
    scripts = [*sorted(LAUNCH.glob("*.sh")), LAUNCH / "slurm.sbatch"]
    command = ["shellcheck", "--external-sources", "--check-sourced", *scripts]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_skypilot_restarts_after_75_and_requires_a_workdir():
    task = read_yaml("sky.yaml")
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [RESTART]
    assert task["resources"]["use_spot"]
    assert task["envs"]["WORKDIR"] is None
    assert (REPOSITORY / task["envs"]["CONFIG"]).is_file()


def test_the_parser_of_skypilot_accepts_the_file():
    sky = pytest.importorskip("sky", reason="needs SkyPilot, in an environment of its own")
    task = sky.Task.from_yaml_config(
        read_yaml("sky.yaml"), env_overrides=[("WORKDIR", "gs://bucket/run")]
    )
    (resources,) = task.resources
    assert resources.use_spot
    assert resources.job_recovery["recover_on_exit_codes"] == [RESTART]


@pytest.mark.parametrize(
    ("nodes", "extra", "processes"),
    [
        (1, "cuda12", []),
        (4, "tpu", ["--multihost"]),
        (2, "cuda13", ["--coordinator=10.0.0.1:8482", "--processes=2", "--process=1"]),
    ],
)
def test_skypilot_starts_the_program_on_every_host(tmp_path, nodes, extra, processes):
    stub(tmp_path / ".venv" / "bin" / "python", RESTART)
    environment = {
        "SKYPILOT_NUM_NODES": str(nodes),
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NODE_RANK": "1",
        "EXTRA": extra,
        "CONFIG": "configs/base.py",
        "WORKDIR": "gs://bucket/a run",
    }
    assert run(read_yaml("sky.yaml")["run"], tmp_path, **environment) == RESTART
    ((_, *words),) = calls(tmp_path / ".venv" / "bin")
    assert words[4:] == processes
    request = check_arguments(words)
    assert request.workdir.name == "a run"


def test_skypilot_installs_the_locked_versions_and_the_libtpu_of_jax(tmp_path):
    stub(tmp_path / "bin" / "uv")
    (tmp_path / ".venv").mkdir()
    (tmp_path / "requirements-3.12.lock").write_text("jax==1\nlibtpu==2\n")
    assert run(read_yaml("sky.yaml")["setup"], tmp_path, EXTRA="tpu") == 0
    assert (tmp_path / ".venv" / "constraints.txt").read_text() == "jax==1\n"
    venv, install = calls(tmp_path / "bin")
    assert venv[:2] == ["uv", "venv"]
    assert install[-2:] == [".venv/constraints.txt", ".[tpu,buckets]"]


def test_a_jobset_restarts_unless_the_program_reports_an_error():
    spec = read_yaml("jobset.yaml")["spec"]
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (job["backoffLimit"], job["parallelism"]) == (0, job["completions"])
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    disrupted, failed = job["podFailurePolicy"]["rules"]
    assert disrupted["action"] == "Count"  # comes first, so a disruption is never an error
    codes = failed["onExitCodes"]
    assert (failed["action"], codes["containerName"]) == ("FailJob", container["name"])
    assert (codes["operator"], codes["values"]) == ("In", [1, 2])
    (rule,) = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert spec["failurePolicy"]["maxRestarts"] > 0
    assert pod["restartPolicy"] == "Never"  # required by podFailurePolicy
    assert pod["terminationGracePeriodSeconds"] >= 120
    assert container["command"][0] == "python"  # without a shell, which would not forward SIGTERM
    assert check_arguments(container["command"][1:]).multihost


def slurm(folder: pathlib.Path, code: int, nodes: int = 1, **environment: str) -> int:
    for name in ("srun", "scontrol"):
        stub(folder / "bin" / name, code if name == "srun" else 0)
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    environment |= {"SLURM_NNODES": str(nodes), "SLURM_JOB_ID": "7"}
    return run((LAUNCH / "slurm.sbatch").read_text(), folder, **environment)


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [(0, "", False), (1, "", False), (2, "3", False), (75, "", True), (137, "19", True),
     (75, "20", False), (128, "", False)],
)  # fmt: skip
def test_a_slurm_job_requeues_itself_after_75_and_a_killed_process(
    tmp_path, code, restarts, requeued
):
    environment = {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    assert slurm(tmp_path, code, **environment) == code
    assert (["scontrol", "requeue", "7"] in calls(tmp_path / "bin")) == requeued


@pytest.mark.parametrize("nodes", [1, 2])
def test_several_slurm_nodes_are_one_run(tmp_path, nodes):
    slurm(tmp_path, 0, nodes)
    ((_, _, python, *words),) = calls(tmp_path / "bin")
    assert python == "python"
    assert check_arguments(words).multihost == (nodes > 1)


def test_slurm_sends_the_signal_to_the_program_and_reads_all_directives():
    lines = (LAUNCH / "slurm.sbatch").read_text().splitlines()
    directives = [line for line in lines if line.startswith("#SBATCH")]
    first = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    assert directives == [line for line in lines[:first] if line.startswith("#SBATCH")]
    (given,) = (line for line in directives if "--signal" in line)
    assert re.search(r"--signal=TERM@\d+$", given)  # with B: only the script would get the signal
    assert any("--requeue" in line for line in directives)
