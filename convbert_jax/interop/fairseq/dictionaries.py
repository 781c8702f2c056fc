"""fairseq dictionaries, `dict.de.txt`: a `word count` per line; four special words are implicit."""

import dataclasses
import functools
import re
from collections.abc import Iterable
from pathlib import Path

from convbert_jax.interfaces.special_ids import SpecialIds
from convbert_jax.interop.claims import shown
from convbert_jax.interop.networks import ConversionError

BEGIN, PAD, END, UNKNOWN = SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
# Decoders begin and end with </s>, so it is both [CLS] and [SEP]. fairseq does not use <s>.
SPECIAL_IDS = SpecialIds(
    pad=SPECIAL.index(PAD),
    unknown=SPECIAL.index(UNKNOWN),
    cls=SPECIAL.index(END),
    sep=SPECIAL.index(END),
    mask=SPECIAL.index(BEGIN),
)
_OVERWRITES = "#fairseq:overwrite"
_LARGEST = 1 << 28  # bytes
_CONTINUES = "@@"  # ends a piece whose word continues in the next piece (subword-nmt, fastBPE)
_FACTORS = [1 << power for power in range(11)]  # sizes are padded to a multiple; usually of 8


@dataclasses.dataclass(frozen=True)
class Dictionary:
    """Words by id.

    Attributes:
      entries: <s>, <pad>, </s> and <unk>, then the words of the file. If a later line overwrites a
        word, both entries are kept and the word is encoded as the later id.
    """

    entries: tuple[str, ...]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the pieces of a text, with </s> at the end.

        Args:
          text: pieces separated by spaces, tokenized as the training texts. Special words in the
            text are encoded as <unk>.
        """
        words = text.split()
        return [*(self._ids.get(word, SPECIAL_IDS.unknown) for word in words), SPECIAL_IDS.sep]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids up to </s>, with pieces joined; omits <s>, <pad> and </s>."""
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
    """Reads a dictionary and pads it with made-up words as fairseq does.

    Args:
      rows: rows of the embedding table: the number of words, or this number rounded up to a
        multiple of a power of 2.

    Raises:
      ConversionError: the file is missing, not UTF-8 or of another size, a line is not `word
        count`, or a word is repeated without `#fairseq:overwrite`.
    """
    try:
        if path.exists() and (not path.is_file() or path.stat().st_size > _LARGEST):
            raise ConversionError(
                f"{path} is not a regular file or is too large for a dictionary. Copy it again.",
                path=path,
            )
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConversionError(
            f"Cannot read {path}: {error.strerror}. Copy the dictionaries into the folder of the "
            "fairseq model.",
            path=path,
        ) from None
    except UnicodeDecodeError as error:
        raise ConversionError(
            f"{path} is not UTF-8: first invalid byte at {error.start}. Copy it again.", path=path
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
                f"{path}, line {number}: {shown(line)} is not `word count`. The file is damaged or "
                "not a fairseq dictionary; copy it again.",
                value=line,
                path=path,
                line=number,
            )
        word, overwrites = found
        if word in known and not overwrites:
            raise ConversionError(
                f"{path}, line {number}: {shown(word)} repeats an earlier word without "
                f"{_OVERWRITES} at the end of the line. Copy the file again.",
                value=word,
                path=path,
                line=number,
            )
        known.add(word)
        entries.append(word)
    if rows not in {-(-len(entries) // factor) * factor for factor in _FACTORS}:
        raise ConversionError(
            f"{path} has {len(entries):,} words, including four special ones, but the embedding "
            f"table of the model has {rows:,} rows. Use the dictionary of this model.",
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
    """Returns (word, whether it overwrites an earlier one), or None if malformed."""
    word, _, count = line.rstrip().rpartition(" ")
    overwrites = count == _OVERWRITES
    if overwrites:
        word, _, count = word.rpartition(" ")
    return (word, overwrites) if word and re.fullmatch(r"[+-]?[0-9]+", count) else None
