"""Export of vocabularies as files that `AutoTokenizer` loads.

tokenizer.json           the complete tokenizer, for recent versions of transformers
tokenizer_config.json    special tokens and the maximal length
vocab.txt, spiece.model  the vocabulary for older software and for this package; byte-level BPE has
                         only tokenizer.json

Differences from the tokenizers of this package:

- Intended: Hugging Face encodes "[MASK]" in a text as the special token, which pipelines need.
- SentencePiece segmentations with equal scores may be resolved differently.
- Hugging Face may not compose Korean compatibility and conjoining letters into a syllable.
"""

import functools
import json
import shutil
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from convbert_jax.config import TokenizerSection
from convbert_jax.data.tokenizer.bpe_model import is_byte_level
from convbert_jax.data.tokenizer.tokenizer import Tokenizer, follow_file
from convbert_jax.data.tokenizer.wordpiece_model import build_pipeline, split_entries
from convbert_jax.interop.networks import ConversionError
from convbert_jax.interop.weight_files import read_json, shown

VOCABULARY = {
    "wordpiece": "vocab.txt",
    "sentencepiece": "spiece.model",
    "bpe": "tokenizer.json",
}
_ROLES = {
    "pad_token": "pad",
    "unk_token": "unknown",
    "cls_token": "cls",
    "sep_token": "sep",
    "mask_token": "mask",
}
SPACE = "\u2581"  # SentencePiece's marker before a word
_BEGIN, _END = r"(?<![\s\S])", r"(?![\s\S])"  # of a text; ^ and $ match at every line
_APART = "\x1f"  # a control character, which is always a separate grapheme
# Characters that extend a grapheme: categories of marks and format characters; Thai and Lao vowel
# am, half-width voicing marks, skin tones.
_EXTENDING = ("Mn", "Me", "Mc", "Cf")
_ALSO_EXTENDING = {0x0E33, 0x0EB3, 0xFF9E, 0xFF9F, *range(0x1F3FB, 0x1F400)}
_UNIGRAM, _BPE = 1, 2  # model types of SentencePiece
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6  # piece types of SentencePiece


def write_tokenizer(
    folder: Path,
    tokenizer: Tokenizer,
    section: TokenizerSection,
    *,
    max_length: int,
    types: bool = True,
    ends: bool = True,
) -> None:
    """Writes the tokenizer files into an existing folder.

    Args:
      section: the settings that `tokenizer` was loaded with.
      max_length: maximal number of tokens of the model, including special tokens.
      types: whether the model has segment types.
      ends: whether [SEP] ends a text; False for a model that continues texts.

    Raises:
      ConversionError: `tokenizers` does not support this kind of SentencePiece model.
    """
    if tokenizer.kind == "wordpiece":
        vocabulary = {entry: i for i, entry in enumerate(tokenizer.entries)}
        pipeline = build_pipeline(section, vocabulary)
    elif tokenizer.kind == "bpe":
        pipeline = tokenizers.Tokenizer.from_file(str(tokenizer.path))
        pipeline.no_padding()
        pipeline.no_truncation()
    else:
        pipeline = _from_sentencepiece(tokenizer.path)
    write_vocabulary(folder, tokenizer)
    names = _special_names(tokenizer)
    pipeline.add_special_tokens(
        [
            # A token of byte-level BPE includes the space before it, so a mask replaces this space.
            tokenizers.AddedToken(
                name,
                special=True,
                normalized=False,
                lstrip=role == "mask_token" and tokenizer.kind == "bpe",
            )
            for role, name in names.items()
        ]
    )
    cls, sep = names["cls_token"], names["sep_token"]
    pipeline.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}" if ends else f"{cls} $A",
        pair=f"{cls} $A {sep} $B:1 {sep}:1" if ends else f"{cls} $A $B",
        special_tokens=[(cls, tokenizer.special.cls), (sep, tokenizer.special.sep)],
    )
    pipeline.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "model_input_names": ["input_ids", *["token_type_ids"] * types, "attention_mask"],
        "clean_up_tokenization_spaces": False,
        **names,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _special_names(tokenizer: Tokenizer) -> dict[str, str]:
    """Returns the special tokens that the vocabulary has, by their names in transformers."""
    ids = {role: getattr(tokenizer.special, ours) for role, ours in _ROLES.items()}
    # The padding id replaces these in a byte-level BPE vocabulary without them.
    absent = [role for role in ("unk_token", "mask_token") if ids[role] == ids["pad_token"]]
    return {role: tokenizer.entries[index] for role, index in ids.items() if role not in absent}


