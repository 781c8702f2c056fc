"""Hooks that build the pages as a MkDocs site, and the writer of generated files.

    python launch/docs.py --write       writes docs/reference/fields.md and command_line.md, and the
                                        address of pyproject.toml into pages, notebooks and
                                        CITATION.cff
    pip install '.[docs]'               MkDocs and mkdocstrings; then:
    mkdocs serve                        the pages in a browser; mkdocs build --strict writes site/

The pages are written for readers of the repository and link to files outside of docs/. In the site,
README.md is the first page, the other pages that they link to are copied, and links to code become
file names, or links to the repository if it has an address.
"""

import ast
import inspect
import json
import os
import pathlib
import re
import sys
import tomllib

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
REFERENCE = REPOSITORY / "docs" / "reference"
_PAGES = {  # page of the site -> file outside of docs/
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
}
_COLAB = "https://colab.research.google.com"
_FENCE_IN_LIST = re.compile(r"^( +)```\w*\n(.*?)^\1```$", re.M | re.S)
# Python-Markdown does not start an item right after a paragraph of the item before.
_ITEM_AFTER_PARAGRAPH = re.compile(r"^( +(?!- |\d+\. )\S.*\n)(?=- |\d+\. )", re.M)
_COMMAND_IN_LIST = re.compile(r"(?<=<pre>)<code>(?=(?:python|pip|echo|curl) )")
_CODE = re.compile(r'((?<!<pre>)<code>|<code class="language-(?:ba)?sh">)([^<]+)(?=</code>)')
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
# The address in commands of the pages, or ADDRESS before the repository is published.
_EXPLAINED = r"ADDRESS is the address of this repository\. ?"
_IN_COMMAND = re.compile(r"(git clone |git\+)(?:ADDRESS|https://github\.com/[\w.-]+/[\w.-]+)")


def on_config(config):
    """Links the pages to the repository, if it has an address."""
    if address := read_address():
        config.repo_url, config.repo_name = address, "GitHub"
    return config


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
    """Rewrites the links and the lists of a page for the site."""
    markdown = _FENCE_IN_LIST.sub(lambda fence: _indented(fence[2]), markdown)
    markdown = _ITEM_AFTER_PARAGRAPH.sub(r"\1\n", markdown)
    source = page.file.src_uri
    outside = source in _PAGES or source.startswith("benchmarks/")
    folder = REPOSITORY / ("." if outside else "docs") / os.path.dirname(source)
    return _LINK.sub(lambda link: _site_link(link, folder, source), markdown)


def on_page_content(html, page, config, files):
    """Lets commands break in long words and before flags, but not after their hyphens."""
    html = _COMMAND_IN_LIST.sub('<code class="language-bash">', html)
    return _CODE.sub(lambda code: code[1] + _breakable(code[2]), html)


def _breakable(code: str) -> str:
    """Returns HTML with flags as elements, and break opportunities in words like paths."""
    code = re.sub(r"\S{20,}", lambda word: re.sub(r"[/=,.](?=\w)", r"\g<0><wbr>", word[0]), code)
    return re.sub(r"(?<!\S)-\S+", r'<span class="flag">\g<0></span>', code)


def _indented(code: str) -> str:
    """Returns a code block by indentation: Python-Markdown has no fences in lists."""
    return re.sub(r"^(?=.)", "    ", code, flags=re.M)


def _site_link(link: re.Match, folder: pathlib.Path, source: str) -> str:
    mark, text, target, anchor = link.groups()
    path = pathlib.Path(os.path.normpath(folder / target))
    if "://" in target or not path.exists():
        return link.group()  # MkDocs reports a broken link
    relative = path.relative_to(REPOSITORY).as_posix()
    if path.suffix not in (".md", ".png", ".svg"):
        address = read_address()
        return f"[{text}]({address}/blob/main/{relative})" if address else f"`{text.strip('`')}`"
    place = {file: page for page, file in _PAGES.items()}.get(relative, relative)
    up = "../" * source.count("/")
    return f"{mark}[{text}]({up}{place.removeprefix('docs/')}{anchor or ''})"


