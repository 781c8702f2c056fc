"""Figures of mean attention maps, diagonal concentration and filters."""

from collections.abc import Sequence

import numpy as np
from etils import epath

from convbert_jax import drawing
from convbert_jax.analysis.inside.filters import LayerFilters, Occurrence, spread
from convbert_jax.analysis.inside.maps import LayerMaps

# Maximum numbers to draw: positions of a map, occurrences of a word, heads of a layer's filters.
SHOWN = 64
OCCURRENCES = 24
HEADS = 4


def draw_maps(layers: Sequence[LayerMaps], title: str, picture: epath.PathLike) -> None:
    """Draws a panel for each layer (row) and head (column): queries by keys."""
    heads = max(len(layer.mean) for layer in layers)
    shown = min(SHOWN, layers[0].mean.shape[-1])
    side = float(np.clip(9.0 / heads, 0.9, 1.8))
    from matplotlib import colors

    with drawing.open_figure(
        picture, (max(5.6, side * heads + 1.6), (side + 0.16) * len(layers) + 1.0), [title]
    ) as figure:
        axes = figure.subplots(len(layers), heads, squeeze=False)
        cells = np.concatenate([layer.mean[:, :shown, :shown].ravel() for layer in layers])
        # Not the maximum: one token with all the attention would darken the rest.
        most = float(np.nanpercentile(cells, 99.8))
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
                    layer.mean[head, :shown, :shown],
                    cmap="viridis",
                    norm=scale,
                    interpolation="none",
                )
                axis.set_title(f"{layer.concentration[head]:.0%}", fontsize=7, pad=2)
            row[0].set_ylabel(f"layer {layer.layer}", fontsize=8)
        bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01, aspect=30, extend="max")
        bar.set_label("mean attention (root scale)", fontsize=8)
        bar.ax.tick_params(labelsize=7)
        figure.suptitle(
            f"{title}\none panel per head: queries (rows) by keys (columns), {shown} positions;\n"
            "above: diagonal concentration",
            fontsize=9,
        )


def draw_concentration(
    models: Sequence[tuple[str, Sequence[LayerMaps], float]], window: int, picture: epath.PathLike
) -> None:
    """Draws a panel for each model: dots are heads side by side, the line is their mean.

    Args:
      models: (name, layers, chance level) of each model.
      window: window of the concentration.
      picture: path of the PNG.
    """
    from matplotlib import ticker

    with drawing.open_figure(
        picture, (4.6 * len(models) + 0.4, 3.6), [name for name, _, _ in models]
    ) as figure:
        axes = figure.subplots(1, len(models), squeeze=False, sharey=True)
        for axis, (name, layers, chance) in zip(axes[0], models, strict=True):
            for layer in layers:
                heads = layer.concentration
                beside = np.linspace(-0.25, 0.25, len(heads)) if len(heads) > 1 else np.zeros(1)
                axis.plot(layer.layer + beside, heads, "o", color="C0", alpha=0.6, ms=4, mew=0)
            means = [layer.concentration.mean() for layer in layers]
            axis.plot([layer.layer for layer in layers], means, "-", color="C0", lw=1.6)
            axis.plot([], [], "o-", color="C0", lw=1.6, ms=4, label="heads and their mean")
            axis.axhline(chance, color="0.35", ls="--", lw=1.2, label=f"chance level, {chance:.0%}")
            axis.set_title(name, fontsize=9)
            axis.set_xlabel("layer", fontsize=9)
            axis.set_xticks([layer.layer for layer in layers])
            axis.set_xlim(layers[0].layer - 0.6, layers[-1].layer + 0.6)
            axis.grid(alpha=0.25)
            axis.tick_params(labelsize=8)
            axis.legend(fontsize=8, frameon=False)
        highest = max(layer.concentration.max() for _, layers, _ in models for layer in layers)
        axes[0, 0].set_ylim(0, 1.3 * max(highest, *(chance for _, _, chance in models)))
        axes[0, 0].yaxis.set_major_formatter(ticker.PercentFormatter(1))
        axes[0, 0].set_ylabel(f"share of attention within {window} positions", fontsize=9)


def draw_filters(
    layers: Sequence[LayerFilters],
    occurrences: Sequence[Occurrence],
    title: str,
    picture: epath.PathLike,
) -> None:
    """Draws a panel for each head, layer by layer: occurrences (rows) by taps (columns)."""
    occurrences = occurrences[:OCCURRENCES]
    snippets = [occurrence.snippet for occurrence in occurrences]
    panels = [(layer, head) for layer in layers for head in range(layer.filters.shape[1])
              if head < HEADS]  # fmt: skip
    most = max(float(layer.filters[: len(occurrences), head].max()) for layer, head in panels)
    with drawing.open_figure(
        picture, (0.95 * len(panels) + 4.4, 0.19 * len(occurrences) + 1.5), [title, *snippets]
    ) as figure:
        axes = figure.subplots(1, len(panels), squeeze=False)
        image = None
        for axis, (layer, head) in zip(axes[0], panels, strict=True):
            taps, moved = layer.filters.shape[-1], spread(layer.filters)[head]
            image = axis.imshow(
                layer.filters[: len(occurrences), head],
                cmap="viridis", vmin=0, vmax=most, aspect="auto", interpolation="none",
            )  # fmt: skip
            axis.set_title(f"layer {layer.layer}\nhead {head}: {moved:.0%}", fontsize=7, pad=3)
            ticks = sorted({0, taps // 2, taps - 1})
            axis.set_xticks(ticks, [str(tick - taps // 2) for tick in ticks], fontsize=7)
            axis.set_yticks([])
        axes[0, 0].set_yticks(range(len(snippets)), snippets, fontsize=7)
        axes[0, 0].set_xlabel("tap", fontsize=8)
        bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01, aspect=30)
        bar.set_label("weight of the tap", fontsize=8)
        bar.ax.tick_params(labelsize=7)
        figure.suptitle(
            f"{title}\n%: share of filter weight that depends on the context", fontsize=9
        )
