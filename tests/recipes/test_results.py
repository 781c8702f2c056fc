"""Each recipe, as Python calls it: it returns what its folder holds, and prints nothing."""

import dataclasses
import errno
import itertools
import json
import math
import pathlib
import shlex
import shutil

import jax
import numpy as np
import pytest
from absl.testing import flagsaver

import convbert_jax
from convbert_jax import command_line, interrupts, recipes
from convbert_jax.config import Config, UserError, to_dict
from convbert_jax.interop.matching import replace
from convbert_jax.interop.networks import abstract_params
from convbert_jax.interop.runs.vocabulary import read_tokenizer
from convbert_jax.recipes import prediction, prepared, pretraining
from convbert_jax.recipes.reports import pretraining_page
from convbert_jax.training.environment import devices, signals
from convbert_jax.training.rollback import LossGuard, TrainingError
from convbert_jax.workdir import Workdir
from tests.html_page.parsed import Page


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


def test_a_run_begins_with_one_line(
    pretrained, pretraining_config, finetuned, finetuning_config, caplog
):
    """Its fields are in config.json; they were 1,000 characters a section on the screen."""
    device = devices.describe_devices(jax.devices()[:1])
    for start, config, run in (
        (recipes.pretrain, pretraining_config, pretrained),
        (recipes.finetune, finetuning_config, finetuned),
    ):
        caplog.clear()
        with caplog.at_level("INFO", "absl"):
            start(config, run.folder)
        shapes = abstract_params(Workdir(run.folder).read_config())
        shapes.pop("head", None)  # each task has its own
        count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
        facts = (config.name, config.recipe, f"{count:,}", str(run.folder / "config.json"), device)
        ours = [r.getMessage() for r in caplog.records if "convbert_jax" in r.pathname]
        assert sum(all(fact in line for fact in facts) for line in ours) == 1, ours
        assert max(map(len, ours)) < 400


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


def test_a_run_without_its_page_is_told_of_all_the_same(
    pretrained, pretraining_config, monkeypatch
):
    def fail(*arguments, **options):
        raise ValueError("no")

    monkeypatch.setattr(pretraining_page, "make", fail)
    for name in ("fill_in", "detect"):
        monkeypatch.setattr(pretraining.held_out_text, name, lambda *arguments: None)
    told = recipes.pretrain(pretraining_config, pretrained.folder).report.splitlines()
    assert told == [line for line in told if line in pretrained.report.splitlines()]
    assert not any("report.html" in line for line in told)
    assert any("report.html" in line for line in pretrained.report.splitlines())


