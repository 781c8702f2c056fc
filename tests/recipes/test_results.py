"""Each recipe, as Python calls it: it returns what its folder holds, and prints nothing."""

import dataclasses
import itertools
import json
import math

import jax
import pytest

from convbert_jax import recipes
from convbert_jax.recipes import prediction


def test_pretraining_returns_its_numbers(pretrained, pretraining_config):
    assert (pretrained.step, pretrained.interrupted) == (4, False)
    assert [(r["step"], r["split"]) for r in pretrained.metrics] == [
        (2, "train"),
        (4, "train"),
        (4, "validation"),
    ]
    *_, last = pretrained.metrics
    assert {n: v for n, v in last.items() if n not in ("step", "split")} == pytest.approx(
        pretrained.evaluation, nan_ok=True
    )
    assert 0 < pretrained.evaluation["mlm_loss"] < 2 * math.log(200)
    assert pretrained.curves.is_file()
    assert pretrained.report.startswith("run, step 4, on held-out text:")
    assert (pretrained.folder / "checkpoints" / "4").is_dir()
    assert json.loads((pretrained.folder / "config.json").read_text())["train"]["steps"] == 4


def test_a_finished_run_returns_what_it_holds(pretrained, pretraining_config):
    again = recipes.pretrain(pretraining_config, pretrained.folder)
    assert again.metrics == pretrained.metrics
    assert again.evaluation == pytest.approx(pretrained.evaluation, nan_ok=True)


def test_evaluation_gives_what_training_logged(pretrained, pretraining_config, tmp_path):
    output = tmp_path / "numbers.json"
    found = recipes.evaluate(pretraining_config, pretrained.folder, output=str(output))
    assert found.step == 4
    assert found.values == pytest.approx(pretrained.evaluation, rel=1e-5, nan_ok=True)
    kept = json.loads(output.read_text())
    assert kept["step"] == 4
    assert kept["mlm_loss"] == found.values["mlm_loss"]
    assert found.file == output
    assert str(output) in found.report


def test_finetuning_returns_tasks_and_table(finetuned):
    (task,) = finetuned.tasks
    assert task.task == "mood"
    assert [run.seed for run in task.chosen_runs] == [0, 1]
    assert all(0 <= r.scores["validation"]["accuracy"] <= 1 for r in task.chosen_runs)
    assert (finetuned.folder / "table.md").read_text() == finetuned.table + "\n"
    assert finetuned.table in finetuned.report
    lines = (finetuned.folder / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["seed"] for line in lines] == [0, 1]


def test_prediction_counts_rows(finetuned, tmp_path):
    (task,) = finetuned.tasks
    source, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("good text 1\nbad text 2\ngood text 3\n")
    model = str(task.folders[0])
    assert recipes.predict(model, str(source), str(output)) == recipes.PredictionResult(3, 0)
    lines = output.read_bytes().splitlines(keepends=True)
    assert {json.loads(line)["prediction"] for line in lines} <= {"0", "1"}


def test_prediction_goes_on_after_a_stop(finetuned, tmp_path, monkeypatch):
    def two_rows(rows):
        yield list(itertools.islice(rows, 2))
        raise KeyboardInterrupt

    source, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("good text 1\nbad text 2\ngood text 3\n")
    arguments = str(finetuned.tasks[0].folders[0]), str(source), str(output)
    with monkeypatch.context() as patch:
        patch.setattr(prediction.prediction_stream, "in_full", two_rows)
        with pytest.raises(KeyboardInterrupt):
            recipes.predict(*arguments)
    assert recipes.predict(*arguments) == recipes.PredictionResult(rows=3, kept=2)
    assert len(output.read_bytes().splitlines()) == 3


def test_recipes_print_nothing_and_configure_nothing(
    pretrained, pretraining_config, finetuned, finetuning_config, tmp_path, capsys
):
    """What they are called from, a notebook for one, keeps its own settings of jax."""
    source = tmp_path / "in.txt"
    source.write_text("good\n")
    before = dict(jax.config.values)
    longer = dataclasses.replace(
        pretraining_config, train=dataclasses.replace(pretraining_config.train, compile_cache="/x")
    )
    recipes.pretrain(longer, pretrained.folder)
    recipes.evaluate(longer, pretrained.folder)
    recipes.finetune(finetuning_config, finetuned.folder)
    recipes.predict(str(finetuned.tasks[0].folders[0]), str(source), str(tmp_path / "out.tsv"))
    assert dict(jax.config.values) == before
    assert capsys.readouterr().out == ""
