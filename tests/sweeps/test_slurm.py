"""Runners of a sweep as jobs of Slurm, which is played: commands on PATH that note what they are
asked for, and the script that sbatch got, run as Slurm runs it.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import convbert_jax
from convbert_jax.config import UserError
from convbert_jax.sweeps import SweepError, request
from convbert_jax.sweeps.folder import Folder
from convbert_jax.sweeps.slurm import submission
from convbert_jax.sweeps.slurm.job import Job
from tests.launch.hearing import hear

DelayedSubmission = pytest.importorskip("submitit.helpers").DelayedSubmission

OPTIONS = "--partition=gpu --gpus=1 --time=1-02 --cpus-per-task=4 --exclusive"
# Note their arguments; sbatch keeps the script, srun runs its command without a cluster.
TOOLS = {
    "sbatch": 'cp "$1" {folder}/script; echo Submitted batch job 77',
    "srun": 'while [ "${{1#--}}" != "$1" ]; do case $1 in --output) shift;; esac; shift; done\n'
    'exec "$@"',
    "squeue": "cat {folder}/state",
    "scontrol": "",
}
# As launch/sweep.py: stops for a signal when its cell is saved, and for a second one at once, if
# that is none passed on.
RUNNER = f"""
import pathlib, signal, sys, time
sys.path.insert(0, {str(pathlib.Path(convbert_jax.__file__).parent.parent)!r})
from convbert_jax import interrupts
asked = []
def stop(number, frame):
    if interrupts.is_first(number):
        asked.append(number)
        if len(asked) == 2:
            sys.exit("a second signal")
signal.signal(signal.SIGTERM, stop)
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
        lines = (self.folder / "asked").read_text().splitlines()
        return [line.removeprefix(f"{tool} ") for line in lines if line.startswith(f"{tool} ")]

    def begin(self) -> subprocess.Popen:
        """The first task of the array, on a node, until its runner is there."""
        before = self.starts()
        process = subprocess.Popen(
            ["bash", str(self.folder / "script")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "PATH": self.path,
                **{"SLURM_JOB_ID": "78", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "0"},
            },
            preexec_fn=hear,
        )
        while self.starts() == before:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)
        return process

    def starts(self) -> int:
        file = self.folder / "starts"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def of_job(self, process: subprocess.Popen) -> int:
        """The task's own process, the child of the script's shell."""
        file = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
        return int(file.read_text().split()[0])


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Cluster:
    cluster = Cluster(tmp_path)
    monkeypatch.setenv("PATH", cluster.path)
    return cluster


@pytest.fixture
def submitted(cluster) -> Cluster:
    (cluster.folder / "runner.py").write_text(RUNNER)
    job = Job((sys.executable, "runner.py"), str(cluster.folder))
    options = submission.read_options(OPTIONS)
    ids = submission.submit("sweep-x", Folder(cluster.folder / "swept"), job, 2, options)
    assert ids == ["77_0", "77_1"]
    return cluster


def test_what_slurm_is_asked_for(submitted):
    script = (submitted.folder / "script").read_text()
    for line in (
        *("array=0-1%2", "cpus-per-task=4", "gpus=1", "job-name=sweep-x", "partition=gpu"),
        *("requeue", "exclusive", "signal=USR2@120", "time=1560", "open-mode=append"),
        f"output={submitted.folder}/swept/slurm/%A_%a_0_log.out",
    ):
        assert f"#SBATCH --{line}\n" in script
    assert "--cpus-per-task=4" in script.partition("srun ")[2]
    assert len(submitted.asked("sbatch")) == 1


def test_a_runner_ends_with_its_code(submitted):
    process = submitted.begin()
    (submitted.folder / "done").touch()
    printed, _ = process.communicate(timeout=60)
    assert (process.returncode, submitted.starts()) == (0, 1), printed
    (submitted.folder / "done").write_text("1")
    process = submitted.begin()
    process.communicate(timeout=60)
    assert process.returncode == 1
    assert submitted.asked("scontrol") == []


@pytest.mark.parametrize("how", ["time is up", "preempted", "preempted, with both signals"])
def test_a_runner_is_put_back_when_its_cell_is_saved(submitted, how):
    (submitted.folder / "state").write_text("RUNNING\n")
    process = submitted.begin()
    number = signal.SIGUSR2 if how == "time is up" else signal.SIGTERM
    os.kill(submitted.of_job(process), number)
    if how == "preempted, with both signals":
        os.kill(submitted.of_job(process), signal.SIGUSR2)
    printed, _ = process.communicate(timeout=60)
    assert (submitted.folder / "saved").exists(), printed
    assert submitted.asked("scontrol") == ["requeue 77_0"]
    process = submitted.begin()  # as Slurm does then
    (submitted.folder / "done").touch()
    process.communicate(timeout=60)
    assert (process.returncode, submitted.starts()) == (0, 2)


def test_two_signals_at_once_wait_for_no_runner_that_nobody_told(monkeypatch):
    job = Job(("sleep", "20"), ".")
    job._process = subprocess.Popen(job.command)
    kill, signals = os.kill, []

    def kill_later(*arguments):
        signals.append(arguments)
        if len(signals) == 1:  # SIGUSR2 comes while SIGTERM is passed on
            job.checkpoint()
        kill(*arguments)

    monkeypatch.setattr(os, "kill", kill_later)
    job._tell()
    assert job._process.wait() == -signal.SIGTERM


