"""Texts with holes, as "Paris is the [MASK] of France.": to token ids, and the holes filled."""

from typing import TypedDict

from convbert_jax.data.tokenizer.tokenizer import Tokenizer

_BLANK = "\u2581"  # how SentencePiece writes the blank before a word
INSIDE = "##"  # how WordPiece begins a piece inside of a word


class Filled(TypedDict):
    """A token for a hole, named as in Hugging Face's pipeline."""

    score: float  # its probability
    token: int  # its id
    token_str: str
    sequence: str  # the text with this hole filled


def mask_token(tokenizer: Tokenizer) -> str:
    """How a hole is written: the vocabulary's own entry, "[MASK]"."""
    return tokenizer.entries[tokenizer.special.mask]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text, without special tokens around; a hole is the id of the mask.

    What stands around the holes is encoded piece by piece. SentencePiece takes each for the begin
    of a text and puts a blank before it, which is taken away where the text has none: "[MASK]."
    ends as "Paris." does.
    """
    parts = text.split(mask_token(tokenizer))
    ids: list[int] = []
    for number, (part, found) in enumerate(zip(parts, tokenizer.encode(parts), strict=True)):
        if number:
            ids.append(tokenizer.special.mask)
            if tokenizer.kind == "sentencepiece" and part and not part[0].isspace():
                found = _without_blank(tokenizer, found)
        ids += found
    return ids


def fill(tokenizer: Tokenizer, text: str, hole: int, token: int) -> str:
    """The text with one of its holes filled; a piece inside of a word joins what it follows."""
    mask = mask_token(tokenizer)
    parts = text.split(mask)
    before, after = mask.join(parts[: hole + 1]), mask.join(parts[hole + 1 :])
    piece = tokenizer.entries[token]
    if tokenizer.kind == "sentencepiece":
        inside = not piece.startswith(_BLANK)
        piece = piece.replace(_BLANK, " ").strip()
    else:
        inside = piece.startswith(INSIDE)
        piece = piece.removeprefix(INSIDE)
    return (before.rstrip() if inside else before) + piece + after


def _without_blank(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    if not ids:
        return ids
    first = tokenizer.entries[ids[0]]
    if first == _BLANK:
        return ids[1:]
    if first.startswith(_BLANK) and first[1:] in tokenizer.entries:
        return [tokenizer.entries.index(first[1:]), *ids[1:]]
    return ids
