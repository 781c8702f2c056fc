"""WordPiece vocabularies as in BERT (Devlin et al., 2019): training, reading, encoding.

They are read from `vocab.txt` (one entry per line) or `tokenizer.json`; training writes
`tokenizer.json`. Splitting and normalization are BERT's, with the settings of the config.
"""

import collections
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import tokenizers
from absl import logging
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from convbert_jax import storage
from convbert_jax.config import TokenizerSection
from convbert_jax.data.errors import TokenizerError
from convbert_jax.interfaces import sentinel_names

FILE = "tokenizer.json"
SPECIAL = {"pad": "[PAD]", "unknown": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
MOST_IDS = 1 << 24  # larger ids are rejected as damage
INSIDE = "##"  # prefix of an entry that continues a word
MAX_WORD_CHARS = 100  # default of a tokenizer.json, as in `tokenizers`
REMEDY = "restore a copy of this tokenizer.json, or check config.tokenizer.path"
ALPHABET = 1000  # most frequent characters with an entry, if they fit; others are unknown
COVERAGE = 0.9995  # minimum share of the characters of the text that have an entry


class WordPieceVocabulary:
    def __init__(self, entries: list[str], section: TokenizerSection, path: Path):
        self.entries = entries
        self._path = path
        # No entry is declared special, so text is never encoded as a special token.
        self._tokenizer = build_pipeline(section, {entry: i for i, entry in enumerate(entries)})

    def special_ids(self) -> dict[str, int]:
        ids = {entry: i for i, entry in enumerate(self.entries)}
        missing = [name for name in SPECIAL.values() if name not in ids]
        if missing:
            raise TokenizerError(
                f"{self._path} has no special tokens {', '.join(missing)}. Use the standard "
                "bert-base-uncased vocabulary, or leave config.tokenizer.path empty to train one.",
                field="config.tokenizer.path",
                path=self._path,
            )
        return {role: ids[name] for role, name in SPECIAL.items()}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list]]:
        """Returns the ids of each text, and (begin, end) of each id in characters."""
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def normalize(self, text: str) -> str:
        return self._tokenizer.normalizer.normalize_str(text)


def open_vocabulary(path: Path, section: TokenizerSection) -> WordPieceVocabulary:
    """Reads the vocabulary at `path`, with the normalization of `section`."""
    if path.suffix == ".json":
        return WordPieceVocabulary(_from_json(path, section), section, path)
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"{path} is not UTF-8 (first invalid byte at {error.start}). Use the standard "
            "bert-base-uncased vocabulary.",
            path=path,
        ) from None
    if text.startswith("\ufeff"):
        raise TokenizerError(
            f"{path} begins with a byte order mark. Save it without one.", path=path
        )
    return WordPieceVocabulary(split_entries(text), section, path)


def split_entries(text: str) -> list[str]:
    """Returns the entries of a `vocab.txt` without carriage returns, which the checks report."""
    lines = text.split("\n")  # not splitlines: an entry may be a Unicode line separator
    if lines and not lines[-1]:
        lines.pop()
    return [line.rstrip("\r") for line in lines]


def train(texts: Iterable[str], section: TokenizerSection) -> bytes:
    """Trains a vocabulary with the special tokens as ids 0 to 4; returns a `tokenizer.json`.

    `tokenizers` numbers characters in the order of a randomly seeded hash map and breaks ties
    between merges by these numbers, so its results vary. For a deterministic result, a first pass
    finds the characters and a second pass receives them in a fixed order.

    Raises:
      TokenizerError: `texts` are too small or too diverse for `section.vocab_size` entries.
    """
    lines = [line for text in texts for line in text.split("\n") if line.strip()]
    normalizer = _normalizer(section)
    counts = collections.Counter()
    for line in lines:
        counts.update(normalizer.normalize_str(line))
    by_count = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))
    if not by_count:
        raise TokenizerError(
            "There is no text to train a vocabulary on. Check config.data.source.",
            field="config.data.source",
        )
    special = [*SPECIAL.values(), *sentinel_names(section.sentinels)]

    def trained(vocab_size: int, first_entries: list[str], alphabet: list[str]) -> dict[str, int]:
        tokenizer = build_pipeline(section, None)
        trainer = trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            special_tokens=first_entries,
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        )
        tokenizer.train_from_iterator(iter(lines), trainer)
        return tokenizer.get_vocab(with_added_tokens=False)

    # A character has one entry, and a second one ("##") if it occurs inside words.
    needed = _count_needed([counts[c] for c in by_count])
    for size in (max(ALPHABET, needed), needed):
        alphabet = by_count[:size]
        characters = sorted(set(trained(0, special, alphabet)) - set(special))
        required = len(special) + len(characters)
        if required <= section.vocab_size:
            break
    else:
        raise TokenizerError(
            f"The characters of the corpus need {required} entries but "
            f"config.tokenizer.vocab_size is {section.vocab_size}. Set "
            f"--config.tokenizer.vocab_size={required} or more, or "
            "--config.tokenizer.kind=sentencepiece.",
            field="config.tokenizer.vocab_size",
            value=section.vocab_size,
        )
    vocabulary = trained(section.vocab_size, special + characters, alphabet)
    if len(vocabulary) < section.vocab_size:
        raise TokenizerError(
            f"The corpus yields at most {len(vocabulary)} entries but config.tokenizer.vocab_size "
            f"is {section.vocab_size}. Set --config.tokenizer.vocab_size={len(vocabulary)} or "
            "less.",
            field="config.tokenizer.vocab_size",
            value=section.vocab_size,
        )
    tokenizer = build_pipeline(section, vocabulary)
    tokenizer.encode_special_tokens = True
    return tokenizer.to_str(pretty=True).encode()


