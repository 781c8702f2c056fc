"""What pages are put together from."""

import base64
from collections.abc import Collection, Iterable, Mapping, Sequence
from xml.etree.ElementTree import Element

from convbert_jax.config import Config, changes, to_dict, to_text
from convbert_jax.html_page.elements import element, foreign


def section(title: str, *children: Element) -> Element:
    """A part of the page under a heading."""
    return element("section", element("h2", title), *children)


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str | Element]],
    *,
    names: int,
    chosen: Collection[int] = (),
) -> Element:
    """Texts from data, and tags, in rows; one that is too wide is moved in its own frame.

    Args:
      head: () shows none.
      names: how many columns, the first ones, are no numbers.
      chosen: numbers of the rows that are to be seen first.
    """

    def cell(tag: str, place: int, content: str | Element) -> Element:
        child = content if isinstance(content, Element) else foreign(content)
        return element(tag, child, **({} if place < names else {"class_": "number"}))

    parts = []
    if head:
        parts.append(element("thead", element("tr", *(cell("th", *c) for c in enumerate(head)))))
    lines = []
    for number, row in enumerate(rows):
        marked = {"class_": "chosen"} if number in chosen else {}
        lines.append(element("tr", *(cell("td", *c) for c in enumerate(row)), **marked))
    return element("div", element("table", *parts, element("tbody", *lines)), class_="wide")


def commands(given: Iterable[tuple[str, str]]) -> Element:
    """What to type next, each with what it does; a click takes the whole of one."""
    parts = []
    for what, command in given:
        parts += [element("dt", what), element("dd", code(command))]
    return element("dl", *parts, class_="commands")


def code(command: str) -> Element:
    """A command line, which a narrow window breaks between its words."""
    parts = []
    for word in command.split(" "):
        parts += [element("span", word), " "]
    return element("pre", element("code", *parts[:-1]), dir="ltr")


def picture(png: bytes, caption: str) -> Element:
    """A PNG inside the page."""
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return element(
        "figure",
        element("img", src=source, alt=caption),
        foreign(caption, "figcaption"),
    )


def facts(given: Mapping[str, str]) -> Element:
    """Names and values."""
    return table((), given.items(), names=2)


def fields(config: Config, leave_out: Collection[str]) -> Element:
    """The fields of a config, folded away: first those that differ from the defaults.

    Args:
      leave_out: those that the run does not read, "section" or "section.field".
    """

    def is_read(path: str) -> bool:
        return path not in leave_out and path.partition(".")[0] not in leave_out

    default, own = to_dict(Config()), to_dict(config)
    changed = {p: pair for p, pair in changes.differences(default, own).items() if is_read(p)}
    others = {p: v for p, v in changes.flatten(own).items() if is_read(p) and p not in changed}
    shown = [(f"config.{path}", *map(_spell, (new, old))) for path, (old, new) in changed.items()]
    rest = [(f"config.{path}", _spell(value)) for path, value in others.items()]
    inner = element(
        "details",
        element("summary", f"{len(rest)} fields at their defaults"),
        _fields_table(("field", "value"), rest),
    )
    return element(
        "details",
        element("summary", f"{len(shown)} fields differ from the defaults"),
        _fields_table(("field", "value", "default"), shown),
        inner,
    )


def _fields_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Element:
    made = table(head, rows, names=len(head))
    made.find("table").set("class", "fields")
    return made


def _spell(value: object) -> str:
    """As an override has it; what is empty is told so."""
    return to_text(tuple(value) if isinstance(value, list) else value) or "(empty)"
