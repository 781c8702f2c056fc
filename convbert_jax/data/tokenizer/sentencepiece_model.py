"""SentencePiece vocabularies (Kudo and Richardson, 2018): train, read, encode.

The normalization is inside the `.model` file, accent stripping too, so the file alone is complete.
"""

import functools
import io
import itertools
import re
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import sentencepiece
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from convbert_jax.config import TokenizerSection
from convbert_jax.data.errors import TokenizerError
from convbert_jax.interfaces.special_ids import sentinel_names

FILE = "tokenizer.model"
LONGEST_LINE = 10_000  # characters given to the trainer at once
SPACE = "\u2581"  # in place of a space
NMT_SPACES = "\u061c\u200b\u200c\u200e\u200f\ufeff\ufffd"  # spaces in SentencePiece's nmt_nfkc
WAYS = 64  # to cut a text, of which one is drawn (Kudo 2018, §3.1: l)
# sentencepiece_model.proto as far as it is needed; whatever else is in a model stays as it is. The
# module that sentencepiece has for it refuses every protobuf older than itself, and with that
# Apache Beam.
_SCHEMA = """
syntax: "proto2"
name: "sentencepiece_path.proto"
message_type {
  name: "Model"
  field { name: "pieces" number: 1 type: TYPE_BYTES label: LABEL_REPEATED }
  field { name: "trainer_spec" number: 2 type: TYPE_BYTES label: LABEL_OPTIONAL }
  field {
    name: "normalizer_spec" number: 3 type: TYPE_MESSAGE type_name: "Normalizer"
    label: LABEL_OPTIONAL
  }
  field { name: "self_test_data" number: 4 type: TYPE_BYTES label: LABEL_OPTIONAL }
  field { name: "denormalizer_spec" number: 5 type: TYPE_BYTES label: LABEL_OPTIONAL }
}
message_type {
  name: "Normalizer"
  field { name: "normalization_rule_tsv" number: 6 type: TYPE_BYTES label: LABEL_OPTIONAL }
}
"""
# Names of each special token, ours first, then those other trainers use.
SPECIAL = {
    "pad": ("[PAD]", "<pad>"),
    "unknown": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<cls>"),
    "sep": ("[SEP]", "<sep>"),
    "mask": ("[MASK]", "<mask>"),
}
# T5's vocabularies, which are known by their sentinels: what is written begins with the id of
# padding and ends with </s>, as what is read.
T5_SENTINEL = "<extra_id_0>"
T5_SPECIAL = {"cls": "<pad>", "sep": "</s>"}


class SentencePieceVocabulary:
    def __init__(self, path: Path):
        self._path = path
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
            self.entries = [self._model.id_to_piece(i) for i in range(self._model.get_piece_size())]
        except (RuntimeError, OSError, UnicodeDecodeError) as error:
            raise TokenizerError(
                f"{path} is not a SentencePiece model ({_first_line(error)}); check "
                "config.tokenizer.path.",
                field="config.tokenizer.path",
                path=path,
            ) from None
        # Of the text in hand: several draws are made of it.
        self._ways = functools.lru_cache(maxsize=1)(self._list_ways)

    def special_ids(self) -> dict[str, int]:
        ids = {entry: i for i, entry in enumerate(self.entries)}
        found = {
            role: next((ids[name] for name in names if name in ids), None)
            for role, names in SPECIAL.items()
        }
        if T5_SENTINEL in ids and found["cls"] is None:
            found |= {role: ids.get(name) for role, name in T5_SPECIAL.items()}
        missing = [SPECIAL[role][0] for role, index in found.items() if index is None]
        if missing:
            raise TokenizerError(
                f"{self._path} lacks the special tokens {', '.join(missing)}; train it with them "
                "as control symbols, or leave config.tokenizer.path empty to train one here.",
                field="config.tokenizer.path",
                path=self._path,
            )
        return found

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self._model.encode(_without_nul(texts), num_threads=1)

    def sample(self, text: str, power: float, seed: int) -> list[int]:
        """Ids of one of the `WAYS` best ways to cut a text, by probability to `power`; drawn by
        `seed` here, as what the library draws by a seed is another in each process.
        """
        ways, scores = self._ways(text)
        if not ways:
            return []
        weights = np.cumsum(np.exp(power * (scores - scores.max())))
        place = np.searchsorted(weights, seed / 2**32 * weights[-1], side="right")
        return ways[min(int(place), len(ways) - 1)]

    def _list_ways(self, text: str) -> tuple[list[list[int]], np.ndarray]:
        """The best ways to cut a text, and the logarithms of their probabilities."""
        try:
            (ways,) = self._model.nbest_encode(_without_nul([text]), nbest_size=WAYS)
        except (RuntimeError, OSError):
            raise TokenizerError(
                f"{self._path} has one way to cut a text, as it is no unigram model; set "
                "config.parallel.sampling=0, or train one with config.tokenizer.algorithm=unigram.",
                field="config.parallel.sampling",
                path=self._path,
            ) from None
        ways = [list(way) for way in ways if len(way)]
        if not ways:
            return [], np.zeros(0)
        starts = np.cumsum([0, *map(len, ways[:-1])])
        return ways, np.add.reduceat(self._scores[np.concatenate(ways)], starts)

    @functools.cached_property
    def _scores(self) -> np.ndarray:
        """Logarithm of the probability of each piece."""
        return np.asarray([self._model.get_score(i) for i in range(len(self.entries))])

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list]]:
        """Ids, and (begin, end) of each in characters of its text, white space before included."""
        found = self._model.encode(_without_nul(texts), out_type="offset_mapping", num_threads=1)
        return [(row["ids"], row["offsets"]) for row in found]

    def decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)

    def normalize(self, text: str) -> str:
        return self._model.normalize(text).replace(SPACE, " ").strip()


