"""What the launch scripts answer before they ask any cloud: wrong command lines, --dry-run."""

import re
import shlex
import shutil
import subprocess

import pytest

from tests.launch.played_cloud import LAUNCH, Cloud

PLACE = ("--project=p", "--zone=us-east5-a")
PROGRAM = ("--", "--config=configs/base.py", "--workdir=gs://bucket/it's a run")
SCRIPTS = {  # what each needs
    "tpu_vm.sh": ("--topology=v5e:4x4", *PLACE),
    "gce.sh": ("--topology=v6e:4x4", *PLACE),
    "xpk.sh": ("--topology=v5p:4x4x4", *PLACE),
    "slurm.sh": ("--nodes=2",),
}
of_google = pytest.mark.parametrize("script", ["tpu_vm.sh", "gce.sh", "xpk.sh"])
each = pytest.mark.parametrize("script", SCRIPTS)


def test_shellcheck():
    if not shutil.which("shellcheck"):
        pytest.skip("needs shellcheck: apt-get install shellcheck")
    scripts = sorted(LAUNCH.glob("*.sh"))
    result = subprocess.run(
        ["shellcheck", "--external-sources", "--check-sourced", *scripts],
        cwd=LAUNCH.parent,
        capture_output=True,
    )
    assert result.returncode == 0, result.stdout.decode()


@pytest.fixture
def cloud(tmp_path):
    return Cloud(tmp_path)


def refuse(cloud, script, *arguments, code=2) -> str:
    """The one sentence with which a command line is refused, and nothing asked of a cloud."""
    result = cloud.run(script, *arguments)
    assert result.returncode == code, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert [asked for asked in cloud.asked() if "config get-value" not in asked] == []
    return line


@each
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "create, run, watch, stop, delete"),
        (("destroy",), "'destroy' is none of"),
        (("destroy",), " run --dry-run shows what would be done"),
        (("run", "--nmae=x"), "--nmae=x is not understood; "),
        (("run", "--config=configs/base.py"), "what is for the program comes after a --"),
        (("run", "--dry-run=1"), "--dry-run=1 is not understood"),
        (("run", "--name=Mine"), "--name=Mine: small letters"),
        (("run", "--restarts=many"), "--restarts=many is not a number"),
    ],
)
def test_wrong_command_lines(cloud, script, arguments, says):
    assert says in refuse(cloud, script, *arguments)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--gpus-per-node=8 --nodes=4", "--nodes=4 is --nodes=N of launch/slurm.sh; say it there"),
        ("-N 4", "-N is --nodes=N"),
        ("--job-name=mine", "--job-name=mine is --name=NAME"),
        ("--output=my.log", "--output=my.log is set by launch/slurm.sh itself; leave it out"),
        ("--ntasks-per-node=8", "set by launch/slurm.sh itself"),
        ("--comment='my run'", "told apart by blanks; leave quotation marks out"),
    ],
)
def test_what_slurm_sh_says_to_sbatch_itself(cloud, words, says):
    """Four nodes that the program is not told of would be four runs in one folder."""
    assert says in refuse(cloud, "slurm.sh", "run", f"--sbatch={words}", "--", "--config=tiny")


def test_other_words_for_sbatch_are_handed_on(cloud):
    words = "--nodelist=a,b --nice=5 --exclusive --time=1:00:00 -p gpu"
    lines = words.replace(" --time", "\n--time")
    result = cloud.run("slurm.sh", "run", "--dry-run", f"--sbatch={lines}", "--", "--config=tiny")
    assert result.returncode == 0, result.stderr
    assert f" {words} '--wrap=" in result.stdout


@of_google
@pytest.mark.parametrize(
    ("topology", "says"),
    [
        ("", "no topology; add --topology=v5e:4x4"),
        ("v5e:3x3", "does not exist; v5e has 1x1, 2x2, 2x4, 4x4"),
        ("v6e:32x32", "does not exist"),
        ("v5e:4x4x4", "does not exist"),
        ("v5p:4x4", "does not exist; v5p has 2x2x1"),
        ("v5p:8x4x4", "the smaller first"),
        ("tpu7x:4x4x6", "multiples of 4"),
        ("v5p:04x4x4", "does not exist"),
        ("h100:8", "the chips are v4, v5e, v5p, v6e and tpu7x"),
    ],
)
def test_topologies_that_do_not_exist(cloud, script, topology, says):
    assert says in refuse(cloud, script, "all", f"--topology={topology}", *PLACE, *PROGRAM)


@pytest.mark.parametrize(("script", "chip"), [("tpu_vm.sh", "tpu7x:2x2x2"), ("gce.sh", "v5e:4x4")])
def test_chips_that_a_service_has_not(cloud, script, chip):
    assert "; take launch/" in refuse(cloud, script, "all", f"--topology={chip}", *PLACE, *PROGRAM)


@pytest.mark.parametrize(
    ("topology", "name", "hosts"),
    [
        ("v5e:1x1", "v5litepod-1", 1),
        ("v5e:2x4", "v5litepod-8", 1),
        ("v5e:16x16", "v5litepod-256", 64),
        ("v6e:4x8", "v6e-32", 8),
        ("v4:2x2x4", "v4-32", 4),
        ("v5p:2x2x1", "v5p-8", 1),
        ("v5p:4x4x4", "v5p-128", 16),
        ("v5p:4x4x12", "v5p-384", 48),
    ],
)
def test_the_names_of_topologies(cloud, topology, name, hosts):
    result = cloud.run(
        "tpu_vm.sh", "create", f"--topology={topology}", *PLACE, "--no-plan", "--dry-run"
    )
    assert f"--accelerator-type={name} " in result.stdout
    assert f" {hosts} hosts" in result.stderr


