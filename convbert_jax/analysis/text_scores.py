"""Scores of generated texts against references: BLEU, chrF, ROUGE, exact match."""

import dataclasses
import importlib
import logging
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata, util

from convbert_jax.config import UserError

log = logging.getLogger(__name__)


class ScoreError(UserError):
    """Texts cannot be scored."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of a set of texts.

    Attributes:
      values: name -> score, from 0 to 100.
      signature: library, version and settings.
    """

    values: Mapping[str, float]
    signature: str


# config.recipe -> names of its scores
NAMES = {
    "translation": ("bleu", "chrf"),
    "summarization": ("rouge1", "rouge2", "rougeL"),
    "text_to_text": ("exact_match", "exact_match_normalized"),
}
# config.recipe -> (module, pip package) that its scores need
LIBRARIES = {
    "translation": ("sacrebleu", "sacrebleu"),
    "summarization": ("rouge_score", "rouge-score"),
}


# Thai, Lao, Tibetan, Burmese, Khmer, kana, Chinese characters
_WITHOUT_SPACES = re.compile(
    "[\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)


# Recipes with corpus-level scores, which need the same number of references for each text.
OF_CORPUS = ("translation",)


def check_library(recipe: str, score_words: str = "13a") -> None:
    """Raises ScoreError if the library for a recipe's scores is not installed."""
    needed = [LIBRARIES[recipe]] if recipe in LIBRARIES else []
    if recipe == "summarization" and score_words != "13a":
        needed.append(LIBRARIES["translation"])
    for module, package in needed:
        if util.find_spec(module) is None:
            raise ScoreError(
                f"Scores of config.recipe='{recipe}' need {package}, which is not installed. Run "
                f"pip install {package}, or install convbert_jax[text].",
                field="config.recipe",
                value=recipe,
            )


def score(
    recipe: str,
    written: Sequence[str],
    references: Sequence[Sequence[str]],
    normalize: Callable[[str], str],
    score_words: str = "13a",
) -> Scores:
    """Computes the scores of a recipe.

    Args:
      recipe: config.recipe.
      written: generated texts.
      references: one or more references for each text. BLEU and chrF use all of them as sacreBLEU
        does, ROUGE the best one for each score, exact match any. For `OF_CORPUS`, each text needs
        the same number.
      normalize: normalizes a text as the model's vocabulary does.
      score_words: config.decoding.score_words.

    Raises:
      ScoreError: as `check_library`.
    """
    check_library(recipe, score_words)
    return _SCORERS[recipe](written, references, normalize, score_words)


def _translation(written, references, normalize, tokenizer: str) -> Scores:
    """Computes corpus-level BLEU (Post 2018) and chrF (Popović 2015)."""
    _warn_of_missing_spaces("BLEU", references, tokenizer)
    sacrebleu = importlib.import_module("sacrebleu")
    values, signatures = {}, []
    bleu = sacrebleu.BLEU(tokenize=tokenizer)
    for name, metric in (("bleu", bleu), ("chrf", sacrebleu.CHRF())):
        streams = [list(texts) for texts in zip(*references, strict=True)]
        values[name] = metric.corpus_score(list(written), streams).score
        signatures.append(f"{name} {metric.get_signature()}")
    return Scores(values, ", ".join(signatures))


class _Words:
    """Tokenizer for rouge-score: sacreBLEU's words in lower case, without punctuation."""

    def __init__(self, name: str):
        self._cut = importlib.import_module("sacrebleu").BLEU(tokenize=name).tokenizer

    def tokenize(self, text: str) -> list[str]:
        return [word for word in self._cut(text.lower()).split() if any(map(_counts, word))]


def _counts(character: str) -> bool:
    return unicodedata.category(character)[0] in "LMN"  # letters, their marks, numbers


def _warn_of_letters(references: Sequence[Sequence[str]]) -> None:
    texts = [text.lower() for of_text in references for text in of_text]
    letters = [letter for text in texts for letter in text if letter.isalpha()]
    unknown = sum(not letter.isascii() for letter in letters)
    if unknown > len(letters) / 10:
        log.warning(
            "ROUGE only counts words of a to z and 0 to 9, but %.0f%% of the letters in the "
            "references are others. Set --config.decoding.score_words=intl, or zh or char for "
            "scripts without spaces.",
            100 * unknown / len(letters),
        )


def _warn_of_missing_spaces(score: str, references: Sequence[Sequence[str]], words: str) -> None:
    """Warns if words are split at spaces although the references' script has none."""
    text = " ".join(text for of_text in references for text in of_text)
    found = [word for word in text.split() if _WITHOUT_SPACES.search(word)]
    share = sum(map(len, found)) / max(1, len(text))
    if words not in ("zh", "char") and share > 0.1 and sum(map(len, found)) > 4 * len(found):
        log.warning(
            "%s with config.decoding.score_words=%s splits words at spaces, but %.0f%% of the "
            "references is in a script without spaces. Set --config.decoding.score_words=zh for "
            "Chinese, or char for Japanese, Thai and others.",
            score,
            words,
            100 * share,
        )


def _summarization(written, references, normalize, words: str) -> Scores:
    """Computes the mean F-measure of ROUGE-1, 2 and L (Lin 2004), with stemming for English.

    With several references, the best one for each score counts (`score_multi` of rouge-score).
    """
    names = NAMES["summarization"]
    english = words == "13a"
    if english:
        _warn_of_letters(references)
    else:
        _warn_of_missing_spaces("ROUGE", references, words)
    scorer = importlib.import_module("rouge_score.rouge_scorer").RougeScorer(
        list(names), use_stemmer=english, tokenizer=None if english else _Words(words)
    )
    pairs = zip(written, references, strict=True)
    found = [scorer.score_multi(list(right), ours) for ours, right in pairs]
    values = {name: 100 * sum(each[name].fmeasure for each in found) / len(found) for name in names}
    how = "F with stemming"
    if not english:
        how = f"F of words of sacreBLEU {metadata.version('sacrebleu')} tok:{words}, lower case"
    how = f"rouge-score {metadata.version('rouge-score')}, {how}"
    return Scores(values, how + _of_several(references, ", the best of"))


def _text_to_text(written, references, normalize, words: str) -> Scores:
    """Computes exact match, ignoring surrounding whitespace: raw and normalized.

    Normalization is the vocabulary's, which may remove case and accents.
    """
    pairs = list(zip(written, references, strict=True))

    def count(alike):
        return sum(any(alike(ours) == alike(text) for text in right) for ours, right in pairs)

    values = {
        "exact_match": 100 * count(str.strip) / len(pairs),
        "exact_match_normalized": 100 * count(lambda text: normalize(text).strip()) / len(pairs),
    }
    how = "texts equal, but for blanks around"
    return Scores(values, how + _of_several(references, ", to one of"))


def _of_several(references: Sequence[Sequence[str]], how: str) -> str:
    """Returns the part of a signature for multiple references, or ""."""
    counts = sorted({len(right) for right in references})
    if counts[-1] == 1:
        return ""
    return f"{how} {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} references"


# config.recipe -> function of (written, references, normalize, score_words)
_SCORERS = {
    "translation": _translation,
    "summarization": _summarization,
    "text_to_text": _text_to_text,
}
# name of a score -> its title
TITLES = {
    "bleu": "BLEU",
    "chrf": "chrF",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "exact_match": "exact match %",
    "exact_match_normalized": "as the vocabulary writes it %",
}