def _without_nul(texts: Sequence[str]) -> list[str]:
    # A NUL would become an unknown piece; every other control character is normalized away.
    return [text.replace("\0", " ") for text in texts]


def open_vocabulary(path: Path, section: TokenizerSection) -> SentencePieceVocabulary:
    """The model at `path`; it holds its own normalization, so `section` is only checked later."""
    del section
    return SentencePieceVocabulary(path)


def train(texts: Iterable[str], section: TokenizerSection) -> bytes:
    """A serialized model with the special tokens as ids 0 to 4.

    Raises:
      TokenizerError: `texts` cannot give `section.vocab_size` pieces.
    """
    model = io.BytesIO()
    faults: list[BaseException] = []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=_keeping_faults(_lines(texts), faults),
                model_writer=model,
                vocab_size=section.vocab_size,
                model_type=section.algorithm,
                pad_id=0,
                unk_id=1,
                bos_id=-1,
                eos_id=-1,
                pad_piece="[PAD]",
                unk_piece="[UNK]",
                control_symbols=["[CLS]", "[SEP]", "[MASK]", *sentinel_names(section.sentinels)],
                max_sentence_length=8 * LONGEST_LINE,  # bytes; longer lines would be left out
                num_threads=16,  # part of the result: sums over threads round differently
                minloglevel=2,
                **_normalization(section, Path(scratch)),
            )
        except RuntimeError as error:
            if faults:
                raise faults[0] from None
            raise _explain(str(error), section.vocab_size) from None
    return _without_path(model.getvalue())


def _keeping_faults(lines: Iterator[str], faults: list[BaseException]) -> Iterator[str]:
    """`lines`; what they raise, Ctrl-C too, is kept: the trainer would make another error of it."""
    try:
        yield from lines
    except BaseException as error:
        faults.append(error)
        raise


def _without_path(model: bytes) -> bytes:
    """The model without the name of the temporary file its normalization was compiled from."""
    content = _message().FromString(model)
    content.normalizer_spec.ClearField("normalization_rule_tsv")
    return content.SerializeToString(deterministic=True)


@functools.cache
def _message():
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_SCHEMA, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Model"))


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in text.replace("\0", " ").split("\n"):
            for start in range(0, len(line), LONGEST_LINE):
                yield line[start : start + LONGEST_LINE]


def _explain(message: str, vocab_size: int) -> TokenizerError:
    size = {"field": "config.tokenizer.vocab_size", "value": vocab_size}
    if match := re.search(r"too high \(\d+\)\. Please set it to a value <= (\d+)", message):
        return TokenizerError(
            f"The corpus gives at most {match[1]} pieces but config.tokenizer.vocab_size is "
            f"{vocab_size}; set --config.tokenizer.vocab_size={match[1]} or less.",
            **size,
        )
    if match := re.search(r"required_chars\. (\d+) vs (\d+)", message):
        return TokenizerError(
            f"The corpus needs {match[2]} entries for its characters alone but "
            f"config.tokenizer.vocab_size is {vocab_size}; set "
            f"--config.tokenizer.vocab_size={match[2]} or more.",
            **size,
        )
    if "sentences_.empty()" in message:
        return TokenizerError(
            "There is no text to train a vocabulary on; check config.data.source.",
            field="config.data.source",
        )
    reason = message.strip().splitlines()[-1]
    return TokenizerError(f"SentencePiece could not train a vocabulary: {reason}.")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["unreadable"])[0]


