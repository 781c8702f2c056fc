"""The `Tokenizer` of SentencePiece, WordPiece, byte-level BPE and pre-tokenized vocabularies.

Text is never encoded as a special token: "[MASK]" in a document becomes ordinary pieces.
Normalization (lower case, accents) is part of the tokenizer, so it is the same in training and
encoding.
"""

import dataclasses
import functools
import hashlib
import json
import re
import socket
import sys
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from convbert_jax import console, storage
from convbert_jax.config import TokenizerSection
from convbert_jax.data.errors import TokenizerError
from convbert_jax.data.tokenizer import (
    bpe_model,
    pieces_model,
    sentencepiece_model,
    wordpiece_model,
)
from convbert_jax.data.tokenizer.normalization import (
    check_tokenizer,
    choose_normalization,
    describe_normalization,
    refuse_lost_letters,
    told_normalization,
    unresolved,
)
from convbert_jax.data.units import write_record
from convbert_jax.interfaces import SENTINEL, SpecialIds


def fit_offsets(text: str, offsets) -> np.ndarray:
    """Adjusts token offsets to visible characters.

    No token begins or ends with white space or an invisible character. Marks (accents) stay with
    the preceding character. A character that is split into several tokens belongs to all of them.
    A token without visible characters is empty.

    Args:
      offsets: (begin, end) pairs from the vocabulary, in characters of `text`.

    Returns:
      [n, 2] int32: begin and end (exclusive) of each token in `text`; both never decrease.
    """
    pairs = np.asarray(offsets, np.int64).reshape(-1, 2)
    if not len(pairs):
        return pairs.astype(np.int32)
    kinds = _kinds()[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)]
    places = np.arange(len(kinds) + 1)
    visible = np.append(kinds != _HIDDEN, True)
    bare = np.append(kinds != _MARK, True)
    next_visible = _next(places, visible)
    next_bare = _next(places, bare)
    # Exclusive end of the last visible character before each place.
    before = np.maximum.accumulate(np.where(visible, places + 1, 0))
    after_visible = np.concatenate([[0], before[:-1]])

    begin, end = pairs.T
    begin = np.minimum(next_visible[begin], np.maximum(begin, end))
    # A token that is part of a character is reported as empty.
    whole = (pairs[:, 0] == pairs[:, 1]) & (begin < len(kinds)) & visible[begin]
    end = np.where(whole, end + 1, np.maximum(after_visible[end], begin))
    end = np.where(end > begin, next_bare[end], end)
    return np.maximum.accumulate(np.stack([begin, end], axis=1), axis=0).astype(np.int32)


def cover(offsets: np.ndarray, begin: int, end: int) -> tuple[int, int] | None:
    """Returns (first, last) token that overlap the characters [begin, end), or None."""
    first = int(np.searchsorted(offsets[:, 1], begin, side="right"))
    last = int(np.searchsorted(offsets[:, 0], end, side="left")) - 1
    return (first, last) if first <= last else None


_HIDDEN, _MARK = 1, 2


@functools.cache
def _kinds() -> np.ndarray:
    """Returns the kind of each code point: _HIDDEN (white space, control), _MARK or 0."""
    kinds = np.zeros(sys.maxunicode + 1, np.uint8)
    for code in range(sys.maxunicode + 1):
        category = unicodedata.category(chr(code))
        if category[0] == "Z" or category in ("Cc", "Cf"):
            kinds[code] = _HIDDEN
        elif category[0] == "M":
            kinds[code] = _MARK
    return kinds


