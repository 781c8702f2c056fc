"""README, docs/ and benchmarks/: commands parse, fields that they name exist, links resolve."""

import ast
import dataclasses
import itertools
import pathlib
import re
import runpy
import shlex

import pytest
from absl.testing import flagsaver

from convbert_jax import command_line
from convbert_jax.command_line.fields import field_types
from convbert_jax.config import Config
from convbert_jax.demo import __main__ as demo
from convbert_jax.sweeps import cli

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "RESULTS.md"
NOTES = sorted((REPOSITORY / "benchmarks" / "notes").glob("*.md"))
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]
STARTS = re.compile(r"python (?:-m [\w.]+|[\w/]+\.py)|bash [\w/]+\.sh")
ENDS = {"|", "&&", ";", ">"}


def commands(page: pathlib.Path) -> list[list[str]]:
    """Returns the commands of a page: lines of its shell blocks, and inline `python …`."""
    text = page.read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`\n]*)`", re.sub(r"```.*?```", "", text, flags=re.S))
    found = []
    for line in lines:
        line = re.sub(r'.*--command="(.*)".*', r"\1", line)  # argument of gcloud ssh
        if not (start := STARTS.search(line)) or "…" in line or "NAME" in line.split("#")[0]:
            continue
        lexer = shlex.shlex(line[start.start() :], posix=True, punctuation_chars="|&;>")
        lexer.whitespace_split = True
        found.append(list(itertools.takewhile(lambda word: word not in ENDS, lexer)))
    return [words for words in found if words != ["python", "-m", "convbert_jax.main"]]


@pytest.mark.parametrize(
    "page", [*PAGES, RESULTS, *NOTES], ids=lambda page: page.relative_to(REPOSITORY).as_posix()
)
def test_the_commands_of_a_page_parse(page):
    assert commands(page) or page.name != "README.md"
    for words in commands(page):
        program, arguments = words[1], words[2:]
        if program == "-m":
            program, arguments = words[2], words[3:]
        if program == "convbert_jax.main":
            with flagsaver.flagsaver():  # buckets would require their package here
                command_line.read(["main.py", *(w.replace("gs:/", "") for w in arguments)])
        elif program == "launch/local_cluster.sh":
            with flagsaver.flagsaver():
                command_line.read(["main.py", *arguments[1:]])
        elif program == "launch/sweep.py":
            cli.read(["sweep.py", *arguments])
        elif program == "convbert_jax.demo":
            demo.make_parser().parse_args(arguments)
        elif not (program == "pytest" and (REPOSITORY / arguments[0]).exists()):
            place = REPOSITORY / (program if "/" in program else program.replace(".", "/"))
            files = (place, place.with_suffix(".py"), place / "__main__.py")
            assert any(file.is_file() for file in files), words


@pytest.mark.parametrize(
    "file", sorted((REPOSITORY / "configs").glob("*.py")), ids=lambda file: file.stem
)
def test_the_commands_in_the_docstring_of_a_config_parse(file):
    """Users copy them; a missing backslash would drop the flags of the next line."""
    lines = ast.get_docstring(ast.parse(file.read_text())).replace("\\\n", " ").splitlines()
    assert [line for line in lines if line.lstrip().startswith("--config") and line[0] == " "] == []
    for line in lines:
        if line.startswith("    python "):
            words = shlex.split(line, comments=True)
            read = cli.read if words[1] == "launch/sweep.py" else command_line.read
            with flagsaver.flagsaver():
                read(["program", *words[2 if words[1] != "-m" else 3 :]])


def known_fields() -> set[str]:
    """Returns the paths of all fields and sections."""
    return {path[: end.start()] for path in field_types() for end in re.finditer(r"\.|$", path)}


def test_fields_that_a_page_names_exist():
    known = known_fields() | {"section.field", "json"}
    for page in [*PAGES, RESULTS, *NOTES]:
        for name in re.findall(r"(?:--|`)config\.([a-z]\w*(?:\.[a-z]\w*)*)", page.read_text()):
            assert name in known, (page.name, name)


def test_fields_that_a_message_names_exist():
    """Checks errors and log lines, including the constant parts of f-strings."""
    known, wrong = known_fields(), []
    for file in sorted((REPOSITORY / "convbert_jax").rglob("*.py")):
        tree = ast.parse(file.read_text())
        docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = re.findall(r"\bconfig\.([a-z]\w*(?:\.[a-z]\w*)*)", node.value)
                if id(node) not in docstrings:
                    wrong += [(file.name, name) for name in named if name not in known]
    files = {"json", "gin", "section.field"}
    assert [found for found in wrong if found[1] not in files] == []


def test_the_table_of_fields_is_current():
    docs = runpy.run_path(str(REPOSITORY / "launch" / "docs.py"))
    assert docs["FIELDS"].read_text() == docs["describe_fields"](), (
        "run: python launch/docs.py --write"
    )


def test_every_section_has_a_docstring():
    for field in dataclasses.fields(Config):
        if dataclasses.is_dataclass(field.type):
            assert not field.type.__doc__.startswith(f"{field.type.__name__}("), field.name


def test_the_readme_has_at_most_120_lines():
    assert len(PAGES[0].read_text().splitlines()) <= 120


def test_results_are_short():
    assert len(RESULTS.read_text().splitlines()) <= 250
    assert len(NOTES) <= 8
    assert [note.name for note in NOTES if len(note.read_text().splitlines()) > 120] == []
    assert len((REPOSITORY / "CHANGELOG.md").read_text().splitlines()) <= 60


@pytest.mark.parametrize("page", [RESULTS, *NOTES], ids=lambda page: page.name)
def test_scripts_tests_and_configs_that_results_name_exist(page):
    """Scripts are named relative to benchmarks/, other files relative to the repository."""
    named = re.findall(r"`([\w/]+(?:\.py|\.sh|/))(?:[: ][^`]*)?`", page.read_text())
    assert named
    for name in named:
        assert any((place / name).exists() for place in (REPOSITORY, RESULTS.parent)), name


def test_the_site_is_built_without_broken_links(tmp_path):
    pytest.importorskip("mkdocs")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    settings = load_config(str(REPOSITORY / "mkdocs.yml"), site_dir=str(tmp_path / "site"))
    settings.plugins.on_startup(command="build", dirty=False)
    build(settings)  # strict: a broken link is an error
    start = (tmp_path / "site" / "index.html").read_text()
    assert 'href="pretraining/"' in start
    assert "benchmarks/figures/quickstart.png" in start
    scripts = r'(?:src|href)="(?:https?:)?//[^"]*\.(?:js|css)'
    assert not re.search(scripts, start)  # the site loads nothing from elsewhere
    assert (tmp_path / "site" / "benchmarks" / "figures" / "quickstart.png").is_file()


SOURCE = '''"""A docstring of several words."""
from typing import Any

def f(x: "int | str | float | None") -> "int | str | float | None":
    """Another docstring of several words."""
    if x:
        raise ValueError(f"x={x!r} is not allowed: "
                         "use a smaller number.")
    logging.warning("%d of the rows were skipped", x)
    return "short text"
'''


def test_errors_and_log_lines_are_found_docstrings_and_annotations_are_not(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    assert runpy.run_path(str(REPOSITORY / "launch" / "messages.py"))["messages"](path) == [
        (7, "ValueError", "x={...} is not allowed: use a smaller number."),
        (9, "logging.warning", "%d of the rows were skipped"),
    ]
