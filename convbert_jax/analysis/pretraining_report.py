"""Results of pre-training: health checks, learning curves, held-out metrics and predictions.

Reference of the health checks: a base-size ConvBERT after 1M steps has generator accuracy 0.62
(sampled 0.54), AUC 0.88, precision 0.79 and recall 0.27 (card of the published Spanish model). Its
replaced rate is 0.15 * (1 - 0.54) = 0.07. The ELECTRA authors warn of a generator that becomes
accurate too early, so that the discriminator cannot learn.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import logging
from etils import epath

from convbert_jax import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
import textwrap

import numpy as np

# No checks before these steps, when metrics are noise.
_FIRST_STEP = 500
_CHANCE_STEP = 2_000


def warn_replaced_token(step: int, values: dict[str, float], uniform: bool = False) -> list[str]:
    """Returns warnings for a log interval of replaced-token detection.

    Args:
      step: completed steps.
      values: summarized metrics of `replaced_token`.
      uniform: replacements are drawn uniformly, so there is no generator to check.
    """
    warnings = []
    if step < _FIRST_STEP:
        return warnings
    replaced, sampled = values["replaced_rate"], values["sampled_accuracy"]
    auc, accuracy = values["discriminator_auc"], values["mlm_accuracy"]
    if replaced < 0.03 or sampled > 0.75:
        warnings.append(
            f"generator too strong: {sampled:.0%} of its samples are the original token, so only "
            f"{replaced:.1%} of the tokens are replaced (usual: 5 to 14%). Lower "
            "config.generator.size, or check for near-duplicate text."
        )
    if math.isnan(auc):
        warnings.append(
            "no tokens replaced: the discriminator had nothing to learn in this interval."
        )
    elif step >= _CHANCE_STEP and auc < 0.55:
        warnings.append(
            f"discriminator no better than chance: AUC {auc:.3f} after {step} steps (usual: above "
            "0.6). Check config.optimizer.learning_rate, the warmup, and whether the tokenizer "
            "fits the corpus."
        )
    elif step >= _CHANCE_STEP and auc > 0.99:
        warnings.append(
            f"discriminator task too easy: AUC {auc:.3f}; the generator is too weak or the text "
            "too regular. Raise config.generator.size."
        )
    if step >= _CHANCE_STEP and accuracy < 0.03 and not uniform:
        warnings.append(
            f"generator does not learn: accuracy {accuracy:.1%} after {step} steps (usual: above "
            "10%). Check config.optimizer.learning_rate and the tokenizer."
        )
    return warnings


def warn_masked_lm(step: int, values: dict[str, float]) -> list[str]:
    """Returns warnings for a log interval of masked language modeling."""
    accuracy = values["mlm_accuracy"]
    if step >= _CHANCE_STEP and accuracy < 0.03:
        return [
            f"model does not learn: accuracy {accuracy:.1%} after {step} steps (usual: above 10%). "
            "Check config.optimizer.learning_rate and the tokenizer."
        ]
    return []


def warn_writing(step: int, values: dict[str, float]) -> list[str]:
    """Returns warnings for a log interval of a generative model."""
    accuracy = values["token_accuracy"]
    if step >= _CHANCE_STEP and accuracy < 0.05:
        return [
            f"model does not learn: next-token accuracy {accuracy:.1%} after {step} steps (usual: "
            "above 20%). Check config.optimizer.learning_rate, the warmup and the tokenizer."
        ]
    return []


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
    Panel("pairs in a batch: loss (nats)", ("contrastive_loss",)),
    Panel("pairs in a batch: accuracy", ("contrastive_accuracy",)),
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
    of_sources = [
        Number(f"{name.removesuffix('/loss')}, loss", f"{value:.3f}")
        for name, value in values.items()
        if name.endswith("/loss")
    ]
    return [*_list_numbers(values, vocab_size), *of_sources]


def _list_numbers(values: Mapping[str, float], vocab_size: int) -> list[Number]:
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
    if "contrastive_loss" in values:
        of_batch = "depends on the pairs of a batch"
        numbers = [Number("pairs, loss", f"{values['contrastive_loss']:.3f} nats", of_batch)]
        accuracy = _percent(values["contrastive_accuracy"])
        if "spearman" not in values:
            return [*numbers, Number("pairs, top-1 accuracy", accuracy, of_batch)]
        correlation = f"{100 * values['spearman']:.2f}"
        return [
            *numbers,
            Number("pairs in the order of their scores", accuracy, "guessing: 50.0%"),
            Number("Spearman's correlation of cosine and score", correlation, "times 100"),
        ]
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


class Subword(NamedTuple):
    """A token of a corrupted text.

    Attributes:
      text: the token after corruption or prediction.
      original: the token of the corpus; None if it is the same.
      marked: whether it was masked, or whether the discriminator predicts that it was replaced.
      begins_word: whether a space precedes it.
    """

    text: str
    original: str | None
    marked: bool
    begins_word: bool


class Cloze(NamedTuple):
    """A held-out text with the most probable token in each masked position.

    Attributes:
      right: accuracy over the masked positions of `rows` texts.
    """

    subwords: tuple[Subword, ...]
    rows: int
    right: float


class Suspects(NamedTuple):
    """A held-out text after the generator, with the discriminator's predictions.

    Attributes:
      found: precision of the predicted replacements over `rows` texts.
      chance: precision of as many random tokens.
    """

    subwords: tuple[Subword, ...]
    rows: int
    found: float
    chance: float


def find_suspects(fake: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Marks the n tokens with the highest scores, where n is the number of replaced tokens.

    Args:
      fake: [L] bool, True for tokens that the generator replaced.
      scores: [L], the discriminator's logits for "replaced".
    """
    suspects = np.zeros(len(fake), bool)
    suspects[np.argsort(-scores, kind="stable")[: fake.sum()]] = True
    return suspects