@of_google
def test_project_and_zone(cloud, script):
    flags = ("all", SCRIPTS[script][0])
    assert "no project; add --project=" in refuse(cloud, script, *flags, *PROGRAM)
    assert "no zone; add --zone=" in refuse(cloud, script, *flags, "--project=p", *PROGRAM)
    wrong = ("--project=p", "--zone=us-east5")
    assert "is not a zone" in refuse(cloud, script, *flags, *wrong, *PROGRAM)


def test_project_and_zone_of_gcloud(cloud):
    cloud.set(project="theirs", zone="us-west4-a")
    flags = (SCRIPTS["tpu_vm.sh"][0], "--no-plan", "--every=0")
    result = cloud.run("tpu_vm.sh", "create", *flags)
    assert result.returncode == 0, result.stderr
    assert cloud.count("queued-resources create") == 1
    assert cloud.count("--zone=us-west4-a --project=theirs") > 3


@pytest.mark.parametrize(
    ("script", "tool", "verb"),
    [
        ("tpu_vm.sh", "gcloud", "create"),
        ("gce.sh", "gcloud", "delete"),
        ("xpk.sh", "gcloud", "create"),
        ("xpk.sh", "xpk", "create"),
        ("slurm.sh", "sbatch", "run"),
        ("slurm.sh", "scancel", "delete"),
    ],
)
def test_a_tool_that_is_not_here(tmp_path, script, tool, verb):
    cloud = Cloud(tmp_path, tools=("gcloud",) if tool == "xpk" else ())
    says = refuse(cloud, script, verb, *SCRIPTS[script], code=1)
    assert f"{tool} is not installed here; " in says


@of_google
@pytest.mark.parametrize("workdir", [(), ("--workdir=runs/base",)])
def test_a_workdir_that_goes_with_the_machine(cloud, script, workdir):
    says = refuse(cloud, script, "all", *SCRIPTS[script], "--", "--config=base", *workdir)
    assert "no --workdir that outlives the machine" in says


@of_google
def test_a_machine_without_a_run_to_plan_it_for(cloud, script):
    assert "no run to plan the machine for" in refuse(
        cloud, script, "create", *SCRIPTS[script], "--dry-run"
    )


def test_slices_are_planned_and_asked_for(cloud):
    flags = ("--topology=v5p:4x4x4", *PLACE)
    for verb in ("plan", "create", "watch"):
        says = refuse(cloud, "xpk.sh", verb, *flags, "--slices=two")
        assert "--slices=two is not a number of slices" in says
    result = cloud.run("xpk.sh", "all", *flags, "--slices=2", "--dry-run", *PROGRAM)
    assert result.returncode == 0, result.stderr
    plan, create, *_ = commands(result.stdout)
    assert "--topology=2xv5p:4x4x4" in plan
    assert {"--tpu-type=v5p-128", "--num-slices=2"} <= set(create)
    result = cloud.run("xpk.sh", "plan", *flags, "--dry-run", *PROGRAM)
    assert "--topology=v5p:4x4x4" in commands(result.stdout)[0]


def test_slurm_plans_for_a_topology(cloud):
    assert "add --topology=gpu:h100x8" in refuse(cloud, "slurm.sh", "plan", *PROGRAM)
    flags = ("--topology=gpu:h100x16", "--dry-run", *PROGRAM)
    for verb, count in (("plan", 1), ("run", 3)):
        found = commands(cloud.run("slurm.sh", verb, *flags).stdout)
        assert found[0][1:5] == [
            *("-m", "convbert_jax.main", "--mode=plan"),
            "--topology=gpu:h100x16",
        ]
        assert len(found) == count


@each
def test_a_dry_run_prints_commands_and_runs_none(cloud, script):
    verb = "run" if script == "slurm.sh" else "all"
    result = cloud.run(script, verb, *SCRIPTS[script], "--dry-run", *PROGRAM)
    assert result.returncode == 0, result.stderr
    assert cloud.asked() == []
    # Whole commands, which a shell reads as they are: words, and the program among them.
    found = commands(result.stdout)
    if script != "slurm.sh":  # which has no topology
        plan = found.pop(0)
        assert plan[1:4] == ["-m", "convbert_jax.main", "--mode=plan"]
    (program,) = [word for words in found for word in words if "convbert_jax.main" in word]
    if script in ("tpu_vm.sh", "gce.sh"):
        program = re.search(r"bash -c ('.*') </dev/null", program).group(1)
        program = " ".join(shlex.split(program))
    assert "-m convbert_jax.main --config=configs/base.py" in program
    assert r"--workdir=gs://bucket/it'\''s a run' --multihost" in program
    tools = {"slurm.sh": {"sbatch", "sacct"}, "xpk.sh": {"xpk", "kubectl"}}.get(
        script, {"gcloud", "git"}
    )
    assert {words[0] for words in found} == tools


def commands(text: str) -> list[list[str]]:
    """Their words; a command may have lines inside quotes."""
    found, begun = [], ""
    for line in text.splitlines():
        begun += line + "\n"
        try:
            found.append(shlex.split(begun))
        except ValueError:  # no closing quotation yet
            continue
        begun = ""
    assert not begun
    return found
