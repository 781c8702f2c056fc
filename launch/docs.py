"""The pages as a site: what MkDocs calls while it builds them, the table of all fields, notebooks.

    python launch/docs.py --write       writes docs/fields.md from the dataclasses of the config
    python launch/docs.py --repository=https://github.com/OWNER/NAME
                                        where it is published: what the notebooks of launch/colab/
                                        install in Colab, and their badges "Open in Colab"
    pip install mkdocs                  once; the extra `docs`
    mkdocs serve                        the pages in a browser; mkdocs build --strict: in site/

The pages are written to be read in the repository: they link to files beside docs/. As a site,
README.md is its first page, what else is beside docs/ and benchmarks/RESULTS.md with its pictures
are copied, and links to code become the names of the files.
"""

import json
import pathlib
import re
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
FIELDS = REPOSITORY / "docs" / "fields.md"
_BESIDE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
}
_ADDRESS = re.compile(r"--repository=(https://github\.com/[\w.-]+/[\w.-]+)")
_COLAB = "https://colab.research.google.com"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files, config):
    """Adds the pages beside docs/, and benchmarks/ as far as pages show it."""
    from mkdocs.structure.files import File

    for name, file in _BESIDE.items():
        files.append(File.generated(config, name, abs_src_path=str(REPOSITORY / file)))
    for file in sorted((REPOSITORY / "benchmarks").rglob("*")):
        if file.suffix in (".md", ".png"):
            name = file.relative_to(REPOSITORY).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(file)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links as they are in the site."""
    here = pathlib.PurePosixPath("/docs", page.file.src_uri).parent
    if page.file.src_uri in _BESIDE:
        here = pathlib.PurePosixPath("/")
    elif page.file.src_uri.startswith("benchmarks/"):
        here = pathlib.PurePosixPath("/benchmarks")
    return _LINK.sub(lambda link: _in_site(link, here, page.file.src_uri), markdown)


def _in_site(link: re.Match, here: pathlib.PurePosixPath, source: str) -> str:
    mark, text, target, anchor = link.groups()
    if "://" in target:
        return link.group()
    path = REPOSITORY / pathlib.Path(_normal(here / target)).relative_to("/")
    if not path.exists():
        return link.group()  # MkDocs says that it leads nowhere
    relative = path.relative_to(REPOSITORY)
    if relative.suffix not in (".md", ".png"):
        return f"`{text.strip('`')}`"
    place = relative.relative_to("docs") if relative.parts[0] == "docs" else relative
    place = {file: name for name, file in _BESIDE.items()}.get(str(place), place)
    up = "../" * source.count("/")
    return f"{mark}[{text}]({up}{place}{anchor or ''})"


def _normal(path: pathlib.PurePosixPath) -> str:
    parts = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return str(pathlib.PurePosixPath(*parts))


def describe_fields() -> str:
    """The page docs/fields.md."""
    from convbert_jax.command_line import overrides
    from convbert_jax.command_line.fields import comments, field_types
    from convbert_jax.command_line.help_text import first_paragraph
    from convbert_jax.config import Config

    config, said = Config(), comments()
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
                lines += [_plain(about), ""]
            lines += ["| field | | |", "|---|---|---|"]
        value = overrides.to_flags({path: getattr(holder, field)})[0].partition("=")[2]
        value = f"`{_cell(value)}`" if value else ""
        lines.append(f"| `{field}` | {value} | {_cell(_plain(said[path]))} |")
    return "\n".join(lines) + "\n"


def _plain(comment: str) -> str:
    """A comment as Markdown: what it would take for marks of its own is escaped."""
    return re.sub(r"([*<\[])", r"\\\1", comment)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def publish(notebook: pathlib.Path, repository: str) -> None:
    """Says in a notebook where the repository is: in its badge, which opens it in Colab from there,
    and in the cell of parameters, from which it installs the package.

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
    elif len(arguments) == 1 and (found := _ADDRESS.fullmatch(arguments[0])):
        for notebook in sorted((REPOSITORY / "launch" / "colab").glob("*.ipynb")):
            publish(notebook, found[1])
            print(f"Wrote {notebook.relative_to(REPOSITORY)}.")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
