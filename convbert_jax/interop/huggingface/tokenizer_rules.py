"""Whether the tokenizer of a folder splits text as ours would with its vocabulary.

A vocabulary alone does not tell: the files beside it may name another class, other rules or more
tokens, with which the same text becomes other ids, silently.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from convbert_jax.interop.claims import shown
from convbert_jax.interop.networks import ConversionError

# Classes of transformers that split as BERT's, without "Fast", and those that say nothing.
_AS_BERT = {"BertTokenizer", "ElectraTokenizer", "ConvBertTokenizer", "DistilBertTokenizer"}
_AS_BERT |= {"MobileBertTokenizer", "LxmertTokenizer", "SqueezeBertTokenizer"}
_BY_JSON = {"PreTrainedTokenizer", "TokenizersBackend"}  # tokenizer.json says all
_AS_BERT |= _BY_JSON
# Classes that read a SentencePiece model, but cut words first or count ids from elsewhere.
_NOT_SENTENCEPIECE = {"BertJapaneseTokenizer", "CamembertTokenizer", "XLMRobertaTokenizer"}
_NOT_SENTENCEPIECE |= {"BarthezTokenizer", "MBartTokenizer"}
# Tokens that need not be called special to be it.
_ROLES = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<pad>", "<unk>", "<s>", "</s>", "<mask>"}


class OtherTokenizerError(ConversionError):
    """The vocabulary of a folder goes with a tokenizer that ours is not."""


def check_rules(
    folder: Path,
    kind: str,
    settings: Mapping[str, Any],
    pipeline: Mapping[str, Any],
    config: Mapping[str, Any],
    added: Mapping[str, Any],
) -> None:
    """
    Args:
      folder: for the error.
      kind: of our tokenizer, "wordpiece" or "sentencepiece".
      settings, pipeline, config, added: tokenizer_config.json, tokenizer.json, config.json and
        added_tokens.json; {} where there is none.

    Raises:
      OtherTokenizerError: with what differs.
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
    """Refuses a vocab.txt that is not that of the tokenizer.json beside it, which they read.

    Raises:
      OtherTokenizerError: with the first entry that differs.
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
                f"the entry {shown(entry)} as {shown(place)} in tokenizer.json, which vocab.txt "
                "has not there",
            )


def _lowercase(pipeline: Mapping[str, Any]) -> Any:
    rules = pipeline.get("normalizer")
    return rules.get("lowercase") if isinstance(rules, dict) else None


def _refuse(folder: Path, what: str) -> NoReturn:
    raise OtherTokenizerError(
        f"{folder} has a tokenizer with {what}, so that texts become other ids there than here "
        "with its vocabulary",
        path=folder,
    )


def _added_tokens(settings, pipeline, added) -> Iterator[str]:
    """Tokens that were added to a vocabulary and are looked for in texts, as words are."""
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
