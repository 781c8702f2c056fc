"""Texts that would break a page if they were read as HTML."""

import re
from collections.abc import Callable, Sequence

from hypothesis import strategies

from convbert_jax.html_page.elements import clean
from tests.html_page.parsed import Page

_FIRST, _LAST = "\ue000", "\ue001"  # around what stands for a text
_STAND_IN = re.compile(f"{_FIRST}([0-9]+){_LAST}")
_PARTS = (
    *("<script>alert(1)</script>", "</style>", "</title>", '"><img src=x onerror=alert(1)>'),
    *("&lt;b&gt;", "&#60;", "&amp", "<!--", "-->", "<![CDATA[", "]]>", "<?php", "</", "<", "'"),
    *("\u202etxet", "\u2066", "שלום", "مرحبا", "漢字", "🙂", "\x00", "\x1b", "\x85", "\ud800"),
    *("\r\n", "\r", "\n", "\t", "\ufffe", " "),
)
TEXTS = strategies.lists(
    strategies.one_of(
        strategies.sampled_from(_PARTS),
        strategies.text(
            strategies.characters(exclude_categories=(), exclude_characters=_FIRST + _LAST),
            min_size=1,
            max_size=5,
        ),
    ),
    min_size=1,
    max_size=5,
).map("".join)


def check(make: Callable[[Sequence[str]], str], texts: Sequence[str]) -> None:
    """Asserts that a page with `texts` has the tags, attributes and texts of one with harmless
    texts in their places, and `texts` themselves, each of them.

    Args:
      make: texts -> page.
    """
    seen, cleaned = set(), list(map(clean, texts))

    def put_in(value):
        if isinstance(value, tuple):
            return tuple(map(put_in, value))
        return value and _STAND_IN.sub(take, value)

    def take(match):
        seen.add(number := int(match[1]))
        return cleaned[number]

    wanted = Page(make([f"{_FIRST}{number}{_LAST}" for number in range(len(texts))]))
    assert Page(make(texts)).events == list(map(put_in, wanted.events))
    assert seen == set(range(len(texts)))
