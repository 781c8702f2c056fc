"""What a model that writes reads of a text, and the text of what it wrote: framed as in training.

pairs            text [SEP]            -> text [SEP]
span_corruption  [CLS] text [SEP] [SEP], each [MASK] a sentinel -> sentinels and what they hide
causal_lm        [CLS] text            -> what follows, [SEP]
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from convbert_jax.config import Config
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.inference import masked_text


class Encoded(NamedTuple):
    """What a model reads of a text: its ids, or none and why, to follow "line N"; and whether it is
    cut there, as config.parallel.cut_sources says.
    """

    ids: list[int]
    problem: str = ""
    cut: bool = False


@dataclasses.dataclass(frozen=True)
class Texts:
    """Both ways between texts and token ids, of a config's recipe.

    Attributes:
      source, target: vocabularies of what is read and of what is written.
    """

    config: Config
    source: Tokenizer
    target: Tokenizer

    @property
    def goes_on(self) -> bool:
        """Whether what is read is the beginning of what is written."""
        return self.config.recipe == "causal_lm"

    @property
    def longest(self) -> tuple[int, str]:
        """Most tokens of what is read, and the field that says so."""
        if self.config.reads_pairs:
            return self.config.parallel.max_length, "config.parallel.max_length"
        most, positions = self.config.data.length, self.config.model.positions
        if self.goes_on and self.config.sequence.positions == "learned" and most >= positions:
            return positions - 1, "config.model.positions less one"  # for what is written
        return most, "config.data.length"

    @property
    def barred(self) -> tuple[int, ...]:
        """Ids that are never written: they stand for no text."""
        special = self.target.special
        kept = {special.sep}  # which may be [CLS] too
        if self.config.recipe == "span_corruption":
            kept |= set(special.sentinels)
        return tuple(sorted(set(special.by_name.values()) - kept))

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """What the model reads of each text."""
        if self.config.recipe == "span_corruption":
            found = [self._with_sentinels(text) for text in texts]
        else:
            special = self.source.special
            start, end = ([special.cls], []) if self.goes_on else ([], [special.sep])
            encoded = self.source.encode(texts) if texts else []
            found = [
                ([*start, *ids, *end], "")
                if len(ids) or self.goes_on
                else ([], "is empty, or has no character that the vocabulary knows")
                for ids in encoded
            ]
        return [self._fit(ids, problem) for ids, problem in found]

    def _fit(self, ids: list[int], problem: str) -> Encoded:
        most, field = self.longest
        if len(ids) <= most:
            return Encoded(ids, problem)
        if self.config.reads_pairs and self.config.parallel.cut_sources:
            return Encoded([*ids[: most - 1], self.source.special.sep], problem, cut=True)
        return Encoded(
            [], f"has {len(ids)} tokens, more than the {most} of {field} that this model reads"
        )

    def decode(self, read: Sequence[int], written: Sequence[int]) -> str:
        """The text of what was written, without [CLS] and [SEP] around, to what was read."""
        ids = list(written)
        if self.goes_on:
            ids = [*read[1:], *written]
        elif self.config.recipe == "span_corruption":
            ids = self._fill(read[1:-2], written)
        # WordPiece marks what goes on with a word; a text may begin so, if a poor one.
        return self.target.decode(ids).removeprefix(
            masked_text.INSIDE if self.target.kind == "wordpiece" else ""
        )

    def _with_sentinels(self, text: str) -> tuple[list[int], str]:
        special, hole = self.source.special, masked_text.mask_token(self.source)
        ids = masked_text.encode(self.source, text)
        places = [place for place, token in enumerate(ids) if token == special.mask]
        if not places:
            return [], f"has no {hole}; write one where something is to be filled in"
        if len(places) > len(special.sentinels):
            most = len(special.sentinels)
            return [], f"has {len(places)} times {hole}; this model fills in at most {most}"
        for place, sentinel in zip(places, special.sentinels, strict=False):
            ids[place] = sentinel
        return [special.cls, *ids, special.sep, special.sep], ""

    def _fill(self, read: Sequence[int], written: Sequence[int]) -> list[int]:
        """The source with what was written of each sentinel in its place."""
        sentinels, spans, current = set(self.target.special.sentinels), {}, []
        for token in written:
            if token in sentinels:
                current = spans.setdefault(token, [])
            else:
                current.append(token)
        filled = ((spans.get(token, []) if token in sentinels else [token]) for token in read)
        return [token for part in filled for token in part]
