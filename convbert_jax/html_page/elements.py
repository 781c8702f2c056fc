"""Tags made of texts. A text is never read as HTML, wherever it comes from: a corpus, a config, the
name of a file may have `<script>` in it.
"""

import re
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from convbert_jax.html_page.style import STYLE

# What no HTML file can hold: control characters, halves of surrogate pairs, code points that are no
# characters.
_UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
# Nothing is fetched and nothing runs, even if there were something to fetch or to run.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def clean(text: str) -> str:
    """`text` as a browser will have it: lines end in a newline, � for what HTML cannot hold."""
    return _UNFIT.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))


def element(tag: str, *children: "Element | str", **attributes: str | float) -> Element:
    """A tag around texts and other tags.

    Args:
      attributes: by name; `class_` is class, `aria_label` is aria-label.
    """
    names = {name: name.rstrip("_").replace("_", "-") for name in attributes}
    made = Element(tag, {names[n]: clean(str(value)) for n, value in attributes.items()})
    last = None
    for child in children:
        if isinstance(child, Element):
            made.append(child)
            last = child
        elif last is None:
            made.text = (made.text or "") + clean(child)
        else:
            last.tail = (last.tail or "") + clean(child)
    return made


def foreign(text: str, tag: str = "bdi", **attributes: str) -> Element:
    """A text from data, in its own direction, which nothing beside it takes part in."""
    return element(tag, text, dir="auto", **attributes)


def render(title: str, *children: Element) -> str:
    """The whole page, for a file in UTF-8."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", STYLE),
    )
    page = element("html", head, element("body", element("main", *children)), lang="en")
    return f"<!DOCTYPE html>\n{ElementTree.tostring(page, encoding='unicode', method='html')}\n"
