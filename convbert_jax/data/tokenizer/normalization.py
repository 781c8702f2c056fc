"""Case, accents and Unicode form: chosen for a new vocabulary, detected for a given one."""

import dataclasses
import unicodedata
from collections.abc import Callable, Sequence

from convbert_jax.config import TokenizerSection
from convbert_jax.data.errors import TokenizerError

RARE = 0.001  # share of the letters of a sample, and of the entries of a vocabulary
# Dotless i, dotted I and schwa of Turkish and Azeri, where lowercasing "I" gives another letter.
CASED_LETTERS = "\u0131\u0130\u0259\u018f"
# Combining marks (category Mn) that are accents or optional points, in Latin, Greek, Cyrillic,
# Hebrew, Arabic, Syriac and symbols. In all other scripts, marks are vowels, voicing or tones.
ACCENTS = (
    (0x0300, 0x0780),
    (0x08C9, 0x0900),
    (0x1AB0, 0x1B00),
    (0x1DC0, 0x2E00),
    (0x302A, 0x302E),
    (0xA66F, 0xA6A0),
    (0xFB1E, 0xFB1F),
    (0xFE00, 0xFE30),
    (0x1BC9D, 0x1D300),
    (0xE0100, 0xE01F0),
)
# Distinct letters that Unicode decomposes into a letter of these scripts and a mark: Yiddish
# letters, and the yeh with hamza of Uyghur and Sorani.
MARKED_LETTERS = (
    *("\u05d0\u05b7", "\u05d0\u05b8", "\u05e4\u05bc", "\u05e4\u05bf", "\u05f2\u05b7"),
    "\u064a\u0654",
)
LOST_LETTERS = 0.01  # share of the letters of a sample; a few foreign words stay below it
EXAMPLES = 3
EXAMPLE_WIDTH = 12  # characters; text without spaces has very long "words"


def unresolved(section: TokenizerSection) -> list[str]:
    """Returns the fields of `section` that are "auto"."""
    names = ("lowercase", "strip_accents", "normalization")
    return [name for name in names if getattr(section, name) == "auto"]


def choose_normalization(
    section: TokenizerSection, sample: Sequence[str] = (), *, is_generative: bool = False
) -> TokenizerSection:
    """Replaces "auto" before a vocabulary is trained.

    Args:
      sample: documents of the corpus.
      is_generative: whether the model generates text, which keeps its case and character width.

    Returns:
      `section` with accents kept. Text is lowercased unless the model is generative or more than
      the share `RARE` of the letters are `CASED_LETTERS`.
    """
    letters = sum(sum(map(str.isalpha, text)) for text in sample)
    cased = sum(text.count(letter) for text in sample for letter in CASED_LETTERS)
    form = "identity"  # BERT's normalization has no Unicode form
    if section.kind == "sentencepiece":
        form = "nfc" if is_generative else "nfkc"
    chosen = {
        "lowercase": not is_generative and cased <= RARE * letters,
        "strip_accents": False,
        "normalization": form,
    }
    return dataclasses.replace(section, **{name: chosen[name] for name in unresolved(section)})


def describe_normalization(
    section: TokenizerSection, sample: Sequence[str], normalize: Callable[[str], str]
) -> str:
    """Returns a log message about the normalization, with `EXAMPLES` words of `sample`.

    Args:
      section: settings without "auto".
      normalize: the normalization of the vocabulary.
    """
    case = "lowercases text" if section.lowercase else "keeps the case of text"
    accents = "removes accents" if section.strip_accents else "keeps accents"
    form = f", applies {section.normalization.upper()}" if section.normalization[:2] == "nf" else ""
    words = dict.fromkeys(word[:EXAMPLE_WIDTH] for text in sample for word in text.split())

    def traits(word: str) -> int:
        compatible = unicodedata.normalize("NFKC", word) != unicodedata.normalize("NFC", word)
        return has_upper(word) + has_accent(word) + compatible

    shown = sorted(words, key=traits, reverse=True)[:EXAMPLES]
    examples = ", ".join(f"'{word}' -> '{' '.join(normalize(word).split())}'" for word in shown)
    return f"The vocabulary {case}, {accents}{form}: {examples}."


def refuse_lost_letters(section: TokenizerSection, sample: Sequence[str]) -> None:
    """Rejects `strip_accents` for a corpus where accent stripping would remove letters.

    Accent stripping removes all nonspacing marks of Unicode. In Hindi, Thai, Japanese and Dhivehi
    they are part of the spelling.

    Raises:
      TokenizerError: more than `LOST_LETTERS` of the letters of `sample` would lose a mark.
    """
    if section.strip_accents is not True:
        return
    letters = marks = 0
    example = ""
    for text in sample:
        letters += sum(map(str.isalpha, text))
        found = _count_letter_marks(text)
        marks += found
        if found and not example:
            example = next(filter(_count_letter_marks, text.split()))
            place = next(i for i in range(len(example)) if _count_letter_marks(example[: i + 1]))
            example = example[max(0, place - 8) : place + 8]
    if marks > LOST_LETTERS * max(1, letters):
        left = "".join(c for c in _decompose(example) if unicodedata.category(c) != "Mn")
        raise TokenizerError(
            "config.tokenizer.strip_accents=True would remove vowel or voicing marks from "
            f"{marks / max(1, letters):.0%} of the letters of the text: '{example}' would become "
            f"'{left}'. Set --config.tokenizer.strip_accents=False.",
            field="config.tokenizer.strip_accents",
            value=True,
        )


def told_normalization(tokenizer) -> dict[str, bool | str]:
    """Detects the fields of config.tokenizer (case, accents, Unicode form) of a vocabulary.

    A SentencePiece model contains its normalization. In a list of entries, cased and accented
    entries are the evidence, because they are unusable if the text is lowercased or stripped of
    accents. A cased list may have only a few accented entries.
    """
    if tokenizer.kind == "pieces":
        return {"lowercase": False, "strip_accents": False, "normalization": "identity"}
    if tokenizer.kind == "sentencepiece":
        form = "identity"
        if tokenizer.normalize("\uff12") == "2":
            form = "nfkc"
        elif tokenizer.normalize("\u1112\u1161") == "\ud558":
            form = "nfc"
        return {
            "lowercase": not has_upper(tokenizer.normalize("É")),
            "strip_accents": not has_accent(tokenizer.normalize("é")),
            "normalization": form,
        }
    entries = [entry for entry in tokenizer.entries if not is_special(entry)]
    upper, accented = (sum(map(has, entries)) for has in (has_upper, has_accent))
    cased = upper > RARE * len(entries)
    told = {"lowercase": False} if cased else {}
    if accented > (0 if cased else RARE * len(entries)):
        told["strip_accents"] = False
    return told


def is_special(entry: str) -> bool:
    return entry[:1] + entry[-1:] in ("[]", "<>")


def has_upper(text: str) -> bool:
    return text != text.lower()


def has_accent(text: str) -> bool:
    return any(unicodedata.category(c) == "Mn" for c in _decompose(text))


def _decompose(text: str) -> str:
    return unicodedata.normalize("NFD", text)


def _count_letter_marks(text: str) -> int:
    """Counts the marks in `text` that are part of the spelling."""
    if text.isascii():
        return 0
    text = _decompose(text)
    marks = (c for c in text if unicodedata.category(c) == "Mn")
    letters = sum(not any(first <= ord(c) < end for first, end in ACCENTS) for c in marks)
    return letters + sum(map(text.count, MARKED_LETTERS))
