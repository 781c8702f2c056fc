"""launch/tpu_vm.sh and gce.sh against a cloud that is played: the way of a run, and its faults."""

import shutil
import signal
import subprocess

import pytest

from tests.launch import played_cloud
from tests.launch.played_cloud import Cloud

HOST = ("--project=p", "--zone=us-east5-a", "--every=0")
PROGRAM = ("--", "--config=configs/base.py", "--workdir=gs://bucket/a run")
CREATE = {"tpu_vm.sh": "queued-resources create", "gce.sh": "managed create"}
DELETE = {"tpu_vm.sh": "queued-resources delete", "gce.sh": "managed delete"}
SLICE = "--topology=v5p:2x2x2"  # two hosts

both = pytest.mark.parametrize("script", ["tpu_vm.sh", "gce.sh"])


@pytest.fixture
def cloud(tmp_path):
    cloud = Cloud(tmp_path)
    yield cloud
    for process in cloud.folder.glob("host-*/.convbert_jax/process"):
        assert not played_cloud.is_running(int(process.read_text())), "a test left a program"


def errors(result) -> list[str]:
    return [line for line in result.stderr.splitlines() if line.startswith("error: ")]


@both
def test_all_is_create_run_delete(cloud, script):
    result = cloud.run(script, "all", SLICE, "--spot", *HOST, *PROGRAM)
    assert result.returncode == 0, result.stderr
    assert errors(result) == []
    assert cloud.count(CREATE[script]) == cloud.count(DELETE[script]) == 1
    assert not cloud.is_there
    line = "-m convbert_jax.main --config=configs/base.py --workdir=gs://bucket/a run --multihost"
    assert cloud.started == [line] * 2


@both
def test_the_verbs_one_by_one(cloud, script):
    where = (SLICE, *HOST)
    assert cloud.run(script, "create", *where, "--no-plan").returncode == 0
    assert cloud.is_there
    for host in (1, 2):
        place = cloud.folder / f"host-{host}"
        assert (place / "convbert_jax" / "launch" / script).exists()
        assert (place / "convbert_jax" / ".venv" / "versions").read_text() == "jax==1\n"
        assert "--constraint .venv/versions .[tpu,buckets]" in (place / "uv-asked").read_text()
    result = cloud.run(script, "watch", *where)
    assert result.returncode == 1
    assert "no run was started" in errors(result)[0]
    result = cloud.run(script, "create", *where, "--no-plan")
    assert result.returncode == 0
    assert "is there already (ready)" in result.stderr
    assert cloud.run(script, "run", *where, *PROGRAM).returncode == 0
    assert cloud.run(script, "watch", *where).returncode == 0
    assert cloud.count(CREATE[script]) == 1
    assert cloud.run(script, "delete", *where).returncode == 0
    assert not cloud.is_there
    result = cloud.run(script, "delete", *where)
    assert result.returncode == 0
    assert errors(result) == []


@both
def test_a_machine_that_is_taken_away_is_made_again(cloud, script):
    """While the program runs on both hosts; at the second start they finish."""
    cloud.program(1, "echo lost >$HOME/../machine; sleep 600", "exit 0")
    cloud.program(2, "sleep 600", "exit 0")
    result = cloud.run(script, "all", SLICE, *HOST, *PROGRAM)
    assert result.returncode == 0, result.stderr
    assert "was taken away" in result.stderr
    assert "restart 1 of 10" in result.stderr
    assert cloud.count(CREATE[script]) == 2
    assert len(cloud.started) == 4
    assert not cloud.is_there


@both
def test_exit_code_75_starts_again_on_the_same_machine(cloud, script):
    """A process that was killed, a signal that stopped the run well, and peers that ended so."""
    cloud.program(1, "exit 75", "exit 75", "exit 0")
    cloud.program(2, "kill -KILL $$", "exit 75", "exit 0")
    result = cloud.run(script, "all", SLICE, *HOST, *PROGRAM)
    assert result.returncode == 0, result.stderr
    assert cloud.count(CREATE[script]) == 1
    assert len(cloud.started) == 6


@both
def test_a_host_that_was_made_anew_starts_again(cloud, script):
    cloud.program(2, "rm -r $HOME/.convbert_jax; exit 0", "exit 0")
    result = cloud.run(script, "all", SLICE, *HOST, *PROGRAM)
    assert result.returncode == 0, result.stderr
    assert "a host was made anew" in result.stderr
    assert len(cloud.started) == 4


