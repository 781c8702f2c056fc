"""Encodes inputs and decodes outputs of generative models and of masked language models.

Special tokens are as in training:

pairs            text [SEP]            -> text [SEP]
span_corruption  [CLS] text [SEP] [SEP], each [MASK] a sentinel -> sentinels and their spans
causal_lm        [CLS] text            -> continuation [SEP]
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, TypedDict

from convbert_jax.config import Config
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.data.tokenizer.wordpiece_model import INSIDE

_BLANK = "\u2581"  # SentencePiece: blank before a word


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
    is removed where the text has none, so that "[MASK]." ends like "Paris.". A token of byte-level
    BPE includes the space before it, so a mask replaces this space.
    """
    parts = text.split(mask_token(tokenizer))
    if tokenizer.keeps_spaces:
        parts[:-1] = [part.removesuffix(" ") for part in parts[:-1]]
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
    begins, piece = tokenizer.split_piece(token)
    return (before if begins else before.rstrip()) + piece + after


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
    """Converts between texts and token ids for a generative model.

    Attributes:
      source, target: tokenizers of inputs and outputs.
      goes_on: whether the output continues the input.
    """

    config: Config
    source: Tokenizer
    target: Tokenizer
    goes_on: ClassVar[bool] = False

    @property
    def longest(self) -> tuple[int, str]:
        """Maximum tokens of an input, and the field that defines it."""
        return self.config.data.length, "config.data.length"

    @property
    def barred(self) -> tuple[int, ...]:
        """Token ids that are never generated: special tokens without text."""
        special = self.target.special
        # [SEP] may have the same id as [CLS].
        return tuple(sorted(set(special.by_name.values()) - {special.sep}))

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Encodes texts as model inputs."""
        encoded = self.source.encode(texts) if texts else []
        return [self._fit(*self._frame(list(ids))) for ids in encoded]

    def decode(self, read: Sequence[int], written: Sequence[int]) -> str:
        """Decodes an output.

        Args:
          read: token ids of the input.
          written: generated token ids without [CLS] and [SEP].
        """
        # The first generated token may continue a word.
        return self.target.decode(self._join(read, written)).removeprefix(
            INSIDE if self.target.kind == "wordpiece" else ""
        )

    def _frame(self, ids: list[int]) -> tuple[list[int], str]:
        """Returns (ids with special tokens, problem)."""
        raise NotImplementedError

    def _join(self, read: Sequence[int], written: Sequence[int]) -> list[int]:
        """Returns the ids of the output text."""
        return list(written)

    def _fit(self, ids: list[int], problem: str) -> Encoded:
        most, field = self.longest
        if len(ids) <= most:
            return Encoded(ids, problem)
        return Encoded([], f"has {len(ids)} tokens, more than the {most} of {field}")


class PairTexts(Texts):
    """Texts of an encoder-decoder that was trained on pairs."""

    @property
    def longest(self) -> tuple[int, str]:
        return self.config.parallel.max_length, "config.parallel.max_length"

    def _frame(self, ids: list[int]) -> tuple[list[int], str]:
        if not ids:
            return [], "is empty or has no characters of the vocabulary"
        return [*ids, self.source.special.sep], ""

    def _fit(self, ids: list[int], problem: str) -> Encoded:
        most, _ = self.longest
        if len(ids) > most and self.config.parallel.cut_sources:
            return Encoded([*ids[: most - 1], self.source.special.sep], problem, cut=True)
        return super()._fit(ids, problem)


class PromptTexts(Texts):
    """Prompts of a language model, and their continuations."""

    goes_on = True

    @property
    def longest(self) -> tuple[int, str]:
        most, positions = self.config.data.length, self.config.model.positions
        if self.config.model.position_embedding == "learned" and most >= positions:
            return positions - 1, "config.model.positions - 1"  # leave a position for the output
        return most, "config.data.length"

    def _frame(self, ids: list[int]) -> tuple[list[int], str]:
        return [self.source.special.cls, *ids], ""

    def _join(self, read: Sequence[int], written: Sequence[int]) -> list[int]:
        return [*read[1:], *written]


class SpanTexts(Texts):
    """Texts with masks, each of which an encoder-decoder of span corruption replaces by a span."""

    @property
    def barred(self) -> tuple[int, ...]:
        return tuple(sorted(set(super().barred) - set(self.target.special.sentinels)))

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        return [self._fit(*self._frame(encode_masked(self.source, text))) for text in texts]

    def _frame(self, ids: list[int]) -> tuple[list[int], str]:
        special, mask = self.source.special, mask_token(self.source)
        places = [place for place, token in enumerate(ids) if token == special.mask]
        if not places:
            return [], f"has no {mask}; write one for each span to predict"
        if len(places) > len(special.sentinels):
            most = len(special.sentinels)
            return [], f"contains {mask} {len(places)} times; this model fills at most {most}"
        for place, sentinel in zip(places, special.sentinels, strict=False):
            ids[place] = sentinel
        return [special.cls, *ids, special.sep, special.sep], ""

    def _join(self, read: Sequence[int], written: Sequence[int]) -> list[int]:
        """Replaces each sentinel of the input by its generated span."""
        sentinels, spans, current = set(self.target.special.sentinels), {}, []
        for token in written:
            if token in sentinels:
                current = spans.setdefault(token, [])
            else:
                current.append(token)
        filled = (spans.get(token, []) if token in sentinels else [token] for token in read[1:-2])
        return [token for part in filled for token in part]


def make_texts(config: Config, source: Tokenizer, target: Tokenizer) -> Texts:
    """Returns the conversion for the recipe of a config."""
    kinds = {"causal_lm": PromptTexts, "span_corruption": SpanTexts}
    return kinds.get(config.recipe, PairTexts)(config, source, target)