def _count_needed(counts: list[int]) -> int:
    """Returns how many of the characters, by descending count, cover `COVERAGE` of a text."""
    wanted, covered = COVERAGE * sum(counts), itertools.accumulate(counts)
    return next(number for number, sum_ in enumerate(covered, start=1) if sum_ >= wanted)


def normalizer(section: TokenizerSection) -> Callable[[str], str]:
    """Returns the normalization of a vocabulary that `train` would produce."""
    return _normalizer(section).normalize_str


def _normalizer(section: TokenizerSection) -> normalizers.Normalizer:
    return normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        lowercase=section.lowercase,
        strip_accents=section.strip_accents,
    )


def build_pipeline(
    section: TokenizerSection, vocabulary: dict[str, int] | None
) -> tokenizers.Tokenizer:
    """Builds BERT's pipeline: normalization, splitting and WordPiece; no entry is special."""
    model = models.WordPiece(
        vocabulary or {}, unk_token="[UNK]", max_input_chars_per_word=section.max_word_chars
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = _normalizer(section)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def split_piece(entry: str) -> tuple[bool, str]:
    """Returns whether an entry begins a word, and its text."""
    return not entry.startswith(INSIDE), entry.removeprefix(INSIDE)


def read_settings(path: Path) -> dict[str, bool | int]:
    """Reads the fields of config.tokenizer from a tokenizer.json; {} for a vocab.txt.

    Raises:
      TokenizerError: the file is not a tokenizer.json.
    """
    if path.suffix != ".json":
        return {}
    content = read_json(path)
    longest = content["model"].get("max_input_chars_per_word", MAX_WORD_CHARS)
    if type(longest) is not int or longest < 1:
        raise TokenizerError(
            f"{path} is damaged (max_input_chars_per_word={longest!r}). To fix it, {REMEDY}.",
            value=longest,
            path=path,
        )
    return _normalization(content, path) | {"max_word_chars": longest}


def describe_other_rules(path: Path) -> str:
    """Describes the unsupported text processing of a tokenizer.json, for a warning.

    Returns "" for BERT's processing and for a vocab.txt.

    Raises:
      TokenizerError: the file is not a tokenizer.json.
    """
    if path.suffix != ".json":
        return ""
    content, found = read_json(path), []
    for part, usual in (("normalizer", "BertNormalizer"), ("pre_tokenizer", "BertPreTokenizer")):
        rules = content.get(part)
        kind = rules.get("type") if isinstance(rules, dict) else None
        if kind != usual:
            found.append(f"the {part} {kind}" if kind else f"no {part}")
        elif part == "normalizer":
            fields = ("clean_text", "handle_chinese_chars")
            found += [f"{field}=false" for field in fields if rules.get(field) is False]
    return " and ".join(found)


def read_json(path: Path) -> dict:
    """Reads a tokenizer.json.

    Raises:
      TokenizerError: the file is damaged or has no vocabulary.
    """
    try:
        return storage.read_json(path, remedy=REMEDY, fields={"model": {"vocab": (dict, list)}})
    except storage.DamagedFileError as error:
        raise TokenizerError(str(error), path=path) from None


def _normalization(content: dict, path: Path) -> dict[str, bool]:
    normalizer = content.get("normalizer")
    if not isinstance(normalizer, dict) or normalizer.get("type") != "BertNormalizer":
        return {}
    lowercase = normalizer.get("lowercase")
    accents = normalizer.get("strip_accents")  # None (BERT's default) means as `lowercase`
    told = {"lowercase": lowercase, "strip_accents": lowercase if accents is None else accents}
    if not all(isinstance(value, bool) for value in told.values()):
        raise TokenizerError(
            f"{path} is damaged (its normalizer has {told}). To fix it, {REMEDY}.", path=path
        )
    return told


def _from_json(path: Path, section: TokenizerSection) -> list[str]:
    content = read_json(path)
    model = content["model"]
    kind = model.get("type")
    if kind != "WordPiece" or model.get("continuing_subword_prefix", "##") != "##":
        raise TokenizerError(
            f"{path} has a {kind} model, not WordPiece with ## or byte-level BPE. Set "
            "config.tokenizer.path to a vocab.txt, such a tokenizer.json or a SentencePiece "
            ".model.",
            field="config.tokenizer.path",
            path=path,
        )
    told = _normalization(content, path)
    for name, there in told.items():
        if there != getattr(section, name):
            raise TokenizerError(
                f"{path} was trained with {name}={there} but config.tokenizer.{name}="
                f"{getattr(section, name)}. Set --config.tokenizer.{name}={there}.",
                field=f"config.tokenizer.{name}",
                value=getattr(section, name),
                path=path,
            )
    if not told:
        logging.info("%s has no BERT normalizer; using the settings of config.tokenizer.", path)
    try:
        added = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
        ids = {**model["vocab"], **added}
        if not ids or not all(isinstance(i, int) and 0 <= i < MOST_IDS for i in ids.values()):
            raise ValueError("ids are not small integers")
    except (KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"{path} is damaged (its entries: {error}). To fix it, {REMEDY}.", path=path
        ) from None
    entries = [""] * (max(ids.values()) + 1)
    for entry, index in ids.items():
        entries[index] = entry
    return entries
