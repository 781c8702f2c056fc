"""What cells cost: steps of equal FLOPs, parameters, the plan."""

import dataclasses

import pytest

from convbert_jax import config_files
from convbert_jax.analysis import arithmetic_plan, flops, overview
from convbert_jax.config import to_dict
from convbert_jax.interop import matching
from convbert_jax.sweeps import Row, Sweep, SweepError
from convbert_jax.sweeps.cells import expand
from convbert_jax.sweeps.checks.files import check_files
from convbert_jax.sweeps.describe import (
    count_flops,
    count_parameters,
    describe,
    describe_changes,
)
from convbert_jax.sweeps.folder import FINISHED, Folder, Record

ROWS = {"attention": Row({"model.mixer": "attention"}), "mixed": Row()}
TABLE = Sweep("tiny", ROWS, seeds=(0, 1))


@pytest.fixture
def folder(tmp_path) -> Folder:
    return Folder(tmp_path / "sweep")


def test_equal_flops_are_equal(folder):
    rows = {**ROWS, "equal": Row({"model.kernel_size": 3}, flops_of="attention")}
    sweep = Sweep("tiny", rows, seeds=(0,))
    for overrides in ({}, {"train.steps": 300}):
        cells = {cell.row: cell.config for cell in expand(sweep, folder, overrides)}
        spent = {name: flops.training_flops(config) for name, config in cells.items()}
        assert spent["equal"] == pytest.approx(spent["attention"], rel=2e-3)  # whole steps
        assert spent["mixed"] < 0.99 * spent["attention"]


def test_a_vocabulary_of_another_size_counts(folder, tmp_path):
    """Its size follows the file when a run starts: what is said of the run before has it too."""
    path = tmp_path / "vocab.txt"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    path.write_text("\n".join([*special, *(f"w{i}" for i in range(20_000))]) + "\n")
    rows = {**ROWS, "equal": Row({"model.mixer": "separable"}, flops_of="attention")}
    sweep = Sweep("tiny", rows, seeds=(0,))
    cells = {c.row: c for c in expand(sweep, folder, {"tokenizer.path": str(path)})}
    named = {"tokenizer.path": str(path), "tokenizer.kind": "wordpiece"}
    real = {
        row: matching.replace(c.config, {**named, "tokenizer.vocab_size": 20_005})
        for row, c in cells.items()
    }
    spent = {row: flops.training_flops(config) for row, config in real.items()}
    assert spent["equal"] == pytest.approx(spent["attention"], rel=2e-3)
    assert {row: count_flops(cell, folder) for row, cell in cells.items()} == spent
    fewer = count_parameters(expand(sweep, folder)[0], folder)
    more = (20_005 - 4_096) * (real["attention"].model.embedding_size + 1)  # table, head's bias
    assert count_parameters(cells["attention"], folder) == fewer + more
    path.unlink()  # refused before anything runs
    with pytest.raises(SweepError, match=r"vocab\.txt"):
        check_files(expand(sweep, folder, {"tokenizer.path": str(path)}), folder)


def test_parts_of_the_steps_follow_them(folder):
    rows = {"both": Row(parts={"objective.masked_lm_steps": 0.3})}
    sweep = Sweep("tiny", rows, seeds=(0,))
    for overrides, steps in ({}, 240), ({"train.steps": 50}, 15):
        (cell,) = expand(sweep, folder, overrides)
        assert cell.config.objective.masked_lm_steps == steps
    with pytest.raises(SweepError, match=r"masked_lm_steps is what the cells differ in"):
        expand(sweep, folder, {"objective.masked_lm_steps": 7})
    both = {**ROWS, "x": Row(flops_of="attention", parts={"objective.masked_lm_steps": 0.3})}
    with pytest.raises(SweepError, match="row x has parts and flops_of; leave one out"):
        expand(Sweep("tiny", both), folder)


@pytest.mark.parametrize("size", ["small", "base"])
def test_mixers_that_translate_have_about_equal_parameters(folder, tmp_path, size):
    for name in ("de", "en"):
        (tmp_path / name).write_text("text\n")
    sweep = config_files.load_sweep(f"ablation:translation,{size}")
    source = f"parallel:{tmp_path}/de,{tmp_path}/en"
    cells = expand(dataclasses.replace(sweep, seeds=(0,)), folder, {"parallel.source": source})
    counts = {cell.row: count_parameters(cell, folder) for cell in cells}
    for count in counts.values():
        assert count == pytest.approx(counts["attention"], rel=0.03), counts


def test_the_plan_says_what_cells_cost(folder, monkeypatch):
    monkeypatch.setattr(arithmetic_plan, "_measure_products", lambda *_: 1e11)
    cells = expand(TABLE, folder)
    folder.write(Record(cells[0].id, FINISHED, to_dict(cells[0].config), ("main",)))
    text = describe(TABLE, cells, folder)
    line = next(line for line in text.splitlines() if line.startswith("attention"))
    # 800 steps of 32 rows of 64 tokens
    assert line.split()[:4] == ["attention", "pretrain", "1,421,825", "1.64e+06"]
    assert "1 finished, 1 new" in line
    assert "4 cells: 2 rows x seeds (0, 1); " in text


@pytest.mark.parametrize(
    ("topology", "chips", "peak"),
    [
        ("v5e-16", 16, 16 * 197e12),
        ("v5e:4x4", 16, 16 * 197e12),
        ("2xv4-8", 8, 8 * 275e12),
        ("tpu7x-8", 4, 4 * 2307e12),
        ("gpu:h100x2", 2, 2 * 989e12),
    ],
)
def test_the_plan_says_time_and_cost(folder, topology, chips, peak):
    cells = expand(TABLE, folder, {"train.steps": 10**9})
    seconds = sum(count_flops(cell, folder) for cell in cells) / (0.3 * peak)
    text = describe(TABLE, cells, folder, topology, 1.5)
    assert f"takes {overview.spell_time(seconds)} on {topology}" in text
    assert f"it costs {seconds / 3_600 * chips * 1.5:,.2f}." in text
    assert "it costs" not in describe(TABLE, cells, folder, topology)


def test_time_on_this_cpu_is_a_range_of_its_speed(folder, monkeypatch):
    monkeypatch.setattr(arithmetic_plan, "_measure_products", lambda *_: 1e11)
    cells = expand(TABLE, folder)
    seconds = sum(count_flops(cell, folder) for cell in cells) / 1e11
    best, worst = (overview.spell_time(seconds / share) for share in (0.65, 0.2))
    assert f"takes {best} to {worst} on cpu" in describe(TABLE, cells, folder)


def test_what_a_row_changes_is_said_with_the_steps_that_follow(folder):
    rows = {
        "plain": Row({"model.mixer": "attention"}),
        "equal": Row({"model.kernel_size": 3}, flops_of="plain"),
        "both": Row(parts={"objective.masked_lm_steps": 0.5}),
    }
    sweep = Sweep("tiny", rows, seeds=(0,))
    cells = {cell.row: cell for cell in expand(sweep, folder, {"train.steps": 50})}
    said = {name: describe_changes(row, cells[name]) for name, row in rows.items()}
    steps = cells["equal"].config.train.steps
    assert steps != 50
    assert said == {
        "plain": "model.mixer=attention",
        "equal": f"model.kernel_size=3 train.steps={steps}",
        "both": "objective.masked_lm_steps=25",
    }
