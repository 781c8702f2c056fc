"""Tables of the report: report.md, variants.csv and runs.csv."""

import collections
import csv
import io
import math
from collections.abc import Collection, Sequence

from etils import epath

from convbert_jax import files
from convbert_jax.analysis import overview
from convbert_jax.analysis.sweep_report.comparison import LEVEL, Comparison, Interval
from convbert_jax.analysis.sweep_report.outcome import SweepOutcome

_METHOD = (
    "± is the 95% confidence interval of the mean over seeds (Student's t). Differences are "
    "relative to **{baseline}**, paired by seed, with 95% intervals. p values are of the two-sided "
    "paired t-test, corrected after Holm for the {tests} comparisons of a column; * marks "
    "p < {level}. With {seeds} seeds, no * does not mean equal."
)
_PRETRAIN = "pretrain"


def markdown(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()
) -> str:
    """Returns an aligned Markdown table; the columns `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * (w - 1) + ":" if i in right else "-" * w for i, w in enumerate(widths)]
    return "\n".join(
        "| {} |".format(
            " | ".join(
                cell.rjust(width) if i in right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
        )
        for row in (header, rule, *rows)
    )


def write_markdown(
    outcome: SweepOutcome,
    comparisons: Sequence[Comparison],
    folder: epath.Path,
    figures: Sequence[str],
) -> str:
    """Writes and returns report.md, with links to the figures."""
    states = collections.Counter(run.state for run in outcome.runs)
    parts = [f"# {outcome.name}", *([outcome.purpose] if outcome.purpose else [])]
    parts.append(
        f"{len(outcome.runs)} runs: {', '.join(f'{n} {state}' for state, n in states.items())}."
    )
    for stage in dict.fromkeys(one.stage for one in comparisons):
        of_stage = [one for one in comparisons if one.stage == stage]
        parts += [f"## {stage}", _table(outcome, of_stage, stage)]
    if comparisons:
        parts.append(
            _METHOD.format(
                baseline=outcome.baseline,
                tests=len(outcome.variants) - 1,
                level=LEVEL,
                seeds=max(one.value.count for one in comparisons),
            )
        )
    changes = [f"- {name}: {v.changes}" for name, v in outcome.variants.items() if v.changes]
    failed = [f"- {run.id}: {run.why}" for run in outcome.runs if run.why]
    for title, lines in (("Changes of the variants", changes), ("Failed", failed)):
        if lines:
            parts += [f"## {title}", "\n".join(lines)]
    parts += [f"![{name.removesuffix('.png')}]({name})" for name in figures]
    text = "\n\n".join(parts) + "\n"
    files.write_text(folder / "report.md", text)
    return text


def write_csv(outcome: SweepOutcome, comparisons: Sequence[Comparison], folder: epath.Path) -> None:
    """Writes variants.csv and runs.csv; missing numbers are empty.

    variants.csv has a line for each variant and metric, runs.csv for each run with its metrics.
    """
    header = ["variant", "stage", "metric", "seeds", "diverged", "mean", "low", "high"]
    header += ["pairs", "difference", "difference_low", "difference_high", "p", "p_holm"]
    table = []
    for one in comparisons:
        change = one.difference or Interval(math.nan, math.nan, math.nan, 0)
        table.append(
            [
                *(one.variant, one.stage, one.metric, one.value.count, one.diverged),
                *(one.value.mean, one.value.low, one.value.high, change.count),
                *(change.mean, change.low, change.high, one.p, one.p_holm),
            ]
        )
    _write(folder / "variants.csv", header, table)
    metrics = list(dict.fromkeys(name for run in outcome.runs for name in run.values))
    header = ["variant", "seed", "stage", "state", "why", "parameters", "tokens", "flops"]
    table = []
    for run in outcome.runs:
        info = outcome.variants[run.variant]
        size = (info.parameters, info.tokens, info.flops) if run.stage == _PRETRAIN else [None] * 3
        values = [run.values.get(name) for name in metrics]
        start = [run.variant, run.seed, run.stage, run.state, run.why]
        table.append([*start, *size, round(run.seconds, 1), *values])
    _write(folder / "runs.csv", [*header, "seconds", *metrics], table)


def _write(path: epath.Path, header: list[str], table: list[list]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for row in table:
        missing = [isinstance(value, float) and math.isnan(value) for value in row]
        writer.writerow(["" if nan else value for value, nan in zip(row, missing, strict=True)])
    files.write_text(path, text.getvalue())


def _table(outcome: SweepOutcome, comparisons: Sequence[Comparison], stage: str) -> str:
    """Formats a table: a row for each variant, and mean, difference and p for each metric."""
    metrics = list(dict.fromkeys(one.metric for one in comparisons))
    by_cell = {(one.variant, one.metric): one for one in comparisons}
    sized = stage == _PRETRAIN and any(info.parameters for info in outcome.variants.values())
    header = ["variant", *(["parameters", "tokens", "FLOPs"] if sized else []), "seeds"]
    for metric in metrics:
        header += [metric.replace("_", " "), "difference", "p"]
    rows = []
    for variant, info in outcome.variants.items():
        found = [by_cell.get((variant, metric)) for metric in metrics]
        row = [variant]
        if sized:
            numbers = ((info.parameters, ",d"), (info.tokens, ".3g"), (info.flops, ".3g"))
            row += ["" if v is None else overview.spell_number(v, form) for v, form in numbers]
        row.append(str(max((one.value.count for one in found if one), default=0)))
        for one in found:
            row += _cells(one) if one else ["", "", ""]
        rows.append(row)
    return markdown(header, rows, right=range(1, len(header)))


def _cells(one: Comparison) -> list[str]:
    """Formats mean, difference and p."""
    digits = _digits(one.value.mean)
    value = _number(one.value.mean, digits)
    if not math.isnan(one.value.low):
        value += f" ± {_number(one.value.high - one.value.mean, digits)}"
    if one.diverged:
        value += f" ({one.diverged} diverged)"
    if one.difference is None:
        return [value, "", ""]
    change = _number(one.difference.mean, digits, sign=True)
    if not math.isnan(one.difference.low):
        bounds = (one.difference.low, one.difference.high)
        change += f" [{', '.join(_number(bound, digits, sign=True) for bound in bounds)}]"
    star = "*" if one.significant else ""
    return [value, change, "no test" if one.significant is None else f"{one.p_holm:.2g}{star}"]


def _digits(value: float) -> int:
    """Returns decimals: 4 for values near 1, fewer for large ones, 3 digits for small ones."""
    size = abs(value)
    if not 0 < size < 0.01:  # NaN too
        return 0 if size >= 1000 else 1 if size >= 100 else 4
    return min(12, 2 - math.floor(math.log10(size)))


def _number(value: float, digits: int, *, sign: bool = False) -> str:
    return "none" if math.isnan(value) else format(value, f"{'+' if sign else ''},.{digits}f")
