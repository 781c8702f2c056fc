"""fairseq's dictionaries, `dict.de.txt`: a word and its count a line, behind four special ones."""

import dataclasses
import functools
import re
from collections.abc import Iterable
from pathlib import Path

from convbert_jax.interfaces.special_ids import SpecialIds
from convbert_jax.interop.claims import shown
from convbert_jax.interop.networks import ConversionError

BEGIN, PAD, END, UNKNOWN = SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
# A decoder begins with </s> and ends with it, so it is [CLS] and [SEP] at once. <s> is in no text.
SPECIAL_IDS = SpecialIds(
    pad=SPECIAL.index(PAD),
    unknown=SPECIAL.index(UNKNOWN),
    cls=SPECIAL.index(END),
    sep=SPECIAL.index(END),
    mask=SPECIAL.index(BEGIN),
)
_OVERWRITES = "#fairseq:overwrite"
_LARGEST = 1 << 28  # bytes
_CONTINUES = "@@"  # at the end of a piece: its word goes on in the next (subword-nmt, fastBPE)
_FACTORS = [1 << power for power in range(11)]  # that dictionaries are padded to; usually 8


@dataclasses.dataclass(frozen=True)
class Dictionary:
    """Words by id.

    Attributes:
      entries: <s>, <pad>, </s> and <unk>, then those of the file; a word that a later line
        overwrites stays where it was and is read as the later one.
    """

    entries: tuple[str, ...]

    def encode(self, text: str) -> list[int]:
        """Ids of pieces between blanks, and </s> behind them.

        Args:
          text: tokenized and cut into pieces as the dictionary's texts were. The special ones
            cannot come out of it: written there they are unknown.
        """
        words = text.split()
        return [*(self._ids.get(word, SPECIAL_IDS.unknown) for word in words), SPECIAL_IDS.sep]

    def decode(self, ids: Iterable[int]) -> str:
        """Words between blanks, pieces joined, up to </s>; <s>, <pad> and </s> are none."""
        words = []
        for index in ids:
            if index == SPECIAL_IDS.sep and words:
                break
            if self.entries[index] not in (BEGIN, PAD, END):
                words.append(self.entries[index])
        return f"{' '.join(words)} ".replace(f"{_CONTINUES} ", "").rstrip()

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        ids = {word: index for index, word in enumerate(self.entries)}
        return {word: index for word, index in ids.items() if word not in SPECIAL}


def read_dictionary(path: Path, rows: int) -> Dictionary:
    """The dictionary of a file, padded with made-up words as fairseq pads.

    Args:
      rows: of the model's table: as many as there are words, or the next multiple of a power of 2.

    Raises:
      ConversionError: it is absent, not UTF-8, of another size, a line is not `word count`, or a
        word stands twice without `#fairseq:overwrite`.
    """
    try:
        if path.exists() and (not path.is_file() or path.stat().st_size > _LARGEST):
            raise ConversionError(f"{path} is no plain file of words; copy it again.", path=path)
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConversionError(
            f"{path} cannot be read ({error.strerror}); a model of fairseq needs its dictionaries "
            "beside it.",
            path=path,
        ) from None
    except UnicodeDecodeError as error:
        raise ConversionError(
            f"{path} is not UTF-8 (first bad byte at {error.start}); copy it again.", path=path
        ) from None
    entries = list(SPECIAL)
    known = set(entries)
    lines = re.split(r"\r\n|\r|\n", text)
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, 1):
        found = _parse(line)
        if found is None:
            raise ConversionError(
                f"{path}, line {number}: {shown(line)} is not a word and its count; it is no "
                "dictionary of fairseq, or damaged.",
                value=line,
                path=path,
                line=number,
            )
        word, overwrites = found
        if word in known and not overwrites:
            raise ConversionError(
                f"{path}, line {number}: {shown(word)} is there before, which only a line "
                f"with {_OVERWRITES} at its end may repeat; copy it again.",
                value=word,
                path=path,
                line=number,
            )
        known.add(word)
        entries.append(word)
    if rows not in {-(-len(entries) // factor) * factor for factor in _FACTORS}:
        raise ConversionError(
            f"{path} has {len(entries):,} words, four special ones with them, but its model's "
            f"table has {rows:,} rows; it belongs to another model.",
            path=path,
        )
    number = 0
    while len(entries) < rows:
        word = f"madeupword{number:04d}"
        if word not in known:
            entries.append(word)
        number += 1
    return Dictionary(tuple(entries))


def _parse(line: str) -> tuple[str, bool] | None:
    """A word, and whether it may stand there twice; None of what is not `word count`."""
    word, _, count = line.rstrip().rpartition(" ")
    overwrites = count == _OVERWRITES
    if overwrites:
        word, _, count = word.rpartition(" ")
    return (word, overwrites) if word and re.fullmatch(r"[+-]?[0-9]+", count) else None
