"""Parses HTML pages, and checks that texts cannot change their structure."""

import re
from collections.abc import Callable, Sequence
from html.parser import HTMLParser

from hypothesis import strategies

from convbert_jax.recipes.reports.page import clean

_FIRST, _LAST = "\ue000", "\ue001"  # delimiters of a text's number
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
    """Asserts that a page shows each of `texts`, and that texts change no tags or attributes.

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


class Page(HTMLParser):
    """Tags, attributes and visible texts of an HTML page, in order.

    Attributes:
      events: ("<", tag, attributes), (">", tag) or ("text", text).
    """

    def __init__(self, html: str):
        super().__init__()
        self.events = []
        self.feed(html)
        self.close()

    @property
    def text(self) -> str:
        """All visible text and the title."""
        return "".join(text for kind, text, *_ in self.events if kind == "text")

    @property
    def tags(self) -> set[str]:
        return {tag for kind, tag, *_ in self.events if kind == "<"}

    def texts(self, tag: str) -> list[str]:
        """Returns the text of each element with this name; such elements must not be nested."""
        found, open_ = [], False
        for kind, name, *_ in self.events:
            if kind == "text" and open_:
                found[-1] += name
            elif name == tag and kind in "<>":
                open_ = kind == "<"
                found += [""] if open_ else []
        return found

    def values(self, attribute: str) -> list[str]:
        """Values of an attribute, in order."""
        tags = [dict(event[2]) for event in self.events if event[0] == "<"]
        return [tag[attribute] for tag in tags if attribute in tag]

    def handle_starttag(self, tag, attrs):
        self.events.append(("<", tag, tuple(attrs)))

    def handle_endtag(self, tag):
        self.events.append((">", tag))

    def handle_data(self, data):
        if self.events and self.events[-1][:2] == ("<", "style"):
            return
        if self.events and self.events[-1][0] == "text":
            data = self.events.pop()[1] + data
        self.events.append(("text", data))

    def handle_comment(self, data):
        self.events.append(("comment", data))

    def handle_pi(self, data):
        self.events.append(("instruction", data))

    def unknown_decl(self, data):
        self.events.append(("declaration", data))
