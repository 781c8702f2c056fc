"""launch/xpk.sh and slurm.sh, whose schedulers start a run again by themselves, with commands that
play them.
"""

import os
import pathlib
import signal
import subprocess
import time

import pytest

from tests.launch.played_cloud import CAPACITY, DENIED, EXISTS, LAUNCH, NOT_FOUND, PLANNER, QUOTA

PLACE = ("--project=p", "--zone=us-east5-a", "--topology=v5p:4x4x4")
PROGRAM = ("--", "--config=configs/base.py", "--workdir=gs://bucket/a run")
# Notes what it is asked for; the files `answer` and `code` of its own name say what it does.
TOOL = """#!/bin/bash
echo "${{0##*/}} ${{*%%=*[$'\\n;']*}}" >>{folder}/asked
for word; do case $word in --command=*|--wrap=*) echo "${{word#*=}}" >{folder}/script;; esac; done
for file in {folder}/"${{0##*/}} $1 $2" {folder}/"${{0##*/}}"; do
  [ -e "$file" ] || continue
  head -n 1 "$file"
  code=$(sed -n 2p "$file")
  [ "$(wc -l <"$file")" -le 2 ] || sed -i 1,2d "$file"
  exit "${{code:-0}}"
done
"""


class Tools:
    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        (folder / "bin").mkdir()
        for name in ("gcloud", "xpk", "kubectl", "sbatch", "squeue", "sacct", "scancel"):
            file = folder / "bin" / name
            file.write_text(TOOL.format(folder=folder))
            file.chmod(0o755)
        (folder / "bin" / "python3").write_text(PLANNER)
        (folder / "bin" / "python3").chmod(0o755)
        (folder / "checkout").mkdir()
        (folder / "checkout" / "launch").symlink_to(LAUNCH)

    def answer(self, tool: str, *answers: tuple[str, int]) -> None:
        """What a tool says, call by call; the last answer stays."""
        (self.folder / tool).write_text("".join(f"{text}\n{code}\n" for text, code in answers))

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["bash", f"checkout/launch/{script}", *arguments],
            env={"PATH": f"{self.folder}/bin:/usr/bin:/bin", "HOME": str(self.folder)},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def asked(self) -> list[str]:
        """The commands, without their scripts."""
        file = self.folder / "asked"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line.partition(" --command")[0].partition(" --wrap")[0] for line in lines]

    @property
    def script(self) -> str:
        return (self.folder / "script").read_text()


@pytest.fixture
def tools(tmp_path):
    return Tools(tmp_path)


def error(result) -> str:
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return line


def verbs(tools, tool: str) -> list[str]:
    return [" ".join(line.split()[1:3]) for line in tools.asked() if line.startswith(tool)]


def test_xpk_all(tools):
    result = tools.run("xpk.sh", "all", *PLACE, "--spot", "--slices=2", *PROGRAM)
    assert result.returncode == 0, result.stderr
    assert verbs(tools, "xpk") == [
        "cluster create",
        "workload create",
        "workload list",
        "workload delete",
        "cluster delete",
    ]
    create, submit, *_ = [line for line in tools.asked() if line.startswith("xpk")]
    assert "--tpu-type=v5p-128 --num-slices=2 --spot" in create
    assert "--max-restarts=10 --restart-on-exit-codes=75" in submit
    assert "--base-docker-image=python:3.12 --script-dir=." in submit
    assert "python -m convbert_jax.main --config=configs/base.py" in tools.script
    assert "'--workdir=gs://bucket/a run' --multihost" in tools.script


def test_xpk_leaves_a_cluster_that_is_there_alone(tools):
    result = tools.run("xpk.sh", "all", *PLACE, "--cluster=theirs", "--image=mine", *PROGRAM)
    assert result.returncode == 0, result.stderr
    assert verbs(tools, "xpk") == ["workload create", "workload list", "workload delete"]
    assert all("--cluster=theirs" in line for line in tools.asked() if line.startswith("xpk"))
    assert "pip install" not in tools.script


