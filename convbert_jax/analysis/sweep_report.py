"""Report of a sweep with the variation between seeds: Markdown, CSV and figures.

A variant is compared with the baseline seed by seed. Runs of one seed have the same batches, masks
and, where the networks are alike, initial weights, so paired differences vary less than the two
values. The test is Student's two-sided paired t-test (`scipy.stats.ttest_rel`). A metric is tested
once for each variant, so p values are corrected after Holm (1979) for all variants, including
those without results yet; this bounds the family-wise error rate at `LEVEL`. Differences that are
equal in all seeds (an accuracy of few texts, for one) have no variance and no test.

The test assumes normal differences and covers seeds only, not other data or training lengths. With
three seeds it detects large differences only: not significant does not mean equal.
"""

import collections
import csv
import dataclasses
import io
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from etils import epath
from scipy import stats

from convbert_jax import drawing, storage
from convbert_jax.analysis import overview

AXES = ("step", "tokens", "flops", "seconds")  # of a learning curve


@dataclasses.dataclass(frozen=True)
class RunOutcome:
    """Result of one run.

    Attributes:
      stage: "pretrain", or the name of the task.
      state: "finished", "failed", "started" or "new"; `why` is the error of a failed run.
      values: metric -> value, NaN if the run diverged; {} if it is not finished.
      curve: held-out metrics of pre-training in order, each point with `AXES`. Seconds exclude
        compilation, evaluation and checkpoints.
    """

    variant: str
    seed: int
    stage: str
    state: str
    why: str = ""
    seconds: float = 0.0
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    curve: tuple[Mapping[str, float], ...] = ()

    @property
    def id(self) -> str:
        return f"{self.variant}/seed-{self.seed}/{self.stage}"


@dataclasses.dataclass(frozen=True)
class VariantInfo:
    """Changes of a variant as text, and its size; None without pre-training."""

    changes: str
    parameters: int | None = None
    tokens: int | None = None
    flops: float | None = None


@dataclasses.dataclass(frozen=True)
class SweepOutcome:
    """Results of a sweep.

    Attributes:
      variants: name -> info, in order; `baseline` is one of them.
      metrics: shown for pre-training; tasks show all of theirs.
    """

    name: str
    purpose: str
    variants: Mapping[str, VariantInfo]
    baseline: str
    metrics: tuple[str, ...]
    runs: tuple[RunOutcome, ...]

    def shown(self) -> list[tuple[str, str]]:
        """The (stage, metric) pairs to show that a finished run has, in order."""
        found: dict[tuple[str, str], None] = {}
        for run in self.runs:
            for metric in run.values:
                if run.stage != "pretrain" or metric in self.metrics:
                    found[run.stage, metric] = None
        order = {metric: place for place, metric in enumerate(self.metrics)}
        stages = list(dict.fromkeys(run.stage for run in self.runs))
        return sorted(found, key=lambda key: (stages.index(key[0]), order.get(key[1], 0)))

    def values(self, variant: str, stage: str, metric: str) -> dict[int, float]:
        """Seed -> value of the finished runs."""
        return {
            run.seed: run.values[metric]
            for run in self.runs
            if (run.variant, run.stage) == (variant, stage) and metric in run.values
        }


LEVEL = 0.05
_ROUNDING = 1e-9  # relative; smaller spreads of differences are rounding errors


