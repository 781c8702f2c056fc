"""Command line of launch/sweep.py: parsed options and rejected input."""

import pytest

from convbert_jax.config import UserError
from convbert_jax.sweeps import Task, cli
from tests.refusals import refused

SBATCH = "--partition=gpu --gpus=1 --time=1-02 --cpus-per-task=4 --exclusive"


def read(*arguments: str, config: str = "ablation:kernel_size") -> cli.Request:
    return cli.read(["sweep.py", f"--config={config}", *arguments])


@pytest.mark.parametrize(
    ("arguments", "field", "mention"),
    [
        (["--plain"], None, "--plain"),
        (["--config=ablation:kernels"], None, "bnk_gl"),
        (["--config=tiny"], None, "configs/ablation.py"),
        (["--config.modle.heads=4"], None, "model"),
        (["--seeds=x"], "--seeds", "x"),
        (["--seeds=0"], "--seeds", 0),
        (["--seeds=1001"], "--seeds", 1001),
        (["--variants=k9,k33"], "--variants", "k33"),
        (["--variants=k1,k3"], "baseline", "k9"),
        (["--baseline=k2"], "baseline", "k2"),
        (
            ["--config=ablation:mixers", "--baseline=light", "--variants=light,mixed-equal-flops"],
            "match_flops_of",
            "attention",
        ),
        (["--workdir=gs://b/c"], "--workdir", "gs://b/c"),
        (["--workdir="], "--workdir", ""),
        ([f"--workdir={__file__}/x"], "--workdir", __file__),
        (["--workdir=nowhere/at-all", "--report"], "--workdir", "nowhere/at-all"),
        (["--finetune=--x"], "--finetune", "--x"),
        (["--finetune=text:trec --y"], "--finetune", "--y"),
        (["--finetune=text:trec", "--finetune=text:trec"], "--finetune", "trec"),
        (["--price=1"], "--plan", "--price"),
        (["--plan", "--price=nan"], "--price", "nan"),
        (["--slurm=0"], "--slurm", 0),
        (["--slurm=2", "--plan"], None, "--plan"),
        (["--sbatch=--time=1:00:00"], "--slurm", "--sbatch"),
        (["--slurm=2"], "--sbatch", "--time"),
        (["--slurm=2", "--sbatch=time=1:00:00"], "--sbatch", "time=1:00:00"),
        (["--slurm=2", "--sbatch=--time=soon"], "--sbatch", "soon"),
        (["--slurm=2", "--sbatch=--time=4"], "--time", "4"),
        (["--slurm=2", "--sbatch=--time=4:59"], "--time", "4:59"),
        (["--slurm=2", "--sbatch=--time=9 --array=0-3"], "--sbatch", "--array=0-3"),
    ],
)
def test_an_invalid_command_line_is_refused(arguments, field, mention):
    with refused(UserError, mention, field=field):
        read(*arguments)


def test_a_command_line():
    asked = read(
        *("--seeds=3,5", "--plan", "--price=2", "--config.train.steps=1k"),
        "--finetune=text:trec --config.task.folder='a b'",
        "--finetune=other=text:trec,paper",
        config="ablation:kernel_size,small",
    )
    assert (asked.name, str(asked.folder)) == ("kernel_size,small", "runs/kernel_size-small")
    assert (asked.action, asked.price) == ("plan", 2)
    assert asked.sweep.seeds == (3, 5)
    assert asked.overrides == {"train.steps": 1000}
    assert asked.sweep.tasks == {
        "trec": Task("text:trec", {"task.folder": "a b"}),
        "other": Task("text:trec,paper", {}),
    }
    for text, seeds in {"3": (0, 1, 2), "3,": (3,), "0, 2,": (0, 2), "1000": range(1000)}.items():
        assert read(f"--seeds={text}").sweep.seeds == tuple(seeds)


def test_variants_keep_the_order_of_the_sweep():
    sweep = read("--variants=k17, k9,k3").sweep
    assert list(sweep.variants) == ["k3", "k9", "k17"]
    assert sweep.reference == "k9"
    assert read("--variants=k3,k5", "--baseline=k5").sweep.reference == "k5"


def test_a_worker_on_a_cluster_gets_the_same_command_line(tmp_path):
    asked = read(
        *("--seeds=2", "--workdir", str(tmp_path), "--variants=k5,k3", "--baseline=k5"),
        *("--slurm", "2", f"--sbatch={SBATCH}", "--config.train.steps=1k"),
        "--finetune=text:trec --config.task.folder='a b'",
    )
    assert (asked.action, asked.workers) == ("submit", 2)
    assert asked.sbatch == {
        **{"partition": "gpu", "gpus": "1", "time": 26 * 60, "cpus_per_task": "4"},
        "exclusive": True,
    }
    again = cli.read(["sweep.py", *asked.arguments])
    assert again.action == "run"
    for name in ("name", "sweep", "overrides"):
        assert getattr(again, name) == getattr(asked, name)
    assert again.folder.path == asked.folder.path


def test_times_are_read_as_sbatch_reads_them():
    minutes = {"5": 5, "90:30": 90, "2:30:00": 150, "1-02": 1560, "1-02:03": 1563}
    assert {time: cli.read_options(f"--time={time}")["time"] for time in minutes} == minutes
