"""Vocabularies for texts that are already tokenized into pieces, as in fairseq.

Pieces are separated by spaces, for example `a tokeni@@ zed text .`; the vocabulary has one piece
per line. Texts are tokenized externally by Moses and the BPE codes of the vocabulary, so this
kind cannot be trained here. The special tokens are fairseq's: `</s>` begins and ends the output
of a decoder.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from convbert_jax.config import TokenizerSection
from convbert_jax.data.errors import TokenizerError

FILE = "vocabulary.pieces"
SUFFIX = ".pieces"
SPECIAL = {"pad": "<pad>", "unknown": "<unk>", "cls": "</s>", "sep": "</s>", "mask": "<s>"}
CONTINUES = "@@"  # suffix of a piece that is continued by the next one (subword-nmt, fastBPE)


class Pieces:
    def __init__(self, entries: list[str], path: Path):
        self.entries, self._path = entries, path
        special = set(SPECIAL.values())
        self._ids = {entry: i for i, entry in enumerate(entries) if entry not in special}

    def special_ids(self) -> dict[str, int]:
        missing = [name for name in SPECIAL.values() if name not in self.entries]
        if missing:
            raise TokenizerError(
                f"{self._path} has no {', '.join(dict.fromkeys(missing))}. Add fairseq's special "
                "tokens as the first lines.",
                path=self._path,
            )
        return {role: self.entries.index(name) for role, name in SPECIAL.items()}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        unknown = self.entries.index(SPECIAL["unknown"])
        return [[self._ids.get(piece, unknown) for piece in text.split()] for text in texts]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list]]:
        """Returns the ids of each text, and (begin, end) of each id in characters."""
        places = [[match.span() for match in re.finditer(r"\S+", text)] for text in texts]
        return list(zip(self.encode(texts), places, strict=True))

    def decode(self, ids: list[int]) -> str:
        joined = " ".join(self.entries[i] for i in ids) + " "
        return joined.replace(f"{CONTINUES} ", "").rstrip()

    def normalize(self, text: str) -> str:
        return text


def open_vocabulary(path: Path, section: TokenizerSection) -> Pieces:
    """Reads the list of pieces at `path`."""
    del section
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"{path} is not UTF-8 (first invalid byte at {error.start}). Restore it from a copy.",
            path=path,
        ) from None
    if lines and not lines[-1]:
        lines.pop()
    return Pieces(lines, path)


def normalizer(section: TokenizerSection) -> Callable[[str], str]:
    """Returns the identity, because the texts are already tokenized."""
    del section
    return str


def split_piece(entry: str) -> tuple[bool, str]:
    """Returns whether an entry ends a word, which this kind marks instead, and its text."""
    return not entry.endswith(CONTINUES), entry.removesuffix(CONTINUES)


def train(texts: Iterable[str], section: TokenizerSection) -> bytes:
    """Raises TokenizerError, because this kind of vocabulary cannot be trained here."""
    raise TokenizerError(
        "config.tokenizer.kind='pieces' cannot be trained: its texts are tokenized externally. Set "
        f"config.tokenizer.path=FILE{SUFFIX} to their vocabulary, or use kind=sentencepiece.",
        field="config.tokenizer.kind",
        value="pieces",
    )
