"""Markdown table of scores over seeds, with published scores for comparison.

Columns show the median over seeds, the spread (best minus worst) and the worst. The best is shown
only on request, since it should not be reported alone. One seed has no spread. Diverged runs rank
as the worst.

Published scores of ConvBERT and related models are x 100 as printed. Dev and test scores are not
comparable, so each row names its split and each average its definition.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

# Columns of ConvBERT's table 3 with their metrics; MNLI is the matched part.
GLUE_COLUMNS = {
    "MNLI": "accuracy",
    "QNLI": "accuracy",
    "QQP": "accuracy",
    "RTE": "accuracy",
    "SST-2": "accuracy",
    "MRPC": "accuracy",
    "CoLA": "mcc",
    "STS-B": "spearman",
}
SQUAD_COLUMNS = {
    ("squad_v1", "exact_match"): "SQuAD 1.1 EM",
    ("squad_v1", "f1"): "SQuAD 1.1 F1",
    ("squad_v2", "exact_match"): "SQuAD 2.0 EM",
    ("squad_v2", "f1"): "SQuAD 2.0 F1",
}
PAPER_MEAN = (
    "mean of 8: MNLI matched, QNLI, QQP, RTE, SST-2 and MRPC by accuracy, CoLA by Matthews, STS-B "
    "by Spearman correlation (ConvBERT's table 3; no WNLI)"
)
LEADERBOARD_SCORE = (
    "GLUE server's score: mean of 9, with WNLI, F1 and accuracy averaged for MRPC and QQP, both "
    "correlations for STS-B, both parts of MNLI; some 3 points below the mean of 8 for the same "
    "predictions of ConvBERT"
)


@dataclasses.dataclass(frozen=True)
class PublishedRow:
    """One row of a published table.

    `scores` maps (task, metric) to a score x 100; `average` is as printed, or None.
    """

    model: str
    source: str
    split: str  # dev | test
    runs: str  # how runs were aggregated: one run, a median, ...
    scores: Mapping[tuple[str, str], float]
    average: float | None = None
    average_is: str = ""
    shown: bool = True  # in tables with a run's own scores


def _paper(model: str, values: str, average: float, *, shown: bool = False) -> PublishedRow:
    """Return a row of ConvBERT's table 3; `values` are in the order of GLUE_COLUMNS."""
    scores = dict(zip(GLUE_COLUMNS.items(), map(float, values.split()), strict=True))
    source = "ConvBERT, table 3"
    return PublishedRow(
        model, source, "test", "GLUE server", scores, average, PAPER_MEAN, shown=shown
    )


def _electra(model: str, values: str, squad: tuple[float, float] | None, *, shown: bool = True):
    """Return dev medians of ELECTRA's README: CoLA SST MRPC STS QQP MNLI QNLI RTE, SQuAD EM."""
    order = ("CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE")
    scores = {
        (task, GLUE_COLUMNS[task]): float(value)
        for task, value in zip(order, values.split(), strict=True)
    }
    if squad:
        scores["squad_v1", "exact_match"], scores["squad_v2", "exact_match"] = squad
    return PublishedRow(model, "ELECTRA, README", "dev", "median", scores, shown=shown)


def _squad(model: str, *values: float, shown: bool = True) -> PublishedRow:
    """Return a row of ConvBERT's table 4: EM and F1 of SQuAD 1.1, then of 2.0."""
    scores = dict(zip(SQUAD_COLUMNS, values, strict=True))
    return PublishedRow(model, "ConvBERT, table 4", "dev", "not stated", scores, shown=shown)


def _leaderboard(model: str, score: float, values: str) -> PublishedRow:
    """Return a row of the GLUE leaderboard."""
    keys = (
        ("CoLA", "mcc"),
        ("SST-2", "accuracy"),
        ("MRPC", "f1"),
        ("MRPC", "accuracy"),
        ("STS-B", "pearson"),
        ("STS-B", "spearman"),
        ("QQP", "f1"),
        ("QQP", "accuracy"),
        ("MNLI", "accuracy"),
        ("MNLI mismatched", "accuracy"),
        ("QNLI", "accuracy"),
        ("RTE", "accuracy"),
        ("WNLI", "accuracy"),
        ("AX", "mcc"),
    )
    scores = dict(zip(keys, map(float, values.split()), strict=True))
    return PublishedRow(
        model, "GLUE leaderboard", "test", "GLUE server", scores, score, LEADERBOARD_SCORE, False
    )


