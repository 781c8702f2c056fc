"""README, docs/ and benchmarks/: commands parse, fields that they name exist, links resolve."""

import ast
import dataclasses
import importlib
import inspect
import itertools
import json
import os
import pathlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap

import pytest
import yaml
from absl.testing import flagsaver

import convbert_jax
from convbert_jax import command_line
from convbert_jax.command_line import flags
from convbert_jax.command_line.fields import field_types
from convbert_jax.config import Config, mixers, plugins, to_dict
from convbert_jax.serve import __main__ as serve
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


def python_files(page: pathlib.Path) -> dict[str, str]:
    """Returns name -> code of the files that a page tells to save ("… as `mine.py`:")."""
    blocks = re.findall(r"as `(\w+\.py)`:\n\n *```python\n(.*?)```", page.read_text(), re.S)
    return {name: textwrap.dedent(code) for name, code in blocks}


@pytest.fixture
def page_folder(tmp_path, monkeypatch):
    """page_folder(page): change to a folder with the Python files and the runs of the page."""
    written = []

    def write(page):
        for name, code in python_files(page).items():
            (tmp_path / name).write_text(code)
            written.append(pathlib.Path(name).stem)
        if "--workdir=runs/" in page.read_text():
            source = {"parallel.source": "parallel:train.en,train.de"}
            config = convbert_jax.load_config("translation:tiny,dynamic", **source)
            for name in ("en-de", "yitu"):
                (tmp_path / "runs" / name).mkdir(parents=True)
                (tmp_path / "runs" / name / "config.json").write_text(json.dumps(to_dict(config)))
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)

    monkeypatch.setattr(plugins, "_allowed", set(plugins._allowed))
    yield write
    for name in written:
        sys.modules.pop(name, None)
    mixers._find.cache_clear()


@pytest.mark.parametrize(
    "page", [*PAGES, RESULTS, *NOTES], ids=lambda page: page.relative_to(REPOSITORY).as_posix()
)
def test_the_commands_of_a_page_parse(page, page_folder):
    page_folder(page)
    assert commands(page) or page.name != "README.md"
    check_commands(page)


def check_commands(page: pathlib.Path) -> None:
    """Parses the commands of a page like the programs that they start."""
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
        elif program == "convbert_jax.serve":
            serve.make_parser().parse_args(arguments)
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


def test_generated_files_are_current():
    docs = runpy.run_path(str(REPOSITORY / "launch" / "docs.py"))
    old = [str(p) for p, text in docs["written"]().items() if p.read_text() != text]
    assert old == [], "run: python launch/docs.py --write"


def test_the_address_of_the_repository_is_set_in_one_place(tmp_path):
    """After a change of pyproject.toml, --write leaves no placeholder and no older address."""
    for name in ("docs", "launch", "configs"):
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    for name in ("README.md", "CITATION.cff", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    settings = tmp_path / "pyproject.toml"
    lines = settings.read_text().splitlines()
    lines = [line for line in lines if not re.match(r"(# )?Repository = ", line)]
    written = [REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "SECURITY.md"]
    for owner in ("first", "second"):
        address = f"https://github.com/{owner}/it"
        entry = f'[project.urls]\nRepository = "{address}"'
        settings.write_text("\n".join(lines).replace("[project.urls]", entry))
        command = [sys.executable, "launch/docs.py", "--write"]
        where = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        subprocess.run(command, cwd=tmp_path, env=where, check=True, capture_output=True)
        pages = [tmp_path / "README.md", *(tmp_path / "docs").rglob("*.md")]
        assert f"git clone {address} " in pages[0].read_text()
        assert f'repository-code: "{address}"' in (tmp_path / "CITATION.cff").read_text()
        placeholder = re.compile(r"\bADDRESS\b|github\.com/OWNER")
        assert [page for page in [*pages, *written] if placeholder.search(page.read_text())] == []
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in found if b"first/it" in path.read_bytes()] == []


def test_the_citation_has_the_version():
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert citation["version"] == convbert_jax.__version__


def test_environment_variables_that_the_package_reads_are_described():
    sources = {
        path: path.read_text() for path in sorted((REPOSITORY / "convbert_jax").rglob("*.py"))
    }
    text = "".join(text for path, text in sources.items() if path.name != "flags.py")
    read = set(re.findall(r'environ(?:\.get\(|\[)"([A-Z_]+)"(?!\] =)', text))
    internal = {"PYTHONPATH", "TF_CPP_MIN_LOG_LEVEL", "TPU_SKIP_MDS_QUERY"}
    assert read - internal <= set(flags.ENVIRONMENT)
    assert {name for name in flags.ENVIRONMENT if name not in text} == set()


def test_the_api_page_has_every_public_function():
    """Each item of the page exists and has a docstring."""
    page = (REPOSITORY / "docs" / "reference" / "api.md").read_text()
    items = re.findall(r"^::: ([\w.]+)$", page, re.M)
    assert len(set(items)) == len(items)
    for item in items:
        module, _, name = item.rpartition(".")
        assert inspect.getdoc(getattr(importlib.import_module(module), name)), item
    for module in ("convbert_jax", "convbert_jax.recipes", "convbert_jax.decoding"):
        public = {f"{module}.{name}" for name in importlib.import_module(module).__all__}
        assert public - set(items) <= {
            # Starts of `convbert_jax.pretrain` and `finetune`; internal to training.
            *(f"convbert_jax.recipes.{name}" for name in ("pretrain", "finetune", "build_task")),
        }


def test_every_section_has_a_docstring():
    for field in dataclasses.fields(Config):
        if dataclasses.is_dataclass(field.type):
            assert not field.type.__doc__.startswith(f"{field.type.__name__}("), field.name


def test_the_readme_has_at_most_90_lines_and_700_words():
    text = PAGES[0].read_text()
    assert len(text.splitlines()) <= 90
    assert len(text.split()) <= 700


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
    pytest.importorskip("mkdocstrings")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    settings = load_config(str(REPOSITORY / "mkdocs.yml"), site_dir=str(tmp_path / "site"))
    settings.plugins.on_startup(command="build", dirty=False)
    build(settings)  # strict: a broken link is an error
    start = (tmp_path / "site" / "index.html").read_text()
    assert 'href="installation/"' in start
    assert "benchmarks/figures/quickstart.png" in start
    pages = {page: page.read_text() for page in (tmp_path / "site").rglob("*.html")}
    assert [page for page, html in pages.items() if "<code>bash\n" in html] == []  # fences in lists
    item_in_a_paragraph = re.compile(r"^(?:- |\d+\. )", re.M)
    texts = {page: re.sub("<pre.*?</pre>", "", html, flags=re.S) for page, html in pages.items()}
    assert [page for page, text in texts.items() if item_in_a_paragraph.search(text)] == []
    scripts = r'(?:src|href)="(?:https?:)?//[^"]*\.(?:js|css)'
    assert not re.search(scripts, start)  # the site loads nothing from elsewhere
    api = (tmp_path / "site" / "reference" / "api" / "index.html").read_text()
    assert "Loads a model for inference on the first device of jax." in api
    assert 'id="convbert_jax.inference.model.Model.encode"' in api
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
