"""Results of a pre-training run: learning curves, and held-out metrics next to chance level."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import logging
from etils import epath

from convbert_jax import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# split ("train" or "validation") -> metric -> [(step, value)]
Curves = Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]


class Panel(NamedTuple):
    """Metrics of one unit, drawn over steps on the same axes.

    Attributes:
      no_skill: value of a model that guesses; None: not drawn.
    """

    title: str
    metrics: tuple[str, ...]
    no_skill: float | None = None


_PANELS = (
    Panel("masked tokens: loss (nats)", ("mlm_loss", "encoder_mlm_loss")),
    Panel(
        "masked tokens: accuracy",
        ("mlm_accuracy", "sampled_accuracy", "encoder_mlm_accuracy"),
    ),
    Panel("pairs of texts: accuracy", ("pair_accuracy",), 0.5),
    Panel("discriminator: area under ROC curve", ("discriminator_auc",), 0.5),
    Panel("discriminator: loss (nats)", ("discriminator_loss",)),
    Panel("next tokens: loss (nats)", ("token_loss",)),
    Panel("next tokens: accuracy", ("token_accuracy",)),
    Panel("perplexity", ("perplexity", "word_perplexity")),
    Panel("distillation: divergence of logits", ("distill_logits",)),
    Panel(
        "distillation: distances of layers",
        ("distill_hidden", "distill_attention", "distill_embeddings"),
    ),
    Panel("share of tokens replaced", ("replaced_rate",)),
    Panel("learning rate", ("learning_rate",)),
)


class Number(NamedTuple):
    """A held-out metric as text, with the value of a model that guesses."""

    name: str
    value: str
    note: str = ""


def arrange_curves(records: Iterable[Mapping[str, Any]]) -> Curves:
    """Turns the records of a metrics file into curves; skips values that are not finite."""
    curves = {}
    for record in records:
        split = curves.setdefault(record["split"], {})
        for name, value in record.items():
            if name not in ("split", "step") and math.isfinite(value):
                split.setdefault(name, []).append((record["step"], value))
    return curves


def choose_panels(curves: Curves) -> list[Panel]:
    """Returns the panels that have at least one curve."""
    present = {name for split in curves.values() for name in split}
    return [panel for panel in _PANELS if present & set(panel.metrics)]


def plot_curves(curves: Curves, picture: epath.Path, title: str) -> bool:
    """Draws all panels of a run into one PNG.

    Returns:
      False if there was nothing to draw.
    """
    panels = choose_panels(curves)
    if not panels:
        logging.warning("%s: no metrics to plot.", title)
        return False
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    with drawing.open_figure(picture, (4.6 * columns, 3.2 * rows), [title]) as figure:
        axes = figure.subplots(rows, columns, squeeze=False)
        for axis, panel in zip(axes.flat, panels, strict=False):
            draw_panel(axis, panel, curves)
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        figure.suptitle(title, fontsize=11, color=drawing.COLORS["ink"])
    return True


def draw_panel(axis: "Axes", panel: Panel, curves: Curves) -> None:
    """Draws the metrics of a panel over steps: thin curves for training, bold for held-out text."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    for color, name in zip(drawing.CURVES, panel.metrics, strict=False):
        for split, label, style in (
            ("train", "", {"lw": 1, "alpha": 0.55}),
            ("validation", ", held out", {"lw": 2, "marker": "o", "ms": 3}),
        ):
            points = curves.get(split, {}).get(name)
            if points:
                alone = {"marker": "o", "ms": 3} if len(points) == 1 else {}
                label = name.replace("_", " ") + label
                axis.plot(*zip(*points, strict=True), color=color, label=label, **style | alone)
    ink, faint, line = (drawing.COLORS[name] for name in ("ink", "faint", "line"))
    if panel.no_skill is not None:
        axis.axhline(panel.no_skill, color=faint, ls="--", lw=1, label="no skill")
    axis.set_title(panel.title, fontsize=10, color=ink)
    axis.set_xlabel("step", fontsize=8, color=faint)
    axis.tick_params(labelsize=8, color=line, labelcolor=faint)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.grid(color=line, lw=0.6)
    axis.spines[:].set_color(line)
    axis.legend(fontsize=7, frameon=False, labelcolor=ink)


def list_numbers(values: Mapping[str, float], vocab_size: int) -> list[Number]:
    """Describes held-out metrics.

    Args:
      values: metric -> value; {} gives an empty list.
      vocab_size: size of the output vocabulary.
    """
    if not values:
        return []
    guessing = f"guessing evenly: {math.log(vocab_size):.3f}"
    if "token_loss" in values:
        numbers = [
            Number("tokens, loss", f"{values['token_loss']:.3f} nats", guessing),
            Number("tokens, accuracy", _percent(values["token_accuracy"])),
            Number("perplexity, per token", f"{values['perplexity']:.2f}"),
        ]
        if "word_perplexity" in values:
            of_words = "the end of a document counts as a word"
            numbers.append(
                Number("perplexity, per word", f"{values['word_perplexity']:.2f}", of_words)
            )
        return numbers
    numbers = [
        Number("masked tokens, loss", f"{values['mlm_loss']:.3f} nats", guessing),
        Number("masked tokens, accuracy", _percent(values["mlm_accuracy"])),
    ]
    if "pair_accuracy" in values:
        accuracy = _percent(values["pair_accuracy"])
        numbers.append(Number("pairs of texts, accuracy", accuracy, "guessing: 50.0%"))
    if "discriminator_auc" in values:
        replaced = values["replaced_rate"]
        original = f"always 'original': {_percent(1 - replaced)}"
        precision = _percent(values["discriminator_precision"], "none flagged")
        recall = f"recall {_percent(values['discriminator_recall'])}, at probability 0.5"
        numbers += [
            Number("tokens replaced", _percent(replaced)),
            Number("discriminator, AUC", f"{values['discriminator_auc']:.3f}", "no skill: 0.500"),
            Number("discriminator, accuracy", _percent(values["discriminator_accuracy"]), original),
            Number("discriminator, precision", precision, recall),
        ]
    return numbers


def describe_numbers(numbers: Iterable[Number]) -> list[str]:
    """Returns one aligned line for each number."""
    return [f"{name:<26}{value:<13}{note}".rstrip() for name, value, note in numbers]


def _percent(value: float, of_none: str = "none to count") -> str:
    return of_none if math.isnan(value) else f"{value:.1%}"
