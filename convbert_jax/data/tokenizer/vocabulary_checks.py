"""What can be wrong with a vocabulary, found before hours of training, said in one sentence.

The `vocab.txt` in the official ConvBERT repository has several of these faults at once: CR LF line
ends and all 1,900 non-ASCII entries decoded with a wrong character set.
"""

import unicodedata
from collections import Counter
from collections.abc import Sequence

from convbert_jax.config import TokenizerSection
from convbert_jax.data.errors import TokenizerError

# Positions in the vocabularies of BERT's release, which have [unused…] entries.
BERT_IDS = {"pad": 0, "unknown": 100, "cls": 101, "sep": 102, "mask": 103}
# Character sets in which UTF-8 is often misread. cp1252: "é" becomes "Ã©"; gbk: "¡" becomes "隆".
MISREADINGS = ("cp1252", "latin-1", "gbk")
# Share of non-ASCII entries that turn back into UTF-8. By chance 4 % of BERT's do in gbk and at
# most 8 % of a list of all its characters.
MISREAD_SHARE = 0.15
RARE = 0.001  # of the letters of a sample, and of the entries of a vocabulary
BERT_SIZE = 30_522  # of its uncased vocabulary, which damaged ones mostly are copies of
STANDARD = "use the standard bert-base-uncased vocabulary of the same length"
# Marks (category Mn) that are no accents but vowels, voicing or the sign for no vowel: of the
# scripts of India and South-East Asia, and of kana. First and one past the last code point.
LETTER_MARKS = (
    (0x0900, 0x1AB0),
    (0x1B00, 0x1DC0),
    (0x3099, 0x309B),
    (0xA800, 0xAC00),
    (0x11000, 0x12000),
)
LOST_LETTERS = 0.01  # of the letters of a sample: more are not some words of another language


def check_tokenizer(tokenizer, section: TokenizerSection, sample: Sequence[str]) -> None:
    """Looks for damage, and for settings that do not fit the vocabulary or the text.

    Args:
      tokenizer: a `Tokenizer`.
      section: the settings it was loaded with.
      sample: some documents of the corpus.

    Raises:
      TokenizerError: one sentence with everything found and how to mend it.
    """
    if tokenizer.kind == "pieces":  # texts come cut: the list decides nothing else
        faults = _unknown_faults(tokenizer, section, sample)
        if faults:
            (fault, _), *_ = faults
            raise TokenizerError(
                f"Vocabulary {tokenizer.path} cannot be trusted: {fault}; cut the texts into its "
                "pieces, with blanks between them."
            )
        return
    faults = [
        *_file_faults(tokenizer),
        *_entry_faults(tokenizer.entries),
        *_special_faults(tokenizer),
        *_normalization_faults(tokenizer, section, sample),
    ]
    if not faults:  # damaged files have unknown tokens too; name the cause, not the effect
        faults = _unknown_faults(tokenizer, section, sample)
    if faults:
        found = ", ".join(fault for fault, _ in faults)
        fixes = list(dict.fromkeys(fix for _, fix in faults))
        raise TokenizerError(
            f"Vocabulary {tokenizer.path} cannot be trusted: {found}; {' and '.join(fixes)}."
        )


def refuse_lost_letters(section: TokenizerSection, sample: Sequence[str]) -> None:
    """For a vocabulary that is to be trained, before it is.

    `strip_accents` takes away all that Unicode calls a nonspacing mark. In Hindi, Thai or Japanese
    that is part of the spelling, and other words are left.

    Raises:
      TokenizerError: it would be taken from more than `LOST_LETTERS` of the letters of `sample`.
    """
    if not section.strip_accents:
        return
    letters = marks = 0
    example = ""
    for text in sample:
        letters += sum(map(str.isalpha, text))
        found = sum(map(_is_letter_mark, _apart(text)))
        marks += found
        if found and not example:
            place = next(i for i, character in enumerate(text) if _has_letter_mark(character))
            around = text[max(0, place - 8) : place + 8].split()
            example = next(filter(_has_letter_mark, around))
    if marks > LOST_LETTERS * max(1, letters):
        left = "".join(c for c in _apart(example) if unicodedata.category(c) != "Mn")
        raise TokenizerError(
            f"config.tokenizer.strip_accents=True would take vowels or voicing, which Unicode "
            f"counts as marks, from {marks / max(1, letters):.0%} of the letters of the text: "
            f"'{example}' would be read as '{left}'; set --config.tokenizer.strip_accents=False."
        )


