"""Texts that come cut into pieces with blanks between them, as fairseq's do: of the words `a`,
`tokenized`, `text` and `.` the text is `a tokeni@@ zed text .`. The vocabulary is a list of pieces,
one a line.

Its texts are cut elsewhere, by Moses and the codes that the list was made with; so none is trained
here. Special tokens are fairseq's, of which one both begins and ends a text that is written.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from convbert_jax.config import TokenizerSection
from convbert_jax.data.errors import TokenizerError

FILE = "vocabulary.pieces"
SUFFIX = ".pieces"
SPECIAL = {"pad": "<pad>", "unknown": "<unk>", "cls": "</s>", "sep": "</s>", "mask": "<s>"}
CONTINUES = "@@"  # at the end of a piece whose word goes on (subword-nmt, fastBPE)


class Pieces:
    def __init__(self, entries: list[str], path: Path):
        self.entries, self._path = entries, path
        special = set(SPECIAL.values())
        self._ids = {entry: i for i, entry in enumerate(entries) if entry not in special}

    def special_ids(self) -> dict[str, int]:
        missing = [name for name in SPECIAL.values() if name not in self.entries]
        if missing:
            raise TokenizerError(
                f"{self._path} lacks {', '.join(dict.fromkeys(missing))}; a list of pieces has "
                "fairseq's special tokens in its first lines.",
                path=self._path,
            )
        return {role: self.entries.index(name) for role, name in SPECIAL.items()}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        unknown = self.entries.index(SPECIAL["unknown"])
        return [[self._ids.get(piece, unknown) for piece in text.split()] for text in texts]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list]]:
        """Ids, and (begin, end) of each in characters of its text."""
        places = [[match.span() for match in re.finditer(r"\S+", text)] for text in texts]
        return list(zip(self.encode(texts), places, strict=True))

    def decode(self, ids: list[int]) -> str:
        joined = " ".join(self.entries[i] for i in ids) + " "
        return joined.replace(f"{CONTINUES} ", "").rstrip()

    def normalize(self, text: str) -> str:
        return text


def open_vocabulary(path: Path, section: TokenizerSection) -> Pieces:
    """The list of pieces at `path`."""
    del section
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"{path} is not UTF-8 (first bad byte at {error.start}); put a copy back.", path=path
        ) from None
    if lines and not lines[-1]:
        lines.pop()
    return Pieces(lines, path)


def normalizer(section: TokenizerSection) -> Callable[[str], str]:
    """Texts are cut elsewhere and stay as they are."""
    del section
    return str


def train(texts: Iterable[str], section: TokenizerSection) -> bytes:
    """Raises TokenizerError: that is done where the texts are cut."""
    raise TokenizerError(
        "config.tokenizer.kind='pieces' is of texts that were cut elsewhere; name their list with "
        f"config.tokenizer.path=FILE{SUFFIX}, or take kind=sentencepiece.",
        field="config.tokenizer.kind",
        value="pieces",
    )