def _next(places: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns the nearest wanted place at or after each place; the last one is always wanted."""
    found = np.where(wanted, places, len(places) - 1)
    return np.minimum.accumulate(found[::-1])[::-1]


KINDS = {
    "sentencepiece": sentencepiece_model,
    "wordpiece": wordpiece_model,
    "bpe": bpe_model,
    "pieces": pieces_model,
}
_SUFFIXES = {".model": "sentencepiece", pieces_model.SUFFIX: "pieces"}
LOST_SHARE = 0.001  # warns if a larger share of the characters cannot be generated
SETTINGS = "tokenizer_settings.json"  # written last, so it marks finished training
SETTINGS_FIELDS = {
    "kind": str,
    "vocab_size": int,
    "lowercase": bool,
    "strip_accents": bool,
    "normalization": str,
    "train_megabytes": int,
}


def count_characters(texts: Iterable[str]) -> int:
    """Counts the characters that are not white space."""
    return sum(len(part) for text in texts for part in text.split())


class Tokenizer:
    """A vocabulary file with its settings; picklable, the vocabulary is loaded lazily.

    Attributes:
      kind: "sentencepiece", "wordpiece", "bpe" or "pieces".
      path: the vocabulary file (`*.model`, `vocab.txt`, `tokenizer.json` or `*.pieces`).
      section: the settings of the vocabulary; "auto" is replaced by the settings of the file.
      vocab_size: number of ids.
      special: ids of [PAD], [UNK], [CLS], [SEP] and [MASK], and of sentinels if there are any.
      fingerprint: sha256 of the file and, for WordPiece, of the normalization settings (other
        files contain them).
    """

    def __init__(self, section: TokenizerSection, path: Path):
        """Reads the vocabulary at `path` with the settings of `section`.

        Raises:
          TokenizerError: the file is missing, unreadable or has no special tokens.
        """
        self.kind = section.kind
        self.path = Path(path)
        self.section = _resolve(section, self.path)
        self.fingerprint = self._read_fingerprint()
        entries = self._vocabulary.entries
        sentinels = {entry: i for i, entry in enumerate(entries) if SENTINEL.fullmatch(entry)}
        self.special = SpecialIds(**self._vocabulary.special_ids(), extra=sentinels)
        self.vocab_size = len(entries)

    def _read_fingerprint(self) -> str:
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise TokenizerError(
                f"Vocabulary {self.path} cannot be read: {error.strerror}. Check "
                "config.tokenizer.path.",
                field="config.tokenizer.path",
                path=self.path,
            ) from None
        section = self.section
        settings = [self.kind]
        if self.kind == "wordpiece":
            settings += [section.lowercase, section.strip_accents, section.max_word_chars]
        return hashlib.sha256(content + json.dumps(settings).encode()).hexdigest()

    @functools.cached_property
    def _vocabulary(self):
        if self._read_fingerprint() != self.fingerprint:  # unpickled, maybe on another host
            raise TokenizerError(
                f"Vocabulary {self.path} on {socket.gethostname()} differs from the vocabulary "
                "that this run started with. Copy the original file to this host.",
                path=self.path,
            )
        return KINDS[self.kind].open_vocabulary(self.path, self.section)

    def __getstate__(self):
        return {key: value for key, value in self.__dict__.items() if key != "_vocabulary"}

    @property
    def entries(self) -> list[str]:
        """All vocabulary entries in the order of their ids."""
        return self._vocabulary.entries

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text; [UNK] is the only special token among them."""
        return self._vocabulary.encode(texts)

    def sample(self, text: str, power: float, seed: int) -> list[int]:
        """Samples a segmentation of `text`: subword regularization (Kudo 2018, §3.1).

        Args:
          power: alpha of the paper, the exponent of the segmentation probabilities.
          seed: uniform 32-bit integer; the same seed gives the same ids.

        Returns:
          The token ids of the segmentation.

        Raises:
          TokenizerError: the vocabulary is not a unigram model.
        """
        if self.kind != "sentencepiece":
            raise TokenizerError(
                f"{self.path} is a {self.kind} vocabulary and cannot sample segmentations. Set "
                "config.parallel.sampling=0.",
                field="config.parallel.sampling",
                path=self.path,
            )
        return self._vocabulary.sample(text, power, seed)

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], np.ndarray]]:
        """Returns the token ids and offsets of each text.

        Offsets are [n, 2] int32: begin and end (exclusive) in characters, see `offsets.fit`.
        """
        found = self._vocabulary.encode_with_offsets(texts)
        return [
            (ids, fit_offsets(text, places))
            for text, (ids, places) in zip(texts, found, strict=True)
        ]

    def unknown_spans(self, texts: Sequence[str]) -> list[list[str]]:
        """Returns the parts of each text, without white space, that are encoded as [UNK]."""
        encoded = zip(texts, self.encode(texts), strict=True)
        affected = [i for i, (_, ids) in enumerate(encoded) if self.special.unknown in ids]
        spans: list[list[str]] = [[] for _ in texts]
        found = self.encode_with_offsets([texts[i] for i in affected])
        for i, (ids, places) in zip(affected, found, strict=True):
            unknown = places[np.equal(ids, self.special.unknown)]
            spans[i] = [part for begin, end in unknown for part in texts[i][begin:end].split()]
        return spans

    def describe_lost(self, texts: Sequence[str]) -> str:
        """Returns a warning about the characters of `texts` that decoding cannot restore.

        It is "" if they are at most the share `LOST_SHARE` of all characters.
        """
        lost, total = Counter(), 0
        for text, ids in zip(texts, self.encode(texts), strict=True):
            characters = Counter("".join(text.split()))
            total += characters.total()
            lost += characters - Counter(self.decode(ids))
        if lost.total() <= LOST_SHARE * total:
            return ""
        examples = " ".join(character for character, _ in lost.most_common(8))
        return (
            f"{lost.total() / total:.1%} of the characters cannot be generated with the vocabulary "
            f"{self.path} ({examples}), so no output can score 100; use a vocabulary trained on "
            "such text with config.tokenizer.normalization=nfc or identity, lowercase=False and "
            "strip_accents=False"
        )

    def count_unknown(self, texts: Sequence[str]) -> int:
        """Counts the characters of `texts`, without white space, that are encoded as [UNK]."""
        return sum(len(span) for spans in self.unknown_spans(texts) for span in spans)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the normalized text of `ids` (original case, accents and spaces are lost)."""
        return self._vocabulary.decode([int(i) for i in ids])

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Returns the vocabulary entry of each id."""
        return [self.entries[i] for i in ids]

    def split_piece(self, index: int) -> tuple[bool, str]:
        """Returns whether the token begins a word or is special, and its text without marks."""
        begins, text = KINDS[self.kind].split_piece(self.entries[index])
        return begins or index in self.special.by_name.values(), text

    @property
    def keeps_spaces(self) -> bool:
        """Whether tokens contain all white space of a text, as in byte-level BPE."""
        return self.kind == "bpe"

    def split_lines(self, text: str) -> list[str]:
        """Splits a document into lines with text, which are encoded one by one.

        A line includes the white space after it if the vocabulary keeps spaces.
        """
        if self.keeps_spaces:
            return [line for line in re.split(r"(?<=\n)(?=\S)", text) if line.strip()]
        return [line for line in text.split("\n") if line.strip()]

    @property
    def begins_word(self) -> np.ndarray:
        """[vocab_size] int32 that counts words: 1 for one entry per word, else 0.

        It is 1 for word-initial entries (marked by SentencePiece and byte-level BPE; unmarked in
        WordPiece) and, for kind "pieces", for word-final entries. Special tokens are 0. WordPiece
        does not encode spaces, so each punctuation mark counts as a word and its counts differ from
        other kinds. Byte-level BPE does not count the first word of a document.
        """
        special = set(self.special.by_name.values()) - {self.special.unknown}
        begins = [KINDS[self.kind].split_piece(entry)[0] for entry in self.entries]
        return np.array([b and i not in special for i, b in enumerate(begins)], np.int32)

    def normalize(self, text: str) -> str:
        """Normalizes `text` (case, accents) as the vocabulary does."""
        return self._vocabulary.normalize(text)


