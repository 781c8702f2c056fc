"""The report as text: report.md for a person, rows.csv and cells.csv for another program."""

import collections
import csv
import io
import math
from collections.abc import Sequence

from etils import epath

from convbert_jax import files
from convbert_jax.analysis import overview
from convbert_jax.analysis.sweep_report.comparison import LEVEL, Interval, Line
from convbert_jax.analysis.sweep_report.outcome import Outcome

_TEST = (
    "± is the 95% interval of the mean over seeds (Student's t). Differences are from "
    "**{baseline}**, paired by seed, with their 95% interval; *outside* the noise of seeds: p of "
    "the two-sided paired t-test, raised after Holm for the {rows} of its column, is below "
    "{level}; else *inside*, which with {seeds} is not the same as equal."
)


def write_markdown(
    outcome: Outcome, lines: Sequence[Line], folder: epath.Path, pictures: Sequence[str]
) -> str:
    """Writes and returns report.md, with links to the pictures beside it."""
    parts = [f"# {outcome.name}"]
    if outcome.purpose:
        parts.append(outcome.purpose)
    states = collections.Counter(cell.state for cell in outcome.cells)
    parts.append(
        f"{len(outcome.cells)} cells: {', '.join(f'{n} {state}' for state, n in states.items())}."
    )
    for stage in dict.fromkeys(line.stage for line in lines):
        parts.append(f"## {stage}")
        parts.append(_table(outcome, [line for line in lines if line.stage == stage], stage))
    if lines:
        parts.append(
            _TEST.format(
                baseline=outcome.baseline,
                rows=_count(len(outcome.rows) - 1, "row"),
                level=LEVEL,
                seeds=_count(max(line.value.count for line in lines), "seed"),
            )
        )
    changed = [f"- {row}: {facts.changes}" for row, facts in outcome.rows.items() if facts.changes]
    if changed:
        parts.append("\n\n".join(["## What the rows change", "\n".join(changed)]))
    failed = [cell for cell in outcome.cells if cell.why]
    if failed:
        parts.append("## Failed")
        parts.append("\n".join(f"- {cell.id}: {cell.why}" for cell in failed))
    parts += [f"![{name.removesuffix('.png')}]({name})" for name in pictures]
    text = "\n\n".join(parts) + "\n"
    files.write_text(folder / "report.md", text)
    return text


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def write_csv(outcome: Outcome, lines: Sequence[Line], folder: epath.Path) -> None:
    """rows.csv, a line for each row and metric; cells.csv, a line for each cell with all of its
    numbers. An empty field is a number that is not there.
    """
    head = ["row", "stage", "metric", "seeds", "diverged", "mean", "low", "high"]
    head += ["pairs", "difference", "difference_low", "difference_high", "p", "p_holm", "noise"]
    table = []
    for line in lines:
        change = line.difference or Interval(math.nan, math.nan, math.nan, 0)
        value = line.value
        table.append(
            [
                *(line.row, line.stage, line.metric, value.count, line.diverged),
                *(value.mean, value.low, value.high, change.count),
                *(change.mean, change.low, change.high, line.p, line.p_holm, line.noise),
            ]
        )
    _write(folder / "rows.csv", head, table)
    metrics = list(dict.fromkeys(name for cell in outcome.cells for name in cell.values))
    head = ["row", "seed", "stage", "state", "why", "parameters", "tokens", "flops", "seconds"]
    table = []
    for cell in outcome.cells:
        facts = outcome.rows[cell.row]
        of_pretraining = (facts.parameters, facts.tokens, facts.flops)
        shown = of_pretraining if cell.stage == "pretrain" else (None,) * 3
        numbers = [cell.values.get(name) for name in metrics]
        start = [cell.row, cell.seed, cell.stage, cell.state, cell.why]
        table.append([*start, *shown, round(cell.seconds, 1), *numbers])
    _write(folder / "cells.csv", [*head, *metrics], table)


def _write(path: epath.Path, head: list[str], table: list[list]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for row in table:
        lost = [isinstance(value, float) and math.isnan(value) for value in row]
        writer.writerow(["" if nan else value for value, nan in zip(row, lost, strict=True)])
    files.write_text(path, text.getvalue())


def _table(outcome: Outcome, lines: Sequence[Line], stage: str) -> str:
    """Rows down, for each metric its mean and the difference across."""
    metrics = list(dict.fromkeys(line.metric for line in lines))
    by_place = {(line.row, line.metric): line for line in lines}
    facts = stage == "pretrain" and any(f.parameters for f in outcome.rows.values())
    table = [["row", *(["parameters", "tokens", "FLOPs"] if facts else []), "seeds"]]
    for metric in metrics:
        table[0] += [metric.replace("_", " "), "difference", "noise"]
    for row, of_row in outcome.rows.items():
        found = [by_place.get((row, metric)) for metric in metrics]
        cells = [row]
        if facts:
            numbers = ((of_row.parameters, ",d"), (of_row.tokens, ".3g"), (of_row.flops, ".3g"))
            cells += ["" if v is None else overview.spell_number(v, form) for v, form in numbers]
        cells.append(str(max((line.value.count for line in found if line), default=0)))
        for line in found:
            cells += _three(line) if line else ["", "", ""]
        table.append(cells)
    widths = [max(len(row[place]) for row in table) for place in range(len(table[0]))]
    marks = ["-" * w if place == 0 else "-" * (w - 1) + ":" for place, w in enumerate(widths)]
    lines = []
    for row in (table[0], marks, *table[1:]):
        name, *numbers = zip(row, widths, strict=True)
        cells = [name[0].ljust(name[1]), *(text.rjust(width) for text, width in numbers)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _three(line: Line) -> list[str]:
    """Mean, difference, verdict."""
    digits = _digits(line)
    value = _number(line.value.mean, digits)
    if not math.isnan(line.value.low):
        value += f" ± {_number(line.value.high - line.value.mean, digits)}"
    if line.diverged:
        value += f" ({line.diverged} diverged)"
    if line.difference is None:
        return [value, "", ""]
    change = _number(line.difference.mean, digits, sign=True)
    if not math.isnan(line.difference.low):
        low, high = line.difference.low, line.difference.high
        change += f" [{_number(low, digits, sign=True)}, {_number(high, digits, sign=True)}]"
    noise = f"{line.noise}, p {line.p_holm:.2g}" if line.noise else "no test"
    return [value, change, noise]


def _digits(line: Line) -> int:
    """Decimals: four of what is near to 1, fewer of what is large, three figures of small ones."""
    size = abs(line.value.mean)
    if not 0 < size < 0.01:  # nan too
        return 0 if size >= 1000 else 1 if size >= 100 else 4
    return min(12, 2 - math.floor(math.log10(size)))


def _number(value: float, digits: int, *, sign: bool = False) -> str:
    return "none" if math.isnan(value) else format(value, f"{'+' if sign else ''},.{digits}f")
