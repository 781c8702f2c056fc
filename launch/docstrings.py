"""Extension of griffe for the site: doctests in docstrings become examples, not quotations."""

import griffe


class Examples(griffe.Extension):
    """Moves paragraphs that start with >>> into a section of examples."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring:
            obj.docstring.value = _with_section(obj.docstring.value)


def _with_section(text: str) -> str:
    paragraphs = text.split("\n\n")
    found = [paragraph for paragraph in paragraphs if paragraph.startswith(">>> ")]
    if not found:
        return text
    others = [paragraph for paragraph in paragraphs if paragraph not in found]
    lines = "\n\n".join(found).splitlines()
    return "\n\n".join([*others, "\n".join(["Examples:", *(f"    {line}" for line in lines)])])
