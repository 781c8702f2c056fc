"""What a command line of launch/sweep.py asks for, and what is refused of it."""

import pytest

from convbert_jax.config import UserError
from convbert_jax.sweeps import Task, request


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "required: --config"),
        (["--config=ablation:kernel_size", "--plain"], "unrecognized arguments: --plain"),
        (["--config=ablation:kernels"], "there is no sweep kernels; choose one of: bnk_gl"),
        (["--config=ablation:mixers,huge"], "mixers has no size huge"),
        (["--config=tiny"], "has no function get_sweep; take one of: configs/ablation.py"),
        (["--config=ablation:mixers", "--seeds=x"], "--seeds=x must be a number"),
        (["--config=ablation:mixers", "--seeds=,"], "--seeds=, must be a number"),
        (["--config=ablation:mixers", "--rows=attention,lihgt"], "there is no row 'lihgt'"),
        (["--config=ablation:kernel_size", "--rows=k1,k3"], "leaves out k9"),
        (["--config=ablation:kernel_size", "--baseline=k2"], "--baseline=k2: there is no such row"),
        (["--config=ablation:kernel_size", "--baseline=k3", "--rows=k9,k1"], "leaves out k3"),
        (
            ["--config=ablation:mixers", "--baseline=light", "--rows=light,mixed-equal-flops"],
            "leaves out attention, whose FLOPs mixed-equal-flops is given; add it.",
        ),
        (
            ["--config=ablation:mixers", "--rows=attention,light,mixed-equal-flops,"],
            "there is no row ''",
        ),
        (["--config=ablation:mixers", "--seeds=0"], "--seeds=0 must be from 1"),
        (["--config=ablation:mixers", "--workdir=gs://b/c"], "gs://b/c is in a bucket"),
        (["--config=ablation:mixers", "--workdir="], "--workdir= names no folder"),
        (["--config=ablation:mixers", f"--workdir={__file__}/x"], "is a file; name a folder"),
        (
            ["--config=ablation:mixers", "--workdir=nowhere/at-all", "--report"],
            "there is no --workdir=nowhere/at-all",
        ),
        (["--config=ablation:mixers", "--finetune=--x"], "must begin with a config"),
        (["--config=ablation:mixers", "--finetune=text:trec --y"], "'--y' is no --config."),
        (["--config=ablation:mixers", "--config.modle.heads=4"], "did you mean"),
    ],
)
def test_a_command_line_that_cannot_be_is_refused(arguments, says):
    with pytest.raises(UserError) as caught:
        request.read(["sweep.py", *arguments])
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [["--price=1"], ["--topology=cpu"], ["--plan", "--price=-1"], ["--plan", "--price=nan"]],
)
def test_a_price_is_of_a_plan_and_a_number(flags):
    with pytest.raises(UserError, match="--price"):
        request.read(["sweep.py", "--config=ablation:mixers", *flags])
    assert request.read(["sweep.py", "--config=ablation:mixers", "--plan", "--price=2"]).price == 2


def test_a_command_line():
    asked = request.read(
        [
            *("sweep.py", "--config=ablation:kernel_size,small", "--seeds=3,5", "--plan"),
            *("--finetune=text:trec --config.task.folder='a b'", "--config.train.steps=1k"),
            "--finetune=other=text:trec,paper",
        ]
    )
    assert (asked.name, str(asked.folder)) == ("kernel_size,small", "runs/kernel_size-small")
    assert asked.sweep.seeds == (3, 5)
    assert asked.overrides == {"train.steps": 1000}
    assert asked.sweep.tasks == {
        "trec": Task("text:trec", {"task.folder": "a b"}),
        "other": Task("text:trec,paper", {}),
    }
    assert asked.do == "plan"


def test_the_report_compares_with_another_row_if_asked():
    """Rows without the sweep's own baseline are then a table, and a runner elsewhere is told."""
    flags = ["--config=ablation:kernel_size", "--rows=k3,k5", "--baseline=k5"]
    asked = request.read(["sweep.py", *flags])
    assert list(asked.sweep.rows) == ["k3", "k5"]
    assert asked.sweep.compared_with == "k5"
    assert "--baseline=k5" in asked.arguments
    assert request.read(["sweep.py", *asked.arguments]).sweep == asked.sweep


@pytest.mark.parametrize(
    ("text", "seeds"), [("3", (0, 1, 2)), ("3,5", (3, 5)), ("3,", (3,)), ("0, 2,", (0, 2))]
)
def test_seeds_are_a_number_or_those_with_commas(text, seeds):
    asked = request.read(["sweep.py", "--config=ablation:kernel_size", f"--seeds={text}"])
    assert asked.sweep.seeds == seeds


def test_rows_are_chosen_in_the_order_of_the_table():
    asked = request.read(["sweep.py", "--config=ablation:kernel_size", "--rows=k17, k9,k3"])
    assert list(asked.sweep.rows) == ["k3", "k9", "k17"]
    assert asked.sweep.compared_with == "k9"
