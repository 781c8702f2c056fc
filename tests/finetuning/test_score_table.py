"""Published rows against their own averages, and the table of a run next to them."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convbert_jax.data.tasks.glue import GLUE
from convbert_jax.finetuning import score_table
from convbert_jax.finetuning.score_table import Column, make_table, summarize, to_markdown


def markdown(columns, **options):
    return to_markdown(make_table(columns, **options))


def rows_with(average_is):
    return [row for row in score_table.PUBLISHED if row.average_is == average_is]


def test_the_papers_average_is_the_mean_of_its_columns():
    rows = rows_with(score_table.PAPER_MEAN)
    assert len(rows) == 14
    for row in rows:
        mean = statistics.mean(row.scores[key] for key in score_table.GLUE_COLUMNS.items())
        assert mean == pytest.approx(row.average, abs=0.0751), row.model


def test_the_leaderboards_score_is_another_mean_of_the_same_predictions():
    rows = rows_with(score_table.LEADERBOARD_SCORE)
    assert len(rows) == 3
    for row in rows:
        scores = row.scores

        def both(first, second, scores=scores):
            return (scores[first] + scores[second]) / 2

        tasks = [
            *(scores[task, "accuracy"] for task in ("SST-2", "QNLI", "RTE", "WNLI")),
            scores["CoLA", "mcc"],
            both(("MRPC", "f1"), ("MRPC", "accuracy")),
            both(("QQP", "f1"), ("QQP", "accuracy")),
            both(("STS-B", "pearson"), ("STS-B", "spearman")),
            both(("MNLI", "accuracy"), ("MNLI mismatched", "accuracy")),
        ]
        assert statistics.mean(tasks) == pytest.approx(row.average, abs=0.0751)
        paper = next(r for r in rows_with(score_table.PAPER_MEAN) if r.model == row.model)
        # Same predictions as in the paper's row; MRPC, QQP and STS-B use the second metric.
        for key in score_table.GLUE_COLUMNS.items():
            assert scores[key] == pytest.approx(paper.scores[key], abs=0.051)
        assert 2 < paper.average - row.average < 4


def test_columns_are_the_first_metrics_of_our_tasks():
    assert {name: GLUE[name].metrics[0] for name in score_table.GLUE_COLUMNS} == (
        score_table.GLUE_COLUMNS
    )


scores = st.floats(0, 1)


@given(st.lists(scores, min_size=1, max_size=9))
def test_summary(values):
    summary = summarize(values)
    assert summary.median == statistics.median(values)
    assert summary.worst == min(values)
    assert summary.best == max(values)
    assert summary.spread == max(values) - min(values)


def test_a_diverged_run_is_the_worst():
    summary = summarize([0.5, math.nan, 0.7])
    assert (summary.median, summary.best) == (0.5, 0.7)
    assert math.isnan(summary.worst)
    assert math.isnan(summary.spread)
    assert math.isnan(summarize([math.nan] * 2).median)


def cells(table):
    """Title of a row -> its cells by title of the column."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(split[0], row, strict=True)) for row in split[2:]}


def test_table_of_some_tasks():
    columns = [
        Column("CoLA", "validation", "mcc", (0.1, 0.3, 0.2)),
        Column("MRPC", "validation", "accuracy", (0.7, 0.7, 0.8)),
        Column("MRPC", "validation", "f1", (0.8, 0.81, 0.82)),
    ]
    table = markdown(columns)
    rows = cells(table)
    ours = rows["this run, median"]
    assert ours["split, runs"] == "dev, 3 seeds"
    assert [ours[t] for t in ("CoLA Matthews", "MRPC acc", "MRPC F1")] == ["20.0", "70.0", "81.0"]
    assert ours["mean of 2"] == "45.0"  # excludes F1
    assert rows["spread (best - worst)"]["CoLA Matthews"] == "20.0"
    assert rows["worst"]["CoLA Matthews"] == "10.0"
    assert "best" not in rows
    assert cells(markdown(columns, show_best=True))["best"]["CoLA Matthews"] == "30.0"
    paper = rows["ConvBERT-small, 1M steps (ConvBERT, table 3)"]
    assert (paper["split, runs"], paper["CoLA Matthews"]) == ("test, GLUE server", "54.8")
    assert paper["mean of 2"] == "69.0"  # (54.8 + 83.3) / 2, not the published 78.9
    assert "CoLA Matthews, MRPC acc" in table.split("|")[-1]  # the columns of the mean


def test_table_of_all_eight_names_the_papers_mean():
    columns = [
        Column(name, "validation_matched" if name == "MNLI" else "validation", metric, (0.5, 0.6))
        for name, metric in score_table.GLUE_COLUMNS.items()
    ]
    columns += [Column("MNLI", "validation_mismatched", "accuracy", (0.9, 0.9))]
    table = markdown(columns)
    rows = cells(table)
    assert rows["this run, median"]["mean of 8"] == "55.0"  # without MNLI mismatched
    assert rows["ConvBERT-base, 1M steps (ConvBERT, table 3)"]["mean of 8"] == "84.9"
    assert score_table.PAPER_MEAN in table
    assert rows["ConvBERT-base (paddle_convbert, README)"]["MNLI mismatched acc"] == "87.9"


def test_tables_of_other_tasks():
    table = markdown([Column("imdb", "test", "accuracy", (0.5, math.nan, 0.6))])
    assert cells(table)["this run, median"]["split, runs"] == "test, 3 seeds"
    assert cells(table)["worst"]["imdb test acc"] == "diverged"
    assert "imdb (1 of 3)" in table
    assert "ConvBERT" not in table
    squad = cells(markdown([Column("squad_v1", "validation", "exact_match", (0.5,))]))
    assert squad["this run"]["split, runs"] == "dev, 1 seed"
    assert squad["ConvBERT-small, 1M steps (ConvBERT, table 4)"]["squad_v1 EM"] == "77.1"


def test_one_seed_has_no_spread():
    table = markdown([Column("toy", "validation", "accuracy", (0.5,))], show_best=True)
    assert "this run " in table
    assert not any(word in table for word in ("spread", "worst", "best", "median"))