def settle_normalization(
    section: TokenizerSection, sample: Sequence[str], *, is_generative: bool
) -> TokenizerSection:
    """Replaces "auto" before a vocabulary is trained, and logs the normalization.

    Args:
      sample, is_generative: see `choose_normalization`.

    Raises:
      TokenizerError: see `refuse_lost_letters`.
    """
    section = choose_normalization(section, sample, is_generative=is_generative)
    refuse_lost_letters(section, sample)
    normalize = KINDS[section.kind].normalizer(section)
    logging.info("%s", describe_normalization(section, sample, normalize))
    return section


def train_tokenizer(texts: Iterable[str], section: TokenizerSection, directory: Path) -> Tokenizer:
    """Trains a vocabulary of exactly `section.vocab_size` entries on `texts` into `directory`.

    "auto" settings are chosen as for an empty sample. The same texts give the same file on any
    number of cores. On failure, no files remain.
    Memory: SentencePiece's unigram trainer needs about 20 MB per MB of text, byte-level BPE 12 MB
    and WordPiece 4 MB.

    Raises:
      TokenizerError: the texts do not support this size; the message has a size that they do.
    """
    section = choose_normalization(section)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    model = KINDS[section.kind]
    path = directory / model.FILE
    with console.log_seconds("Training the vocabulary"):
        trained = model.train(texts, section)
    try:
        with storage.replacing(path) as file:
            file.write(trained)
    except OSError as error:
        raise TokenizerError(
            f"{path} could not be written ({error.strerror}). Free some space or use another "
            "config.data.directory, then run again.",
            field="config.data.directory",
            path=path,
        ) from None
    write_record(directory / SETTINGS, training_settings(section))
    return Tokenizer(section, path)