PUBLISHED: tuple[PublishedRow, ...] = (
    _paper("TinyBERT, distilled", "84.6 90.4 89.1 70.0 93.1 82.6 51.1 83.7", 80.6),
    _paper("MobileBERT, distilled", "84.3 91.6 88.3 70.4 92.6 84.5 51.1 84.8", 81.0),
    _paper("ELECTRA-small", "79.7 87.7 88.0 60.8 89.1 83.7 54.6 80.3", 78.0, shown=True),
    _paper("ELECTRA-small, longer", "81.6 88.3 88.0 63.6 91.1 84.9 55.6 84.6", 79.7),
    _paper("GPT", "82.1 88.1 88.5 56.0 91.3 75.7 45.4 80.0", 75.9),
    _paper("BERT-base", "84.6 90.5 89.2 66.4 93.5 84.8 52.1 85.8", 80.9, shown=True),
    _paper("ELECTRA-base", "85.8 92.7 89.1 73.1 93.4 86.7 59.7 87.7", 83.5),
    _paper("ELECTRA-base, longer", "88.5 93.1 89.5 75.2 96.0 88.1 64.6 90.2", 85.7),
    _paper("ConvBERT-small, 1M steps", "81.5 88.5 88.0 62.2 89.2 83.3 54.8 83.4", 78.9, shown=True),
    _paper("ConvBERT-small, 4M steps", "82.1 88.5 88.4 65.1 91.2 85.1 56.7 83.8", 80.1),
    _paper(
        "ConvBERT-medium-small, 1M steps",
        "82.1 88.7 88.4 65.3 89.2 84.6 56.4 82.9",
        79.7,
        shown=True,
    ),
    _paper("ConvBERT-medium-small, 4M steps", "82.9 89.2 88.6 66.0 92.3 85.7 59.1 85.3", 81.1),
    _paper("ConvBERT-base, 1M steps", "85.3 92.4 89.6 74.7 95.0 88.2 66.0 88.2", 84.9, shown=True),
    _paper("ConvBERT-base, 4M steps", "88.3 93.2 90.0 77.9 95.7 88.3 67.8 89.7", 86.4),
    _leaderboard(
        "ConvBERT-base, 4M steps",
        83.2,
        "67.8 95.7 91.4 88.3 90.4 89.7 73.0 90.0 88.3 87.4 93.2 77.9 65.1 42.9",
    ),
    _leaderboard(
        "ConvBERT-medium-small, 4M steps",
        78.6,
        "59.1 92.3 89.6 85.7 86.3 85.3 70.2 88.6 82.9 81.9 89.2 66.0 65.1 36.6",
    ),
    _leaderboard(
        "ConvBERT-small, 4M steps",
        77.6,
        "56.7 91.2 89.1 85.1 84.6 83.8 69.9 88.4 82.1 80.8 88.5 65.1 65.1 34.5",
    ),
    _electra(
        "ELECTRA-small++", "57.0 91.2 88.0 87.5 89.0 81.3 88.4 66.7", (75.8, 70.1), shown=False
    ),
    _electra(
        "ELECTRA-base++", "67.7 95.1 89.5 91.2 91.5 88.8 93.2 82.7", (86.8, 80.5), shown=False
    ),
    _electra("ELECTRA-large", "69.1 96.9 90.8 92.6 92.4 90.9 95.0 88.0", (89.7, 88.1), shown=False),
    _electra("ELECTRA-small, OpenWebText", "56.8 88.3 87.4 86.8 88.3 78.9 87.9 68.5", None),
    PublishedRow(
        "ConvBERT-small",
        "PaddleNLP, README",
        "dev",
        "one run",
        {
            ("CoLA", "mcc"): 56.22,
            ("SST-2", "accuracy"): 91.39,
            ("MRPC", "accuracy"): 87.70,
            ("STS-B", "spearman"): 86.34,  # the source does not state which correlation
            ("QQP", "accuracy"): 85.47,
            ("MNLI", "accuracy"): 81.87,
            ("QNLI", "accuracy"): 87.71,
            ("RTE", "accuracy"): 66.06,
        },
    ),
    PublishedRow(
        "ConvBERT-base",
        "paddle_convbert, README",
        "dev",
        "not stated",
        {
            ("CoLA", "mcc"): 69.2,
            ("SST-2", "accuracy"): 94.6,
            ("MRPC", "accuracy"): 90.4,
            ("MRPC", "f1"): 93.1,
            ("STS-B", "pearson"): 90.8,
            ("STS-B", "spearman"): 90.7,
            ("QQP", "accuracy"): 92.0,
            ("QQP", "f1"): 89.4,
            ("MNLI", "accuracy"): 88.1,
            ("MNLI mismatched", "accuracy"): 87.9,
            ("QNLI", "accuracy"): 93.0,
            ("RTE", "accuracy"): 83.4,
            ("WNLI", "accuracy"): 56.3,
            ("squad_v1", "exact_match"): 84.82,
            ("squad_v1", "f1"): 91.29,
            ("squad_v2", "exact_match"): 80.91,
            ("squad_v2", "f1"): 83.90,
        },
    ),
    _squad("DistilBERT", 71.8, 81.2, 60.6, 64.1, shown=False),
    _squad("TinyBERT", 72.7, 82.1, 65.3, 68.8, shown=False),
    _squad("MobileBERT", 83.4, 90.3, 77.6, 80.2, shown=False),
    _squad("ELECTRA-small", 65.6, 73.8, 62.8, 65.2),
    _squad("ELECTRA-small, longer", 75.8, 85.2, 70.1, 73.2, shown=False),
    _squad("BERT-base", 80.7, 88.4, 74.2, 77.1),
    _squad("ELECTRA-base", 84.5, 90.8, 80.5, 83.3, shown=False),
    _squad("ConvBERT-small, 1M steps", 77.1, 84.1, 68.7, 70.5),
    _squad("ConvBERT-small, 4M steps", 78.8, 85.5, 71.2, 73.6, shown=False),
    _squad("ConvBERT-medium-small, 1M steps", 79.4, 86.0, 71.7, 74.3),
    _squad("ConvBERT-medium-small, 4M steps", 81.5, 88.1, 74.3, 76.8, shown=False),
    _squad("ConvBERT-base, 1M steps", 84.7, 90.9, 80.6, 83.1),
)


_NAMES = {
    "accuracy": "acc",
    "mcc": "Matthews",
    "spearman": "Spearman",
    "pearson": "Pearson",
    "f1": "F1",
    "macro_f1": "macro F1",
    "micro_f1": "micro F1",
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
        row for row in PUBLISHED if row.shown and any(c.published in row.scores for c in columns)
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
        if keys == set(GLUE_COLUMNS.items()):
            notes.append(f"Mean: {PAPER_MEAN}.")
            notes.append(f"It is not the {LEADERBOARD_SCORE}.")
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