TOKENS = "ERROR: (gcloud) There was a problem refreshing your tokens. Run: gcloud auth login"


@both
@pytest.mark.parametrize("fault", [TOKENS, played_cloud.UNREACHABLE, "ERROR: (gcloud) HTTP 503"])
def test_a_look_that_fails_ends_no_run(cloud, script, fault):
    """A network that is down where this is started, say: the machine would be deleted for it."""
    for host in (1, 2):
        cloud.program(host, "until [ -e $HOME/../enough ]; do sleep 0.1; done")
    process = cloud.start(script, "all", SLICE, *HOST, *PROGRAM)
    cloud.wait_for(lambda: len(cloud.started) == 2, process)
    told = cloud.folder / "told-ssh"
    looks = cloud.count(" ssh ")
    cloud.wait_for(lambda: cloud.count(" ssh ") > looks + 4, process)  # it was seen
    cloud.tell("ssh", *[fault] * 20)
    cloud.wait_for(lambda: not told.read_text(), process)
    cloud.set(enough="")
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "convbert-jax cannot be seen now: " in said
    assert cloud.count(CREATE[script]) == cloud.count(DELETE[script]) == 1


def test_why_the_hosts_of_a_group_cannot_be_listed_is_said(cloud):
    """And not what the command before has said."""
    for host in (1, 2):
        cloud.program(host, "until [ -e $HOME/../enough ]; do sleep 0.1; done")
    process = cloud.start("gce.sh", "all", SLICE, *HOST, *PROGRAM)
    cloud.wait_for(lambda: len(cloud.started) == 2, process)
    looks = cloud.count(" ssh ")
    cloud.wait_for(lambda: cloud.count(" ssh ") > looks + 4, process)
    cloud.tell("list", *["ERROR: (gcloud) HTTP 503"] * 8)
    cloud.wait_for(lambda: not (cloud.folder / "told-list").read_text(), process)
    cloud.set(enough="")
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "cannot be seen now: ERROR: (gcloud) HTTP 503" in said


@both
def test_a_machine_that_is_never_seen_again_is_told(cloud, script):
    for host in (1, 2):
        cloud.program(host, "sleep 120")
    assert cloud.run(script, "create", SLICE, *HOST, "--no-plan").returncode == 0
    process = cloud.start(script, "run", SLICE, *HOST, *PROGRAM)
    cloud.wait_for(lambda: len(cloud.started) == 2, process)
    looks = cloud.count(" ssh ")
    cloud.wait_for(lambda: cloud.count(" ssh ") > looks + 4, process)
    cloud.tell("ssh", *[TOKENS] * 1_000)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "60 looks at it in a row have failed: gcloud knows no account" in said
    cloud.tell("ssh")
    assert cloud.run(script, "delete", SLICE, *HOST).returncode == 0


@both
def test_restarts_have_a_limit(cloud, script):
    for host in (1, 2):
        cloud.program(host, *["exit 75"] * 9)
    result = cloud.run(script, "all", SLICE, "--restarts=2", *HOST, *PROGRAM)
    assert result.returncode == 75
    assert len(cloud.started) == 6
    (line,) = errors(result)
    assert "lost 3 times, and --restarts=2" in line
    assert not cloud.is_there, "at the end it is deleted all the same"


@both
@pytest.mark.parametrize("keep", [False, True])
def test_an_error_of_the_program_is_shown_and_not_tried_again(cloud, script, keep):
    cloud.program(1, "exit 75")
    cloud.program(2, "echo 'error: its own reason'; exit 1")
    flags = ("--keep",) if keep else ()
    result = cloud.run(script, "all", SLICE, *flags, *HOST, *PROGRAM)
    assert result.returncode == 1
    assert "error: its own reason" in result.stderr
    assert "ended with exit code 1" in errors(result)[-1]
    assert len(cloud.started) == 2
    assert cloud.is_there == keep


@both
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (played_cloud.QUOTA, "the project's quota in us-east5-a is used up"),
        (played_cloud.DENIED, "the account may not do this in p"),
        (played_cloud.LOGIN, "run: gcloud auth login"),
        ("ERROR: (gcloud) something new", "ERROR: (gcloud) something new"),
    ],
)
def test_a_fault_that_waiting_does_not_mend(cloud, script, fault, says):
    cloud.tell("create", fault)
    result = cloud.run(script, "all", SLICE, *HOST, *PROGRAM)
    assert result.returncode == 1
    (line,) = errors(result)
    assert says in line
    assert cloud.count(CREATE[script]) == 1
    assert cloud.started == []