def pair_subwords(
    pieces: Sequence[tuple[bool, str]],
    original_pieces: Sequence[tuple[bool, str]],
    marked: Sequence[bool],
) -> tuple[Subword, ...]:
    """Pairs the tokens of a row with their originals.

    Args:
      pieces: tokens after corruption or prediction: (whether it begins a word, text).
      original_pieces: tokens of the corpus.
    """
    return tuple(
        Subword(new[1] or "_", None if new == old else old[1] or "_", bool(mark), old[0])
        for new, old, mark in zip(pieces, original_pieces, marked, strict=True)
    )


def describe_cloze(cloze: Cloze) -> list[str]:
    """Formats a cloze: `[token]` was masked, `[token<original]` is a wrong prediction."""
    text = ""
    for shown, old, hidden, begins_word in cloze.subwords:
        filled = f"[{shown if old is None else f'{shown}<{old}'}]" if hidden else shown
        text += (" " if begins_word else "") + filled
    return [
        "Masked tokens of a held-out text: [prediction] is right, [prediction<original] is wrong:",
        *_wrap(text),
        count_right(cloze),
    ]


def count_right(cloze: Cloze) -> str:
    """Returns a sentence with the accuracy over all texts."""
    return f"Accuracy over {cloze.rows} texts: {cloze.right:.0%}."


def describe_suspects(suspects: Suspects) -> list[str]:
    """Formats a text: `[new<original]` was replaced, `!` follows a predicted replacement."""
    text = ""
    for shown, old, suspect, begins_word in suspects.subwords:
        marked = shown if old is None else f"[{shown}<{old}]"
        text += (" " if begins_word else "") + marked + ("!" if suspect else "")
    return [
        "Replaced tokens of a held-out text: [new<original]; ! marks the same number of tokens, by",
        "highest discriminator score:",
        *_wrap(text),
        count_found(suspects),
    ]


def count_found(suspects: Suspects) -> str:
    """Returns a sentence with the precision over all texts."""
    return (
        f"Precision of the predicted replacements over {suspects.rows} texts: "
        f"{suspects.found:.0%}; of random tokens: {suspects.chance:.0%}."
    )


def _wrap(text: str) -> list[str]:
    lines = textwrap.wrap(text.strip(), 96, break_long_words=False, break_on_hyphens=False)
    return [f"  {line}" for line in lines]
