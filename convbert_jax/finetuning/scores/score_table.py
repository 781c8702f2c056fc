"""Markdown table of scores over seeds, with published scores for comparison.

Columns show the median over seeds, the spread (best minus worst) and the worst. The best is shown
only on request, since it should not be reported alone. One seed has no spread. Diverged runs rank
as the worst.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from convbert_jax.finetuning.scores import published

_NAMES = {
    "accuracy": "acc",
    "mcc": "Matthews",
    "spearman": "Spearman",
    "pearson": "Pearson",
    "f1": "F1",
    "macro_f1": "macro F1",
    "span_f1": "span F1",
    "exact_match": "EM",
}


@dataclasses.dataclass(frozen=True)
class Column:
    """One metric of one split of a task, by seed."""

    task: str
    split: str
    metric: str
    values: tuple[float, ...]  # fractions; NaN where the run diverged

    @property
    def title(self) -> str:
        part = self.split.partition("_")[2]
        test = "test" if self.split.startswith("test") else ""
        words = (self.task, part, test, _NAMES.get(self.metric, self.metric))
        return " ".join(word for word in words if word)

    @property
    def published(self) -> tuple[str, str]:
        """Key in published rows, where MNLI's matched part is called MNLI."""
        part = " mismatched" if self.split.endswith("_mismatched") else ""
        return self.task + part, self.metric


@dataclasses.dataclass(frozen=True)
class Table:
    """Table cells as strings: two columns of names, then numbers.

    Attributes:
      rows: The first row is the header.
      notes: Sentences that explain the content.
    """

    rows: list[list[str]]
    notes: list[str]


@dataclasses.dataclass(frozen=True)
class Summary:
    """Summary over seeds, as fractions; NaN where too many runs diverged."""

    median: float
    spread: float  # best minus worst
    worst: float
    best: float


def summarize(values: Sequence[float]) -> Summary:
    """Compute median, spread, worst and best; higher is better, and NaN is the worst."""
    ranked = [value if math.isfinite(value) else -math.inf for value in values]
    numbers = statistics.median(ranked), max(ranked) - min(ranked), min(ranked), max(ranked)
    return Summary(*(number if math.isfinite(number) else math.nan for number in numbers))


def make_table(columns: Sequence[Column], *, show_best: bool = False) -> Table:
    """Make a table of this run's rows and published rows, with notes that define the averages.

    Args:
      columns: In display order. The first column of each task enters the mean; of MNLI only the
        matched part does.
    """
    summaries = [summarize(column.values) for column in columns]
    averaged = _averaged(columns)
    seeds = {len(column.values) for column in columns}
    ours = [("this run", [summary.median for summary in summaries])]
    if seeds != {1}:
        ours = [
            ("this run, median", ours[0][1]),
            ("spread (best - worst)", [summary.spread for summary in summaries]),
            ("worst", [summary.worst for summary in summaries]),
            *([("best", [summary.best for summary in summaries])] if show_best else []),
        ]
    counts = "/".join(map(str, sorted(seeds))) + (" seed" if seeds == {1} else " seeds")
    is_test = all(column.split.startswith("test") for column in columns)
    table = [["", "split, runs", *(column.title for column in columns)]]
    if averaged:
        table[0].append(f"mean of {len(averaged)}")
    for title, values in ours:
        runs = f"{'test' if is_test else 'dev'}, {counts}" if title == ours[0][0] else ""
        mean = [values[place] for place in averaged] if title == ours[0][0] else []
        table.append(
            [title, runs, *(_show(100 * value) for value in values), *_mean(averaged, mean)]
        )
    shown = [
        row
        for row in published.PUBLISHED
        if row.shown and any(c.published in row.scores for c in columns)
    ]
    for row in shown:
        values = [row.scores.get(column.published) for column in columns]
        mean = [values[place] for place in averaged]
        cells = ["" if value is None else f"{value:.1f}" for value in values]
        scale = [] if None in mean else [value / 100 for value in mean]
        table.append(
            [
                f"{row.model} ({row.source})",
                f"{row.split}, {row.runs}",
                *cells,
                *_mean(averaged, scale),
            ]
        )
    return Table(table, _notes(columns, averaged, shown))


def to_markdown(table: Table) -> str:
    """Format the table, followed by its notes."""
    return "\n".join([*_align(table.rows), "", *table.notes])


def _averaged(columns: Sequence[Column]) -> list[int]:
    """Return the indices of the averaged columns; empty if there are fewer than two."""
    places: dict[str, int] = {}
    for place, column in enumerate(columns):
        if not column.split.endswith("_mismatched"):
            places.setdefault(column.task, place)
    if len({columns[place].split.startswith("test") for place in places.values()}) > 1:
        return []
    return list(places.values()) if len(places) > 1 else []


def _mean(averaged: list[int], values: list[float]) -> list[str]:
    """Return the cell of the mean, if the table has that column."""
    if not averaged:
        return []
    return [_show(100 * sum(values) / len(values)) if values else ""]


def _show(value: float) -> str:
    return "diverged" if math.isnan(value) else f"{value:.1f}"


def _align(table: list[list[str]]) -> list[str]:
    """Format a Markdown table; names are left-aligned, numbers right-aligned."""
    widths = [max(len(row[place]) for row in table) for place in range(len(table[0]))]
    lines = []
    for row in table:
        cells = [
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(cells)} |")
    marks = ["-" * w if place < 2 else "-" * (w - 1) + ":" for place, w in enumerate(widths)]
    lines.insert(1, f"| {' | '.join(marks)} |")
    return lines


def _notes(columns: Sequence[Column], averaged: list[int], shown) -> list[str]:
    """Return notes that define the mean and compare splits."""
    notes = []
    if averaged:
        keys = {columns[place].published for place in averaged}
        if keys == set(published.GLUE_COLUMNS.items()):
            notes.append(f"Mean: {published.PAPER_MEAN}.")
            notes.append(f"It is not the {published.LEADERBOARD_SCORE}.")
        else:
            titles = ", ".join(columns[place].title for place in averaged)
            notes.append(
                f"Mean: plain mean of {titles}, for published rows too; neither the mean of 8 of "
                "ConvBERT's table 3 nor the GLUE server's score."
            )
    if any(row.split == "test" for row in shown) and not all(
        column.split.startswith("test") for column in columns
    ):
        notes.append("Rows marked test are scores on the hidden test sets, this run's are not.")
    diverged = [
        f"{column.task} ({lost} of {len(column.values)})"
        for column in columns
        if (lost := sum(not math.isfinite(value) for value in column.values))
    ]
    if diverged:
        notes.append(f"Diverged runs, counted as the worst: {', '.join(dict.fromkeys(diverged))}.")
    return notes