@both
def test_no_capacity_is_waited_for(cloud, script):
    cloud.tell("create", played_cloud.CAPACITY, played_cloud.CAPACITY)
    result = cloud.run(script, "all", SLICE, *HOST, *PROGRAM)
    assert result.returncode == 0, result.stderr
    assert cloud.count(CREATE[script]) == 3


@both
def test_a_machine_that_exists_after_all_is_waited_for(cloud, script):
    """Asked for by another, or by an answer that was lost."""
    cloud.tell("create", played_cloud.EXISTS)
    cloud.tell("parts", played_cloud.EXISTS, played_cloud.EXISTS)
    result = cloud.run(script, "create", SLICE, *HOST, "--no-plan", "--restarts=0")
    assert result.returncode == 75  # it was never there, as it turns out
    assert "absent before it was ready" in result.stderr


@both
@pytest.mark.parametrize("fault", [played_cloud.SSH, played_cloud.UNREACHABLE])
def test_a_new_host_may_not_answer_yet(cloud, script, fault):
    cloud.tell("ssh", fault, fault)
    result = cloud.run(script, "create", SLICE, *HOST, "--no-plan")
    assert result.returncode == 0, result.stderr


@both
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (played_cloud.SSH, "refuses the ssh key; run: gcloud compute config-ssh"),
        (played_cloud.UNREACHABLE, "does the network let port 22 in?"),
    ],
)
def test_a_host_that_never_answers(cloud, script, fault, says):
    cloud.tell("ssh", *[fault] * 99)
    result = cloud.run(script, "create", SLICE, *HOST, "--no-plan")
    assert result.returncode == 1
    (line,) = errors(result)
    assert says in line


@both
def test_a_machine_that_cannot_be_deleted_is_told_with_the_command(cloud, script):
    cloud.tell("delete", *[played_cloud.DENIED] * 9)
    result = cloud.run(script, "all", SLICE, *HOST, *PROGRAM)
    (line,) = errors(result)
    assert "may cost money" in line
    command = line.partition("bash launch/")[2].split()
    assert command[:2] == [script, "delete"]
    (cloud.folder / "told-delete").unlink()
    assert cloud.run(*command).returncode == 0
    assert not cloud.is_there


@both
def test_a_queue_is_waited_in_and_a_failed_request_asked_for_again(cloud, script):
    if script == "tpu_vm.sh":
        cloud.tell("queue", "WAITING_FOR_RESOURCES", "PROVISIONING", "FAILED")
    else:
        two = ("PROVISIONING", "STAGING"), ("STAGING", "RUNNING"), ("STOPPED",), ("STOPPED",)
        cloud.tell("node", *[state for states in two for state in (*states, states[0])[:2]])
    result = cloud.run(script, "all", SLICE, *HOST, *PROGRAM)
    assert result.returncode == 0, result.stderr
    assert "lost before it was ready" in result.stderr


@both
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_deletes(cloud, script, number):
    for host in (1, 2):
        cloud.program(host, "trap 'echo saved >>$HOME/../saved; exit 75' TERM; sleep 600 & wait")
    process = cloud.start(script, "all", SLICE, *HOST, *PROGRAM)
    cloud.wait_for(lambda: len(cloud.started) == 2, process)
    process.send_signal(number)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 130, text
    assert (cloud.folder / "saved").read_text() == "saved\nsaved\n"
    assert not cloud.is_there


@both
def test_run_goes_on_when_it_is_no_longer_followed(cloud, script):
    assert cloud.run(script, "create", SLICE, *HOST, "--no-plan").returncode == 0
    for host in (1, 2):
        cloud.program(host, "until [ -e $HOME/../enough ]; do sleep 0.1; done; exit 0")
    process = cloud.start(script, "run", SLICE, *HOST, *PROGRAM)
    cloud.wait_for(lambda: len(cloud.started) == 2, process)
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the run goes on" in text
    (cloud.folder / "enough").touch()
    result = cloud.run(script, "watch", SLICE, *HOST)
    assert result.returncode == 0, result.stderr
    assert len(cloud.started) == 2


SAVES = "trap 'echo saved >>$HOME/../saved; exit 75' TERM; touch $HOME/../up-$$; sleep 600 & wait"


