"""Is a difference between two rows more than the noise of seeds?

A row is compared with the baseline seed by seed: the same seed draws the same initial weights where
the networks are alike, the same batches and the same masks, so the difference of a pair has less
noise than the two numbers. The test is Student's paired t-test, two-sided, of the differences
(`scipy.stats.ttest_rel`); a metric is tested in as many rows as there are, so its p-values are
raised after Holm (1979) for all of them, those that are not there yet too, which keeps the chance
of any false alarm among them at `LEVEL`. A difference is *outside* the noise of seeds where the
raised p is below `LEVEL`, else *inside*. Differences that are the same in all seeds, as two of an
accuracy of few texts often are, show no noise to be tested against, and have no test.

It speaks of seeds alone, of this text, this many steps and these rates. It assumes that differences
are near to normal, and with three seeds it finds only large ones: inside is not "equal".
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from convbert_jax.analysis.sweep_report.outcome import Outcome

LEVEL = 0.05
INSIDE, OUTSIDE = "inside", "outside"
_ROUNDING = 1e-9  # relative, of differences that are the same


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean and its 95% interval by Student's t; the bounds are NaN of one value alone."""

    mean: float
    low: float
    high: float
    count: int


@dataclasses.dataclass(frozen=True)
class Line:
    """One metric of one row.

    Attributes:
      diverged: seeds whose number is not finite; they are in no mean.
      difference: from the baseline, over the seeds that both have; None of the baseline itself.
      p: of the paired test, and `p_holm` raised; NaN where there is no test.
    """

    row: str
    stage: str
    metric: str
    value: Interval
    diverged: int = 0
    difference: Interval | None = None
    p: float = math.nan
    p_holm: float = math.nan

    @property
    def noise(self) -> str:
        """INSIDE or OUTSIDE the noise of seeds; "" where there is no test."""
        if self.difference is None or math.isnan(self.p_holm):
            return ""
        return OUTSIDE if self.p_holm < LEVEL else INSIDE


def compare_all(outcome: Outcome) -> list[Line]:
    """A line for each metric that is shown and each row that has it."""
    lines = []
    for stage, metric in outcome.shown():
        baseline = outcome.values(outcome.baseline, stage, metric)
        of_metric = []
        for row in outcome.rows:
            found = outcome.values(row, stage, metric)
            if found:
                against = None if row == outcome.baseline else baseline
                of_metric.append(compare(row, stage, metric, found, against))
        raised = holm([line.p for line in of_metric], len(outcome.rows) - 1)
        lines += [
            dataclasses.replace(line, p_holm=p) for line, p in zip(of_metric, raised, strict=True)
        ]
    return lines


def compare(
    row: str,
    stage: str,
    metric: str,
    values: Mapping[int, float],
    baseline: Mapping[int, float] | None,
) -> Line:
    """One row against the baseline, both as seed -> value; None: it is the baseline."""
    finite = [value for value in values.values() if math.isfinite(value)]
    line = Line(row, stage, metric, summarize(finite), len(values) - len(finite))
    if baseline is None:
        return line
    pairs = [(values[seed], baseline[seed]) for seed in values if seed in baseline]
    pairs = [pair for pair in pairs if all(map(math.isfinite, pair))]
    differences = [one - other for one, other in pairs]
    return dataclasses.replace(line, difference=summarize(differences), p=test(differences))


def summarize(values: Sequence[float]) -> Interval:
    """Mean and interval; NaN of nothing."""
    count = len(values)
    mean = float(np.mean(values)) if count else math.nan
    if count < 2:
        return Interval(mean, math.nan, math.nan, count)
    half = float(stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count))
    return Interval(mean, mean - half, mean + half, count)


def test(differences: Sequence[float]) -> float:
    """p of the paired t-test; NaN of less than two, and of several that are the same."""
    if len(differences) < 2:
        return math.nan
    if np.ptp(differences) <= _ROUNDING * np.abs(differences).max():
        return math.nan if any(differences) else 1.0
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def holm(p: Sequence[float], tests: int) -> list[float]:
    """p-values raised for the number of `tests` (Holm 1979); NaN, of no test yet, is kept."""
    tested = sorted((value, place) for place, value in enumerate(p) if not math.isnan(value))
    raised, highest = list(p), 0.0
    for rank, (value, place) in enumerate(tested):
        highest = max(highest, min(1.0, (tests - rank) * value))
        raised[place] = highest
    return raised
