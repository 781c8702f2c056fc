"""A held-out text in which a model filled in what was hidden, or found what was put in."""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Subword(NamedTuple):
    """One of a text that has been changed.

    Attributes:
      text: what stands there now, and `original`: what stood there; None if it is the same.
      marked: whether it was hidden; or whether the discriminator took it for one that was put in.
    """

    text: str
    original: str | None
    marked: bool
    begins_word: bool


class Cloze(NamedTuple):
    """A held-out text whose hidden subwords the model filled in, each by the likeliest one.

    Attributes:
      right: share of those that are what stood there, over `rows` such texts.
    """

    subwords: tuple[Subword, ...]
    rows: int
    right: float


class Suspects(NamedTuple):
    """A held-out text after the generator, as the discriminator saw it.

    Attributes:
      found: share of new subwords among the suspects, over `rows` such texts; `chance`: of those
        drawn blindly.
    """

    subwords: tuple[Subword, ...]
    rows: int
    found: float
    chance: float


def find_suspects(fake: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Marks the n tokens of a row with the highest scores, n being the number of fake ones.

    Args:
      fake: [L] bool, True where the generator put in another token.
      scores: [L], the discriminator's logits for "replaced".
    """
    suspects = np.zeros(len(fake), bool)
    suspects[np.argsort(-scores, kind="stable")[: fake.sum()]] = True
    return suspects


def pair_subwords(
    pieces: Sequence[str], original_pieces: Sequence[str], marked: Sequence[bool]
) -> tuple[Subword, ...]:
    """One row.

    Args:
      pieces: subwords that stand there now; `original_pieces`: what stood there.
    """
    starts = _word_starts(original_pieces)
    return tuple(
        Subword(_show(new), None if new == old else _show(old), bool(mark), start)
        for new, old, start, mark in zip(pieces, original_pieces, starts, marked, strict=True)
    )


def describe_cloze(cloze: Cloze) -> list[str]:
    """It in lines of text: `[subword]` was hidden, `[subword<original]` is a wrong guess."""
    text = ""
    for shown, old, hidden, begins_word in cloze.subwords:
        filled = f"[{shown if old is None else f'{shown}<{old}'}]" if hidden else shown
        text += (" " if begins_word else "") + filled
    return [
        "A held-out text: [subwords] were hidden and filled in, [guess<word] where another stood:",
        *_wrap(text),
        count_right(cloze),
    ]


def count_right(cloze: Cloze) -> str:
    """How well they are filled in over many texts, in a sentence."""
    return f"Over {cloze.rows} such rows {cloze.right:.0%} are what stood there."


def describe_suspects(suspects: Suspects) -> list[str]:
    """It in lines of text: `[new<old]` is a replaced subword, `!` follows a suspect."""
    text = ""
    for shown, old, suspect, begins_word in suspects.subwords:
        marked = shown if old is None else f"[{shown}<{old}]"
        text += (" " if begins_word else "") + marked + ("!" if suspect else "")
    return [
        "A held-out text: [new<old] was put in by the generator, ! marks as many subwords as were",
        "replaced, those that the discriminator suspects most:",
        *_wrap(text),
        count_found(suspects),
    ]


def count_found(suspects: Suspects) -> str:
    """How well the discriminator does over many texts, in a sentence."""
    return (
        f"Over {suspects.rows} such rows {suspects.found:.0%} of its suspects are new; by chance "
        f"{suspects.chance:.0%}."
    )


def _wrap(text: str) -> list[str]:
    lines = textwrap.wrap(text.strip(), 96, break_long_words=False, break_on_hyphens=False)
    return [f"  {line}" for line in lines]


def _word_starts(pieces: Sequence[str]) -> list[bool]:
    """SentencePiece marks the start of a word, WordPiece what goes on with it."""
    if any(piece.startswith("\u2581") for piece in pieces):
        special = [piece.startswith("[") and piece.endswith("]") for piece in pieces]
        return [p.startswith("\u2581") or s for p, s in zip(pieces, special, strict=True)]
    return [not piece.startswith("##") for piece in pieces]


def _show(piece: str) -> str:
    return piece.removeprefix("\u2581").removeprefix("##") or "_"
