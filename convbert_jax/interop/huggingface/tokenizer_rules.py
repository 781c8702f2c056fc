"""Checks that the tokenizer of a folder gives the same ids as this package with its vocabulary.

The files next to a vocabulary may name another class, other rules or added tokens, which would
silently change the ids of a text.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from convbert_jax.interop.claims import shown
from convbert_jax.interop.networks import ConversionError

# Transformers classes with BERT's rules, without "Fast"; generic classes are added below.
_AS_BERT = {"BertTokenizer", "ElectraTokenizer", "ConvBertTokenizer", "DistilBertTokenizer"}
_AS_BERT |= {"MobileBertTokenizer", "LxmertTokenizer", "SqueezeBertTokenizer"}
_BY_JSON = {"PreTrainedTokenizer", "TokenizersBackend"}  # tokenizer.json has all rules
_AS_BERT |= _BY_JSON
# Classes that use a SentencePiece model, but split words first or shift ids.
_NOT_SENTENCEPIECE = {"BertJapaneseTokenizer", "CamembertTokenizer", "XLMRobertaTokenizer"}
_NOT_SENTENCEPIECE |= {"BarthezTokenizer", "MBartTokenizer"}
# Tokens that are special even if no file marks them as such.
_ROLES = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<pad>", "<unk>", "<s>", "</s>", "<mask>"}


class OtherTokenizerError(ConversionError):
    """The tokenizer of a folder is not supported."""


def check_rules(
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


def check_entries(folder: Path, entries: Sequence[str], pipeline: Mapping[str, Any]) -> None:
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
        if name not in special | _ROLES
    )
