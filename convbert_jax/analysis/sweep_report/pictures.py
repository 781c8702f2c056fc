"""The report as pictures: every seed with means and intervals, and learning curves."""

import math
from collections.abc import Sequence

import numpy as np
from etils import epath

from convbert_jax import drawing
from convbert_jax.analysis.sweep_report.comparison import OUTSIDE, Line
from convbert_jax.analysis.sweep_report.outcome import AXES, Outcome

_TITLES = {"step": "steps", "tokens": "tokens", "flops": "FLOPs", "seconds": "seconds of training"}
_MOST_CURVES = 2  # metrics that get a line of panels
_OF_CLOCK = ("tokens_per_second", "host_memory", "device_memory")


def draw_means(outcome: Outcome, lines: Sequence[Line], picture: epath.Path) -> bool:
    """A panel for each metric: dots are seeds, the bar is the mean's 95% interval; filled where the
    difference from the baseline is outside the noise of seeds.

    Returns:
      whether there was anything to draw.
    """
    keys = outcome.shown()
    if not keys:
        return False
    columns = min(3, len(keys))
    height = 1.2 + 0.32 * len(outcome.rows)
    panels = math.ceil(len(keys) / columns)
    with drawing.open_figure(
        picture, (4.4 * columns + 1.0, height * panels), outcome.rows, dpi=110
    ) as figure:
        axes = figure.subplots(panels, columns, squeeze=False, sharey=True)
        names = list(outcome.rows)
        for axis, (stage, metric) in zip(axes.flat, keys, strict=False):
            for line in lines:
                if (line.stage, line.metric) != (stage, metric):
                    continue
                place = names.index(line.row)
                values = list(outcome.values(line.row, stage, metric).values())
                axis.plot(values, [place] * len(values), "o", color="0.2", ms=3, zorder=4)
                if not math.isnan(line.value.low):
                    axis.plot(
                        [line.value.low, line.value.high], [place] * 2, color=f"C{place % 10}", lw=2
                    )
                axis.plot(
                    line.value.mean,
                    place,
                    "D",
                    color=f"C{place % 10}",
                    mfc=f"C{place % 10}" if line.noise == OUTSIDE else "white",
                    ms=7,
                    zorder=3,
                )
                if line.row == outcome.baseline and not math.isnan(line.value.mean):
                    axis.axvline(line.value.mean, color="0.5", ls="--", lw=1)
            axis.set_title(_title(stage, metric), fontsize=10)
            axis.set_yticks(range(len(names)), names, fontsize=8)
            axis.set_ylim(len(names) - 0.5, -0.5)
            axis.tick_params(axis="x", labelsize=8)
            axis.grid(alpha=0.25)
        for axis in axes.flat[len(keys) :]:
            axis.set_visible(False)
        figure.suptitle(
            f"{outcome.name}: seeds (dots), mean and 95% interval; filled: outside the noise of "
            f"seeds against {outcome.baseline}",
            fontsize=9,
        )
    return True


def draw_curves(outcome: Outcome, lines: Sequence[Line], picture: epath.Path) -> bool:
    """Held-out numbers of pre-training against steps, tokens, FLOPs and seconds: the mean over
    seeds, and all of them between the least and the largest as a band.

    Returns:
      whether there was anything to draw.
    """
    del lines
    have = {name for cell in outcome.cells for point in cell.curve for name in point}
    metrics = [name for name in outcome.metrics if name in have and name not in _OF_CLOCK]
    metrics = metrics[:_MOST_CURVES]
    if not metrics:
        return False
    with drawing.open_figure(
        picture, (3.7 * len(AXES) + 1.5, 3.2 * len(metrics)), outcome.rows, dpi=110
    ) as figure:
        axes = figure.subplots(len(metrics), len(AXES), squeeze=False, sharey="row")
        for metric, panels in zip(metrics, axes, strict=True):
            for place, row in enumerate(outcome.rows):
                style = {"color": f"C{place % 10}", "ls": ("-", "--", ":")[place // 10 % 3]}
                for along, axis in zip(AXES, panels, strict=True):
                    _draw_row(axis, outcome, row, metric, along, style)
            for along, axis in zip(AXES, panels, strict=True):
                axis.set_xlabel(_TITLES[along], fontsize=8)
                axis.tick_params(labelsize=8)
                axis.grid(alpha=0.25)
            panels[0].set_ylabel(f"{metric.replace('_', ' ')}, held out", fontsize=9)
        handles, names = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside right center", fontsize=8, frameon=False)
        figure.suptitle(f"{outcome.name}: mean over seeds, band from least to largest", fontsize=9)
    return True


def _draw_row(axis, outcome: Outcome, row: str, metric: str, along: str, style: dict) -> None:
    """One line; seeds are brought together by the step."""
    points: dict[float, list[tuple[float, float]]] = {}
    for cell in outcome.cells:
        for point in cell.curve if cell.row == row else ():
            if metric in point and math.isfinite(point[metric]):
                points.setdefault(point["step"], []).append((point[along], point[metric]))
    if not points:
        return
    found = [np.asarray(points[step]) for step in sorted(points)]
    x = [pairs[:, 0].mean() for pairs in found]
    axis.plot(x, [p[:, 1].mean() for p in found], label=row, marker=".", ms=4, lw=1.4, **style)
    axis.fill_between(
        x,
        [p[:, 1].min() for p in found],
        [p[:, 1].max() for p in found],
        color=style["color"],
        alpha=0.15,
        lw=0,
    )


def _title(stage: str, metric: str) -> str:
    name = metric.replace("_", " ")
    return name if stage == "pretrain" else f"{stage}: {name}"