@pytest.mark.parametrize(
    ("what", "fault", "says", "then"),
    [
        ("xpk cluster create", QUOTA, "the project's quota", ["cluster create"]),
        ("xpk cluster create", CAPACITY, "there is no capacity", ["cluster create"]),
        ("xpk cluster create", DENIED, "may not do this", ["cluster create"]),
        (
            "xpk workload create",
            EXISTS,
            "a run of this name",
            ["cluster create", "workload create"],
        ),
    ],
)
def test_faults_of_xpk_are_one_sentence_and_leave_nothing(tools, what, fault, says, then):
    tools.answer(what, (fault, 1))
    tools.answer("xpk workload delete", (NOT_FOUND, 1))
    result = tools.run("xpk.sh", "all", *PLACE, *PROGRAM)
    assert result.returncode == 1
    assert says in error(result)
    assert verbs(tools, "xpk") == [*then, "workload delete", "cluster delete"]


def test_xpk_says_that_a_run_failed_and_what_it_cannot_delete(tools):
    tools.answer("xpk workload list", ("the table", 125))
    result = tools.run("xpk.sh", "run", *PLACE, *PROGRAM)
    assert result.returncode == 1
    assert "the run failed, after 10 restarts" in error(result)
    tools.answer("xpk cluster delete", (DENIED, 1))
    result = tools.run("xpk.sh", "delete", *PLACE)
    assert result.returncode == 1
    assert "may cost money" in error(result)


def test_a_look_by_xpk_that_fails_deletes_nothing(tools):
    """Nor does a week, after which xpk waits no more."""
    looks = [("no network", 1), ("a week", 124), ("no network", 1), ("the table", 0)]
    tools.answer("xpk workload list", *looks)
    result = tools.run("xpk.sh", "all", *PLACE, "--every=0", *PROGRAM)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("cannot be seen now") == 2
    assert verbs(tools, "xpk")[2:] == [*["workload list"] * 4, "workload delete", "cluster delete"]
    tools.answer("xpk workload list", ("no such cluster", 1))
    result = tools.run("xpk.sh", "watch", *PLACE)
    assert result.returncode == 1
    assert "xpk cannot follow it (exit code 1)" in error(result)
    result = tools.run("xpk.sh", "run", *PLACE, "--every=0", *PROGRAM)
    assert result.returncode == 1
    assert result.stderr.count("cannot be seen now") == 59


def test_xpk_stop_waits_until_the_run_has_saved(tools):
    result = tools.run("xpk.sh", "stop", *PLACE)
    assert result.returncode == 0, result.stderr
    delete, wait = tools.asked()
    assert delete.startswith("xpk workload delete --workload=convbert-jax")
    assert wait.startswith("kubectl wait --for=delete pods --selector=")
    tools.answer("kubectl", ("error: timed out waiting for the condition on pods/x", 1))
    result = tools.run("xpk.sh", "stop", *PLACE)
    assert result.returncode == 1
    assert "could not be stopped: error: timed out waiting" in error(result)
    result = tools.run("xpk.sh", "delete", *PLACE)
    assert result.returncode == 0, result.stderr
    assert "may be lost: error: timed out" in result.stderr
    assert verbs(tools, "xpk")[-1] == "cluster delete"
    tools.answer("kubectl", ("error: no matching resources found", 1))
    assert tools.run("xpk.sh", "stop", *PLACE).returncode == 0


