"""A page as a parser that is not ours sees it."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Tags, attributes and visible texts, in order.

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
        """What a reader sees of it, and the title."""
        return "".join(text for kind, text, *_ in self.events if kind == "text")

    @property
    def tags(self) -> set[str]:
        return {tag for kind, tag, *_ in self.events if kind == "<"}

    def texts(self, tag: str) -> list[str]:
        """The text inside of each such tag, none of which holds another."""
        found, open_ = [], False
        for kind, name, *_ in self.events:
            if kind == "text" and open_:
                found[-1] += name
            elif name == tag and kind in "<>":
                open_ = kind == "<"
                found += [""] if open_ else []
        return found

    def values(self, attribute: str) -> list[str]:
        """Of each tag that has it."""
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
