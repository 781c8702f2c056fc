"""What layers do, drawn: average maps, their concentration, a word's filters."""

from collections.abc import Sequence

import numpy as np
from etils import epath

from convbert_jax import drawing
from convbert_jax.analysis.inside.filters import LayerFilters, Occurrence, spread
from convbert_jax.analysis.inside.maps import LayerMaps

SHOWN = 64  # positions of a map
OCCURRENCES = 24  # of a word
HEADS = 8  # of the filters


def draw_maps(layers: Sequence[LayerMaps], title: str, picture: epath.PathLike) -> None:
    """A panel for each layer (down) and head (across): queries down, keys across."""
    heads = max(len(layer.mean) for layer in layers)
    shown = min(SHOWN, layers[0].mean.shape[-1])
    side = float(np.clip(9.0 / heads, 0.9, 1.8))
    pyplot = drawing.open_pyplot([title])
    from matplotlib import colors

    figure, axes = pyplot.subplots(
        len(layers),
        heads,
        figsize=(side * heads + 1.6, (side + 0.16) * len(layers) + 0.8),
        squeeze=False,
        layout="constrained",
    )
    most = max(float(np.nanmax(layer.mean[:, :shown, :shown])) for layer in layers)
    scale = colors.PowerNorm(0.5, vmin=0, vmax=most)
    image = None
    for layer, row in zip(layers, axes, strict=True):
        for head, axis in enumerate(row):
            axis.set_xticks([])
            axis.set_yticks([])
            if head >= len(layer.mean):
                axis.set_visible(False)
                continue
            image = axis.imshow(
                layer.mean[head, :shown, :shown], cmap="viridis", norm=scale, interpolation="none"
            )
            axis.set_title(f"{layer.concentration[head]:.0%}", fontsize=7, pad=2)
        row[0].set_ylabel(f"layer {layer.layer}", fontsize=8)
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01, aspect=30)
    bar.set_label("mean attention (root scale)", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    figure.suptitle(
        f"{title}\nheads across, of each the first {shown} positions, queries down; above a map: "
        "diagonal concentration",
        fontsize=9,
    )
    drawing.save(figure, picture)


def draw_concentration(
    models: Sequence[tuple[str, Sequence[LayerMaps], float]], window: int, picture: epath.PathLike
) -> None:
    """A panel for each model (its name, its layers, its chance level): dots are heads, the line
    their mean.
    """
    pyplot = drawing.open_pyplot([name for name, _, _ in models])
    figure, axes = pyplot.subplots(
        1,
        len(models),
        figsize=(4.6 * len(models) + 0.4, 3.6),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for axis, (name, layers, chance) in zip(axes[0], models, strict=True):
        for layer in layers:
            heads = layer.concentration
            axis.plot([layer.layer] * len(heads), heads, "o", color="C0", alpha=0.45, ms=4.5)
        means = [layer.concentration.mean() for layer in layers]
        axis.plot([layer.layer for layer in layers], means, "-", color="C0", lw=1.6)
        axis.plot([], [], "o-", color="C0", lw=1.6, ms=4.5, label="heads, and their mean")
        axis.axhline(chance, color="0.35", ls="--", lw=1.2, label=f"chance level, {chance:.0%}")
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("layer", fontsize=9)
        axis.set_xticks([layer.layer for layer in layers])
        axis.set_ylim(0, 1.03)
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=8)
        axis.legend(fontsize=8, frameon=False)
    axes[0, 0].set_ylabel(f"share of attention within {window} positions", fontsize=9)
    drawing.save(figure, picture)


def draw_filters(
    layers: Sequence[LayerFilters],
    occurrences: Sequence[Occurrence],
    title: str,
    picture: epath.PathLike,
) -> None:
    """A panel for each layer (down) and head (across): occurrences down, taps across."""
    occurrences = occurrences[:OCCURRENCES]
    snippets = [occurrence.snippet for occurrence in occurrences]
    heads = min(HEADS, max(layer.filters.shape[1] for layer in layers))
    most = max(float(layer.filters[: len(occurrences), :heads].max()) for layer in layers)
    pyplot = drawing.open_pyplot([title, *snippets])
    height = 0.19 * len(occurrences) + 0.7
    figure, axes = pyplot.subplots(
        len(layers),
        heads,
        figsize=(1.35 * heads + 4.6, height * len(layers) + 0.9),
        squeeze=False,
        layout="constrained",
    )
    image = None
    for place, (layer, row) in enumerate(zip(layers, axes, strict=True)):
        moved, taps = spread(layer.filters), layer.filters.shape[-1]
        for head, axis in enumerate(row):
            axis.set_yticks([])
            if head >= layer.filters.shape[1]:
                axis.set_visible(False)
                continue
            image = axis.imshow(
                layer.filters[: len(occurrences), head],
                cmap="viridis", vmin=0, vmax=most, aspect="auto", interpolation="none",
            )  # fmt: skip
            axis.set_title(f"head {head}: {moved[head]:.0%}", fontsize=8, pad=3)
            ticks = sorted({0, taps // 2, taps - 1})
            axis.set_xticks(ticks, [f"{tick - taps // 2:+d}" if tick != taps // 2 else "0"
                                    for tick in ticks], fontsize=7)  # fmt: skip
            if place == len(layers) - 1:
                axis.set_xlabel("tap", fontsize=8)
        row[0].set_yticks(range(len(snippets)), snippets, fontsize=7)
        row[0].set_ylabel(f"layer {layer.layer}", fontsize=9)
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01, aspect=30)
    bar.set_label("weight of the tap", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    figure.suptitle(
        f"{title}\nabove a panel: the share of weight that the context moves", fontsize=9
    )
    drawing.save(figure, picture)
