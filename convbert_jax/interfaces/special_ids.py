"""Ids of special tokens: read from the vocabulary, used to build and to mask rows."""

import dataclasses
import re
from collections.abc import Mapping

# Sentinels, which replace removed spans, as named by this package and by T5.
SENTINEL = re.compile(r"(?:\[SPAN_(\d+)\]|<extra_id_(\d+)>)")


def sentinel_names(count: int) -> list[str]:
    """Returns the vocabulary entries of `count` sentinels."""
    return [f"[SPAN_{number}]" for number in range(count)]


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """Ids of the special tokens of one vocabulary.

    Attributes:
      pad: [PAD], after the end of a row.
      unknown: [UNK], text that the vocabulary cannot encode; may be masked like other text.
      cls: [CLS], at the beginning of a row, of a piece of a packed row, and of decoder inputs.
      sep: [SEP], at the end of a text, including decoder targets.
      mask: [MASK], replaces a masked token.
      extra: name -> id of additional special tokens, for example sentinels.
    """

    pad: int
    unknown: int
    cls: int
    sep: int
    mask: int
    extra: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def by_name(self) -> dict[str, int]:
        """All special ids by name: the five fields, then `extra`."""
        five = (field.name for field in dataclasses.fields(self) if field.name != "extra")
        return {name: getattr(self, name) for name in five} | dict(self.extra)

    @property
    def sentinels(self) -> tuple[int, ...]:
        """Ids of the sentinels of the first, second, ... removed span; () without sentinels."""
        found = {name: SENTINEL.fullmatch(name) for name in self.extra}
        number = {name: int(match[1] or match[2]) for name, match in found.items() if match}
        return tuple(self.extra[name] for name in sorted(number, key=number.get))

    @property
    def never_hidden(self) -> tuple[int, ...]:
        """Ids that no objective masks; padding is recognized by its segment id."""
        return self.cls, self.sep, self.mask, *self.extra.values()