def write_vocabulary(folder: Path, tokenizer: Tokenizer) -> None:
    """Writes only vocab.txt, spiece.model or, for byte-level BPE, the original tokenizer.json."""
    path = folder / VOCABULARY[tokenizer.kind]
    if tokenizer.kind == "wordpiece":
        text = "".join(f"{entry}\n" for entry in tokenizer.entries)
        path.write_text(text, encoding="utf-8", newline="\n")
    else:
        shutil.copyfile(tokenizer.path, path)


def find_vocabulary(folder: Path) -> Path | None:
    """Returns the vocabulary file of a folder, or None if it has no supported one."""
    for name in ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model", "vocab.txt"):
        if (folder / name).is_file():
            return folder / name
    file = folder / "tokenizer.json"
    content = _read(file)
    is_wordpiece = _part(content, "model").get("type") == "WordPiece"
    return file if is_wordpiece or is_byte_level(content) else None


def describe_vocabulary(folder: Path, path: Path) -> dict[str, object]:
    """Returns the fields of config.tokenizer for a vocabulary of a Hugging Face folder.

    If no tokenizer file states whether the vocabulary is cased, this is derived from its entries.

    Raises:
      OtherTokenizerError: the tokenizer of the folder is not supported.
      ConversionError: a tokenizer file is damaged.
      TokenizerError: the file is not a vocabulary.
    """
    names = ("tokenizer_config.json", "tokenizer.json", "config.json", "added_tokens.json")
    settings, pipeline, *others = (_read(folder / name) for name in names)
    kind = "sentencepiece" if path.suffix == ".model" else "wordpiece"
    if path.suffix == ".json" and is_byte_level(pipeline):
        kind = "bpe"
    fields: dict[str, object] = {"kind": kind, "path": str(path)}
    if kind == "bpe":
        _check_byte_level(folder, path, settings, pipeline, others[1])
        return fields
    _check_rules(folder, kind, settings, pipeline, *others)
    if kind == "sentencepiece":
        return fields
    if path.suffix == ".txt":
        _check_entries(folder, split_entries(path.read_text("utf-8", errors="replace")), pipeline)
    normalizer, model = _part(pipeline, "normalizer"), _part(pipeline, "model")
    lowercase = normalizer.get("lowercase", settings.get("do_lower_case"))
    accents = normalizer.get("strip_accents", settings.get("strip_accents"))
    if lowercase is None:
        told = follow_file(TokenizerSection(path=str(path)))  # logs the result
        lowercase = told.lowercase
        accents = told.strip_accents if accents is None else accents
    found = {
        "lowercase": lowercase,
        "strip_accents": lowercase if accents is None else accents,  # BERT's rule
        "max_word_chars": model.get("max_input_chars_per_word", 100),
    }
    for (name, value), kind in zip(found.items(), (bool, bool, int), strict=True):
        if type(value) is not kind:
            raise ConversionError(
                f"The tokenizer files of {folder} have the invalid {name}={shown(value)}. Copy "
                "them again.",
                field=name,
                value=value,
                path=folder,
            )
    return fields | found


def _read(path: Path) -> dict:
    """Reads a JSON file; an empty dict if it does not exist."""
    return read_json(path) if path.exists() else {}


def _part(content: dict, name: str) -> dict:
    part = content.get(name)
    return part if isinstance(part, dict) else {}


