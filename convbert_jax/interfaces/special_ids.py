"""Ids of a vocabulary that stand for no text: the tokenizer finds them, rows and masks use them."""

import dataclasses
import re
from collections.abc import Mapping

# Of ids that stand for a span that was taken out: our name, and T5's.
SENTINEL = re.compile(r"(?:\[SPAN_(\d+)\]|<extra_id_(\d+)>)")


def sentinel_names(count: int) -> list[str]:
    """Entries of a vocabulary for `count` sentinels."""
    return [f"[SPAN_{number}]" for number in range(count)]


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """Ids of the special tokens of one vocabulary.

    Attributes:
      pad: [PAD], behind the end of a row.
      unknown: [UNK], what the vocabulary cannot spell. It stands for text, and may be hidden.
      cls: [CLS], begins a row or a piece of a packed one, and what a decoder writes.
      sep: [SEP], ends a text, one that a decoder writes too.
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
    def sentinels(self) -> tuple[int, ...]:
        """Ids that stand for the first, second, ... span taken out of a text; () if it has none."""
        found = {name: SENTINEL.fullmatch(name) for name in self.extra}
        number = {name: int(match[1] or match[2]) for name, match in found.items() if match}
        return tuple(self.extra[name] for name in sorted(number, key=number.get))

    @property
    def never_hidden(self) -> tuple[int, ...]:
        """Ids that no objective hides; padding is known by its segment id."""
        return self.cls, self.sep, self.mask, *self.extra.values()