def told_normalization(tokenizer) -> dict[str, bool]:
    """Case and accents that a vocabulary must have been made for, by field of config.tokenizer.

    A SentencePiece model normalizes by itself. Of a list of entries only those tell something that
    could never be used: cased ones, and accented ones, which in a cased list may be few.
    """
    if tokenizer.kind == "pieces":
        return {"lowercase": False, "strip_accents": False}
    if tokenizer.kind == "sentencepiece":
        return {
            "lowercase": not _has_upper(tokenizer.normalize("É")),
            "strip_accents": not _has_accent(tokenizer.normalize("é")),
        }
    entries = [entry for entry in tokenizer.entries if not _is_special(entry)]
    upper, accented = (sum(map(has, entries)) for has in (_has_upper, _has_accent))
    cased = upper > RARE * len(entries)
    told = {"lowercase": False} if cased else {}
    if accented > (0 if cased else RARE * len(entries)):
        told["strip_accents"] = False
    return told


def unknown_rate(tokenizer, texts: Sequence[str]) -> float:
    """Share of [UNK] among the tokens of `texts`."""
    encoded = tokenizer.encode(texts)
    unknown = sum(ids.count(tokenizer.special.unknown) for ids in encoded)
    return unknown / max(1, sum(map(len, encoded)))


def _file_faults(tokenizer) -> list[tuple[str, str]]:
    if tokenizer.path.suffix in (".model", ".json"):
        return []
    lines = tokenizer.path.read_bytes().split(b"\n")
    ends = sum(line.endswith(b"\r") for line in lines)
    fix = STANDARD if tokenizer.vocab_size == BERT_SIZE else "save it with LF alone (dos2unix)"
    return [(f"{ends} of its lines end in CR LF", fix)] if ends else []


def _undamaged(entries: Sequence[str]) -> str:
    """What to do about a damaged list of entries."""
    return STANDARD if len(entries) == BERT_SIZE else "put an undamaged copy of it there"


def _entry_faults(entries: list[str]) -> list[tuple[str, str]]:
    faults = []
    fix = _undamaged(entries)
    lost = sum("\ufffd" in entry for entry in entries)
    if lost > RARE * len(entries):
        faults.append((f"{lost} entries contain the replacement character U+FFFD", fix))
    foreign = [entry.removeprefix("##") for entry in entries if not entry.isascii()]
    for charset in MISREADINGS:
        misread = sum(_reads_as_utf8(entry, charset) for entry in foreign)
        if misread >= 5 and misread > MISREAD_SHARE * len(foreign):
            fault = (
                f"{misread} of {len(foreign)} non-ASCII entries are UTF-8 once misread as {charset}"
            )
            faults.append((fault, fix))
            break
    repeated = len(entries) - len(set(entries))
    if repeated:
        twice = next(entry for entry, count in Counter(entries).items() if count > 1)
        faults.append((f"{repeated} entries are duplicates, one of them '{twice}'", fix))
    return faults


def _reads_as_utf8(entry: str, charset: str) -> bool:
    try:
        return not entry.encode(charset).decode("utf-8").isascii()
    except UnicodeError:
        return False


