"""The report of a sweep: the test of differences by hand, and files that can be read."""

import csv
import math

import numpy as np
import pytest
from matplotlib import image

from convbert_jax.analysis import sweep_report
from convbert_jax.analysis.sweep_report import CellOutcome, Outcome, RowFacts, comparison

SEEDS = (0, 1, 2)
# AUC of each seed: `better` is above `plain` by 0.100, 0.101, 0.099; `noisy` by -0.1, 0.1, 0.3
AUC = {
    "plain": (0.60, 0.64, 0.68),
    "better": (0.700, 0.741, 0.779),
    "noisy": (0.50, 0.74, 0.98),
    "broken": (),
}


def make_outcome(**changes) -> Outcome:
    cells = [
        CellOutcome(
            row,
            seed,
            "pretrain",
            "finished",
            seconds=3.0,
            values={"discriminator_auc": value, "tokens_per_second": 1000.0, "hidden": 1.0},
            curve=tuple(
                {
                    **{"step": step, "tokens": 64 * step, "flops": 1e6 * step},
                    **{"seconds": 0.1 * step, "discriminator_auc": value - 1 / step},
                }
                for step in (10, 20)
            ),
        )
        for row, values in AUC.items()
        for seed, value in zip(SEEDS, values, strict=False)
    ]
    cells += [
        CellOutcome("plain", 0, "trec", "finished", values={"test accuracy": 0.5}),
        CellOutcome("better", 0, "trec", "finished", values={"test accuracy": math.nan}),
        CellOutcome("broken", 0, "pretrain", "failed", why="no room; make some."),
    ]
    fields = {
        "name": "table",
        "purpose": "Which one?",
        "rows": {row: RowFacts(f"model.mixer={row}", 1234, 6400, 1e9) for row in AUC},
        "baseline": "plain",
        "metrics": ("discriminator_auc", "tokens_per_second"),
        "cells": tuple(cells),
    }
    return Outcome(**fields | changes)


def test_a_paired_test_by_hand():
    # differences 1, 2, 3: mean 2, standard error 1/sqrt(3), t = 2 sqrt(3); with 2 degrees of
    # freedom p = 1 - t / sqrt(2 + t^2), and 97.5% of t lie below 4.3027
    line = comparison.compare(
        "a", "pretrain", "m", {0: 2.0, 1: 4.0, 2: 6.0, 3: 9.0}, {2: 3.0, 1: 2.0, 0: 1.0}
    )
    assert line.p == pytest.approx(1 - math.sqrt(12 / 14))
    assert line.difference.mean == pytest.approx(2.0)
    half = 4.302653 / math.sqrt(3)
    assert line.difference.low == pytest.approx(2 - half, abs=1e-5)
    assert line.difference.high == pytest.approx(2 + half, abs=1e-5)
    assert (line.difference.count, line.value.count) == (3, 4)
    assert line.value.mean == pytest.approx(21 / 4)


def test_the_order_of_seeds_and_the_side_of_the_difference_do_not_matter():
    one, other = {0: 1.0, 1: 5.0, 2: 3.0}, {2: 2.0, 0: 0.5, 1: 4.9}
    forth, back = (
        comparison.compare("a", "s", "m", *pair) for pair in ((one, other), (other, one))
    )
    assert forth.p == pytest.approx(back.p)
    assert forth.difference.mean == pytest.approx(-back.difference.mean)


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([], math.nan),
        ([1.0], math.nan),
        ([0.0, 0.0], 1.0),
        ([0.5, 0.5, 0.5], math.nan),
        ([0.625 - 0.5, 0.750000000001 - 0.625], math.nan),  # two of sixteen texts, twice
    ],
)
def test_differences_without_noise(differences, p):
    assert comparison.test(differences) == pytest.approx(p, nan_ok=True)


def test_p_values_are_raised_after_holm():
    # 0.01 x 3; 0.03 x 2; and 0.04 x 1, which may not be less than the one before
    assert comparison.holm([0.01, math.nan, 0.04, 0.03], 3) == pytest.approx(
        [0.03, math.nan, 0.06, 0.06], nan_ok=True
    )
    assert comparison.holm([0.9, 0.8], 2) == [1.0, 1.0]


def test_a_row_that_is_not_there_yet_counts():
    """So that what is outside stays so when the other rows are finished."""
    assert comparison.holm([0.03, math.nan], 2) == pytest.approx([0.06, math.nan], nan_ok=True)
    cells = [cell for cell in make_outcome().cells if cell.row != "noisy"]
    part, whole = (
        {(line.row, line.metric): line.p_holm for line in comparison.compare_all(outcome)}
        for outcome in (make_outcome(cells=tuple(cells)), make_outcome())
    )
    key = "better", "discriminator_auc"
    assert part[key] == pytest.approx(whole[key])