def make_tokenizer(
    section: TokenizerSection,
    directory: Path,
    checked: Sequence[str],
    sample: Callable[[int], Iterable[str]],
    *,
    is_generative: bool,
) -> Tokenizer:
    """Loads the vocabulary at `section.path`, or trains one into `directory`, and checks it.

    Args:
      checked: texts to choose the normalization for and to check the vocabulary on.
      sample: returns about a number of bytes of text to train on.
      is_generative: see `choose_normalization`.

    Raises:
      TokenizerError: the vocabulary cannot be trained, or fails the check.
    """
    if section.path:
        tokenizer = load_tokenizer(section, directory)
    else:
        section = settle_normalization(section, checked, is_generative=is_generative)
        started = time.monotonic()
        logging.info("Training a %s vocabulary of %d entries.", section.kind, section.vocab_size)
        tokenizer = train_tokenizer(sample(section.train_megabytes * 1_000_000), section, directory)
        logging.info("Trained %s in %.0f s.", tokenizer.path, time.monotonic() - started)
    check_tokenizer(tokenizer, checked)
    if not is_generative and tokenizer.special.mask == tokenizer.special.pad:
        raise TokenizerError(
            f"{tokenizer.path} has no mask token, which an encoder needs. Add [MASK] to its "
            "added_tokens as a special token.",
            field="config.tokenizer.path",
            path=tokenizer.path,
        )
    return tokenizer


def describe_tokenizer(section: TokenizerSection) -> dict[str, Any]:
    """Returns the path of a vocabulary, whose content is compared later, or its settings."""
    return {"path": section.path} if section.path else training_settings(section)


def training_settings(section: TokenizerSection) -> dict:
    """Returns the fields of `section` that affect a trained vocabulary."""
    names = ["kind", "vocab_size", "lowercase", "strip_accents", "normalization"]
    names += {"sentencepiece": ["algorithm"], "wordpiece": ["max_word_chars"]}.get(section.kind, [])
    names += ["sentinels"] if section.sentinels else []  # older settings files lack this field
    return {name: getattr(section, name) for name in [*names, "train_megabytes"]}


def is_trained(directory: Path) -> bool:
    """Returns whether `train_tokenizer` finished in `directory`."""
    return (Path(directory) / SETTINGS).is_file()


def follow_file(section: TokenizerSection, given: Collection[str] = ()) -> TokenizerSection:
    """Updates `section` from the vocabulary file `section.path`: kind, size, case and accents.

    Case and accents are updated as far as the file determines them. Without a path, `section` is
    returned unchanged.

    Args:
      given: paths of explicitly set fields, for example "tokenizer.kind". They are kept;
        `load_tokenizer` or `check_tokenizer` reports contradictions with the file.

    Raises:
      TokenizerError: the file does not exist or is not a vocabulary.
    """
    if not section.path:
        return section
    path = storage.expand(section.path)
    kind = _kind_of(path)
    is_wordpiece = kind == "wordpiece" and path.is_file()
    if is_wordpiece and (other := wordpiece_model.describe_other_rules(path)):
        logging.warning(
            "%s has %s. This is ignored: text is split as in BERT, so its tokens differ from "
            "the tokens of other libraries.",
            path,
            other,
        )
    told = _read_settings(dataclasses.replace(section, kind=kind), path)
    new = {
        name: value
        for name, value in told.items()
        if (f"tokenizer.{name}" not in given or name in unresolved(section))
        and value != getattr(section, name)
    }
    if new:
        changed = ", ".join(f"config.tokenizer.{name}={value}" for name, value in new.items())
        logging.info("From the vocabulary %s: %s.", path, changed)
    return dataclasses.replace(section, **new)


