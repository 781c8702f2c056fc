"""Guesses the encoding of text that is not UTF-8."""

import functools
import operator
import re

SAMPLE_BYTES = 1 << 16  # size of the sample for a guess
_PUNCTUATION = "".join(map(chr, (*range(0x3000, 0x3020), *range(0xFF01, 0xFF60))))
_QUOTES = "\u2018\u2019\u201c\u201d\u201e\u2013\u2014\u2026«»°"
_RUSSIAN = "оеаинтсрвлкмдпуяыьгз"
_POLISH = "ąćęłńóśźżĄĆĘŁŃÓŚŹŻ" + _QUOTES
_CZECH = "áčďéěíňóřšťúůýžäôľĺŕÁČĎÉĚÍŇÓŘŠŤÚŮÝŽ" + _QUOTES
# (encoding, frequent characters of its texts); the first of equally good encodings wins.
# Encodings of Latin scripts:
_LATIN = (
    ("cp1252", "äöüßàâæçèéêëîïôœùûÿñáíóúãõåøìòÄÖÜÀÂÇÈÉÊÎÔÑÁÍÓÚÃÕÅØ¿¡€" + _QUOTES),
    ("cp1250", _POLISH),
    ("cp1250", _CZECH),
    ("iso-8859-2", _POLISH),
    ("iso-8859-2", _CZECH),
    ("cp1254", "çğıöşüâîûÇĞİÖŞÜÂÎÛ" + _QUOTES),
)
# Single-byte encodings of other scripts:
_OTHER = (
    ("cp1251", _RUSSIAN),
    ("koi8-r", _RUSSIAN),
    ("cp1253", "αοιετσνηυρπκμλςόίάέήδγωύθχφώβ"),
    ("cp1255", "יוהלארמתבשנםחדעקפגצןכטזס"),
    ("cp1256", "اليمونرتبةعدسفهكقحجشصطأخى"),
    ("cp874", "านรอกเงมยลวดทส่้ัีิตคปบหพไขแชใจะ็ื"),
)


@functools.cache
def _multibyte() -> tuple[tuple[str, str], ...]:
    """Returns the same pairs for multi-byte encodings, from rows of their code tables."""

    def rows(codec: str, first: int, last: int) -> str:
        trails = (*range(0x40, 0x7F), *range(0xA1, 0xFF))
        data = b"".join(bytes((row, t)) for row in range(first, last + 1) for t in trails)
        return data.decode(codec, "ignore")

    japanese = "".join(map(chr, range(0x3041, 0x30FF))) + rows("euc_jp", 0xB0, 0xCF)
    return (
        ("euc_kr", rows("euc_kr", 0xB0, 0xC8)),
        ("gbk", rows("gb2312", 0xB0, 0xD7) + _PUNCTUATION),
        ("euc_jp", japanese + _PUNCTUATION),
        ("shift_jis", japanese + _PUNCTUATION),
        ("big5", rows("big5", 0xA4, 0xC6) + _PUNCTUATION),
    )


def guess_encoding(data: bytes) -> str:
    """Returns the most likely encoding of `data`, or "" if none fits.

    The score of an encoding is the share of frequent characters among the non-ASCII characters.

    Args:
      data: whole lines of text.
    """
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    try:
        data.decode("utf-8")
        return "utf-8"
    except UnicodeDecodeError:
        pass
    runs = re.findall(rb"[\x80-\xff]+", data)
    single = len(b"".join(runs)) < 2 * len(runs)  # accented letters between ASCII letters
    candidates = _LATIN if single else (*_multibyte(), *_OTHER)
    share, best = max(
        ((_share(data, *each), each[0]) for each in candidates), key=operator.itemgetter(0)
    )
    return best if share > 0.6 else ""


def _share(data: bytes, encoding: str, characters: str) -> float:
    decoded = [character for character in data.decode(encoding, "replace") if character > "\x7f"]
    frequent = set(characters)
    return sum(character in frequent for character in decoded) / max(1, len(decoded))
