"""What a pre-training run has learned, for a person: curves, numbers beside those of no skill."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import logging
from etils import epath

from convbert_jax import drawing

# split ("train" or "validation") -> metric -> [(step, value)]
Curves = Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]


class Panel(NamedTuple):
    """One of the pictures of a run: metrics of one unit over steps.

    Attributes:
      no_skill: what a model without any has, if that is a number.
    """

    title: str
    metrics: tuple[str, ...]
    no_skill: float | None = None


_PANELS = (
    Panel("masked tokens: loss (nats)", ("mlm_loss", "encoder_mlm_loss")),
    Panel(
        "masked tokens: share predicted",
        ("mlm_accuracy", "sampled_accuracy", "encoder_mlm_accuracy"),
    ),
    Panel("pairs of texts: share told", ("pair_accuracy",), 0.5),
    Panel("discriminator: area under ROC curve", ("discriminator_auc",), 0.5),
    Panel("discriminator: loss (nats)", ("discriminator_loss",)),
    Panel("next tokens: loss (nats)", ("token_loss",)),
    Panel("next tokens: share told", ("token_accuracy",)),
    Panel("perplexity", ("perplexity", "word_perplexity")),
    Panel("from the teacher: divergence of outputs", ("distill_logits",)),
    Panel(
        "from the teacher: distances of layers",
        ("distill_hidden", "distill_attention", "distill_embeddings"),
    ),
    Panel("share of tokens replaced", ("replaced_rate",)),
    Panel("learning rate", ("learning_rate",)),
)


class Number(NamedTuple):
    """A held-out metric, spelled out, with what no skill would give."""

    name: str
    value: str
    note: str = ""


def arrange_curves(records: Iterable[Mapping[str, Any]]) -> Curves:
    """The lines of a metrics file as curves, without the numbers that were not finite."""
    curves = {}
    for record in records:
        split = curves.setdefault(record["split"], {})
        for name, value in record.items():
            if name not in ("split", "step") and math.isfinite(value):
                split.setdefault(name, []).append((record["step"], value))
    return curves


def choose_panels(curves: Curves) -> list[Panel]:
    """Those that a run has numbers for."""
    present = {name for split in curves.values() for name in split}
    return [panel for panel in _PANELS if present & set(panel.metrics)]


def plot_curves(curves: Curves, picture: epath.Path, title: str) -> bool:
    """Draws the metrics that the run has, training thin and held-out bold, into a PNG.

    Returns:
      whether there was anything to draw.
    """
    panels = choose_panels(curves)
    if not panels:
        logging.warning("%s: there are no numbers to draw.", title)
        return False
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    with drawing.open_figure(picture, (4.6 * columns, 3.2 * lines), [title]) as figure:
        axes = figure.subplots(lines, columns, squeeze=False)
        for axis, (heading, names, no_skill) in zip(axes.flat, panels, strict=False):
            for index, name in enumerate(names):
                label = name.replace("_", " ")
                for split, style in (
                    ("train", {"lw": 1, "alpha": 0.55}),
                    ("validation", {"lw": 2, "marker": "o", "ms": 3}),
                ):
                    points = curves.get(split, {}).get(name)
                    if points:
                        held_out = ", held out" if split == "validation" else ""
                        alone = {"marker": "o", "ms": 3} if len(points) == 1 else {}
                        axis.plot(
                            *zip(*points, strict=True),
                            color=f"C{index}",
                            label=label + held_out,
                            **style | alone,
                        )
            if no_skill is not None:
                axis.axhline(no_skill, color="0.5", ls="--", lw=1, label="no skill")
            axis.set_title(heading, fontsize=10)
            axis.set_xlabel("step", fontsize=8)
            axis.tick_params(labelsize=8)
            axis.grid(alpha=0.25)
            axis.legend(fontsize=7, frameon=False)
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        figure.suptitle(title, fontsize=11)
    return True


def list_numbers(values: Mapping[str, float], vocab_size: int) -> list[Number]:
    """Held-out metrics for a person; none of no values.

    Args:
      vocab_size: of what is written.
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
    """A line each."""
    return [f"{name:<26}{value:<13}{note}".rstrip() for name, value, note in numbers]


def _percent(value: float, of_none: str = "none to count") -> str:
    return of_none if math.isnan(value) else f"{value:.1%}"
