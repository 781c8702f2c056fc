"""Ids of a vocabulary that stand for no text: the tokenizer finds them, rows and masks use them."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """Ids of the special tokens of one vocabulary.

    Attributes:
      pad: [PAD], behind the end of a row.
      unknown: [UNK], what the vocabulary cannot spell. It stands for text, and may be hidden.
      cls: [CLS], begins a row or a piece of a packed one.
      sep: [SEP], ends a text.
      mask: [MASK], hides a token.
      extra: name -> id of those that a vocabulary has besides, sentinels for one.
    """

    pad: int
    unknown: int
    cls: int
    sep: int
    mask: int
    extra: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def by_name(self) -> dict[str, int]:
        """All of them: the five by the names of their fields, then `extra`."""
        five = (field.name for field in dataclasses.fields(self) if field.name != "extra")
        return {name: getattr(self, name) for name in five} | dict(self.extra)

    @property
    def never_hidden(self) -> tuple[int, ...]:
        """Ids that no objective hides; padding is known by its segment id."""
        return self.cls, self.sep, self.mask, *self.extra.values()
