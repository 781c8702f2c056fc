"""Hooks that build the pages as a MkDocs site, and writers of docs/fields.md and notebook badges.

    python launch/docs.py --write       writes docs/fields.md from the config dataclasses
    python launch/docs.py --repository=https://github.com/OWNER/NAME
                                        writes this address into the notebooks of launch/colab/:
                                        where they install the package from, and a Colab badge
    pip install mkdocs                  the extra `docs`; then:
    mkdocs serve                        the pages in a browser; mkdocs build --strict writes site/

The pages are written for readers of the repository and link to files outside of docs/. In the site,
README.md is the first page, the other pages that they link to are copied, and links to code become
file names.
"""

import json
import os
import pathlib
import re
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
FIELDS = REPOSITORY / "docs" / "fields.md"
_PAGES = {  # page of the site -> file outside of docs/
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
}
_ADDRESS = re.compile(r"--repository=(https://github\.com/[\w.-]+/[\w.-]+)")
_COLAB = "https://colab.research.google.com"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files, config):
    """Adds the pages outside of docs/, and the pages and figures of benchmarks/."""
    from mkdocs.structure.files import File

    sources = {page: REPOSITORY / file for page, file in _PAGES.items()}
    for file in sorted((REPOSITORY / "benchmarks").rglob("*")):
        if file.suffix in (".md", ".png"):
            sources[file.relative_to(REPOSITORY).as_posix()] = file
    for page, file in sources.items():
        files.append(File.generated(config, page, abs_src_path=str(file)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrites the links of a page for the site."""
    source = page.file.src_uri
    outside = source in _PAGES or source.startswith("benchmarks/")
    folder = REPOSITORY / ("." if outside else "docs") / os.path.dirname(source)
    return _LINK.sub(lambda link: _site_link(link, folder, source), markdown)


def _site_link(link: re.Match, folder: pathlib.Path, source: str) -> str:
    mark, text, target, anchor = link.groups()
    path = pathlib.Path(os.path.normpath(folder / target))
    if "://" in target or not path.exists():
        return link.group()  # MkDocs reports a broken link
    relative = path.relative_to(REPOSITORY).as_posix()
    if path.suffix not in (".md", ".png"):
        return f"`{text.strip('`')}`"
    place = {file: page for page, file in _PAGES.items()}.get(relative, relative)
    up = "../" * source.count("/")
    return f"{mark}[{text}]({up}{place.removeprefix('docs/')}{anchor or ''})"


def describe_fields() -> str:
    """Returns the content of docs/fields.md."""
    from convbert_jax.command_line import overrides
    from convbert_jax.command_line.fields import comments, field_types
    from convbert_jax.command_line.help_text import first_paragraph
    from convbert_jax.config import Config

    config, described = Config(), comments()
    lines = [
        "# Every field of a config",
        "",
        "Written by `python launch/docs.py --write` from the comments in "
        "[convbert_jax/config/](../convbert_jax/config/). A field is set by "
        "`--config.SECTION.FIELD=VALUE`; `--config=FILE --help` shows those of a file with its "
        "values. The values here are those that a file in [configs/](../configs/) starts from.",
    ]
    section = None
    for path in field_types():
        name, _, field = path.rpartition(".")
        holder = getattr(config, name) if name else config
        if name != section:
            section = name
            lines += ["", f"## {name or 'The run'}", ""]
            if name and (about := first_paragraph(type(holder))):
                lines += [_escape(about), ""]
            lines += ["| field | | |", "|---|---|---|"]
        value = overrides.to_flags({path: getattr(holder, field)})[0].partition("=")[2]
        cells = [f"`{field}`", f"`{value}`" if value else "", _escape(described[path])]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return re.sub(r"([*<\[])", r"\\\1", text)


def publish(notebook: pathlib.Path, repository: str) -> None:
    """Writes the address of the repository into a notebook: its badge and its parameters.

    Args:
      repository: https://github.com/OWNER/NAME.
    """
    content = json.loads(notebook.read_text(encoding="utf-8"))
    first = content["cells"][0]
    if first["source"][0].startswith("[!["):
        del first["source"][:2]
    name = repository.removeprefix("https://github.com/")
    page = f"{_COLAB}/github/{name}/blob/main/launch/colab/{notebook.name}"
    badge = f"[![Open in Colab]({_COLAB}/assets/colab-badge.svg)]({page})"
    first["source"] = [f"{badge}\n", "\n", *first["source"]]
    for cell in content["cells"]:
        if "parameters" in cell["metadata"].get("tags", ()):
            cell["source"][0] = re.sub(r'"[^"]*"', f'"{repository}"', cell["source"][0], count=1)
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    notebook.write_text(text, encoding="utf-8")


def main(arguments: list[str]) -> None:
    if arguments == ["--write"]:
        FIELDS.write_text(describe_fields())
        print(f"Wrote {FIELDS.relative_to(REPOSITORY)}.")
    elif len(arguments) == 1 and (match := _ADDRESS.fullmatch(arguments[0])):
        for notebook in sorted((REPOSITORY / "launch" / "colab").glob("*.ipynb")):
            publish(notebook, match[1])
            print(f"Wrote {notebook.relative_to(REPOSITORY)}.")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