def _from_sentencepiece(path: Path) -> tokenizers.Tokenizer:
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
    trainer, rules = model.trainer_spec, model.normalizer_spec
    kinds = {piece.type for piece in model.pieces}
    if trainer.model_type not in (_UNIGRAM, _BPE):
        raise ConversionError(
            f"{path} is a SentencePiece model of words or characters, which Hugging Face "
            "tokenizers do not support. Train one with config.tokenizer.algorithm=unigram or bpe.",
            path=path,
        )
    if kinds - {_NORMAL, _UNKNOWN, _CONTROL, _BYTE}:
        raise ConversionError(
            f"{path} has user-defined symbols, which Hugging Face tokenizers split differently. "
            "Train the model with control symbols only.",
            path=path,
        )
    if trainer.treat_whitespace_as_suffix or not rules.escape_whitespaces:
        raise ConversionError(
            f"{path} was trained with treat_whitespace_as_suffix or without escape_whitespaces, "
            "which cannot be exported. Train it with the default settings.",
            path=path,
        )
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    byte_fallback = trainer.byte_fallback
    if trainer.model_type == _UNIGRAM:
        # Special pieces have score 0 and would always win. They get the lowest score of the others,
        # because the penalty of an unknown character is relative to the lowest score.
        low = min(piece.score for piece in model.pieces if piece.type == _NORMAL)
        scored = [
            (piece.piece, low if piece.type in (_CONTROL, _UNKNOWN) else piece.score)
            for piece in model.pieces
        ]
        inner = models.Unigram(scored, unk_id=trainer.unk_id, byte_fallback=byte_fallback)
    else:
        inner = models.BPE(
            {piece: i for i, (piece, _) in enumerate(pieces)},
            _merges(pieces),
            unk_token=pieces[trainer.unk_id][0],
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    tokenizer = tokenizers.Tokenizer(inner)
    tokenizer.normalizer = normalizers.Sequence(_normalization(path, rules))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme="never", split=trainer.split_by_whitespace
    )
    scheme = "always" if rules.add_dummy_prefix else "never"
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    return tokenizer


def _normalization(path: Path, rules) -> list[normalizers.Normalizer]:
    """Returns normalizers equivalent to the normalization of a SentencePiece model.

    `Precompiled` uses the same table, but looks up short graphemes by their first character and so
    drops combining marks. These steps before it prevent that:

    1. Turn marks that compose with no letter into separate graphemes. This comes first, because
       composition would reorder them.
    2. Compose the text with NFC, if the table composes.
    3. Delete the marks that the table deletes.
    4. Separate the remaining marks.
    """
    steps = [normalizers.Replace("\0", " ")]  # as the tokenizer of this package does
    if rules.precompiled_charsmap:
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        steps += [normalizers.Replace(*pair) for pair in _voiced_kana(model)]
        bare = model.normalize("aa")
        extending = _extending_characters()
        deleted = {c for c in extending if model.normalize(f"a{c}a") == bare}
        composing = {c for c in extending if extending[c]} - deleted
        alone = {*extending} - composing - deleted
        composes = "\u00e9" in model.normalize("e\u0301")
        steps += [
            *([_set_apart(alone)] if alone else []),
            *([normalizers.NFC()] if composes else []),
            *([normalizers.Replace(_any_of(deleted), "")] if deleted else []),
            *([_set_apart(composing)] if composing else []),
            normalizers.Precompiled(rules.precompiled_charsmap),
            normalizers.Replace(_APART, ""),
        ]
    if rules.remove_extra_whitespaces:
        steps += [
            normalizers.Replace(tokenizers.Regex(f"{_BEGIN} +| +{_END}"), ""),
            normalizers.Replace(tokenizers.Regex(r" {2,}"), " "),
        ]
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    if rules.remove_extra_whitespaces:  # SPACE characters at the end of a text are removed as well
        steps.append(normalizers.Replace(tokenizers.Regex(f"{SPACE}+{_END}"), ""))
    return steps


def _voiced_kana(model: sentencepiece.SentencePieceProcessor) -> Iterator[tuple[str, str]]:
    """Yields (half-width kana with voicing mark, composed character).

    Neither a lookup of single characters nor NFC composes these pairs.
    """
    for base in map(chr, range(0xFF66, 0xFF9E)):
        for voicing in "\uff9e\uff9f":
            composed = model.normalize(base + voicing).lstrip(SPACE)
            if len(composed) == 1:
                yield base + voicing, composed


