"""What a pre-training run has learned, for a person: curves, numbers beside those of no skill, one
sentence taken apart.
"""

import math
import textwrap
from collections.abc import Sequence

import numpy as np
from absl import logging
from etils import epath

from convbert_jax import drawing
from convbert_jax.training.reports.reporting import read_metrics

# Panels of the picture: title, metrics, and the name and value of a no-skill line.
_PANELS = (
    ("masked tokens: loss (nats)", ("mlm_loss",), None),
    ("masked tokens: share predicted", ("mlm_accuracy", "sampled_accuracy"), None),
    ("pairs of texts: share told", ("pair_accuracy",), ("no skill", 0.5)),
    ("discriminator: area under ROC curve", ("discriminator_auc",), ("no skill", 0.5)),
    ("discriminator: loss (nats)", ("discriminator_loss",), None),
    ("next tokens: loss (nats)", ("token_loss",), None),
    ("next tokens: share told", ("token_accuracy",), None),
    ("perplexity", ("perplexity", "word_perplexity"), None),
    ("share of tokens replaced", ("replaced_rate",), None),
    ("learning rate", ("learning_rate",), None),
)


def read_curves(metrics_file: epath.Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """split -> metric -> [(step, value)] of a run's metrics.jsonl.

    Raises:
      DamagedFileError: a line is not what was written.
    """
    curves = {}
    for record in read_metrics(metrics_file):
        split = curves.setdefault(record.pop("split"), {})
        step = record.pop("step")
        for name, value in record.items():
            if math.isfinite(value):
                split.setdefault(name, []).append((step, value))
    return curves


def plot_curves(metrics_file: epath.Path, picture: epath.Path, title: str) -> bool:
    """Draws the metrics that the run has, training thin and held-out bold, into a PNG.

    Returns:
      whether there was anything to draw.
    """
    pyplot = drawing.open_pyplot([title])
    curves = read_curves(metrics_file)
    present = {name for split in curves.values() for name in split}
    panels = [panel for panel in _PANELS if present & set(panel[1])]
    if not panels:
        logging.warning("%s has no numbers to draw.", metrics_file)
        return False
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(4.6 * columns, 3.2 * lines), squeeze=False, layout="constrained"
    )
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
                    axis.plot(
                        *zip(*points, strict=True),
                        color=f"C{index}",
                        label=label + held_out,
                        **style,
                    )
        if no_skill:
            axis.axhline(no_skill[1], color="0.5", ls="--", lw=1, label=no_skill[0])
        axis.set_title(heading, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
        axis.legend(fontsize=7, frameon=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(title, fontsize=11)
    drawing.save(figure, picture)
    return True


def describe_numbers(values: dict[str, float], vocab_size: int) -> list[str]:
    """Held-out metrics, one line each, with what no skill would give.

    Args:
      vocab_size: of what is written.
    """
    guessing = math.log(vocab_size)
    if "token_loss" in values:
        rows = [
            (
                "tokens, loss",
                f"{values['token_loss']:.3f} nats",
                f"guessing evenly: {guessing:.3f}",
            ),
            ("tokens, accuracy", _percent(values["token_accuracy"]), ""),
            ("perplexity, per token", f"{values['perplexity']:.2f}", ""),
        ]
        if "word_perplexity" in values:
            of_words = "the end of a document counts as a word"
            rows.append(("perplexity, per word", f"{values['word_perplexity']:.2f}", of_words))
        return _align(rows)
    rows = [
        (
            "masked tokens, loss",
            f"{values['mlm_loss']:.3f} nats",
            f"guessing evenly: {guessing:.3f}",
        ),
        ("masked tokens, accuracy", _percent(values["mlm_accuracy"]), ""),
    ]
    if "pair_accuracy" in values:
        accuracy = _percent(values["pair_accuracy"])
        rows.append(("pairs of texts, accuracy", accuracy, "guessing: 50.0%"))
    if "discriminator_auc" in values:
        replaced = values["replaced_rate"]
        original = f"always 'original': {_percent(1 - replaced)}"
        recall = f"recall {_percent(values['discriminator_recall'])}, at probability 0.5"
        rows += [
            ("tokens replaced", _percent(replaced), ""),
            ("discriminator, AUC", f"{values['discriminator_auc']:.3f}", "no skill: 0.500"),
            ("discriminator, accuracy", _percent(values["discriminator_accuracy"]), original),
            ("discriminator, precision", _percent(values["discriminator_precision"]), recall),
        ]
    return _align(rows)


def _align(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    return [f"{name:<26}{value:<13}{note}".rstrip() for name, value, note in rows]


def _percent(value: float) -> str:
    return "none flagged" if math.isnan(value) else f"{value:.1%}"


def find_suspects(fake: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Marks the n tokens of a row with the highest scores, n being the number of fake ones.

    Args:
      fake: [L] bool, True where the generator put in another token.
      scores: [L], the discriminator's logits for "replaced".
    """
    suspects = np.zeros(len(fake), bool)
    suspects[np.argsort(-scores, kind="stable")[: fake.sum()]] = True
    return suspects


def mark_replaced(
    pieces: Sequence[str], original_pieces: Sequence[str], suspects: Sequence[bool]
) -> list[str]:
    """One row as lines of text: `[new<old]` is a replaced subword, `!` follows a suspect.

    Args:
      pieces: subwords that the discriminator read; `original_pieces`: what stood there.
    """
    starts = _word_starts(original_pieces)
    text = ""
    for new, old, start, suspect in zip(pieces, original_pieces, starts, suspects, strict=True):
        shown = _show(old) if new == old else f"[{_show(new)}<{_show(old)}]"
        text += (" " if start else "") + shown + ("!" if suspect else "")
    return textwrap.wrap(text.strip(), 96, break_long_words=False, break_on_hyphens=False)


def _word_starts(pieces: Sequence[str]) -> list[bool]:
    """SentencePiece marks the start of a word, WordPiece what goes on with it."""
    if any(piece.startswith("\u2581") for piece in pieces):
        special = [piece.startswith("[") and piece.endswith("]") for piece in pieces]
        return [p.startswith("\u2581") or s for p, s in zip(pieces, special, strict=True)]
    return [not piece.startswith("##") for piece in pieces]


def _show(piece: str) -> str:
    return piece.removeprefix("\u2581").removeprefix("##") or "_"
