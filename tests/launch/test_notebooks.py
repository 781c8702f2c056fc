"""Notebooks of launch/colab/: complete outputs, and every cell runs at a small size."""

import ast
import html
import importlib.metadata
import importlib.util
import json
import re
import runpy
import subprocess
import sys
import types

import pytest

from tests.conftest import REPOSITORY
from tests.test_pages import check_commands

NOTEBOOKS = sorted((REPOSITORY / "launch" / "colab").glob("*.ipynb"))
TINY = {
    "model.layers": 1,
    "model.hidden_size": 32,
    "model.embedding_size": 32,
    "model.heads": 2,
    "model.ffn_size": 64,
    "data.workers": 1,
    "train.compile_cache": "",
}
ENCODER = {
    **TINY, "data.length": 32, "tokenizer.vocab_size": 400, "train.batch_size": 8,
    "train.eval_rows": 16,
}  # fmt: skip
# Notebook -> values of its parameter cell in the tests.
SMALL = {
    "pretrain": {"STEPS": 12, "MORE": ENCODER},
    "finetune": {
        "EPOCHS": 1.0,
        "MORE": {
            "finetune.train_rows": 64, "finetune.length": 32, "finetune.buckets": (),
            "train.compile_cache": "",
        },
    },
    "inside": {"STEPS": 4, "MORE": {**ENCODER, "model.head_ratio": 1}},
    "ablation": {"STEPS": 4, "SEEDS": 2, "MORE": ENCODER},
    "translate": {
        "STEPS": 4, "PAIRS": 300,
        "MORE": {**TINY, "parallel.shapes": 1, "parallel.max_length": 64, "train.eval_rows": 16},
    },
}  # fmt: skip


