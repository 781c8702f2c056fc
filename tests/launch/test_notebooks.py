"""The notebooks of launch/colab/: stored without outputs, and each cell runs, in small."""

import json
import pathlib
import sys
import types

import flax.nnx  # noqa: F401  before IPython is played: it looks for the real one
import matplotlib
import pytest

from convbert_jax import console

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent.parent
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
# What the cell of parameters says, for a test: by notebook.
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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_without_outputs_and_leaves_jax_alone(path):
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert "jax.devices()" in "".join(code[0]["source"])
    assert [i for i, c in enumerate(code) if "parameters" in c["metadata"].get("tags", ())] == [1]
    text = "".join(line for cell in code for line in cell["source"])
    assert "pip install" not in text
    assert str(REPOSITORY) not in text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("notebooks")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pretrain", "finetune", "inside", "ablation", "translate"])
def test_each_cell_runs(name, folder, monkeypatch, capsys):
    """In the order of a reader: fine-tuning starts from the run of the first."""
    monkeypatch.chdir(folder)
    matplotlib.use("Agg")
    monkeypatch.setattr(console, "set_up_logging", lambda: None)  # it would stay for other tests
    played, shown = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    played.get_ipython, played.version_info = (lambda: None), (9, 0)
    shown.HTML, shown.display = str, print
    monkeypatch.setitem(sys.modules, "IPython", played)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
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
        assert printed.count("the noise (p = ") == 2
        assert names["values"]["9 taps"].keys() == {0, 1}
    elif name == "finetune":
        assert names["result"].tasks
        assert (folder / "runs" / "modules" / "huggingface" / "config.json").is_file()
    else:
        assert printed.count("BLEU") >= 2
        assert "(right: sechsundfünfzigtausendsieben)" in printed


def test_the_table_has_every_notebook():
    assert sorted(SMALL) == [path.stem for path in NOTEBOOKS]