def normalizer(section: TokenizerSection) -> Callable[[str], str]:
    """The normalization of a model that `train` would make."""
    with tempfile.TemporaryDirectory() as scratch:
        rules = _normalization(section, Path(scratch))
        names = {f"rule_{name.rpartition('_')[2]}": rule for name, rule in rules.items()}
        sentencepiece.set_min_log_level(2)
        made = sentencepiece.SentencePieceNormalizer(**names)
    return lambda text: made.normalize(text.replace("\0", " ")).replace(SPACE, " ").strip()


def _normalization(section: TokenizerSection, scratch: Path) -> dict[str, str]:
    """Arguments of the trainer: a rule of SentencePiece, or a table in `scratch`."""
    form = section.normalization
    if not (section.lowercase or section.strip_accents or form == "nfc"):
        return {"normalization_rule_name": {"nfkc": "nmt_nfkc"}.get(form, form)}
    table = scratch / "normalization.tsv"
    table.write_text(_rules(form, section.lowercase, section.strip_accents))
    return {"normalization_rule_tsv": str(table)}


@functools.cache
def _rules(form: str, lowercase: bool, strip_accents: bool) -> str:
    """SentencePiece's table of what each character or sequence becomes.

    SentencePiece's own table for lower case, nmt_nfkc_cf, leaves "İ" as it is, makes capitals of
    Cherokee and "ss" of "ß"; BERT and Python lower-case these.

    Args:
      form: "nfkc", "nfc" or "identity".
      strip_accents: without category Mn after NFD, and without format characters, as in BERT.
    """
    compose = {"nfkc": "NFKC", "nfc": "NFC"}.get(form)

    def normalize(text: str) -> str:
        text = unicodedata.normalize(compose, text) if compose else text
        if lowercase:
            text = text.lower()
            text = unicodedata.normalize(compose, text) if compose else text
        if strip_accents:
            bare = unicodedata.normalize("NFD", text)
            bare = "".join(c for c in bare if unicodedata.category(c) != "Mn")
            text = unicodedata.normalize("NFC", bare)  # Hangul syllables whole again
        return text

    rules = {}
    for code in range(1, sys.maxunicode + 1):  # a rule for NUL would be a key of length zero
        character = chr(code)
        category = unicodedata.category(character)
        if category in ("Cn", "Co", "Cs"):
            continue
        if character in "\t\n\v\f\r\x85\u2028\u2029":
            normal = " "
        elif category == "Cc":
            normal = ""
        elif form == "nfkc" and (category == "Zs" or character in NMT_SPACES):
            normal = " "
        elif strip_accents and category == "Cf":
            normal = ""
        else:
            normal = normalize(character)
        rules[character] = normal
    if compose:
        rules |= {parts: normalize(whole) for parts, whole in _compositions(compose)}
    lines = (
        f"{_spell(text)}\t{_spell(normal)}\n" for text, normal in rules.items() if normal != text
    )
    return "".join(lines)


def _compositions(form: str) -> Iterator[tuple[str, str]]:
    """(sequence of characters, what it is as one), of marks in any order that NFC understands."""
    for code in range(0xC0, sys.maxunicode + 1):
        whole = chr(code)
        first, *marks = unicodedata.normalize("NFD", whole)
        if not marks or unicodedata.normalize("NFC", whole) != whole:
            continue
        for order in itertools.permutations(marks):
            for count in range(len(marks)):
                begin = unicodedata.normalize("NFC", first + "".join(order[:count]))
                parts = begin + "".join(order[count:])
                if unicodedata.normalize("NFC", parts) == whole:
                    yield parts, whole
    for base, voicing in itertools.product(map(chr, range(0xFF66, 0xFF9E)), "\uff9e\uff9f"):
        whole = unicodedata.normalize(form, base + voicing)  # NFKC: kana of half the width
        if len(whole) == 1:
            yield base + voicing, whole


def _spell(text: str) -> str:
    return " ".join(f"{ord(c):X}" for c in text)
