"""Attention maps by position, dynamic convolution filters of a word, and figures of both.

`recipes/inspection.py` computes the inputs from a model.
"""

import dataclasses
import re
from collections.abc import Sequence

import numpy as np
from etils import epath

from convbert_jax import drawing

WINDOW = 4  # positions on each side, as ConvBERT's filters of 9 taps


@dataclasses.dataclass(frozen=True)
class LayerMaps:
    """Attention maps of one layer.

    Attributes:
      layer: index over all stages, from 0.
      mean: [H, L, L], query by key: mean over the texts that have both positions, NaN if no text
        has them. Texts differ in length, so rows need not sum to 1.
      concentration: [H], see `concentration`; mean over all tokens of all texts.
    """

    layer: int
    mean: np.ndarray
    concentration: np.ndarray


def concentration(maps: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Computes diagonal concentration: the mean share of attention within `window` positions.

    It follows figure 2 of ConvBERT (Jiang et al. 2020), where many heads attend only to neighbors.
    The identity has 1. [CLS] and [SEP] count as ordinary queries and keys, so a head that attends
    to [SEP] is below `chance`.

    Args:
      maps: [..., n, n], maps of a text without padding; rows sum to 1.
      window: maximum distance in positions.

    Returns:
      [...], from 0 to 1.
    """
    return (maps * _near(maps.shape[-1], window)).sum((-1, -2)) / maps.shape[-1]


def chance(length: int, window: int = WINDOW) -> float:
    """Computes `concentration` of uniform attention over a text.

    This chance level is (number of pairs at most `window` apart) / length^2.
    """
    return float(_near(length, window).mean())


def _near(length: int, window: int) -> np.ndarray:
    places = np.arange(length)
    return np.abs(places[:, None] - places) <= window


class MapSums:
    """Accumulator of a model's attention maps over texts.

    Args:
      length: maximum number of tokens of a text.
      window: `window` of `concentration`.
    """

    def __init__(self, length: int, window: int = WINDOW):
        self.window, self.length, self.texts, self.tokens = window, length, 0, 0
        self._counts = np.zeros((length, length))
        self._chance = 0.0
        self._sums: dict[int, np.ndarray] = {}
        self._near: dict[int, np.ndarray] = {}

    def add(self, maps: dict[int, np.ndarray]) -> None:
        """Adds the maps of a text without padding: layer -> [H, n, n]."""
        n = next(iter(maps.values())).shape[-1]
        self.texts += 1
        self.tokens += n
        self._counts[:n, :n] += 1
        self._chance += n * chance(n, self.window)
        for layer, of_layer in maps.items():
            heads = len(of_layer)
            sums = self._sums.setdefault(layer, np.zeros((heads, self.length, self.length)))
            sums[:, :n, :n] += of_layer
            near = self._near.setdefault(layer, np.zeros(heads))
            near += n * concentration(of_layer, self.window)

    @property
    def chance(self) -> float:
        """Chance level of the added texts: mean of `chance` over all tokens."""
        return self._chance / self.tokens

    def layers(self) -> list[LayerMaps]:
        """Returns the means of all layers, up to the length of the longest text."""
        used = int(np.count_nonzero(self._counts[0]))
        counts = self._counts[:used, :used]
        with np.errstate(invalid="ignore"):
            return [
                LayerMaps(
                    layer,
                    np.where(counts > 0, sums[:, :used, :used] / counts, np.nan),
                    self._near[layer] / self.tokens,
                )
                for layer, sums in sorted(self._sums.items())
            ]


_BESIDE = 22  # characters shown on each side of the word


@dataclasses.dataclass(frozen=True)
class Occurrence:
    """An occurrence of a word.

    Attributes:
      text: index of the text.
      token: position of the word's first token in the model's input, where [CLS] is 0.
      snippet: the word in its context.
    """

    text: int
    token: int
    snippet: str


@dataclasses.dataclass(frozen=True)
class LayerFilters:
    """Filters of one layer.

    Attributes:
      layer: index over all stages, from 0.
      filters: [occurrences, H, K]; tap i reads at offset i - K // 2. Each filter sums to 1.
    """

    layer: int
    filters: np.ndarray


def find_word(word: str, number: int, text: str, places: np.ndarray) -> list[Occurrence]:
    """Finds all occurrences of `word` as a whole word in a text, ignoring case.

    Args:
      number: index of the text.
      places: [n, 2] start and end (exclusive) of each input token in characters, without [CLS].
    """
    found = []
    for match in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE):
        (covering,) = np.nonzero((places[:, 0] <= match.start()) & (match.start() < places[:, 1]))
        if len(covering):
            snippet = _cut_out(text, match.start(), match.end())
            # The last match, because a token for the space can cover the same character.
            found.append(Occurrence(number, int(covering[-1]) + 1, snippet))
    return found


def _cut_out(text: str, start: int, end: int) -> str:
    before, after = text[max(0, start - _BESIDE) : start], text[end : end + _BESIDE]
    before = ("…" if start > _BESIDE else "") + before
    after += "…" if end + _BESIDE < len(text) else ""
    return " ".join(f"{before}{text[start:end].upper()}{after}".split())


def spread(filters: np.ndarray) -> np.ndarray:
    """Computes the share of filter weight that depends on the context.

    This is the mean total variation distance to the mean filter: half the sum over taps of
    |filter - mean filter|, averaged over occurrences.

    Args:
      filters: [occurrences, H, K].

    Returns:
      [H], from 0 (the same filter everywhere) to below 1.
    """
    return np.abs(filters - filters.mean(0)).sum(-1).mean(0) / 2


def chosen_layers(layers: Sequence[int], asked: Sequence[int]) -> list[int]:
    """Chooses the layers to draw: those in `asked`, or the first, middle and last."""
    if asked:
        return [layer for layer in layers if layer in asked]
    places = {0, len(layers) // 2, len(layers) - 1}
    return [layers[place] for place in sorted(places) if layers]


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