def read_address() -> str:
    """Returns the address of the repository in pyproject.toml, "" before it is published."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project.get("urls", {}).get("Repository", "")


def written() -> dict[pathlib.Path, str]:
    """Returns file -> content of every file that --write writes."""
    address = read_address()
    files = {
        REFERENCE / "fields.md": describe_fields(),
        REFERENCE / "command_line.md": describe_command_line(),
    }
    for page in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))):
        if page not in files:
            text = page.read_text(encoding="utf-8")
            text = _IN_COMMAND.sub(lambda found: found[1] + (address or "ADDRESS"), text)
            files[page] = re.sub(_EXPLAINED, "", text) if address else text
    for notebook in sorted((REPOSITORY / "launch" / "colab").glob("*.ipynb")):
        files[notebook] = publish(notebook, address)
    citation = REPOSITORY / "CITATION.cff"
    files[citation] = _cite(citation.read_text(encoding="utf-8"), address)
    return files


def publish(notebook: pathlib.Path, address: str) -> str:
    """Returns a notebook whose badge and first cell have the address of the repository.

    Args:
      address: https://github.com/OWNER/NAME, or "": no badge.
    """
    content = json.loads(notebook.read_text(encoding="utf-8"))
    first = content["cells"][0]
    if first["source"][0].startswith("[!["):
        del first["source"][:2]
    if address:
        name = address.removeprefix("https://github.com/")
        page = f"{_COLAB}/github/{name}/blob/main/launch/colab/{notebook.name}"
        badge = f"[![Open in Colab]({_COLAB}/assets/colab-badge.svg)]({page})"
        first["source"] = [f"{badge}\n", "\n", *first["source"]]
    for cell in content["cells"]:
        if "install" in cell["metadata"].get("tags", ()):
            cell["source"] = [
                re.sub(r'^REPOSITORY = "[^"]*"', f'REPOSITORY = "{address}"', line)
                for line in cell["source"]
            ]
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _cite(text: str, address: str) -> str:
    """Returns CITATION.cff with the version of the package and the address."""
    import convbert_jax

    fields = {"version": convbert_jax.__version__, "repository-code": address and f'"{address}"'}
    for name, value in fields.items():
        text = re.sub(rf"^{name}: .*\n", "", text, flags=re.M)
        if value:
            text = text.replace("license: ", f"{name}: {value}\nlicense: ", 1)
    return text


def describe_fields() -> str:
    """Returns the content of docs/reference/fields.md."""
    from convbert_jax.command_line import overrides
    from convbert_jax.command_line.fields import comments, field_types
    from convbert_jax.command_line.help_text import first_paragraph
    from convbert_jax.config import Config

    config, described = Config(), comments()
    lines = [
        "# Every field of a config",
        "",
        "`python launch/docs.py --write` writes this page from the comments in "
        "[convbert_jax/config/](../../convbert_jax/config/). Set a field with "
        "`--config.SECTION.FIELD=VALUE`. `--config=FILE --help` prints the fields with the values "
        "of that file. The defaults below are the values that the files in "
        "[configs/](../../configs/) start from. [Values](command_line.md#values) shows how to "
        "write numbers and lists.",
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
            lines += _table("field", "default", "meaning")
        value = overrides.to_flags({path: getattr(holder, field)})[0].partition("=")[2]
        lines.append(_row(_code(field), _code(value), _escape(described[path])))
    return "\n".join(lines) + "\n"


def describe_command_line() -> str:
    """Returns the content of docs/reference/command_line.md."""
    from convbert_jax.command_line import exit_codes, flags, overrides, request
    from convbert_jax.command_line.help_text import default_text
    from convbert_jax.config_files import known_files
    from convbert_jax.serve.__main__ import make_parser
    from convbert_jax.sweeps import cli

    modes_of = request.MODES_OF_FLAG
    lines = [
        "# Command line",
        "",
        "`python launch/docs.py --write` writes this page from the code. "
        "`--help` prints the modes and flags, `--config=FILE --help` the fields.",
        "",
        "```",
        "python -m convbert_jax.main --config=FILE [--config.SECTION.FIELD=VALUE ...] [flags]",
        "python -m convbert_jax.main --workdir=RUN     resumes a run",
        "```",
        "",
        "## Modes",
        "",
        *_table("`--mode=`", "action", "flags"),
    ]
    for mode, about in flags.MODES.items():
        own = ", ".join(_code(f"--{flag}") for flag, modes in modes_of.items() if mode in modes)
        lines.append(_row(_code(mode), _escape(about), own))
    lines += ["", "The default is `train`.", "", "## Flags", ""]
    lines += _table("flag", "values", "default", "modes", "meaning")
    for flag in flags.own_flags():
        kinds = getattr(flag.parser, "enum_values", ()) if flag.name != "mode" else ()
        values = ", ".join(map(_code, kinds)) or ("see above" if flag.name == "mode" else "")
        default = default_text(flag) if flag.name != "mode" else "train"
        modes = ", ".join(modes_of.get(flag.name, ("all",)))
        about = _escape(re.sub(r"^<[^>]*>: ", "", flag.help))  # absl repeats the values
        lines.append(_row(_code(f"--{flag.name}"), values, _code(default), modes, about))
    lines += ["", "A flag that the mode does not use is an error.", "", "## Values", ""]
    lines += [" ".join(inspect.getdoc(overrides).split("\n\n")[1].split())]
    lines += ["", "[Fields](fields.md) lists all fields.", "", "## Config files", ""]
    lines += ["`--config=NAME` is short for `--config=configs/NAME.py`.", ""]
    lines += _table("file", "content")
    for name in known_files():
        about = ast.get_docstring(ast.parse((REPOSITORY / name).read_text(encoding="utf-8")))
        first = " ".join(about.partition("\n\n")[0].split())
        lines.append(_row(f"[{name}](../../{name})", _escape(first)))
    lines += ["", "## Exit codes", "", *_table("code", "meaning")]
    lines += [_row(_code(str(code)), about) for code, about in exit_codes.EXIT_CODES.items()]
    lines += ["", "## Environment variables", "", *_table("variable", "meaning")]
    lines += [_row(_code(name), about) for name, about in flags.ENVIRONMENT.items()]
    for title, program, parser in (
        ("Server", "convbert_jax.serve", make_parser()),
        ("Sweeps", "launch/sweep.py", cli.make_parser()),
    ):
        lines += ["", f"## {title}", "", f"Flags of `{program}`:", ""]
        lines += _table("flag", "default", "meaning")
        for action in parser._actions:
            if action.dest != "help":
                default = "" if action.default in (None, False, [], "") else str(action.default)
                name = _code(" ".join(filter(None, (action.option_strings[0], action.metavar))))
                lines.append(_row(name, _code(default), _escape(action.help)))
    return "\n".join(lines) + "\n"


def _table(*names: str) -> list[str]:
    return [_row(*names), "|" + "---|" * len(names)]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _escape(text: str) -> str:
    return re.sub(r"([*<\[])", r"\\\1", text)


def main(arguments: list[str]) -> None:
    if arguments != ["--write"]:
        sys.exit(__doc__)
    for file, text in written().items():
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            print(f"Wrote {file.relative_to(REPOSITORY)}.")


if __name__ == "__main__":
    main(sys.argv[1:])