@dataclasses.dataclass(frozen=True)
class Interval:
    """Mean and 95% confidence interval (Student's t); bounds are NaN for a single value."""

    mean: float
    low: float
    high: float
    count: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One metric of one variant.

    Attributes:
      diverged: number of seeds whose value is not finite; they are excluded from the mean.
      difference: difference from the baseline over common seeds; None for the baseline itself.
      p: p value of the paired test; NaN without a test.
      p_holm: corrected p value; NaN without a test.
    """

    variant: str
    stage: str
    metric: str
    value: Interval
    diverged: int = 0
    difference: Interval | None = None
    p: float = math.nan
    p_holm: float = math.nan

    @property
    def significant(self) -> bool | None:
        """Whether the corrected p value is below `LEVEL`; None without a test."""
        return None if math.isnan(self.p_holm) else self.p_holm < LEVEL


def compare_all(outcome: SweepOutcome) -> list[Comparison]:
    """Compares each variant that has results with the baseline, for each shown metric."""
    comparisons = []
    for stage, metric in outcome.shown():
        baseline = outcome.values(outcome.baseline, stage, metric)
        of_metric = []
        for variant in outcome.variants:
            values = outcome.values(variant, stage, metric)
            if values:
                reference = None if variant == outcome.baseline else baseline
                of_metric.append(compare(variant, stage, metric, values, reference))
        corrected = holm([one.p for one in of_metric], len(outcome.variants) - 1)
        comparisons += [
            dataclasses.replace(one, p_holm=p) for one, p in zip(of_metric, corrected, strict=True)
        ]
    return comparisons


def compare(
    variant: str,
    stage: str,
    metric: str,
    values: Mapping[int, float],
    baseline: Mapping[int, float] | None,
) -> Comparison:
    """Compares a variant with the baseline (seed -> value), or summarizes the baseline (None)."""
    finite = [value for value in values.values() if math.isfinite(value)]
    result = Comparison(variant, stage, metric, summarize(finite), len(values) - len(finite))
    if baseline is None:
        return result
    pairs = [(values[seed], baseline[seed]) for seed in values if seed in baseline]
    differences = [one - other for one, other in pairs if math.isfinite(one - other)]
    return dataclasses.replace(
        result, difference=summarize(differences), p=paired_test(differences)
    )


def summarize(values: Sequence[float]) -> Interval:
    """Returns mean and interval; NaN for no values."""
    count = len(values)
    mean = float(np.mean(values)) if count else math.nan
    if count < 2:
        return Interval(mean, math.nan, math.nan, count)
    half = float(stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count))
    return Interval(mean, mean - half, mean + half, count)


def paired_test(differences: Sequence[float]) -> float:
    """Returns p of the paired t-test: NaN for fewer than two, or for equal nonzero differences."""
    if len(differences) < 2:
        return math.nan
    if np.ptp(differences) <= _ROUNDING * np.abs(differences).max():
        return math.nan if any(differences) else 1.0
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def holm(p: Sequence[float], tests: int) -> list[float]:
    """Returns p values corrected for a number of `tests` (Holm 1979); NaN stays NaN."""
    order = sorted((value, place) for place, value in enumerate(p) if not math.isnan(value))
    corrected, highest = list(p), 0.0
    for rank, (value, place) in enumerate(order):
        highest = max(highest, min(1.0, (tests - rank) * value))
        corrected[place] = highest
    return corrected


_TITLES = {"step": "steps", "tokens": "tokens", "flops": "FLOPs", "seconds": "training seconds"}
_MAX_CURVES = 2  # metrics that get a row of panels
_HARDWARE = ("tokens_per_second", "host_memory", "device_memory")


def draw_means(outcome: SweepOutcome, comparisons: Sequence[Comparison], path: epath.Path) -> bool:
    """Draws a panel for each metric: seeds as dots, means with 95% intervals.

    Means with a significant difference from the baseline are filled.

    Returns:
      False if there was nothing to draw.
    """
    keys = outcome.shown()
    if not keys:
        return False
    names = list(outcome.variants)
    columns = min(3, len(keys))
    panels = math.ceil(len(keys) / columns)
    size = (4.4 * columns + 1.0, (1.2 + 0.32 * len(names)) * panels)
    with drawing.open_figure(path, size, outcome.variants, dpi=110) as figure:
        axes = figure.subplots(panels, columns, squeeze=False, sharey=True)
        for axis, (stage, metric) in zip(axes.flat, keys, strict=False):
            for one in comparisons:
                if (one.stage, one.metric) != (stage, metric):
                    continue
                y = names.index(one.variant)
                values = list(outcome.values(one.variant, stage, metric).values())
                color, mean = f"C{y % 10}", one.value
                axis.plot(values, [y] * len(values), "o", color="0.2", ms=3, zorder=4)
                if not math.isnan(mean.low):
                    axis.plot([mean.low, mean.high], [y] * 2, color=color, lw=2)
                fill = color if one.significant else "white"
                axis.plot(mean.mean, y, "D", color=color, mfc=fill, ms=7, zorder=3)
                if one.variant == outcome.baseline and not math.isnan(mean.mean):
                    axis.axvline(mean.mean, color="0.5", ls="--", lw=1)
            axis.set_title(_title(stage, metric), fontsize=10)
            axis.set_yticks(range(len(names)), names, fontsize=8)
            axis.set_ylim(len(names) - 0.5, -0.5)
            axis.tick_params(axis="x", labelsize=8)
            axis.grid(alpha=0.25)
        for axis in axes.flat[len(keys) :]:
            axis.set_visible(False)
        figure.suptitle(
            f"{outcome.name}: seeds (dots), mean and 95% interval; filled: significantly different "
            f"from {outcome.baseline}",
            fontsize=9,
        )
    return True


def draw_curves(outcome: SweepOutcome, path: epath.Path) -> bool:
    """Draws held-out metrics of pre-training over steps, tokens, FLOPs and seconds.

    Curves are means over seeds, with a band from minimum to maximum.

    Returns:
      False if there was nothing to draw.
    """
    have = {name for run in outcome.runs for point in run.curve for name in point}
    metrics = [name for name in outcome.metrics if name in have and name not in _HARDWARE]
    metrics = metrics[:_MAX_CURVES]
    if not metrics:
        return False
    size = (3.7 * len(AXES) + 1.5, 3.2 * len(metrics))
    with drawing.open_figure(path, size, outcome.variants, dpi=110) as figure:
        axes = figure.subplots(len(metrics), len(AXES), squeeze=False, sharey="row")
        for metric, panels in zip(metrics, axes, strict=True):
            for i, variant in enumerate(outcome.variants):
                style = {"color": f"C{i % 10}", "ls": ("-", "--", ":")[i // 10 % 3]}
                for along, axis in zip(AXES, panels, strict=True):
                    _draw_variant(axis, outcome, variant, metric, along, style)
            for along, axis in zip(AXES, panels, strict=True):
                axis.set_xlabel(_TITLES[along], fontsize=8)
                axis.tick_params(labelsize=8)
                axis.grid(alpha=0.25)
            panels[0].set_ylabel(f"{metric.replace('_', ' ')}, held out", fontsize=9)
        handles, names = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside right center", fontsize=8, frameon=False)
        figure.suptitle(
            f"{outcome.name}: mean over seeds, band from minimum to maximum", fontsize=9
        )
    return True


def _draw_variant(
    axis, outcome: SweepOutcome, variant: str, metric: str, along: str, style: dict
) -> None:
    """Draws one curve; seeds are averaged at equal steps."""
    points: dict[float, list[tuple[float, float]]] = {}
    for run in outcome.runs:
        for point in run.curve if run.variant == variant else ():
            if metric in point and math.isfinite(point[metric]):
                points.setdefault(point["step"], []).append((point[along], point[metric]))
    if not points:
        return
    found = [np.asarray(points[step]) for step in sorted(points)]
    x = [pairs[:, 0].mean() for pairs in found]
    y = [pairs[:, 1] for pairs in found]
    means = [values.mean() for values in y]
    axis.plot(x, means, label=variant, marker=".", ms=4, lw=1.4, **style)
    low, high = [values.min() for values in y], [values.max() for values in y]
    axis.fill_between(x, low, high, color=style["color"], alpha=0.15, lw=0)


def _title(stage: str, metric: str) -> str:
    name = metric.replace("_", " ")
    return name if stage == "pretrain" else f"{stage}: {name}"


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
    storage.write_text(folder / "report.md", text)
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
    storage.write_text(path, text.getvalue())


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


__all__ = ["RunOutcome", "SweepOutcome", "VariantInfo", "write"]


def write(outcome: SweepOutcome, folder: epath.Path) -> str:
    """Writes the report into `folder` and returns the text of report.md.

    Raises:
      OSError: the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    comparisons = compare_all(outcome)
    drawn = []
    if draw_means(outcome, comparisons, folder / "means.png"):
        drawn.append("means.png")
    if draw_curves(outcome, folder / "curves.png"):
        drawn.append("curves.png")
    write_csv(outcome, comparisons, folder)
    return write_markdown(outcome, comparisons, folder, drawn)
