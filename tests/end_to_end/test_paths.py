"""Complete workflows of an encoder and a translation model, as commands; part of the quick tier."""

import json

import numpy as np
import pytest
from absl.testing import flagsaver

from convbert_jax import command_line, console, main
from convbert_jax.config import to_dict
from convbert_jax.interop.sources import read_source
from convbert_jax.storage import write_json
from convbert_jax.workdir import Workdir
from tests.end_to_end.test_command_line import SMALL, TINY, run, text_source
from tests.runs import PAIRS, make_config, write_pairs

__all__ = ["text_source"]  # fixture


@pytest.fixture(autouse=True)
def _keep_logging(monkeypatch):
    monkeypatch.setattr(console, "set_up_logging", lambda: None)  # would affect other tests


def start(*arguments) -> None:
    """Run a command in this process, which is faster than starting another."""
    with flagsaver.flagsaver():
        main.main(command_line.read(["main.py", *map(str, arguments)]))


def parameters(path) -> dict[str, np.ndarray]:
    """Read the parameters of the main network of a run or a folder."""
    return dict(read_source(str(path)).networks["main"].parameters)


def test_an_encoder(tmp_path, text_source):
    """Prepare, train, kill, resume, evaluate, export, import, fine-tune, predict."""
    flags = (*SMALL, text_source, "--config.model.mixer=mixed")
    # Trains four steps twice, once killed and resumed, and compares bit for bit.
    verified = run(
        "--mode=verify_resume", "--verify_steps=4", TINY, *flags, f"--workdir={tmp_path}/run"
    )
    assert verified.returncode == 0, verified.stderr
    trained = Workdir(tmp_path / "run").trial("killed").path
    start("--mode=eval", f"--workdir={trained}")
    (kept,) = (trained / "evaluation").glob("*.json")
    assert json.loads(kept.read_text())

    start("--mode=export", f"--workdir={trained}", f"--output={tmp_path}/exported")
    before, exported = parameters(trained), parameters(tmp_path / "exported")
    assert before.keys() <= exported.keys() | {"rtd_head"}
    start(
        "--mode=import", TINY, *flags, f"--source={tmp_path}/exported",
        f"--workdir={tmp_path}/imported",
    )  # fmt: skip
    imported = parameters(tmp_path / "imported")
    for path, array in exported.items():
        np.testing.assert_array_equal(array, before[path], err_msg=path)
        np.testing.assert_array_equal(imported[path], array, err_msg=path)

    rows = [f"{('good', 'bad')[i % 2]} word{i},{('yes', 'no')[i % 2]}" for i in range(40)]
    (tmp_path / "train.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    start(
        "--config=configs/text.py:own", f"--config.init_from={tmp_path}/imported",
        f"--config.task.train={tmp_path}/train.csv", f"--workdir={tmp_path}/tuned",
        "--config.finetune.epochs=1", "--config.finetune.length=16",
        "--config.finetune.buckets=()", "--config.finetune.batch_size=8",
        "--config.finetune.seeds=1",
    )  # fmt: skip
    (model,) = Workdir(tmp_path / "tuned").models()
    (tmp_path / "new.txt").write_text("good\nbad\n")
    start(
        "--mode=predict", f"--workdir={model}", f"--input={tmp_path}/new.txt",
        f"--output={tmp_path}/answers.jsonl",
    )  # fmt: skip
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [answer["prediction"] in ("yes", "no") for answer in answers] == [True, True]


def test_a_translation_model(tmp_path):
    """Prepare, train, score and translate."""
    fields = {name.replace(".", "__"): value for name, value in PAIRS.items()}
    fields |= {
        "train__steps": 4,
        "optimizer__warmup_steps": 1,
        "parallel__source": write_pairs(tmp_path, "train", 100),
    }
    write_json(tmp_path / "config.json", to_dict(make_config(**fields)))
    start(f"--config={tmp_path}/config.json", f"--workdir={tmp_path}/run")
    start("--mode=eval", f"--workdir={tmp_path}/run")
    (kept,) = (tmp_path / "run" / "evaluation").glob("*.json")
    assert "bleu" in str(json.loads(kept.read_text())).lower()
    (tmp_path / "new.txt").write_text("bo ce\nha\n")
    start(
        "--mode=predict", f"--workdir={tmp_path}/run", f"--input={tmp_path}/new.txt",
        f"--output={tmp_path}/answers.jsonl",
    )  # fmt: skip
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2
