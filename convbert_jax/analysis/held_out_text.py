"""Predictions for one held-out text: of masked tokens, and of replaced tokens."""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


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
    pieces: Sequence[str], original_pieces: Sequence[str], marked: Sequence[bool]
) -> tuple[Subword, ...]:
    """Pairs the tokens of a row with their originals.

    Args:
      pieces: tokens after corruption or prediction.
      original_pieces: tokens of the corpus.
    """
    starts = _word_starts(original_pieces)
    return tuple(
        Subword(_show(new), None if new == old else _show(old), bool(mark), start)
        for new, old, start, mark in zip(pieces, original_pieces, starts, marked, strict=True)
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


def _word_starts(pieces: Sequence[str]) -> list[bool]:
    """Finds first tokens of words: marked in SentencePiece, unmarked in WordPiece."""
    if any(piece.startswith("\u2581") for piece in pieces):
        special = [piece.startswith("[") and piece.endswith("]") for piece in pieces]
        return [p.startswith("\u2581") or s for p, s in zip(pieces, special, strict=True)]
    return [not piece.startswith("##") for piece in pieces]


def _show(piece: str) -> str:
    return piece.removeprefix("\u2581").removeprefix("##") or "_"
