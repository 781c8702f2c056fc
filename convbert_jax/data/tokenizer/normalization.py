"""Case, accents and Unicode form of a vocabulary, and checks for damage and wrong settings.

The `vocab.txt` in the official ConvBERT repository has several of these faults: CR LF line ends,
and all 1,900 non-ASCII entries were decoded with the wrong character set.
"""

import dataclasses
import unicodedata
from collections import Counter
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
      `section` with accents kept. Text is lowercased unless the kind is byte-level BPE, the model
      is generative or more than the share `RARE` of the letters are `CASED_LETTERS`.
    """
    letters = sum(sum(map(str.isalpha, text)) for text in sample)
    cased = sum(text.count(letter) for text in sample for letter in CASED_LETTERS)
    form = "identity"  # BERT's normalization has no Unicode form
    lossy = section.kind != "bpe"  # byte-level BPE keeps text as it is
    if section.kind == "sentencepiece":
        form = "nfc" if is_generative else "nfkc"
    chosen = {
        "lowercase": lossy and not is_generative and cased <= RARE * letters,
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

    SentencePiece and byte-level BPE files contain their normalization. In a list of entries, cased
    and accented entries are the evidence, because they are unusable if the text is lowercased or
    stripped of accents. A cased list may have only a few accented entries.
    """
    if tokenizer.kind == "pieces":
        return {"lowercase": False, "strip_accents": False, "normalization": "identity"}
    if tokenizer.kind in ("sentencepiece", "bpe"):
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


# Ids in the official BERT vocabularies, which have [unused…] entries.
BERT_IDS = {"pad": 0, "unknown": 100, "cls": 101, "sep": 102, "mask": 103}
# Character sets that UTF-8 is often misread as. cp1252: "é" becomes "Ã©"; gbk: "¡" becomes "隆".
MISREADINGS = ("cp1252", "latin-1", "gbk")
# Share of the entries encodable in such a set whose bytes are valid UTF-8: 100% in a damaged list,
# but by chance also 18% of the common Chinese characters (GB2312, level 1) in gbk.
MISREAD_SHARE = 0.5
BERT_SIZE = 30_522  # entries of bert-base-uncased; most damaged vocabularies are copies of it
STANDARD = "use the standard bert-base-uncased vocabulary of the same length"


def check_tokenizer(tokenizer, sample: Sequence[str]) -> None:
    """Checks a vocabulary for damage, and for settings that do not fit it or the text.

    Args:
      tokenizer: a `Tokenizer`.
      sample: some documents of the corpus.

    Raises:
      TokenizerError: the message lists all faults and their fixes.
    """
    if tokenizer.kind == "pieces":  # the texts are already tokenized; no other check applies
        if faults := _unknown_faults(tokenizer, sample):
            raise TokenizerError(
                f"Vocabulary {tokenizer.path} failed validation: {faults[0][0]}. Tokenize the "
                "texts into its pieces, separated by spaces.",
                path=tokenizer.path,
            )
        return
    faults = _special_faults(tokenizer)
    if tokenizer.section.path:  # vocabularies trained here need no further checks
        faults = [
            *_file_faults(tokenizer),
            *([] if tokenizer.kind == "bpe" else _entry_faults(tokenizer.entries)),
            *faults,
            *_normalization_faults(tokenizer, sample),
        ]
    if not faults:  # damage causes unknown tokens too; report only the cause
        faults = _unknown_faults(tokenizer, sample)
    if faults:
        found = ", ".join(fault for fault, _ in faults)
        fixes = list(dict.fromkeys(fix for _, fix in faults))
        raise TokenizerError(
            f"Vocabulary {tokenizer.path} failed validation: {found}. To fix it, "
            f"{' and '.join(fixes)}.",
            path=tokenizer.path,
        )


def _file_faults(tokenizer) -> list[tuple[str, str]]:
    if tokenizer.path.suffix in (".model", ".json"):
        return []
    lines = tokenizer.path.read_bytes().split(b"\n")
    ends = sum(line.endswith(b"\r") for line in lines)
    fix = STANDARD if tokenizer.vocab_size == BERT_SIZE else "convert its line ends (dos2unix)"
    return [(f"{ends} lines end in CR LF", fix)] if ends else []


def _undamaged(entries: Sequence[str]) -> str:
    """Returns the fix for a damaged list of entries."""
    return STANDARD if len(entries) == BERT_SIZE else "replace it with an undamaged copy"


def _entry_faults(entries: list[str]) -> list[tuple[str, str]]:
    faults = []
    fix = _undamaged(entries)
    lost = sum("\ufffd" in entry for entry in entries)
    if lost > RARE * len(entries):
        faults.append((f"{lost} entries contain the replacement character U+FFFD", fix))
    foreign = [entry.removeprefix("##") for entry in entries if not entry.isascii()]
    for charset in MISREADINGS:
        encoded = [found for entry in foreign if (found := _encode(entry, charset))]
        misread = sum(map(_is_utf8, encoded))
        if misread >= 5 and misread > MISREAD_SHARE * len(encoded):
            fault = f"{misread} of {len(foreign)} non-ASCII entries are UTF-8 misread as {charset}"
            faults.append((fault, fix))
            break
    repeated = len(entries) - len(set(entries))
    if repeated:
        twice = next(entry for entry, count in Counter(entries).items() if count > 1)
        faults.append((f"{repeated} entries are duplicates, for example '{twice}'", fix))
    return faults