@pytest.mark.parametrize(
    ("does", "signal_sent", "expected"),
    [
        ("exit 0", False, 0),
        ("exit 1", False, 1),
        ("exit 75", False, 75),
        ("trap 'kill %1; echo saved; exit 75' TERM; sleep 20 & touch {up}; wait", True, 75),
    ],
)
def test_a_container_has_the_exit_code_of_the_program(tools, does, signal_sent, expected):
    """The script that xpk runs, as xpk runs it, with a Python that plays the program."""
    assert tools.run("xpk.sh", "run", *PLACE, *PROGRAM).returncode == 0
    up = tools.folder / "up"
    for name, text in (("python", does.format(up=up)), ("pip", "exit 0")):
        (tools.folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools.folder / "bin" / name).chmod(0o755)
    (tools.folder / "requirements-3.12.lock").write_text("jax==1\n")
    process = subprocess.Popen(
        ["bash", "-c", XPK.replace("COMMAND", tools.script)],
        cwd=tools.folder,
        env={"PATH": f"{tools.folder}/bin:/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    if signal_sent:
        wait_for(up, process)
        process.send_signal(signal.SIGTERM)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == expected
    assert ("saved" in out) == signal_sent


# How a container of xpk starts a command and hands TERM on: to the shell that it begins.
XPK = """
handed_on() ( kill -TERM $!; )
trap handed_on TERM
(COMMAND) & first=$!
while kill -0 $first 2>/dev/null; do sleep 0.1; done
wait $first
"""


def wait_for(file: pathlib.Path, process) -> None:
    limit = time.monotonic() + 60
    while not file.exists():
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.05)


def slurm(tools, verb: str, *arguments: str):
    return tools.run("slurm.sh", verb, "--every=0", "--name=t-slurm", *arguments)


def test_slurm_submits_and_follows(tools):
    tools.answer("sbatch", ("7;cluster", 0))
    states = ("PENDING|0:0", "RUNNING|0:0", "COMPLETED|0:0")
    tools.answer("sacct", *((state, 0) for state in states))
    result = slurm(tools, "run", "--nodes=4", "--sbatch=--gpus-per-node=8 --time=60", *PROGRAM)
    assert result.returncode == 0, result.stderr
    for state in states:
        assert f"Job 7: {state}" in result.stderr
    (line,) = [line for line in tools.asked() if line.startswith("sbatch")]
    for words in ("--nodes=4", "--requeue", "--signal=B:USR1@120", "--gpus-per-node=8 --time=60"):
        assert words in line
    assert "'--workdir=gs://bucket/a run' --multihost" in tools.script


@pytest.mark.parametrize(
    ("state", "code"), [("FAILED|2:0", 2), ("CANCELLED by 5|0:15", 1), ("TIMEOUT|0:0", 1)]
)
def test_slurm_ends_with_the_code_of_the_run(tools, state, code):
    log = tools.folder / "checkout" / "runs" / "slurm-t-slurm.log"
    log.parent.mkdir()
    log.write_text("error: its own reason\n")
    tools.answer("squeue", ("7", 0), ("", 0))
    tools.answer("sacct", (state, 0))
    result = slurm(tools, "watch")
    assert result.returncode == code
    assert "error: its own reason" in result.stderr
    assert f"ended as {state.partition('|')[0]}" in result.stderr


def test_slurm_follows_a_job_that_was_put_back(tools):
    """After a lost node Slurm puts the job back by itself: it has not ended."""
    tools.answer("squeue", *[("7", 0)] * 4, ("", 0))
    states = ("RUNNING|0:0", "NODE_FAIL|1:0", "PREEMPTED|0:0", "COMPLETED|0:0")
    tools.answer("sacct", *((state, 0) for state in states))
    result = slurm(tools, "watch")
    assert result.returncode == 0, result.stderr
    assert [line for line in result.stderr.splitlines() if "error" in line] == []


@pytest.mark.parametrize("verb", ["stop", "delete"])
def test_slurm_ends_a_job_after_it_has_saved(tools, verb):
    tools.answer("squeue", ("7", 0), ("", 0))
    assert slurm(tools, verb).returncode == 0
    asked = [line for line in tools.asked() if line.startswith("scancel")]
    assert asked == [
        "scancel --state=PENDING --me --name=t-slurm",
        "scancel --batch --signal=USR2 --state=RUNNING --me --name=t-slurm",
    ]
    tools.answer("scancel", ("", 1), ("", 0))
    result = slurm(tools, verb)
    if verb == "stop":
        assert "could not be stopped" in error(result)
    else:
        assert "checkpoint is lost" in result.stderr
        assert tools.asked()[-1] == "scancel --me --name=t-slurm"


def test_faults_of_slurm_are_one_sentence(tools):
    tools.answer("sbatch", ("sbatch: error: Batch job submission failed: Invalid partition", 1))
    result = slurm(tools, "run", *PROGRAM)
    assert result.returncode == 1
    assert "Invalid partition" in error(result)
    assert "no job t-slurm is in the queue" in error(slurm(tools, "watch"))
    tools.answer("squeue", ("7", 0))
    assert "is in the queue already" in error(slurm(tools, "run", *PROGRAM))


class Job:
    """The script that sbatch is given, with commands that play srun, scancel and scontrol."""

    def __init__(self, tools, *does: str, restarted: int = 0):
        """Task i does `does[i]`, a line of shell in which {up} is to be made."""
        tools.answer("sbatch", ("7", 0))
        tools.answer("sacct", ("COMPLETED|0:0", 0))
        assert slurm(tools, "run", *PROGRAM).returncode == 0
        self.folder, checkout = tools.folder, tools.folder / "checkout"
        self.tasks = [self.folder / f"up-{i}" for i in range(len(does))]
        lines = [
            f"( {does[i].format(up=self.tasks[i])} ) & pids+=($!)\necho $! >>{self.folder}/tasks"
            for i in range(len(does))
        ]
        # As srun does: each code is told, the highest is its own.
        highest = (
            'for i in "${!pids[@]}"; do wait ${pids[i]}; code=$?\n'
            'told="srun: error: node$i: task $i: Exited with exit code $code"\n'
            '[ $code = 0 ] || echo "$told" >&2\n'
            "[ $code -le $most ] || most=$code\ndone\nexit $most"
        )
        plays = {
            "srun": "most=0\n" + "\n".join(lines) + f"\n{highest}",
            "scancel": f"kill -TERM $(cat {self.folder}/tasks)",
            "scontrol": f'echo "$*" >>{self.folder}/requeued',
            "sleep": 'exec /bin/sleep "${1/60/0}"',
        }
        for name, text in plays.items():
            (self.folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
            (self.folder / "bin" / name).chmod(0o755)
        self.by_slurm("RUNNING")
        with open(checkout / "runs" / "slurm-t-slurm.log", "a") as log:
            log.write("srun: error: node0: task 0: Exited with exit code 2\n")  # an earlier start
            log.flush()
            self.process = subprocess.Popen(
                ["sh", "-c", tools.script],  # sbatch's --wrap is for sh
                cwd=checkout,
                stdout=log,
                stderr=log,
                env={
                    "PATH": f"{self.folder}/bin:/usr/bin:/bin",
                    "SLURM_JOB_ID": "7",
                    "SLURM_RESTART_COUNT": str(restarted),
                },
            )

    def by_slurm(self, state: str) -> None:
        (self.folder / "squeue").write_text(f"{state}\n0\n")

    def send(self, number: signal.Signals, *, tasks: bool, script: bool) -> None:
        """A signal, when all tasks are there to hear it."""
        for task in self.tasks:
            wait_for(task, self.process)
        for pid in (self.folder / "tasks").read_text().split() if tasks else ():
            os.kill(int(pid), number)
        if script:
            self.process.send_signal(number)

    def end(self) -> tuple[int, bool]:
        """Its exit code, and whether it has put itself back."""
        code = self.process.wait(timeout=60)
        requeued = self.folder / "requeued"
        if requeued.exists():
            assert requeued.read_text() == "requeue 7\n"
        return code, requeued.exists()


SAVES = "trap 'kill %1; exit 75' TERM; sleep 20 & touch {up}; wait"


@pytest.mark.parametrize(
    ("does", "restarted", "expected"),
    [
        (["exit 0"], 0, (0, False)),
        (["exit 2"], 0, (2, False)),
        (["exit 75"], 0, (75, True)),
        (["exit 75"], 10, (75, False)),
        (["exit 137"], 9, (137, True)),
        (["exit 75", "exit 1", "exit 75"], 0, (1, False)),
        (["exit 1", "exit 137"], 0, (1, False)),
        (["exit 75", "exit 75"], 0, (75, True)),
    ],
)
def test_the_job_puts_itself_back(tools, does, restarted, expected):
    """After 75 and a kill, unless a task ended with an error of its own."""
    assert Job(tools, *does, restarted=restarted).end() == expected


@pytest.mark.parametrize(
    ("number", "tasks", "script"),
    [
        (signal.SIGTERM, True, False),  # preemption, with GraceTime
        (signal.SIGTERM, True, True),  # the same, where Slurm also tells the script
        (signal.SIGUSR1, False, True),  # the time is almost up
    ],
)
def test_a_job_that_is_told_to_end_puts_itself_back(tools, number, tasks, script):
    job = Job(tools, SAVES, SAVES)
    job.send(number, tasks=tasks, script=script)
    assert job.end() == (75, True)


def test_a_job_that_was_stopped_or_cancelled_stays_away(tools):
    job = Job(tools, SAVES, SAVES)
    job.send(signal.SIGUSR2, tasks=False, script=True)
    assert job.end() == (75, False)
    (tools.folder / "tasks").unlink()
    for task in job.tasks:
        task.unlink()
    (tools.folder / "squeue").unlink()
    job = Job(tools, SAVES)
    job.by_slurm("COMPLETING")
    job.send(signal.SIGTERM, tasks=True, script=True)
    assert job.end() == (75, False)
