"""Text to token ids and back: one `Tokenizer` over SentencePiece, WordPiece, or pieces of texts
that were cut elsewhere.

The five special tokens can never come out of text: "[MASK]" written in a document is encoded as
ordinary pieces. Normalization (lower case, accents) belongs to the tokenizer, so training and
encoding cannot disagree.
"""

import dataclasses
import functools
import hashlib
import json
import socket
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
from absl import logging

from convbert_jax import files, progress
from convbert_jax.config import TokenizerSection
from convbert_jax.data.errors import TokenizerError
from convbert_jax.data.records import read_record, write_record
from convbert_jax.data.tokenizer import offsets, pieces_model, sentencepiece_model, wordpiece_model
from convbert_jax.data.tokenizer.normalization import (
    choose_normalization,
    describe_normalization,
    refuse_lost_letters,
    told_normalization,
    unresolved,
)
from convbert_jax.data.tokenizer.vocabulary_checks import check_tokenizer
from convbert_jax.interfaces.special_ids import SENTINEL, SpecialIds

__all__ = [
    "Tokenizer",
    "check_tokenizer",
    "follow_file",
    "load_tokenizer",
    "settle_normalization",
    "train_tokenizer",
]

KINDS = {
    "sentencepiece": sentencepiece_model,
    "wordpiece": wordpiece_model,
    "pieces": pieces_model,
}
_SUFFIXES = {".model": "sentencepiece", pieces_model.SUFFIX: "pieces"}  # others: wordpiece
LOST_SHARE = 0.001  # of the characters of a text: more that cannot be written is worth a warning
SETTINGS = "tokenizer_settings.json"  # written last: its presence says that training finished
SETTINGS_FIELDS = {
    "kind": str,
    "vocab_size": int,
    "lowercase": bool,
    "strip_accents": bool,
    "normalization": str,
    "train_megabytes": int,
}


def count_characters(texts: Iterable[str]) -> int:
    """Characters that are not white space."""
    return sum(len(part) for text in texts for part in text.split())


