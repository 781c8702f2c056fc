"""How good texts are that a model wrote, by the libraries of the field, beside references."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata, util

from convbert_jax.config import UserError


class ScoreError(UserError):
    """Texts cannot be scored."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """Of a set of texts.

    Attributes:
      values: by name, from 0 to 100.
      signature: which library, version and settings these are by.
    """

    values: Mapping[str, float]
    signature: str


# config.recipe -> the module that scores need, as Python and as pip call it
LIBRARIES = {
    "translation": ("sacrebleu", "sacrebleu"),
    "summarization": ("rouge_score", "rouge-score"),
}


def check_library(recipe: str) -> None:
    """Raises ScoreError where what scores texts of the recipe is not installed."""
    module, package = LIBRARIES.get(recipe, ("", ""))
    if module and util.find_spec(module) is None:
        raise ScoreError(
            f"config.recipe='{recipe}' is scored by {package}, which is not installed; install it: "
            f"pip install {package}, or convbert_jax[text]."
        )


def score(
    recipe: str,
    written: Sequence[str],
    references: Sequence[str],
    normalize: Callable[[str], str],
    bleu_tokenizer: str = "13a",
) -> Scores:
    """The scores of config.recipe.

    Args:
      written, references: texts side by side.
      normalize: a text as the model's vocabulary would write it.
      bleu_tokenizer: config.decoding.bleu_tokenizer.

    Raises:
      ScoreError: as `check_library`.
    """
    check_library(recipe)
    if recipe == "translation":
        return _translation(written, references, bleu_tokenizer)
    if recipe == "summarization":
        return _summarization(written, references)
    return _text_to_text(written, references, normalize)


def _translation(written, references, tokenizer: str) -> Scores:
    """BLEU and chrF of the whole set (Post 2018, Popović 2015)."""
    sacrebleu = importlib.import_module("sacrebleu")
    values, signatures = {}, []
    bleu = sacrebleu.BLEU(tokenize=tokenizer)
    for name, metric in (("bleu", bleu), ("chrf", sacrebleu.CHRF())):
        values[name] = metric.corpus_score(list(written), [list(references)]).score
        signatures.append(f"{name} {metric.get_signature()}")
    return Scores(values, ", ".join(signatures))


def _summarization(written, references) -> Scores:
    """F of ROUGE-1, 2 and L, means over texts, with stemming (Lin 2004)."""
    names = ("rouge1", "rouge2", "rougeL")
    scorer = importlib.import_module("rouge_score.rouge_scorer").RougeScorer(
        list(names), use_stemmer=True
    )
    found = [scorer.score(right, ours) for ours, right in zip(written, references, strict=True)]
    values = {
        name.lower(): 100 * sum(each[name].fmeasure for each in found) / len(found)
        for name in names
    }
    return Scores(values, f"rouge-score {metadata.version('rouge-score')}, F with stemming")


def _text_to_text(written, references, normalize) -> Scores:
    """Share of texts that are the reference, but for blanks around: as it stands, and as the
    vocabulary would write it, without case and accents if it has none.
    """
    pairs = list(zip(written, references, strict=True))
    exact = sum(ours.strip() == right.strip() for ours, right in pairs)
    normalized = sum(normalize(ours).strip() == normalize(right).strip() for ours, right in pairs)
    values = {
        "exact_match": 100 * exact / len(pairs),
        "exact_match_normalized": 100 * normalized / len(pairs),
    }
    return Scores(values, "texts equal, but for blanks around")


# names of scores -> what people call them
TITLES = {
    "bleu": "BLEU",
    "chrf": "chrF",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougel": "ROUGE-L",
    "exact_match": "exact match %",
    "exact_match_normalized": "as the vocabulary writes it %",
}