@functools.cache
def _extending_characters() -> dict[str, bool]:
    """Returns the characters that extend a grapheme -> whether NFC composes them with a letter."""
    parts = [unicodedata.decomposition(chr(code)).split() for code in range(sys.maxunicode + 1)]
    composing = {
        chr(int(pair[1], 16))
        for code, pair in enumerate(parts)
        if len(pair) == 2
        and not pair[0].startswith("<")
        and unicodedata.is_normalized("NFC", chr(code))
    }
    return {
        chr(code): chr(code) in composing
        for code in range(sys.maxunicode + 1)
        if code in _ALSO_EXTENDING or unicodedata.category(chr(code)) in _EXTENDING
    }


def _set_apart(characters: set[str]) -> normalizers.Normalizer:
    """Inserts `_APART` before each of the characters."""
    return normalizers.Replace(_any_of(characters, before=True), _APART)


def _any_of(characters: set[str], *, before: bool = False) -> tokenizers.Regex:
    """Returns a regular expression for any of `characters`, or for the position `before` one.

    Excludes the beginning of the text, where insertions corrupt the offsets of `tokenizers`.
    """
    ranges: list[list[int]] = []
    for code in sorted(map(ord, characters)):
        if ranges and code == ranges[-1][1] + 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    any_ = "[" + "".join(rf"\x{{{a:X}}}-\x{{{b:X}}}" for a, b in ranges) + "]"
    return tokenizers.Regex(rf"(?<=[\s\S])(?={any_})" if before else any_)


def _merges(pieces: list[tuple[str, float]]) -> list[tuple[str, str]]:
    """Returns the merges of a BPE model, which SentencePiece stores as the order of its pieces."""
    ids = {piece: i for i, (piece, _) in enumerate(pieces)}
    merges = []
    for piece, score in pieces:
        halves = [
            (piece[:i], piece[i:])
            for i in range(1, len(piece))
            if piece[:i] in ids and piece[i:] in ids
        ]
        halves.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += [(score, left, right) for left, right in halves]
    merges.sort(key=lambda merge: -merge[0])
    return [(left, right) for _, left, right in merges]


# Transformers classes with BERT's rules, without "Fast"; generic classes are added below.
_AS_BERT = {"BertTokenizer", "ElectraTokenizer", "ConvBertTokenizer", "DistilBertTokenizer"}
_AS_BERT |= {"MobileBertTokenizer", "LxmertTokenizer", "SqueezeBertTokenizer"}
_BY_JSON = {"PreTrainedTokenizer", "TokenizersBackend"}  # tokenizer.json has all rules
_AS_BERT |= _BY_JSON
# Classes that use a SentencePiece model, but split words first or shift ids.
_NOT_SENTENCEPIECE = {"BertJapaneseTokenizer", "CamembertTokenizer", "XLMRobertaTokenizer"}
_NOT_SENTENCEPIECE |= {"BarthezTokenizer", "MBartTokenizer"}
# Tokens that are special even if no file marks them as such.
_SPECIAL = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<pad>", "<unk>", "<s>", "</s>", "<mask>"}


class OtherTokenizerError(ConversionError):
    """The tokenizer of a folder is not supported."""


def _check_rules(
    folder: Path,
    kind: str,
    settings: Mapping[str, Any],
    pipeline: Mapping[str, Any],
    config: Mapping[str, Any],
    added: Mapping[str, Any],
) -> None:
    """Checks that class, rules and added tokens of a tokenizer are supported.

    Args:
      folder: for the error message.
      kind: "wordpiece" or "sentencepiece".
      settings, pipeline, config, added: content of tokenizer_config.json, tokenizer.json,
        config.json and added_tokens.json; {} for a missing file.

    Raises:
      OtherTokenizerError: the tokenizer is not supported; the message has the reason.
    """
    name = settings.get("tokenizer_class") or config.get("tokenizer_class")
    own = str(name).removesuffix("Fast")
    if name and (own in _NOT_SENTENCEPIECE if kind == "sentencepiece" else own not in _AS_BERT):
        _refuse(folder, f"tokenizer_class={shown(name)}")
    if kind == "wordpiece":
        if settings.get("tokenize_chinese_chars") is False:
            _refuse(folder, "tokenize_chinese_chars=false in tokenizer_config.json")
        lowercase, there = settings.get("do_lower_case"), _lowercase(pipeline)
        if own not in _BY_JSON and None not in (lowercase, there) and lowercase != there:
            _refuse(
                folder,
                f"do_lower_case={shown(lowercase)} in tokenizer_config.json and "
                f"lowercase={shown(there)} in tokenizer.json",
            )
        for part, usual in (
            ("normalizer", "BertNormalizer"),
            ("pre_tokenizer", "BertPreTokenizer"),
        ):
            rules = pipeline.get(part)
            if isinstance(rules, dict) and rules.get("type") != usual:
                _refuse(folder, f"the {part} {shown(rules.get('type'))} in tokenizer.json")
            for field in ("handle_chinese_chars", "clean_text"):
                if isinstance(rules, dict) and rules.get(field) is False:
                    _refuse(folder, f"{field}=false in tokenizer.json")
    for token in _added_tokens(settings, pipeline, added):
        _refuse(folder, f"the added token {shown(token)}")