def test_of_scores_in_steps_two_seeds_give_few_false_alarms():
    """Of 277 texts; equal differences once were outside with p 0, and raised alarms in a third."""
    random, alarms, tries = np.random.default_rng(0), 0, 300
    for _ in range(tries):
        right = np.round(277 * (0.7 + 0.01 * random.normal(size=(9, 2)))) / 277
        p = [comparison.test(list(row - right[0])) for row in right[1:]]
        raised = [value for value in comparison.holm(p, 8) if not math.isnan(value)]
        alarms += min(raised, default=1.0) < comparison.LEVEL
    assert alarms / tries < comparison.LEVEL + 0.03


def test_rows_without_a_difference_seldom_are_outside():
    random, alarms, tries = np.random.default_rng(0), 0, 300
    for _ in range(tries):
        seeds = random.normal(size=(1, 4))  # what the rows of a seed have in common
        values = 10 * seeds + random.normal(size=(6, 4))
        lines = [
            comparison.compare("r", "s", "m", dict(enumerate(row)), dict(enumerate(values[0])))
            for row in values[1:]
        ]
        alarms += min(comparison.holm([line.p for line in lines], 5)) < comparison.LEVEL
    assert alarms / tries < comparison.LEVEL + 0.03


def test_what_is_outside_the_noise():
    lines = {(line.row, line.metric): line for line in comparison.compare_all(make_outcome())}
    assert lines["better", "discriminator_auc"].noise == comparison.OUTSIDE
    assert lines["noisy", "discriminator_auc"].noise == comparison.INSIDE
    assert lines["plain", "discriminator_auc"].noise == ""
    assert lines["better", "tokens_per_second"].noise == comparison.INSIDE  # the same to the bit
    lost = lines["better", "test accuracy"]
    assert (lost.diverged, lost.value.count, lost.noise) == (1, 0, "")
    assert ("better", "hidden") not in lines


def test_the_files_of_a_report(tmp_path):
    text = sweep_report.write(make_outcome(), tmp_path)
    assert text == (tmp_path / "report.md").read_text()
    before = text.partition("## trec")[0].splitlines()
    rows = {line.split(" | ")[0].strip("| "): line for line in before if "|" in line}
    assert "0.7400 ± " in rows["better"]
    assert "+0.1000 [" in rows["better"]
    assert "outside, p " in rows["better"]
    assert "inside, p " in rows["noisy"]
    assert "- broken/seed-0/pretrain: no room; make some." in text
    assert "12 cells: 11 finished, 1 failed." in text
    assert "for the 3 rows" in text
    assert "## What the rows change\n\n- plain: model.mixer=plain\n- better: model.mi" in text
    with (tmp_path / "rows.csv").open() as file:
        table = {(r["row"], r["metric"]): r for r in csv.DictReader(file)}
    assert float(table["better", "discriminator_auc"]["difference"]) == pytest.approx(0.1)
    assert table["plain", "discriminator_auc"]["difference"] == ""
    with (tmp_path / "cells.csv").open() as file:
        cells = list(csv.DictReader(file))
    assert len(cells) == 12
    assert cells[0]["hidden"] == "1.0"  # all numbers, shown or not
    assert cells[-1] | {"state": "failed", "why": "no room; make some."} == cells[-1]
    for name in ("means.png", "curves.png"):
        assert f"]({name})" in text
        pixels = image.imread(tmp_path / name)
        assert min(pixels.shape[:2]) > 200
        assert pixels[..., :3].std() > 0.02  # something is drawn
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (3.2e-5, "0.0000320"),
        (0.0, "0.0000"),
        (0.74, "0.7400"),
        (-2e-3, "-0.00200"),
        (2e5, "200,000"),
    ],
)
def test_a_small_number_keeps_its_figures(tmp_path, value, shown):
    cells = (CellOutcome("plain", 0, "pretrain", "finished", values={"discriminator_auc": value}),)
    line = next(
        line for line in sweep_report.write(make_outcome(cells=cells), tmp_path).splitlines()
        if line.startswith("| plain ")
    )  # fmt: skip
    assert line.split(" | ")[5].strip() == shown


def test_a_report_of_nothing_yet(tmp_path):
    cells = (CellOutcome("plain", 0, "pretrain", "not begun"),)
    text = sweep_report.write(make_outcome(cells=cells), tmp_path)
    assert "1 cells: 1 not begun." in text
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "cells.csv",
        "report.md",
        "rows.csv",
    ]