def test_a_finished_run_does_not_fail_for_its_picture_or_a_damaged_line(
    pretrained, pretraining_config, tmp_path, monkeypatch, caplog
):
    def fail(*arguments):
        raise OSError(errno.EFBIG, "File too large")

    folder = tmp_path / "run"
    shutil.copytree(pretrained.folder, folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[0] = lines[0].replace('"split"', '"sqlit"')
    (folder / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    own = dataclasses.replace(pretraining_config.data, directory=str(pretrained.folder / "data"))
    with monkeypatch.context() as patch:
        patch.setattr(pretraining.pretraining_report, "plot_curves", fail)
        for name in ("fill_in", "detect"):
            patch.setattr(pretraining.held_out_text, name, lambda *arguments: None)
        result = recipes.pretrain(dataclasses.replace(pretraining_config, data=own), folder)
    assert result.evaluation == pretrained.evaluation
    assert result.curves is None
    assert "curves.png could not be drawn" in caplog.text
    assert "metrics.jsonl is damaged (line 1: it has no 'split')" in caplog.text


def test_a_stop_while_data_is_prepared_waits_for_nothing(tmp_path, monkeypatch):
    """A trainer of vocabularies hears no signal for minutes."""
    free = []

    def prepare(*_, **__):
        free.append(interrupts._state.free)

    monkeypatch.setattr(prepared.corpora, "prepare", prepare)
    prepared.prepare(Config(), tmp_path)
    prepared.prepare(Config(), tmp_path, runner=object())
    assert free == [True, False]  # a runner ends its processes itself


def test_pages_of_real_runs(pretrained, finetuned, monkeypatch):
    for run, recipe in ((pretrained, "replaced_token"), (finetuned, "finetune")):
        file = run.folder / "report.html"
        assert str(file) in run.report.splitlines()[-1]
        page = Page(file.read_text())
        assert page.tags.isdisjoint({"script", "link", "iframe", "object", "base", "a"})
        assert all(source.startswith("data:") for source in page.values("src"))
        assert f"config.recipe={recipe}" in page.text
        monkeypatch.chdir(run.folder)
        typed = [shlex.split(text) for text in page.texts("pre")]
        assert len(typed) >= 3
        for command in typed:
            assert command[:3] == ["python", "-m", "convbert_jax.main"]
            with flagsaver.flagsaver():
                command_line.read(command[2:])
    page = Page((pretrained.folder / "report.html").read_text())
    for line in pretrained.report.splitlines()[1:7]:  # each number of the text is on the page
        name, value, *_ = [part for part in line.split("  ") if part]
        assert f"{name.strip()}{value.strip()}" in page.text
    assert "train.batch_size8" in page.text
    assert len(Page((finetuned.folder / "report.html").read_text()).values("src")) == 2


def test_an_interrupted_run_leaves_a_page_at_once(
    pretrained, pretraining_config, tmp_path, monkeypatch
):
    """Nothing is computed for it: a machine that is taken away gives little time."""
    train = pretraining.loop.train

    def stopped(*arguments, **options):
        return dataclasses.replace(train(*arguments, **options), stopped_by="SIGTERM")

    def fail(*arguments):
        raise AssertionError("there is no time")

    folder = tmp_path / "run"
    shutil.copytree(pretrained.folder, folder)
    with monkeypatch.context() as patch:
        patch.setattr(pretraining.loop, "train", stopped)
        for name in ("fill_in", "detect"):
            patch.setattr(pretraining.held_out_text, name, fail)
        patch.setattr(pretraining.pretraining_report, "plot_curves", fail)
        assert recipes.pretrain(pretraining_config, folder).report == ""
    page = Page((folder / "report.html").read_text())
    assert "interrupted after step 4 of 4" in page.text
    assert page.texts("pre") == [f"python -m convbert_jax.main --workdir={folder}"]
    assert "masked tokens, loss" in page.text  # of the last evaluation


def stop_after(step: int, monkeypatch) -> None:
    """As if SIGTERM came while that step is under way."""
    asked = iter(range(1, 1000))

    def requested(self, done):
        return "SIGTERM" if next(asked) >= step else None

    monkeypatch.setattr(signals.StopSignals, "requested", requested)


@pytest.mark.slow
def test_an_interrupted_run_leaves_a_page_and_the_end_another(
    pretraining_config, pretrained, tmp_path, monkeypatch, caplog
):
    own = dataclasses.replace(pretraining_config.data, directory=str(pretrained.folder / "data"))
    config = dataclasses.replace(pretraining_config, data=own)
    caplog.set_level("INFO", logger="absl")
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        stopped = recipes.pretrain(config, tmp_path)
    assert (stopped.stopped_by, stopped.step, stopped.report) == ("SIGTERM", 2, "")
    page = Page((tmp_path / "report.html").read_text())
    assert "interrupted after step 2 of 4" in page.text
    assert "There was no evaluation yet." in page.text
    assert page.texts("pre") == [f"python -m convbert_jax.main --workdir={tmp_path}"]
    assert any("report.html" in record.getMessage() for record in caplog.records)
    finished = recipes.pretrain(config, tmp_path)
    page = Page((tmp_path / "report.html").read_text())
    assert not finished.interrupted
    assert "finished at step 4" in page.text


def test_a_run_that_an_error_ends_leaves_a_page(
    pretraining_config, pretrained, tmp_path, monkeypatch
):
    own = dataclasses.replace(pretraining_config.data, directory=str(pretrained.folder / "data"))
    config = dataclasses.replace(pretraining_config, data=own)
    seen = []

    def judge(self, loss, norm):
        seen.append(loss)
        return "the loss is not finite <nan>" if len(seen) == 4 else ""

    monkeypatch.setattr(LossGuard, "judge", judge)
    with pytest.raises(TrainingError) as raised:
        recipes.pretrain(config, tmp_path)
    page = Page((tmp_path / "report.html").read_text())
    assert "ended by an error after step " in page.text
    assert str(raised.value) in page.text
    assert "There was no evaluation yet." in page.text
    assert page.texts("pre") == [f"python -m convbert_jax.main --workdir={tmp_path}"]

    def fail(*arguments, **options):
        raise KeyError("mlm_loss")

    seen.clear()
    monkeypatch.setattr(pretraining, "_begin_report", fail)
    with pytest.raises(TrainingError, match="the loss is not finite"):  # all the same
        recipes.pretrain(config, tmp_path)


@pytest.mark.slow
def test_interrupted_tasks_leave_a_page(finetuning_config, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(5, patch)
        with pytest.raises(KeyboardInterrupt):
            recipes.finetune(finetuning_config, tmp_path)
    page = Page((tmp_path / "report.html").read_text())
    assert "interrupted; finished runs: 1" in page.text
    assert "mood" in page.text
    assert page.texts("pre") == [f"python -m convbert_jax.main --workdir={tmp_path}"]


def test_the_page_says_that_a_run_went_back(pretraining_config, tmp_path):
    """As one does that is killed after it, and started again."""
    kept = {"skipped": [{"after": 2, "batches": 1}]}
    (tmp_path / "skipped_batches.json").write_text(json.dumps(kept))
    recipes.pretrain(pretraining_config, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "a bad step: went back to step 2 and past 1 batches" in page


def test_a_vocabulary_of_the_same_size_from_elsewhere_is_refused(pretrained, tmp_path):
    run = shutil.copytree(pretrained.folder, tmp_path / "run")
    tokenizer, _ = read_tokenizer(Workdir(run), Workdir(run).read_config())
    assert run in tokenizer.path.parents
    tokenizer.path.write_bytes(tokenizer.path.read_bytes() + b"\x1a\x00")  # the same pieces
    with pytest.raises(UserError, match=r"is not the vocabulary that .* learned with"):
        convbert_jax.load(run)


def test_a_run_is_all_that_its_model_needs(pretraining_config, tmp_path, monkeypatch):
    """Shards and the working directory it began in are gone; it is moved and used from there."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    recipes.pretrain(replace(pretraining_config, {"data.directory": "shards"}), "runs/first")
    before = convbert_jax.load("runs/first").encode(["The cat sat."])
    run = shutil.copytree("runs/first", tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(tmp_path / "here")
    np.testing.assert_array_equal(convbert_jax.load(run).encode(["The cat sat."]), before)
    second = dataclasses.replace(pretraining_config, init_from=str(run))
    recipes.pretrain(second, tmp_path / "second")
    shutil.rmtree(run)
    convbert_jax.load(tmp_path / "second")


def test_the_copy_is_of_the_vocabulary_that_was_learned_with(pretraining_config, tmp_path):
    """The corpus and its vocabulary are made anew from other text: refused, and it stays."""
    text = tmp_path / "text.txt"
    shutil.copy(pretraining_config.data.source.removeprefix("text:"), text)
    config = replace(pretraining_config, {"data.source": f"text:{text}"})
    recipes.pretrain(config, tmp_path / "run")
    (copy,) = (tmp_path / "run" / "vocabulary").glob("*.model")
    before = copy.read_bytes()
    shutil.rmtree(tmp_path / "run" / "data")
    text.write_text(text.read_text().replace("e", "o"))
    with pytest.raises(UserError, match=r"is not the vocabulary that .*run learned with"):
        recipes.pretrain(replace(config, {"train.steps": 6}), tmp_path / "run")
    made = tmp_path / "run" / "data" / copy.name
    assert made.read_bytes() != before
    assert copy.read_bytes() == before


def test_numbers_replace_nothing_but_such_numbers(pretrained, tmp_path):
    """A file of the user's at --output was lost, with its name one slip away from another."""
    notes = tmp_path / "notes.txt"
    config = Workdir(pretrained.folder).read_config()
    for content in ("what I saw\n", '{"step": 4}\n', "[]"):
        notes.write_text(content)
        for mode, run in (
            ("eval", lambda: recipes.evaluate(config, pretrained.folder, output=str(notes))),
            ("plan", lambda: recipes.plan(config, tmp_path, topology="cpu", output=str(notes))),
        ):
            with pytest.raises(UserError, match=f"exists and was not written by --mode={mode}"):
                run()
        assert notes.read_text() == content
    notes.write_text("")  # as mktemp makes one
    first = recipes.evaluate(config, pretrained.folder, output=str(notes))
    again = recipes.evaluate(config, pretrained.folder, output=str(notes))
    assert again.values == pytest.approx(first.values, nan_ok=True)


def test_rows_of_another_vocabulary_are_not_evaluated(pretrained, text, tmp_path):
    """A run that was moved without its rows: others, of another text, were made beside it, and
    their ids taken for words of the run's vocabulary.
    """
    run = shutil.copytree(pretrained.folder, tmp_path / "run", ignore=lambda *_: ["data"])
    other = tmp_path / "other.txt"
    words = pathlib.Path(text.removeprefix("text:")).read_text()
    other.write_text(words.replace("e", "o"))
    config = replace(Workdir(run).read_config(), {"data.source": f"text:{other}"})
    for use in (
        lambda: recipes.evaluate(config, run),
        lambda: recipes.inspect(str(run), output=str(tmp_path / "out")),
    ):
        (run / "config.json").write_text(json.dumps(to_dict(config)))
        with pytest.raises(UserError, match=r"is not the vocabulary that .*run learned with"):
            use()
    (copy,) = (run / "vocabulary").glob("*.model")
    named = {"tokenizer.path": str(copy), "data.directory": str(tmp_path / "rows")}
    found = recipes.evaluate(replace(config, named), run, frozenset(named))
    assert math.isfinite(found.values["mlm_loss"])


def test_revisions_leave_out_a_generator_that_their_format_cannot_hold(
    pretraining_config, tmp_path, caplog
):
    """One head is left for a small generator, half of each kind, as in configs/small.py."""
    changed = {
        "checkpoint.huggingface_every": 4,
        "generator.release_heads": True,
        "generator.size": 0.25,
        "model.mixer": "mixed",
        "model.heads": 4,
        "train.steps": 4,
    }
    run = recipes.pretrain(replace(pretraining_config, changed), tmp_path / "run")
    written = run.folder / "huggingface" / "step-4"
    assert (written / "model.safetensors").is_file()
    assert not (written / "generator").exists()
    assert "The generator is left out" in caplog.text
