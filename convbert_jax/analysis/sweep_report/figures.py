"""Figures of the report: means with all seeds, and learning curves."""

import math
from collections.abc import Sequence

import numpy as np
from etils import epath

from convbert_jax import drawing
from convbert_jax.analysis.sweep_report.comparison import Comparison
from convbert_jax.analysis.sweep_report.outcome import AXES, SweepOutcome

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