def cells(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def code_cells(path):
    return [cell for cell in cells(path) if cell["cell_type"] == "code"]


def text_of(output: dict) -> str:
    """Returns the printed text and the text and HTML results of an output."""
    data = output.get("data", {})
    return "".join(
        [*output.get("text", []), *data.get("text/plain", []), *data.get("text/html", [])]
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_complete_and_have_no_absolute_path(path):
    executed = [cell["execution_count"] for cell in code_cells(path)]
    outputs = [output for cell in code_cells(path) for output in cell["outputs"]]
    assert executed == list(range(1, len(executed) + 1))
    assert {output["output_type"] for output in outputs} >= {"stream", "display_data"}
    assert [output for output in outputs if output["output_type"] == "error"] == []
    assert [output for output in outputs if output.get("name") == "stderr"] == []  # log lines
    absolute = re.compile(r"(?<![\w.<:/])/[a-z]+/\w|[A-Z]:\\\\")
    assert [found for output in outputs if (found := absolute.search(text_of(output)))] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_code_cell_installs_and_the_second_has_the_parameters(path):
    tags = [cell["metadata"].get("tags", []) for cell in code_cells(path)]
    assert tags == [["install"], ["parameters"], *[[]] * (len(tags) - 2)]
    for cell in code_cells(path):
        ast.parse("".join(cell["source"]))
    assert "jax.devices()" in "".join(code_cells(path)[1]["source"])
    assert "upgrade" not in "".join(code_cells(path)[0]["source"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_commands_of_a_notebook_parse(path, tmp_path):
    page = tmp_path / "page.md"
    texts = ["".join(cell["source"]) for cell in cells(path) if cell["cell_type"] == "markdown"]
    page.write_text("\n".join(texts))
    check_commands(page)


def exec_cell(notebook: str, contains: str, **names) -> dict:
    """Executes a notebook's cell that contains a text; returns its variables."""
    (cell,) = (
        source
        for c in code_cells(REPOSITORY / "launch" / "colab" / f"{notebook}.ipynb")
        if contains in (source := "".join(c["source"]))
    )
    exec(compile(cell, notebook, "exec"), names)
    return names


def install(notebook: str, address: str) -> None:
    """Executes the first code cell of a notebook with the address of a repository."""
    (source, *_) = code_cells(REPOSITORY / "launch" / "colab" / f"{notebook}.ipynb")
    code = "".join(source["source"])
    assert code.count('REPOSITORY = ""') == 1
    code = code.replace('REPOSITORY = ""', f"REPOSITORY = {address!r}")
    exec(compile(code, notebook, "exec"), {})


def test_a_machine_without_the_package_installs_it_and_keeps_its_jax(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    find_spec, commands = importlib.util.find_spec, []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    for name in SMALL:
        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        install(name, "")  # the package is installed
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(SystemExit, match="REPOSITORY"):
            install(name, "")
        assert commands == []
        for given in ("https://example.org/it", "checkout"):
            install(name, given)
            (command,) = commands
            commands.clear()
            assert command[1:4] == ["-m", "pip", "install"]
            assert command[-3:-1] == ["--constraint", "keep.txt"]
            assert given in command[-1]
            assert ("git+" in command[-1]) == ("://" in given)
            assert ("[text]" in command[-1]) == (name == "translate")
            kept = (tmp_path / "keep.txt").read_text().splitlines()
            assert f"jax=={importlib.metadata.version('jax')}" in kept


def test_a_published_notebook_has_its_badge_once(tmp_path):
    docs = runpy.run_path(str(REPOSITORY / "launch" / "docs.py"))
    for path in NOTEBOOKS:
        copy = tmp_path / path.name
        copy.write_bytes(path.read_bytes())
        for owner in ("first", "second"):
            copy.write_text(docs["publish"](copy, f"https://github.com/{owner}/it"))
        badge = "".join(cells(copy)[0]["source"]).partition("\n")[0]
        place = f"github/second/it/blob/main/launch/colab/{path.name}"
        assert badge.endswith(f"(https://colab.research.google.com/{place})")
        assert "".join(cells(copy)[0]["source"]).count("colab-badge") == 1
        assert copy.read_text().count('REPOSITORY = \\"https://github.com/second/it\\"') == 1
        before, after = cells(path), cells(copy)
        assert after[2:] == before[2:]
        unpublished = docs["publish"](copy, "")
        assert "colab-badge" not in unpublished
        assert 'REPOSITORY = \\"\\"' in unpublished


def test_the_table_of_an_ablation_has_the_difference_and_p_value_of_each_row(capsys):
    rows = {
        "a": {0: 1.0, 1: 2.0, 2: 3.0},
        "b": {0: 2.0, 1: 3.01, 2: 3.99},
        "c": {0: 1.5, 1: 2.5, 2: 3.5},
    }
    exec_cell("ablation", "sweep_report.holm", VARIANTS=rows, METRIC="loss", values=rows)
    lines = capsys.readouterr().out.splitlines()
    assert "+1.000 from a" in lines[1]
    assert "p = 0.000" in lines[1]
    assert "+0.500 from a" in lines[2]
    assert "p = " not in lines[2]  # the same difference for every seed


def test_painted_text_is_escaped():
    """Each character appears once, also if two tokens share it."""
    text = "a <b> \U0001f600"
    tokens = [(0, 1, 0.25), (2, 5, 0.5), (6, 7, 0.75), (6, 7, 0.5)]
    suspects = [dict(zip(("start", "end", "probability"), token, strict=True)) for token in tokens]
    model = types.SimpleNamespace(fill_mask=lambda text: [], replaced=lambda text: suspects)
    package = types.SimpleNamespace(load=lambda folder: model)
    names = {"convbert_jax": package, "FOLDER": "", "html": html, "HTML": str}
    paint = exec_cell("pretrain", "def paint", **names, display=lambda shown: None)["paint"]
    assert re.sub("<[^>]*>", "", paint(text)) == html.escape(text)
    assert "<b>" not in paint(text)


def display(shown, display_id=False):
    """Replaces IPython's `display` by printing."""
    print(shown)
    return types.SimpleNamespace(update=display) if display_id else None


@pytest.fixture
def ipython(monkeypatch):
    """Stubs for IPython, and figures without a display."""
    import flax.nnx  # noqa: F401  before the stubs: it looks for the real IPython
    import matplotlib

    matplotlib.use("Agg")
    package, shown = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    package.get_ipython, package.version_info = (lambda: None), (9, 0)
    shown.HTML, shown.Image, shown.display = str, len, display
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)


def test_curves_of_a_run_without_a_discriminator(ipython):
    """Uses MORE = {"recipe": "masked_lm"}."""
    draw = exec_cell("pretrain", "def draw")["draw"]
    records = [
        {"step": step, "split": split, "mlm_loss": 5.0, "mlm_accuracy": 0.2}
        for step in (10, 20)
        for split in ("train", "validation")
    ]
    assert draw(records) > 1_000  # bytes of a PNG
    assert draw([r | {"discriminator_auc": 0.6} for r in records]) > draw(records)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("notebooks")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pretrain", "finetune", "inside", "ablation", "translate"])
def test_each_cell_runs(name, folder, ipython, monkeypatch, capsys):
    """Cells run in order; fine-tuning starts from the first notebook's run."""
    from convbert_jax import console

    monkeypatch.chdir(folder)
    monkeypatch.setattr(console, "set_up_logging", lambda: None)  # would affect later tests
    names = {}
    for cell in cells(REPOSITORY / "launch" / "colab" / f"{name}.ipynb"):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), name, "exec"), names)
            if "parameters" in cell["metadata"].get("tags", ()):
                names |= SMALL[name]
    printed = capsys.readouterr().out
    if name == "pretrain":
        assert "discriminator, AUC" in printed
        assert "rgba(220" in printed
    elif name == "inside":
        assert "chance level" in printed
        assert (folder / "runs" / "inside" / "pictures" / "filters.png").is_file()
    elif name == "ablation":
        assert printed.count(", p = ") == 2
        assert names["values"]["9 taps"].keys() == {0, 1}
    elif name == "finetune":
        assert names["result"].tasks
        assert (folder / "runs" / "modules" / "huggingface" / "config.json").is_file()
    else:
        assert printed.count("BLEU") >= 2
        assert "(correct: sechsundfünfzigtausendsieben)" in printed