def _read_settings(section: TokenizerSection, path: Path) -> dict[str, object]:
    """Returns the fields of config.tokenizer that a vocabulary file determines.

    BERT's settings replace "auto" fields that the file does not determine.
    """
    usual = dict.fromkeys(unresolved(section), True) | {"normalization": "identity"}
    said = {}
    if section.kind == "wordpiece" and path.is_file():
        said = wordpiece_model.read_settings(path)
    tokenizer = Tokenizer(dataclasses.replace(section, **(usual | said)), path)
    said |= {"kind": section.kind, "vocab_size": tokenizer.vocab_size}
    return usual | told_normalization(tokenizer) | said


def _resolve(section: TokenizerSection, path: Path) -> TokenizerSection:
    """Replaces "auto" in `section` by the settings of the vocabulary file at `path`."""
    if names := unresolved(section):
        told = _read_settings(section, path)
        return dataclasses.replace(section, **{name: told[name] for name in names})
    return section


def _kind_of(path: Path) -> str:
    is_json = path.suffix == ".json" and path.is_file()
    if is_json and bpe_model.is_byte_level(wordpiece_model.read_json(path)):
        return "bpe"
    return _SUFFIXES.get(path.suffix, "wordpiece")


def load_tokenizer(section: TokenizerSection, directory: Path) -> Tokenizer:
    """Loads the vocabulary at `section.path`, or else the vocabulary trained into `directory`.

    Raises:
      TokenizerError: no vocabulary exists, its kind or size differs from `section`, or it was
        trained with other settings.
    """
    if section.path:
        path = storage.expand(section.path)
        expected = _kind_of(path)
        if section.kind != expected and path.exists():
            raise TokenizerError(
                f"{path.name} is a {expected} vocabulary but config.tokenizer.kind="
                f"'{section.kind}'. Set --config.tokenizer.kind={expected}.",
                field="config.tokenizer.kind",
                value=section.kind,
            )
        tokenizer = Tokenizer(section, path)
    else:
        if not is_trained(directory):
            raise TokenizerError(
                f"{directory} has no trained vocabulary. Prepare the corpus first or set "
                "config.tokenizer.path.",
                field="config.tokenizer.path",
                path=directory,
            )
        remedy = f"restore a copy, or delete {directory} and prepare it again"
        there = storage.read_json(Path(directory) / SETTINGS, remedy=remedy, fields=SETTINGS_FIELDS)
        section = dataclasses.replace(
            section, **{name: there[name] for name in unresolved(section)}
        )
        wanted = training_settings(section)
        names = [*wanted, *(name for name in there if name not in wanted)]
        different = [name for name in names if there.get(name) != wanted.get(name)]
        if different:
            name = different[0]
            raise TokenizerError(
                f"The vocabulary in {directory} was trained with {name}={there.get(name)!r} but "
                f"config.tokenizer.{name}={getattr(section, name, None)!r}. Restore this setting "
                "or use another config.data.directory.",
                field=f"config.tokenizer.{name}",
                value=getattr(section, name, None),
                path=directory,
            )
        tokenizer = Tokenizer(section, Path(directory) / KINDS[section.kind].FILE)
    if tokenizer.vocab_size != section.vocab_size:
        raise TokenizerError(
            f"{tokenizer.path} has {tokenizer.vocab_size} entries but config.tokenizer.vocab_size "
            f"is {section.vocab_size}. Set --config.tokenizer.vocab_size={tokenizer.vocab_size}.",
            field="config.tokenizer.vocab_size",
            value=section.vocab_size,
            path=tokenizer.path,
        )
    return tokenizer
