"""Encodes texts with masks, as "Paris is the [MASK] of France.", and fills the masks."""

from typing import TypedDict

from convbert_jax.data.tokenizer.tokenizer import Tokenizer

_BLANK = "\u2581"  # SentencePiece: blank before a word
INSIDE = "##"  # WordPiece: prefix of a token that continues a word


class Filled(TypedDict):
    """A prediction for a mask, with the keys of Hugging Face's fill-mask pipeline."""

    score: float  # probability
    token: int  # token id
    token_str: str
    sequence: str  # the text with this mask filled


def mask_token(tokenizer: Tokenizer) -> str:
    """Returns the mask token of the vocabulary, "[MASK]"."""
    return tokenizer.entries[tokenizer.special.mask]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes a text with masks, without [CLS] and [SEP].

    The parts between masks are encoded separately. SentencePiece puts a blank before each part; it
    is removed where the text has none, so that "[MASK]." ends like "Paris.".
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
    """Fills mask number `hole`; a token that continues a word is joined to the text before it."""
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