def _start_run(cloud, script, *does) -> subprocess.Popen:
    """A run that is followed, of which every host does the same."""
    assert cloud.run(script, "create", SLICE, *HOST, "--no-plan").returncode == 0
    for host in (1, 2):
        cloud.program(host, *does)
    process = cloud.start(script, "run", SLICE, *HOST, *PROGRAM)
    cloud.wait_for(lambda: len(list(cloud.folder.glob("up-*"))) == 2, process)
    return process


@both
def test_a_run_that_is_stopped_saves_and_keeps_the_machine(cloud, script):
    """Who follows it in another terminal does not start it again; the verb run does."""
    process = _start_run(cloud, script, SAVES, "exit 0")
    result = cloud.run(script, "stop", SLICE, *HOST)
    assert result.returncode == 0, result.stderr
    assert (cloud.folder / "saved").read_text() == "saved\nsaved\n"
    _, text = process.communicate(timeout=60)
    assert process.returncode == 75, text
    assert "the run was stopped; the verb run goes on" in text
    assert len(cloud.started) == 2
    assert cloud.is_there
    assert cloud.run(script, "stop", SLICE, *HOST).returncode == 0
    assert cloud.run(script, "run", SLICE, *HOST, *PROGRAM).returncode == 0
    assert len(cloud.started) == 4


@both
def test_delete_saves_first(cloud, script):
    process = _start_run(cloud, script, SAVES)
    result = cloud.run(script, "delete", SLICE, *HOST)
    assert result.returncode == 0, result.stderr
    assert (cloud.folder / "saved").read_text() == "saved\nsaved\n"
    assert not cloud.is_there
    process.communicate(timeout=60)
    assert process.returncode in (1, 75)  # who follows sees that it was stopped, or that it is gone
    assert len(cloud.started) == 2


@both
def test_delete_says_what_is_lost(cloud, script):
    assert cloud.run(script, "create", SLICE, *HOST, "--no-plan").returncode == 0
    cloud.tell("ssh", played_cloud.UNREACHABLE, played_cloud.UNREACHABLE)
    result = cloud.run(script, "delete", SLICE, *HOST)
    assert result.returncode == 0, result.stderr
    assert "since the last checkpoint is lost: a host cannot be reached by ssh" in result.stderr
    assert not cloud.is_there
    result = cloud.run(script, "stop", SLICE, *HOST)
    assert result.returncode == 1
    assert "is not there, or not ready" in errors(result)[0]


@both
def test_an_exit_code_that_comes_late_is_waited_for(cloud, script):
    assert cloud.run(script, "create", SLICE, *HOST, "--no-plan").returncode == 0
    gone = subprocess.Popen(["true"])
    gone.wait()
    for host in (1, 2):
        folder = cloud.folder / f"host-{host}" / ".convbert_jax"
        folder.mkdir()
        (folder / "process").write_text(f"{gone.pid}\n")
        (folder / "log").write_text("Done.\n")
        subprocess.Popen(["bash", "-c", f"sleep 2; echo 0 >{folder}/exit"])
    result = cloud.run(script, "watch", SLICE, *HOST)
    assert result.returncode == 0, result.stderr
    assert not cloud.started


def test_one_host_is_one_machine_without_a_group(tmp_path):
    cloud = Cloud(tmp_path, hosts=1)
    result = cloud.run("gce.sh", "all", "--topology=v6e:2x4", *HOST, *PROGRAM)
    assert result.returncode == 0, result.stderr
    assert cloud.count("instances create convbert-jax --machine-type=ct6e-standard-8t") == 1
    assert cloud.count("instance-groups") == cloud.count("workload-policy") == 0
    assert cloud.started == [
        "-m convbert_jax.main --config=configs/base.py --workdir=gs://bucket/a run"
    ]
    assert not cloud.is_there


def _plays_the_plan(cloud, code: int) -> None:
    """A Python that writes what it was asked for and ends with `code`."""
    python = cloud.folder / "bin" / "python3"
    python.write_text(f'#!/bin/bash\necho "$*" >>{cloud.folder}/planned\nexit {code}\n')
    python.chmod(0o755)


PLANNED = (
    "-m convbert_jax.main --mode=plan --topology=v5p:2x2x2 --config=configs/base.py "
    "--workdir=gs://bucket/a run\n"
)