class Tokenizer:
    """A vocabulary file and how to use it; picklable, the vocabulary itself is loaded lazily.

    Attributes:
      kind: "sentencepiece", "wordpiece" or "pieces".
      path: the vocabulary file (`*.model`, `vocab.txt`, `tokenizer.json` or `*.pieces`).
      section: the settings of the vocabulary, with what the file says in place of "auto".
      vocab_size: number of ids.
      special: ids of [PAD], [UNK], [CLS], [SEP] and [MASK], and of sentinels if it has some.
      fingerprint: sha256 of the file and, for WordPiece, of the normalization settings (a
        SentencePiece model holds its own).
    """

    def __init__(self, section: TokenizerSection, path: Path):
        """Reads the vocabulary at `path` by the settings of `section`.

        Raises:
          TokenizerError: the file is missing, cannot be read, or lacks a special token.
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
                f"Vocabulary {self.path} cannot be read: {error.strerror}; check "
                "config.tokenizer.path.",
                field="config.tokenizer.path",
                path=self.path,
            ) from None
        section = self.section
        settings = ["pieces" if self.kind == "pieces" else "sentencepiece"]
        if self.kind == "wordpiece":
            settings = [self.kind, section.lowercase, section.strip_accents, section.max_word_chars]
        return hashlib.sha256(content + json.dumps(settings).encode()).hexdigest()

    @functools.cached_property
    def _vocabulary(self):
        if self._read_fingerprint() != self.fingerprint:  # in another process, maybe elsewhere
            raise TokenizerError(
                f"Vocabulary {self.path} is another one on {socket.gethostname()} than where this "
                "began; put a copy of that one there.",
                path=self.path,
            )
        return KINDS[self.kind].open_vocabulary(self.path, self.section)

    def __getstate__(self):
        return {key: value for key, value in self.__dict__.items() if key != "_vocabulary"}

    @property
    def entries(self) -> list[str]:
        """All vocabulary entries, by id."""
        return self._vocabulary.entries

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens around or inside (but for [UNK])."""
        return self._vocabulary.encode(texts)

    def sample(self, text: str, power: float, seed: int) -> list[int]:
        """Ids of one of the ways to cut `text`: subword regularization (Kudo 2018, §3.1).

        Args:
          power: alpha of the paper, that probabilities of the best ways are taken to.
          seed: of 32 bits, evenly spread; the same seed gives the same ids.

        Raises:
          TokenizerError: WordPiece and BPE have one way alone.
        """
        if self.kind != "sentencepiece":
            raise TokenizerError(
                f"{self.path} is a {self.kind} vocabulary, which cuts a text in one way; set "
                "config.parallel.sampling=0.",
                field="config.parallel.sampling",
                path=self.path,
            )
        return self._vocabulary.sample(text, power, seed)

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], np.ndarray]]:
        """For each text its token ids as of `encode`, and where they stand: [n, 2] int32 of (first
        character, one past the last), see `offsets.fit`.
        """
        found = self._vocabulary.encode_with_offsets(texts)
        return [
            (ids, offsets.fit(text, places))
            for text, (ids, places) in zip(texts, found, strict=True)
        ]

    def unknown_spans(self, texts: Sequence[str]) -> list[list[str]]:
        """For each text the parts without white space that are encoded as [UNK]."""
        encoded = zip(texts, self.encode(texts), strict=True)
        affected = [i for i, (_, ids) in enumerate(encoded) if self.special.unknown in ids]
        spans: list[list[str]] = [[] for _ in texts]
        found = self.encode_with_offsets([texts[i] for i in affected])
        for i, (ids, places) in zip(affected, found, strict=True):
            unknown = places[np.equal(ids, self.special.unknown)]
            spans[i] = [part for begin, end in unknown for part in texts[i][begin:end].split()]
        return spans

    def describe_lost(self, texts: Sequence[str]) -> str:
        """The characters of `texts` that decoding never gives back, for a warning; "" where they
        are at most `LOST_SHARE` of all.
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
            f"{lost.total() / total:.1%} of the characters cannot be written with the vocabulary "
            f"{self.path} ({examples}), so no output scores 100; use a vocabulary with "
            "config.tokenizer.normalization=nfc or identity, lowercase=False and "
            "strip_accents=False, trained on such text"
        )

    def count_unknown(self, texts: Sequence[str]) -> int:
        """Characters of `texts`, white space aside, that are encoded as [UNK]."""
        return sum(len(span) for spans in self.unknown_spans(texts) for span in spans)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, normalized (case, accents and white space do not come back)."""
        return self._vocabulary.decode([int(i) for i in ids])

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary entry of each id."""
        return [self.entries[i] for i in ids]

    @property
    def begins_word(self) -> np.ndarray:
        """[vocab_size] int32, 1 for what begins a word: SentencePiece marks that, WordPiece what
        goes on with one; of pieces, which are marked where their word goes on, for what ends it.
        Special tokens are no words. WordPiece does not know of blanks: each sign of punctuation is
        a word there, so that its counts are not those of the others.
        """
        special = set(self.special.by_name.values()) - {self.special.unknown}
        if self.kind == "sentencepiece":
            begins = [entry.startswith("\u2581") for entry in self.entries]
        elif self.kind == "pieces":
            begins = [not entry.endswith(pieces_model.CONTINUES) for entry in self.entries]
        else:
            begins = [not entry.startswith("##") for entry in self.entries]
        return np.array([b and i not in special for i, b in enumerate(begins)], np.int32)

    def normalize(self, text: str) -> str:
        """`text` as the vocabulary sees it: case and accents as it was made for."""
        return self._vocabulary.normalize(text)


def settle_normalization(
    section: TokenizerSection, sample: Sequence[str], *, is_generative: bool
) -> TokenizerSection:
    """Chooses what is "auto" for a vocabulary that is to be trained, and logs what it does.

    Args:
      sample, is_generative: as `choose_normalization` takes them.

    Raises:
      TokenizerError: as `refuse_lost_letters`.
    """
    section = choose_normalization(section, sample, is_generative=is_generative)
    refuse_lost_letters(section, sample)
    normalize = KINDS[section.kind].normalizer(section)
    logging.info("%s", describe_normalization(section, sample, normalize))
    return section


def train_tokenizer(texts: Iterable[str], section: TokenizerSection, directory: Path) -> Tokenizer:
    """Trains a vocabulary of exactly `section.vocab_size` entries on `texts` into `directory`.

    Settings that are "auto" are chosen as for an empty sample. The same texts give the same file,
    on any number of cores. Nothing is left behind on failure.
    Memory: SentencePiece's unigram trainer takes some 20 MB for each MB of text, WordPiece 4 MB.

    Raises:
      TokenizerError: the texts cannot give that many entries; the message has the number they can.
    """
    section = choose_normalization(section)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    model = KINDS[section.kind]
    path = directory / model.FILE
    with progress.log_seconds("Training the vocabulary"):
        trained = model.train(texts, section)
    try:
        with files.replacing(path) as file:
            file.write(trained)
    except OSError as error:
        raise TokenizerError(
            f"{path} could not be written ({error.strerror}); free some space or name another "
            "config.data.directory, then run again.",
            field="config.data.directory",
            path=path,
        ) from None
    write_record(directory / SETTINGS, training_settings(section))
    return Tokenizer(section, path)


def training_settings(section: TokenizerSection) -> dict:
    """The fields of `section` that decide what a trained vocabulary looks like."""
    names = ["kind", "vocab_size", "lowercase", "strip_accents", "normalization"]
    names += ["algorithm"] if section.kind == "sentencepiece" else ["max_word_chars"]
    names += ["sentinels"] if section.sentinels else []  # a later field: those without stay theirs
    return {name: getattr(section, name) for name in [*names, "train_megabytes"]}


def is_trained(directory: Path) -> bool:
    """Whether `train_tokenizer` finished in `directory`."""
    return (Path(directory) / SETTINGS).is_file()


def follow_file(section: TokenizerSection, given: Collection[str] = ()) -> TokenizerSection:
    """`section` with what the vocabulary at `section.path` tells of itself: kind, size, and as far
    as it can be told case and accents; as it is where a vocabulary is to be trained.

    Args:
      given: paths of fields that were asked for by name, "tokenizer.kind" for one. They stay, and
        `load_tokenizer` or `check_tokenizer` says where the file contradicts.

    Raises:
      TokenizerError: there is no such file, or it is no vocabulary.
    """
    if not section.path:
        return section
    path = files.expand(section.path)
    kind = _kind_of(path)
    is_wordpiece = kind == "wordpiece" and path.is_file()
    if is_wordpiece and (other := wordpiece_model.describe_other_rules(path)):
        logging.warning(
            "%s has %s. Here its entries alone are used and text is split as BERT does it, so that "
            "it becomes other tokens than elsewhere.",
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
    """Fields of config.tokenizer that a vocabulary file tells, and BERT's where `section` has
    "auto" and the file tells nothing.
    """
    usual = dict.fromkeys(unresolved(section), True) | {"normalization": "identity"}
    said = {}
    if section.kind == "wordpiece" and path.is_file():
        said = wordpiece_model.read_settings(path)
    tokenizer = Tokenizer(dataclasses.replace(section, **(usual | said)), path)
    said |= {"kind": section.kind, "vocab_size": tokenizer.vocab_size}
    return usual | told_normalization(tokenizer) | said


def _resolve(section: TokenizerSection, path: Path) -> TokenizerSection:
    """`section` with the settings of the vocabulary file at `path` in place of "auto"."""
    if names := unresolved(section):
        told = _read_settings(section, path)
        return dataclasses.replace(section, **{name: told[name] for name in names})
    return section


def _kind_of(path: Path) -> str:
    return _SUFFIXES.get(path.suffix, "wordpiece")


def load_tokenizer(section: TokenizerSection, directory: Path) -> Tokenizer:
    """The vocabulary at `section.path`, or else the one trained into `directory`.

    Raises:
      TokenizerError: no vocabulary, one of another kind or size than `section` says, or one
        trained with other settings.
    """
    if section.path:
        path = files.expand(section.path)
        expected = _kind_of(path)
        if section.kind != expected and path.exists():
            raise TokenizerError(
                f"{path.name} is a {expected} vocabulary but config.tokenizer.kind="
                f"'{section.kind}'; set --config.tokenizer.kind={expected}.",
                field="config.tokenizer.kind",
                value=section.kind,
            )
        tokenizer = Tokenizer(section, path)
    else:
        if not is_trained(directory):
            raise TokenizerError(
                f"{directory} holds no trained vocabulary; prepare the corpus first or set "
                "config.tokenizer.path.",
                field="config.tokenizer.path",
                path=directory,
            )
        remedy = f"put a copy back, or delete {directory} and prepare it again"
        there = read_record(Path(directory) / SETTINGS, remedy=remedy, fields=SETTINGS_FIELDS)
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
                f"config.tokenizer.{name}={getattr(section, name, None)!r}; set it back, or name "
                "another config.data.directory.",
                field=f"config.tokenizer.{name}",
                value=getattr(section, name, None),
                path=directory,
            )
        tokenizer = Tokenizer(section, Path(directory) / KINDS[section.kind].FILE)
    if tokenizer.vocab_size != section.vocab_size:
        raise TokenizerError(
            f"{tokenizer.path} has {tokenizer.vocab_size} entries but config.tokenizer.vocab_size "
            f"is {section.vocab_size}; set --config.tokenizer.vocab_size={tokenizer.vocab_size}.",
            field="config.tokenizer.vocab_size",
            value=section.vocab_size,
            path=tokenizer.path,
        )
    return tokenizer