def _check_byte_level(
    folder: Path,
    path: Path,
    settings: Mapping[str, Any],
    pipeline: Mapping[str, Any],
    added: Mapping[str, Any],
) -> None:
    """Checks that the other files of a folder agree with its byte-level tokenizer.json.

    Args:
      folder: for the error message.
      path: the tokenizer.json.
      settings, pipeline, added: as in `_check_rules`.

    Raises:
      OtherTokenizerError: a file has another special token, added token or add_prefix_space.
      TokenizerError: the file is damaged or has no special tokens.
    """
    tokenizer = Tokenizer(TokenizerSection(kind="bpe", path=str(path)), path)
    spaced = settings.get("add_prefix_space")
    there = '"add_prefix_space": true' in json.dumps(pipeline["pre_tokenizer"])
    if isinstance(spaced, bool) and spaced != there:
        _refuse(folder, f"add_prefix_space={shown(spaced)}, unlike its tokenizer.json")
    like = {"cls_token": "bos_token", "sep_token": "eos_token"}  # names of language models
    for role, name in _special_names(tokenizer).items():
        field = role if settings.get(role) or role not in like else like[role]
        value = settings.get(field)
        value = value.get("content") if isinstance(value, dict) else value
        if value and value != name and role != "unk_token":  # bytes are never unknown
            _refuse(folder, f"{field}={shown(value)}, where its tokenizer.json has {name}")
    for token in _added_tokens(settings, {}, added):
        if token not in tokenizer.entries:
            _refuse(folder, f"the added token {shown(token)}")


def _check_entries(folder: Path, entries: Sequence[str], pipeline: Mapping[str, Any]) -> None:
    """Checks that vocab.txt has the entries of tokenizer.json, which transformers reads.

    Raises:
      OtherTokenizerError: an entry differs; the message names the first one.
    """
    model = pipeline.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict):
        return
    places = {entry: place for place, entry in enumerate(entries)}
    for entry, place in vocabulary.items():
        if places.get(entry) != place:
            _refuse(
                folder,
                f"the entry {shown(entry)} at id {shown(place)} in tokenizer.json but not in "
                "vocab.txt",
            )


def _lowercase(pipeline: Mapping[str, Any]) -> Any:
    rules = pipeline.get("normalizer")
    return rules.get("lowercase") if isinstance(rules, dict) else None


def _refuse(folder: Path, what: str) -> NoReturn:
    raise OtherTokenizerError(
        f"{folder} has a tokenizer with {what}, which is not supported: texts would get different "
        "ids",
        path=folder,
    )


def _added_tokens(settings, pipeline, added) -> Iterator[str]:
    """Yields the tokens that were added to a vocabulary and are not special."""
    decoder = settings.get("added_tokens_decoder")
    tokens = [*decoder.values()] if isinstance(decoder, dict) else []
    there = pipeline.get("added_tokens")
    tokens += there if isinstance(there, list) else []
    tokens = [token for token in tokens if isinstance(token, dict)]
    special = {str(token.get("content")) for token in tokens if token.get("special") is True}
    named = [value for name, value in settings.items() if name.endswith("_token")]
    several = settings.get("additional_special_tokens")
    named += several if isinstance(several, list) else []
    for value in named:
        special.add(str(value.get("content") if isinstance(value, dict) else value))
    yield from (
        name
        for name in dict.fromkeys([*(str(token.get("content")) for token in tokens), *added])
        if name not in special | _SPECIAL
    )