@pytest.mark.parametrize("script", ["tpu_vm.sh", "gce.sh", "xpk.sh"])
@pytest.mark.parametrize("code", [0, 1])
def test_a_plan_asks_no_cloud(cloud, script, code):
    _plays_the_plan(cloud, code)
    result = cloud.run(script, "plan", SLICE, *PROGRAM)
    assert (result.returncode, result.stderr) == (code, "")
    assert (cloud.folder / "planned").read_text() == PLANNED
    assert cloud.asked() == []


@both
def test_what_does_not_fit_is_not_asked_for(cloud, script):
    _plays_the_plan(cloud, 1)
    result = cloud.run(script, "all", SLICE, *HOST, *PROGRAM)
    assert result.returncode == 1
    assert "nothing was asked for" in errors(result)[0]
    result = cloud.run(script, "create", SLICE, *HOST, *PROGRAM)
    assert result.returncode == 1
    assert cloud.count(CREATE[script]) == 0
    assert (cloud.folder / "planned").read_text() == 2 * PLANNED
    _plays_the_plan(cloud, 0)
    result = cloud.run(script, "all", SLICE, *HOST, *PROGRAM)
    assert result.returncode == 0, result.stderr
    assert cloud.count(CREATE[script]) == cloud.count(DELETE[script]) == 1
    assert (cloud.folder / "planned").read_text() == 3 * PLANNED
    result = cloud.run(script, "all", SLICE, "--no-plan", *HOST, *PROGRAM)
    assert result.returncode == 0, result.stderr
    assert (cloud.folder / "planned").read_text() == 3 * PLANNED


@both
def test_a_config_that_the_hosts_would_not_get_is_told_first(cloud, script):
    """They get what git lists; without this a machine is waited and paid for first."""
    (cloud.checkout / "my configs").mkdir()
    (cloud.checkout / "my configs" / "mine.py").touch()
    (cloud.checkout / "vocab.txt").touch()
    program = ("--", "--config=my configs/mine.py:large", "--workdir=gs://bucket/run")
    vocabulary = "--config.tokenizer.path=vocab.txt"
    for verb in ("create", "all"):
        result = cloud.run(script, verb, SLICE, *HOST, *program)
        assert result.returncode == 2
        assert "git add my configs/mine.py first" in errors(result)[0]
        result = cloud.run(script, verb, SLICE, *HOST, *PROGRAM, vocabulary)
        assert result.returncode == 2
        assert f"{vocabulary}: git does not list vocab.txt" in errors(result)[0]
    assert cloud.asked() == []
    subprocess.run(["git", "add", "."], cwd=cloud.checkout, check=True)
    assert cloud.run(script, "all", SLICE, *HOST, *program, vocabulary).returncode == 0
    assert (
        f"--config=my configs/mine.py:large --workdir=gs://bucket/run {vocabulary}"
        in (cloud.started[0])
    )


@both
def test_a_folder_that_is_no_checkout_is_told_first(cloud, script):
    shutil.rmtree(cloud.checkout / ".git")
    result = cloud.run(script, "all", SLICE, *HOST, *PROGRAM)
    assert result.returncode == 1
    assert "is no git checkout" in errors(result)[0]
    assert cloud.asked() == []


# As on Ubuntu 24.04: pip installs nothing beside the system's packages unless it is told to.
MANAGED = """#!/bin/bash
if [ "$PIP_BREAK_SYSTEM_PACKAGES" != 1 ]; then echo externally-managed-environment >&2; exit 1; fi
cp "$HOME/uv" "$HOME/.local/bin"
"""


def test_a_host_whose_python_is_the_systems_gets_uv(cloud):
    host = cloud.folder / "host"
    (host / ".local" / "bin").mkdir(parents=True)
    (host / "convbert_jax").mkdir()
    shutil.copy(cloud.folder / "uv", host)
    python = host / ".local" / "bin" / "python3"
    python.write_text(MANAGED)
    python.chmod(0o755)
    archive = ["tar", "-czf", host / "convbert_jax.tar.gz", "-C", cloud.checkout, "."]
    subprocess.run(archive, check=True)
    sourced = ". launch/machines/command_line.sh; . launch/machines/hosts.sh; "
    result = subprocess.run(
        ["bash", "-c", sourced + 'eval "$(install_text)"'],
        cwd=cloud.checkout,
        env={"HOME": str(host), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert (host / "convbert_jax" / ".venv" / "versions").exists()
