"""Tests whether the difference between two variants exceeds the variation between seeds.

A variant is compared with the baseline seed by seed. Runs of one seed have the same batches, masks
and, where the networks are alike, initial weights, so paired differences vary less than the two
values. The test is Student's two-sided paired t-test (`scipy.stats.ttest_rel`). A metric is tested
once for each variant, so p values are corrected after Holm (1979) for all variants, including
those without results yet; this bounds the family-wise error rate at `LEVEL`. Differences that are
equal in all seeds (an accuracy of few texts, for one) have no variance and no test.

The test assumes normal differences and covers seeds only, not other data or training lengths. With
three seeds it detects large differences only: not significant does not mean equal.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from convbert_jax.analysis.sweep_report.outcome import SweepOutcome

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
    return dataclasses.replace(result, difference=summarize(differences), p=test(differences))


def summarize(values: Sequence[float]) -> Interval:
    """Returns mean and interval; NaN for no values."""
    count = len(values)
    mean = float(np.mean(values)) if count else math.nan
    if count < 2:
        return Interval(mean, math.nan, math.nan, count)
    half = float(stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count))
    return Interval(mean, mean - half, mean + half, count)


def test(differences: Sequence[float]) -> float:
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
