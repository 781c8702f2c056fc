"""Slurm workers: recorded Slurm commands and execution of submitit's job script."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from convbert_jax.sweeps import SweepError, cli
from convbert_jax.sweeps.table import Folder
from tests.refusals import refused

pytest.importorskip("submitit")

SCRIPT = pathlib.Path(cli.__file__).parents[2] / "launch" / "sweep.py"
OPTIONS = "--partition=gpu --gpus=1 --time=1-02 --cpus-per-task=4 --exclusive"
# Stubs record their arguments; sbatch keeps the script, srun executes its command.
TOOLS = {
    "sbatch": 'cp "$1" {folder}/script; echo Submitted batch job 77',
    "srun": 'while [ "${{1#--}}" != "$1" ]; do case $1 in --output) shift;; esac; shift; done\n'
    'exec "$@"',
    "scontrol": "",
}
# Like launch/sweep.py, saves on SIGTERM and ignores SIGUSR2.
WORKER = """
import pathlib, signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
with open("starts", "a") as file:
    file.write("started\\n")
while not asked and not pathlib.Path("done").exists():
    time.sleep(0.02)
if asked:
    time.sleep(0.3)
    pathlib.Path("saved").touch()
    sys.exit(130)
sys.exit(int(pathlib.Path("done").read_text() or 0))
"""


class Cluster:
    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        (folder / "bin").mkdir()
        for name, what in TOOLS.items():
            file = folder / "bin" / name
            text = f'#!/bin/bash\necho "{name} $*" >>{{folder}}/asked\n{what}\n'
            file.write_text(text.format(folder=folder))
            file.chmod(0o755)
        self.path = f"{folder}/bin:{os.environ['PATH']}"

    def asked(self, tool: str) -> list[str]:
        file = self.folder / "asked"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.removeprefix(f"{tool} ") for line in lines if line.startswith(f"{tool} ")]

    def begin(self) -> subprocess.Popen:
        """Executes the array's first job; returns once its worker has started."""
        before = self.starts()
        process = subprocess.Popen(
            ["bash", str(self.folder / "script")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                **{"SLURM_JOB_ID": "78", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "0"},
            },
        )
        while self.starts() == before:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)
        return process

    def starts(self) -> int:
        file = self.folder / "starts"
        return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Cluster:
    cluster = Cluster(tmp_path)
    monkeypatch.setenv("PATH", cluster.path)
    return cluster


def test_a_job_is_requeued_after_its_run_has_saved(cluster):
    (cluster.folder / "worker.py").write_text(WORKER)
    worker = cli.Worker(("worker.py",), str(cluster.folder))
    folder = Folder(cluster.folder / "sweep")
    ids = cli.submit("sweep-x", folder, worker, 2, cli.read_options(OPTIONS))
    assert ids == ["77_0", "77_1"]
    assert worker.checkpoint().function == worker  # before it has started a process
    script = (cluster.folder / "script").read_text()
    for line in (
        *("array=0-1%2", "cpus-per-task=4", "gpus=1", "job-name=sweep-x", "partition=gpu"),
        *("requeue", "exclusive", "signal=USR2@120", "time=1560", "open-mode=append"),
        f"output={cluster.folder}/sweep/slurm/%A_%a_0_log.out",
    ):
        assert f"#SBATCH --{line}\n" in script
    assert "--cpus-per-task=4" in script.partition("srun ")[2]
    assert len(cluster.asked("sbatch")) == 1

    process = cluster.begin()
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    os.kill(int(children.read_text().split()[0]), signal.SIGUSR2)
    printed, _ = process.communicate(timeout=60)
    assert (cluster.folder / "saved").exists(), printed
    assert cluster.asked("scontrol") == ["requeue 77_0"]
    # Slurm runs the job again; its exit code is the worker's
    for content in ("", "1"):
        process = cluster.begin()
        (cluster.folder / "done").write_text(content)
        process.communicate(timeout=60)
        assert process.returncode == int(content or 0)
        (cluster.folder / "done").unlink()
    assert len(cluster.asked("scontrol")) == 1
    assert cluster.starts() == 3


def test_a_refusal_of_sbatch_is_reported(cluster):
    (cluster.folder / "bin" / "sbatch").write_text(
        "#!/bin/bash\necho 'sbatch: error: invalid partition specified: gpu' >&2; exit 1\n"
    )
    worker = cli.Worker(("x",), ".")
    with refused(SweepError, "sbatch: error: invalid partition specified: gpu"):
        cli.submit("x", Folder(cluster.folder / "sweep"), worker, 2, {"time": 60})


def test_a_missing_program_or_package_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused(SweepError, "sbatch", field="--slurm"):
        cli.check_installed()
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    with refused(SweepError, "pip install submitit", field="--slurm"):
        cli.check_installed()


def test_the_command_submits_workers_and_starts_no_run(cluster):
    """Input files are checked before submission."""
    from submitit.helpers import DelayedSubmission

    command = [
        *(sys.executable, str(SCRIPT), "--config=ablation:kernel_size", "--variants=k3,k9"),
        *("--workdir=sweep", "--slurm=2", "--sbatch=--time=60"),
    ]

    def run(*more: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*command, *more], cwd=cluster.folder, capture_output=True, text=True, timeout=120
        )

    refusal = run("--config.data.source=text:nowhere/*.txt")
    assert refusal.returncode == 1
    assert "nowhere/*.txt" in refusal.stderr
    assert not cluster.asked("sbatch")
    done = run()
    assert done.returncode == 0, done.stderr
    assert "77" in done.stdout
    assert not (cluster.folder / "sweep" / "runs").exists()
    pickled = cluster.folder / "sweep" / "slurm" / "77_0_submitted.pkl"
    worker = DelayedSubmission.load(pickled).function
    assert worker.folder == str(cluster.folder)
    assert "--workdir=sweep" in worker.command
    assert not any("slurm=" in word or "sbatch" in word for word in worker.command)