def _special_faults(tokenizer) -> list[tuple[str, str]]:
    ids = tokenizer.special.by_name
    if ids["cls"] == ids["pad"]:  # T5's, see sentencepiece_model.py
        ids = {role: index for role, index in ids.items() if role != "cls"}
    if len(set(ids.values())) < len(ids):
        return [("special tokens share an id", _undamaged(tokenizer.entries))]
    moved = [
        f"{tokenizer.entries[ids[role]]} is {ids[role]}"
        for role, usual in _expected_ids(tokenizer.entries).items()
        if ids[role] != usual
    ]
    if moved:
        fault = f"special tokens were moved ({', '.join(moved)})"
        return [(fault, _undamaged(tokenizer.entries))]
    names = {role: tokenizer.entries[index] for role, index in ids.items() if role != "unknown"}
    produced = {i for encoded in tokenizer.encode(list(names.values())) for i in encoded}
    leaking = [name for role, name in names.items() if ids[role] in produced]
    if leaking:
        return [
            (
                f"the text '{leaking[0]}' is encoded as the special token",
                "train a vocabulary with control symbols instead of user-defined ones",
            )
        ]
    return []


def _expected_ids(entries: list[str]) -> dict[str, int]:
    """Where BERT's order of entries, [unused…] ones before the others, has the special tokens.

    Lists of other makers have another number of unused ones, here all right if they are numbered
    through and nothing stands between them, or the special tokens before them: {}.
    """
    before = entries[: entries.index("[UNK]")] if "[UNK]" in entries else []
    unused = [entry for entry in before if entry.startswith("[unused")]
    if "[unused1]" not in unused:
        return {}
    first = 0 if unused[0] == "[unused0]" else 1
    numbered = ["[PAD]", *(f"[unused{first + i}]" for i in range(len(unused)))]
    shift = len(before) - BERT_IDS["unknown"] if before == numbered else 0
    return BERT_IDS | {role: BERT_IDS[role] + shift for role in BERT_IDS if role != "pad"}


def _normalization_faults(tokenizer, section, sample) -> list[tuple[str, str]]:
    """Case and accents of the settings against those of the entries and of the sample."""
    entries = [entry for entry in tokenizer.entries if not _is_special(entry)]
    faults = []
    for name, has, trait in (
        ("lowercase", _has_upper, "upper-case"),
        ("strip_accents", _has_accent, "accented"),
    ):
        setting = getattr(section, name)
        share = sum(map(has, entries)) / max(1, len(entries))
        removes = not has(tokenizer.normalize("É" if name == "lowercase" else "é"))
        letters = [c for text in sample for c in text if c.isalpha()]
        in_sample = sum(map(has, letters)) / max(1, len(letters))
        if removes != setting:
            fault = f"it {'removes' if removes else 'keeps'} {trait} letters"
        elif setting and share > RARE:
            fault = f"{share:.1%} of its entries have {trait} letters and can never be used"
        elif not setting and share == 0 and in_sample > RARE:
            fault = f"no entry has an {trait} letter but {in_sample:.1%} of the text's letters are"
        else:
            continue
        faults.append((fault, f"set --config.tokenizer.{name}={not setting}"))
    return faults


def _unknown_faults(tokenizer, section, sample) -> list[tuple[str, str]]:
    rate = unknown_rate(tokenizer, sample)
    if rate <= section.max_unknown_rate:
        return []
    fix = "use a vocabulary made for this text or raise config.tokenizer.max_unknown_rate"
    return [
        (
            f"{rate:.1%} of the tokens of the text are unknown, more than "
            f"config.tokenizer.max_unknown_rate={section.max_unknown_rate}",
            fix,
        )
    ]


def _is_special(entry: str) -> bool:
    return entry[:1] + entry[-1:] in ("[]", "<>")


def _has_upper(text: str) -> bool:
    return text != text.lower()


def _apart(text: str) -> str:
    return unicodedata.normalize("NFD", text)


def _is_letter_mark(character: str) -> bool:
    code = ord(character)
    inside = code >= LETTER_MARKS[0][0] and any(a <= code < b for a, b in LETTER_MARKS)
    return inside and unicodedata.category(character) == "Mn"


def _has_letter_mark(text: str) -> bool:
    return any(map(_is_letter_mark, _apart(text)))


def _has_accent(text: str) -> bool:
    return any(unicodedata.category(c) == "Mn" for c in _apart(text))
