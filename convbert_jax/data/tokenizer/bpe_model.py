"""Byte-level BPE vocabularies as in GPT-2 (Radford et al., 2019): training, reading, encoding.

A vocabulary is one `tokenizer.json`. Every byte has an entry, so no text is unknown, and decoding
restores white space, case and all characters. Entries are written with one printable character per
byte: a space is "\u0120".
"""

import functools
import json
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from convbert_jax.config import TokenizerSection
from convbert_jax.data.errors import TokenizerError
from convbert_jax.data.tokenizer.wordpiece_model import SPECIAL, read_json
from convbert_jax.interfaces import sentinel_names

FILE = "tokenizer.json"
# Names of each special token, in order of preference: ours (as in ModernBERT), RoBERTa's, and those
# of language models, where the beginning of a text is [CLS] and its end is [SEP].
ROLES = {
    "pad": ("[PAD]", "<pad>", "<|pad|>", "<|padding|>"),
    "unknown": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>", "<|startoftext|>", "<|begin_of_text|>", "<|endoftext|>"),
    "sep": ("[SEP]", "</s>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>"),
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
}
# Bytes in any UTF-8 text, in both cases and in compatibility forms.
_PROBE = "".join(map(chr, [*range(0x800), *range(0x800, 0x10000, 0xFFF), 0xFF21, 0x10FFFF]))
_PROBE += "".join(map(chr, range(0x10000, 0x110000, 0x3FFFF)))
_FORMS = {"nfc": normalizers.NFC, "nfkc": normalizers.NFKC}


class ByteLevelVocabulary:
    def __init__(self, pipeline: tokenizers.Tokenizer, path: Path):
        self._path, self._pipeline = path, pipeline
        self._added = {token.content: i for i, token in pipeline.get_added_tokens_decoder().items()}
        ids = pipeline.get_vocab(with_added_tokens=True)
        self.entries = [""] * (max(ids.values()) + 1)
        for entry, index in ids.items():
            self.entries[index] = entry

    def special_ids(self) -> dict[str, int]:
        """Finds the special tokens by their names.

        A file without an unknown or a mask token is valid, because no text is unknown and language
        models have no masks. The padding id replaces these.
        """
        ids = {
            role: next((self._added[name] for name in names if name in self._added), None)
            for role, names in ROLES.items()
        }
        missing = [SPECIAL[role] for role in ("pad", "cls", "sep") if ids[role] is None]
        if missing:
            raise TokenizerError(
                f"{self._path} has no special tokens {', '.join(missing)} among its added_tokens. "
                "Add them, or leave config.tokenizer.path empty to train a vocabulary.",
                field="config.tokenizer.path",
                path=self._path,
            )
        return {role: ids["pad"] if index is None else index for role, index in ids.items()}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._pipeline.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list]]:
        """Returns the ids of each text, and (begin, end) of each id in characters."""
        encodings = self._pipeline.encode_batch(texts, add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def decode(self, ids: list[int]) -> str:
        return self._pipeline.decode(ids, skip_special_tokens=False)

    def normalize(self, text: str) -> str:
        rules = self._pipeline.normalizer
        return rules.normalize_str(text) if rules else text


def is_byte_level(content: Mapping[str, Any]) -> bool:
    """Returns whether the content of a tokenizer.json is a byte-level BPE vocabulary."""
    model, splitting = content.get("model"), json.dumps(content.get("pre_tokenizer"))
    return isinstance(model, dict) and model.get("type") == "BPE" and '"ByteLevel"' in splitting


def open_vocabulary(path: Path, section: TokenizerSection) -> ByteLevelVocabulary:
    """Reads the tokenizer.json at `path`, which contains its normalization."""
    del section
    content = read_json(path)
    for setting in ("truncation", "padding", "post_processor"):
        content[setting] = None
    try:
        pipeline = tokenizers.Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # `tokenizers` raises no other class
        raise TokenizerError(
            f"{path} is not a byte-level BPE vocabulary ({error}). Check config.tokenizer.path.",
            field="config.tokenizer.path",
            path=path,
        ) from None
    pipeline.encode_special_tokens = True  # text is never encoded as a special token
    pipeline.decoder = decoders.ByteLevel()
    vocabulary = ByteLevelVocabulary(pipeline, path)
    restored = vocabulary.decode(vocabulary.encode([_PROBE])[0]).removeprefix(" ")
    if not _same_text(restored, _PROBE):
        raise TokenizerError(
            f"{path} does not restore text: its normalizer, pre_tokenizer or entries lose "
            "characters. Use a byte-level BPE vocabulary of all bytes without lower-casing.",
            field="config.tokenizer.path",
            path=path,
        )
    return vocabulary


def _same_text(one: str, other: str) -> bool:
    return unicodedata.normalize("NFKC", one) == unicodedata.normalize("NFKC", other)


def train(texts: Iterable[str], section: TokenizerSection) -> bytes:
    """Trains a vocabulary with the special tokens as ids 0 to 4; returns a `tokenizer.json`.

    Raises:
      TokenizerError: `texts` are too small for `section.vocab_size` entries, or these are fewer
        than the special tokens and bytes.
    """
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise TokenizerError(
            "There is no text to train a vocabulary on. Check config.data.source.",
            field="config.data.source",
        )
    size = {"field": "config.tokenizer.vocab_size", "value": section.vocab_size}
    special = [*SPECIAL.values(), *sentinel_names(section.sentinels)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if (required := len(special) + len(alphabet)) > section.vocab_size:
        raise TokenizerError(
            f"The special tokens and bytes need {required} entries but "
            f"config.tokenizer.vocab_size is {section.vocab_size}. Set "
            f"--config.tokenizer.vocab_size={required} or more.",
            **size,
        )
    pipeline = tokenizers.Tokenizer(models.BPE())
    if section.normalization in _FORMS:
        pipeline.normalizer = _FORMS[section.normalization]()
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=section.vocab_size,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    pipeline.train_from_iterator(iter(texts), trainer)
    if (found := pipeline.get_vocab_size()) < section.vocab_size:
        raise TokenizerError(
            f"The corpus yields at most {found} entries but config.tokenizer.vocab_size is "
            f"{section.vocab_size}. Set --config.tokenizer.vocab_size={found} or less.",
            **size,
        )
    return pipeline.to_str(pretty=True).encode()


def normalizer(section: TokenizerSection) -> Callable[[str], str]:
    """Returns the normalization of a vocabulary that `train` would produce."""
    rules = _FORMS.get(section.normalization)
    return rules().normalize_str if rules else str


def split_piece(entry: str) -> tuple[bool, str]:
    """Returns whether an entry begins a word, and its text.

    Entries that begin with a space or a line end begin a word, except runs of white space. A second
    space before a word may count too; the first word of a text has no mark.
    """
    try:
        text = bytes(_bytes()[character] for character in entry).decode(errors="replace")
    except KeyError:  # an added token
        text = entry
    begins = text[:1].isspace() and (len(text) == 1 or not text.isspace())
    return begins, text.strip()


@functools.cache
def _bytes() -> dict[str, int]:
    """Returns the character of an entry -> its byte.

    Printable characters of Latin-1 stand for themselves; the other bytes are U+0100 and following.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }
