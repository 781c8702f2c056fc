"""Encodes inputs and decodes outputs of generative models and of masked language models.

Special tokens are as in training:

pairs            text [SEP]            -> text [SEP]
span_corruption  [CLS] text [SEP] [SEP], each [MASK] a sentinel -> sentinels and their spans
causal_lm        [CLS] text            -> continuation [SEP]
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, TypedDict

from convbert_jax.config import Config
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


def encode_masked(tokenizer: Tokenizer, text: str) -> list[int]:
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


def fill_mask(tokenizer: Tokenizer, text: str, hole: int, token: int) -> str:
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


class Encoded(NamedTuple):
    """An encoded input.

    Attributes:
      ids: token ids, [] if the text cannot be read.
      problem: reason, as the rest of a sentence that begins with "line N".
      cut: whether the text was truncated because of config.parallel.cut_sources.
    """

    ids: list[int]
    problem: str = ""
    cut: bool = False


@dataclasses.dataclass(frozen=True)
class Texts:
    """Converts between texts and token ids for the recipe of a config.

    Attributes:
      source, target: tokenizers of inputs and outputs.
    """

    config: Config
    source: Tokenizer
    target: Tokenizer

    @property
    def goes_on(self) -> bool:
        """Whether the output continues the input."""
        return self.config.recipe == "causal_lm"

    @property
    def longest(self) -> tuple[int, str]:
        """Maximum tokens of an input, and the field that defines it."""
        if self.config.reads_pairs:
            return self.config.parallel.max_length, "config.parallel.max_length"
        most, positions = self.config.data.length, self.config.model.positions
        if self.goes_on and self.config.sequence.positions == "learned" and most >= positions:
            return positions - 1, "config.model.positions - 1"  # leave a position for the output
        return most, "config.data.length"

    @property
    def barred(self) -> tuple[int, ...]:
        """Token ids that are never generated: special tokens without text."""
        special = self.target.special
        kept = {special.sep}  # may have the same id as [CLS]
        if self.config.recipe == "span_corruption":
            kept |= set(special.sentinels)
        return tuple(sorted(set(special.by_name.values()) - kept))

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Encodes texts as model inputs."""
        if self.config.recipe == "span_corruption":
            found = [self._with_sentinels(text) for text in texts]
        else:
            special = self.source.special
            start, end = ([special.cls], []) if self.goes_on else ([], [special.sep])
            encoded = self.source.encode(texts) if texts else []
            found = [
                ([*start, *ids, *end], "")
                if len(ids) or self.goes_on
                else ([], "is empty or has no characters of the vocabulary")
                for ids in encoded
            ]
        return [self._fit(ids, problem) for ids, problem in found]

    def _fit(self, ids: list[int], problem: str) -> Encoded:
        most, field = self.longest
        if len(ids) <= most:
            return Encoded(ids, problem)
        if self.config.reads_pairs and self.config.parallel.cut_sources:
            return Encoded([*ids[: most - 1], self.source.special.sep], problem, cut=True)
        return Encoded([], f"has {len(ids)} tokens, more than the {most} of {field}")

    def decode(self, read: Sequence[int], written: Sequence[int]) -> str:
        """Decodes an output.

        Args:
          read: token ids of the input.
          written: generated token ids without [CLS] and [SEP].
        """
        ids = list(written)
        if self.goes_on:
            ids = [*read[1:], *written]
        elif self.config.recipe == "span_corruption":
            ids = self._fill(read[1:-2], written)
        # The first generated token may continue a word.
        return self.target.decode(ids).removeprefix(
            INSIDE if self.target.kind == "wordpiece" else ""
        )

    def _with_sentinels(self, text: str) -> tuple[list[int], str]:
        special, hole = self.source.special, mask_token(self.source)
        ids = encode_masked(self.source, text)
        places = [place for place, token in enumerate(ids) if token == special.mask]
        if not places:
            return [], f"has no {hole}; write one for each span to predict"
        if len(places) > len(special.sentinels):
            most = len(special.sentinels)
            return [], f"contains {hole} {len(places)} times; this model fills at most {most}"
        for place, sentinel in zip(places, special.sentinels, strict=False):
            ids[place] = sentinel
        return [special.cls, *ids, special.sep, special.sep], ""

    def _fill(self, read: Sequence[int], written: Sequence[int]) -> list[int]:
        """Replaces each sentinel of the input by its generated span."""
        sentinels, spans, current = set(self.target.special.sentinels), {}, []
        for token in written:
            if token in sentinels:
                current = spans.setdefault(token, [])
            else:
                current.append(token)
        filled = ((spans.get(token, []) if token in sentinels else [token]) for token in read)
        return [token for part in filled for token in part]