def _encode(entry: str, charset: str) -> bytes:
    """Encodes `entry` in a character set; returns b"" if this is impossible."""
    try:
        return entry.encode(charset)
    except UnicodeError:
        return b""


def _is_utf8(encoded: bytes) -> bool:
    try:
        encoded.decode("utf-8")
    except UnicodeError:
        return False
    return True


def _special_faults(tokenizer) -> list[tuple[str, str]]:
    ids = tokenizer.special.by_name
    moved = [
        f"{tokenizer.entries[ids[role]]} is {ids[role]}"
        for role, usual in _expected_ids(tokenizer.entries).items()
        if ids[role] != usual
    ]
    if moved:
        fault = f"special tokens have unexpected ids ({', '.join(moved)})"
        return [(fault, _undamaged(tokenizer.entries))]
    names = {role: tokenizer.entries[index] for role, index in ids.items() if role != "unknown"}
    produced = {i for encoded in tokenizer.encode(list(names.values())) for i in encoded}
    leaking = [name for role, name in names.items() if ids[role] in produced]
    if leaking:
        return [
            (
                f"the text '{leaking[0]}' is encoded as a special token",
                "train a vocabulary with control symbols instead of user-defined ones",
            )
        ]
    return []


def _expected_ids(entries: list[str]) -> dict[str, int]:
    """Returns the expected ids of the special tokens in a vocabulary with BERT's order of entries.

    BERT's order begins with [PAD] and [unused…] entries. Other vocabularies with this order have
    another number of [unused…] entries, which is valid if they are numbered consecutively. Returns
    {} for a vocabulary without [unused…] entries before the special tokens.
    """
    before = entries[: entries.index("[UNK]")] if "[UNK]" in entries else []
    unused = [entry for entry in before if entry.startswith("[unused")]
    if "[unused1]" not in unused:
        return {}
    first = 0 if unused[0] == "[unused0]" else 1
    numbered = ["[PAD]", *(f"[unused{first + i}]" for i in range(len(unused)))]
    shift = len(before) - BERT_IDS["unknown"] if before == numbered else 0
    return BERT_IDS | {role: BERT_IDS[role] + shift for role in BERT_IDS if role != "pad"}


def _normalization_faults(tokenizer, sample) -> list[tuple[str, str]]:
    """Compares the normalization settings with the entries and with the sample."""
    entries = [entry for entry in tokenizer.entries if not is_special(entry)]
    faults = []
    for name, has, trait in (
        ("lowercase", has_upper, "upper-case"),
        ("strip_accents", has_accent, "accented"),
    ):
        setting = getattr(tokenizer.section, name)
        found = [entry for entry in entries if has(entry)]
        unusable = sum(not has(tokenizer.normalize(entry)) for entry in found)
        unusable /= max(1, len(entries))
        removes = not has(tokenizer.normalize("É" if name == "lowercase" else "é"))
        letters = [c for text in sample for c in text if c.isalpha()]
        in_sample = sum(map(has, letters)) / max(1, len(letters))
        if removes != setting:
            fault = f"it {'removes' if removes else 'keeps'} {trait} letters"
        elif setting and unusable > RARE:
            fault = f"{unusable:.1%} of the entries have {trait} letters and can never be used"
        elif not setting and not found and in_sample > RARE:
            fault = f"no entry has an {trait} letter but {in_sample:.1%} of the text's letters are"
        else:
            continue
        faults.append((fault, f"set --config.tokenizer.{name}={not setting}"))
    form = tokenizer.section.normalization
    told = told_normalization(tokenizer).get("normalization", form)
    if told != form:
        fix = f"set --config.tokenizer.normalization={told}"
        faults.append((f"it normalizes text as '{told}', not as '{form}'", fix))
    return faults


def _unknown_faults(tokenizer, sample) -> list[tuple[str, str]]:
    section, sample = tokenizer.section, list(sample)
    lost = [span for spans in tokenizer.unknown_spans(sample) for span in spans]
    characters = sum(len(part) for text in sample for part in text.split())
    rate = sum(map(len, lost)) / max(1, characters)
    if rate <= section.max_unknown_rate:
        return []
    fault = (
        f"{rate:.1%} of the characters of the text are unknown, more than "
        f"config.tokenizer.max_unknown_rate={section.max_unknown_rate}"
    )
    fix = "use a vocabulary for this kind of text"
    if not section.path:
        fix = "raise config.tokenizer.vocab_size"
        if section.kind == "wordpiece":
            fix = "set --config.tokenizer.kind=sentencepiece"
    longest = max(map(len, lost))
    if section.kind == "wordpiece" and longest > section.max_word_chars:
        fault += (
            f", and words longer than config.tokenizer.max_word_chars={section.max_word_chars} "
            f"are entirely unknown (the longest has {longest} characters)"
        )
        fix += ", raise max_word_chars"
    return [(fault, f"{fix} or raise max_unknown_rate")]