def test_a_second_signal_while_the_first_is_noted_costs_no_cell(submitted, monkeypatch):
    job = Job((sys.executable, "runner.py"), str(submitted.folder))
    job._process = subprocess.Popen(job.command, cwd=job.folder, preexec_fn=_deaf_to_submitit)
    while not submitted.starts():
        assert job._process.poll() is None
        time.sleep(0.02)
    kill, signals = os.kill, []

    def kill_and_interrupt(*arguments):
        kill(*arguments)
        signals.append(arguments)
        if len(signals) == 1:  # SIGUSR2 comes before it is noted that SIGTERM was passed on
            time.sleep(0.1)
            job.checkpoint()

    monkeypatch.setattr(os, "kill", kill_and_interrupt)
    job._tell()
    assert len(signals) == 2
    assert (submitted.folder / "saved").exists()


def _deaf_to_submitit():
    hear()
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def test_a_cancelled_runner_saves_and_is_not_put_back(submitted):
    (submitted.folder / "state").write_text("COMPLETING\n")
    process = submitted.begin()
    os.kill(submitted.of_job(process), signal.SIGTERM)
    process.communicate(timeout=60)
    assert (submitted.folder / "saved").exists()
    assert process.returncode == 130
    assert submitted.asked("scontrol") == []


def test_what_slurm_refuses_is_a_sentence(cluster):
    (cluster.folder / "bin" / "sbatch").write_text(
        "#!/bin/bash\necho 'sbatch: error: invalid partition specified: gpu' >&2; exit 1\n"
    )
    with pytest.raises(SweepError) as caught:
        submission.submit(
            "x", Folder(cluster.folder / "swept"), Job(("true",), "."), 2, {"time": "1:00"}
        )
    assert str(caught.value) == (
        "sbatch: error: invalid partition specified: gpu; nothing was submitted."
    )


@pytest.mark.parametrize(
    ("time", "minutes"),
    [("90", 90), ("90:30", 90), ("2:30:00", 150), ("1-02", 1560), ("1-02:03", 1563), ("0:60", 1)],
)
def test_times_as_slurm_has_them(time, minutes):
    assert submission._minutes(time) == minutes


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--slurm=0"], "--slurm=0 must be from 1"),
        (["--slurm=x"], "invalid int value: 'x'"),
        (["--slurm=2"], "has no --time, before whose end"),
        (["--slurm=2", "--plan"], "not allowed with argument"),
        (["--sbatch=--time=1:00"], "--sbatch is of --slurm; add --slurm=N"),
        (["--slurm=2", "--sbatch=time=1:00"], "'time=1:00' is no option"),
        (["--slurm=2", "--sbatch=--time="], "'--time=' is no option"),
        (["--slurm=2", "--sbatch=--time=soon"], "--time=soon is no time"),
        (["--slurm=2", "--sbatch=--time=0:10"], "--time=0:10 is no time of a minute"),
        (["--slurm=2", "--sbatch=--time"], "--time=True is no time"),
        (
            ["--slurm=2", "--sbatch=--time=4"],
            "leaves next to nothing beside the 2 minutes",
        ),
        (["--slurm=2", "--sbatch=--time=9 --array=0-3"], "--slurm sets --array=0-3 itself"),
        (["--slurm=2", "--sbatch=--time='9"], "no closing quotation"),
    ],
)
def test_a_command_line_that_cannot_be_is_refused(arguments, says):
    with pytest.raises(UserError) as caught:
        request.read(["sweep.py", "--config=ablation:kernel_size", *arguments])
    assert says in str(caught.value)


def test_runners_elsewhere_get_the_same_command(tmp_path):
    asked = request.read(
        [
            *("sweep.py", "--config", "ablation:kernel_size", "--seeds=2", f"--workdir={tmp_path}"),
            *("--slurm=2", f"--sbatch={OPTIONS}", "--config.train.steps=1k", "--rows=k9,k3"),
            "--finetune=text:trec --config.task.folder='a b'",
        ]
    )
    assert (asked.do, asked.runners, asked.sbatch["gpus"]) == ("submit", 2, "1")
    again = request.read(["sweep.py", *asked.arguments])
    assert again.do == "run"
    for name in ("name", "sweep", "overrides"):
        assert getattr(again, name) == getattr(asked, name)
    assert again.folder.path == asked.folder.path


def test_what_is_missing_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SweepError, match="needs sbatch, which is not on PATH; start this on a log"):
        submission.check_installed()
    for package in ("optuna", "submitit"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(SweepError, match=f"needs {package}, .*: pip install {package}"):
            submission.check_installed()


def test_the_whole_command_submits_and_begins_nothing(cluster):
    """By launch/sweep.py, with what it refuses before: data that is not there."""
    script = pathlib.Path(submission.__file__).parents[3] / "launch" / "sweep.py"
    command = [
        *(sys.executable, str(script), "--config=ablation:kernel_size", "--rows=k3,k9"),
        *("--workdir=swept", "--slurm=2", "--sbatch=--time=60"),
    ]

    def run(*more: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*command, *more], cwd=cluster.folder, capture_output=True, text=True, timeout=120
        )

    refused = run("--config.data.source=text:nowhere/*.txt")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: row k3: No file matches 'nowhere/*.txt'")
    assert not (cluster.folder / "asked").exists()
    done = run()
    assert done.returncode == 0, done.stderr
    assert "2 runners of 6 cells are in the queue: job 77; they print to swept/slurm/" in (
        done.stdout
    )
    assert not (cluster.folder / "swept" / "cells").exists()
    pickled = cluster.folder / "swept" / "slurm" / "77_0_submitted.pkl"
    task = DelayedSubmission.load(pickled).function
    assert task.folder == str(cluster.folder)
    assert f"--workdir={cluster.folder}/swept" in task.command
