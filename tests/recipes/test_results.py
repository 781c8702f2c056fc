"""Each recipe called from Python returns the contents of its folder and prints nothing."""

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
from convbert_jax.recipes import prediction, prepared, pretraining
from convbert_jax.recipes.reports import pretraining as reports
from convbert_jax.training import environment, signals
from convbert_jax.training.loop import EvaluationError, LossGuard, TrainingError
from convbert_jax.workdir import Workdir
from tests.html import Page
from tests.refusals import refused


def resume_command(folder) -> str:
    return f"python -m convbert_jax.main --workdir={folder}"


def with_data_of(run, config: Config) -> Config:
    """Return `config` with the prepared data of `run`."""
    return replace(config, {"data.directory": str(run.folder / "data")})


def fail(*arguments, **options):
    raise AssertionError("must not be called")


def without_predictions(patch) -> None:
    """Skip a report's predictions for held-out text, which need further compilation."""
    for name in ("fill_in", "detect"):
        patch.setattr(reports, name, lambda *arguments: None)


def test_pretraining_returns_its_numbers(pretrained, pretraining_config, caplog):
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
    assert pretrained.report.startswith("run, step 4, ")
    assert (pretrained.folder / "checkpoints" / "4").is_dir()
    assert json.loads((pretrained.folder / "config.json").read_text())["train"]["steps"] == 4


def test_a_finished_run_returns_its_results_again(
    pretrained, pretraining_config, finetuned, finetuning_config, tmp_path, capsys, caplog
):
    """Nothing is printed, JAX's settings are unchanged, and one log line describes the run."""
    device = environment.describe_devices(jax.devices()[:1])
    before = dict(jax.config.values)
    named = replace(pretraining_config, {"train.compile_cache": "/x"})
    found = []
    for start, config, run in (
        (recipes.pretrain, named, pretrained),
        (recipes.finetune, finetuning_config, finetuned),
    ):
        caplog.clear()
        with caplog.at_level("INFO", "absl"):
            found.append(start(config, run.folder))
        shapes = abstract_params(Workdir(run.folder).read_config())
        shapes.pop("head", None)  # the head differs between tasks
        count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
        facts = (config.name, config.recipe, f"{count:,}", str(run.folder / "config.json"), device)
        ours = [r.getMessage() for r in caplog.records if "convbert_jax" in r.pathname]
        assert sum(all(fact in line for fact in facts) for line in ours) == 1, ours
        assert max(map(len, ours)) < 400
    again, tuned = found
    assert again.metrics == pretrained.metrics
    assert again.evaluation == pytest.approx(pretrained.evaluation, nan_ok=True)
    assert tuned.table == finetuned.table
    assert dict(jax.config.values) == before
    assert capsys.readouterr().out == ""


def test_evaluation_gives_the_logged_numbers(pretrained, pretraining_config, tmp_path):
    """An existing --output file is replaced only if it is empty or a result file."""
    output = tmp_path / "numbers.json"
    for content in ("my notes\n", '{"step": 4}\n', "[]"):
        output.write_text(content)
        for run in (
            lambda: recipes.evaluate(pretraining_config, pretrained.folder, output=str(output)),
            lambda: recipes.plan(pretraining_config, tmp_path, topology="cpu", output=str(output)),
        ):
            with refused(EvaluationError, field="--output", path=output):
                run()
        assert output.read_text() == content
    with refused(EvaluationError, field="--output", path=tmp_path):
        recipes.evaluate(pretraining_config, pretrained.folder, output=str(tmp_path))
    output.write_text("")
    for _ in range(2):
        found = recipes.evaluate(pretraining_config, pretrained.folder, output=str(output))
        assert found.step == 4
        assert found.values == pytest.approx(pretrained.evaluation, rel=1e-5, nan_ok=True)
        kept = json.loads(output.read_text())
        assert (kept["step"], kept["mlm_loss"]) == (4, found.values["mlm_loss"])
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


def test_prediction_counts_rows_and_resumes(finetuned, tmp_path, monkeypatch, capsys):
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
    lines = output.read_bytes().splitlines(keepends=True)
    assert len(lines) == 3
    assert {json.loads(line)["prediction"] for line in lines} <= {"0", "1"}
    with refused(UserError, field="--output", path=output):
        recipes.predict(*arguments)
    assert capsys.readouterr().out == ""


# --- a finished run survives faults of its report ---


def test_a_run_without_its_page_still_reports_in_text(pretrained, pretraining_config, monkeypatch):
    monkeypatch.setattr(reports, "make_page", fail)
    without_predictions(monkeypatch)
    lines = recipes.pretrain(pretraining_config, pretrained.folder).report.splitlines()
    assert lines == [line for line in lines if line in pretrained.report.splitlines()]
    assert not any("report.html" in line for line in lines)
    assert any("report.html" in line for line in pretrained.report.splitlines())


def test_a_figure_that_cannot_be_drawn_and_a_damaged_metric_are_warnings(
    pretrained, pretraining_config, tmp_path, monkeypatch, caplog
):
    def full(*arguments):
        raise OSError(errno.EFBIG, "File too large")

    folder = shutil.copytree(pretrained.folder, tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[0] = lines[0].replace('"split"', '"sqlit"')
    (folder / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    monkeypatch.setattr(pretraining.pretraining_report, "plot_curves", full)
    without_predictions(monkeypatch)
    result = recipes.pretrain(with_data_of(pretrained, pretraining_config), folder)
    assert result.evaluation == pretrained.evaluation
    assert result.curves is None
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert any("curves.png" in text for text in warnings)
    assert any("metrics.jsonl" in text and "line 1" in text for text in warnings)


def test_signals_are_heard_while_data_is_prepared(tmp_path, monkeypatch):
    """SIGTERM and SIGINT are handled while a vocabulary is trained, which takes minutes."""
    free = []

    def prepare(*_, **__):
        free.append(interrupts._state.nothing_to_save)

    monkeypatch.setattr(prepared.corpora, "prepare", prepare)
    prepared.prepare(Config(), tmp_path)
    prepared.prepare(Config(), tmp_path, runner=object())
    assert free == [True, False]  # a runner stops its own processes


# --- pages ---


def test_pages_of_real_runs(pretrained, finetuned, monkeypatch):
    pages = []
    for run, recipe in ((pretrained, "replaced_token"), (finetuned, "finetune")):
        file = run.folder / "report.html"
        assert str(file) in run.report.splitlines()[-1]
        page = Page(file.read_text())
        assert page.tags.isdisjoint({"script", "link", "iframe", "object", "base", "a"})
        assert all(source.startswith("data:") for source in page.values("src"))
        assert f"recipe {recipe}" in page.text
        monkeypatch.chdir(run.folder)
        typed = [shlex.split(text) for text in page.texts("pre")]
        assert len(typed) >= 3
        for command in typed:
            assert command[:3] == ["python", "-m", "convbert_jax.main"]
            with flagsaver.flagsaver():
                command_line.read(command[2:])
        pages.append(page)
    first, second = pages
    for line in pretrained.report.splitlines()[1:7]:  # the page has these numbers
        name, value, *_ = [part for part in line.split("  ") if part]
        assert f"{name.strip()}{value.strip()}" in first.text
    assert "config.train.batch_size8" in first.text
    assert len(second.values("src")) == 2


def test_an_interrupted_run_writes_its_page_at_once(
    pretrained, pretraining_config, tmp_path, monkeypatch
):
    """Nothing is computed for the page, since a preempted machine may disappear within seconds."""
    train = pretraining.loop.train

    def stopped(*arguments, **options):
        return dataclasses.replace(train(*arguments, **options), stopped_by="SIGTERM")

    folder = shutil.copytree(pretrained.folder, tmp_path / "run")
    monkeypatch.setattr(pretraining.loop, "train", stopped)
    for name in ("fill_in", "detect"):
        monkeypatch.setattr(reports, name, fail)
    monkeypatch.setattr(pretraining.pretraining_report, "plot_curves", fail)
    assert recipes.pretrain(pretraining_config, folder).report == ""
    page = Page((folder / "report.html").read_text())
    assert page.texts("pre") == [resume_command(folder)]
    value = f"{pretrained.evaluation['mlm_loss']:.3f}"  # from the last evaluation
    assert any(value in row for row in page.texts("tr"))


def stop_after(step: int, monkeypatch) -> None:
    """Simulate a SIGTERM during that step."""
    asked = iter(range(1, 1000))

    def requested(self, done):
        return "SIGTERM" if next(asked) >= step else None

    monkeypatch.setattr(signals.StopSignals, "requested", requested)


@pytest.mark.slow
def test_an_interrupted_run_writes_a_page_and_its_end_another(
    pretraining_config, pretrained, tmp_path, monkeypatch, caplog
):
    config = with_data_of(pretrained, pretraining_config)
    caplog.set_level("INFO", logger="absl")
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        stopped = recipes.pretrain(config, tmp_path)
    assert (stopped.stopped_by, stopped.step, stopped.report) == ("SIGTERM", 2, "")
    page = Page((tmp_path / "report.html").read_text())
    assert page.texts("pre") == [resume_command(tmp_path)]
    assert any("report.html" in record.getMessage() for record in caplog.records)
    finished = recipes.pretrain(config, tmp_path)
    assert not finished.interrupted
    assert resume_command(tmp_path) not in Page((tmp_path / "report.html").read_text()).texts("pre")


@pytest.mark.slow
def test_interrupted_tasks_leave_a_page(finetuning_config, tmp_path, monkeypatch):
    stop_after(5, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        recipes.finetune(finetuning_config, tmp_path)
    page = Page((tmp_path / "report.html").read_text())
    assert any("mood" in row and "seed 0" in row for row in page.texts("tr"))
    assert page.texts("pre") == [resume_command(tmp_path)]


def test_a_run_that_fails_leaves_a_page_and_its_successor_needs_no_other_folder(
    pretraining_config, pretrained, tmp_path, monkeypatch
):
    """Covers the page and the moved folder of a run whose initial weights are deleted later."""
    source = shutil.copytree(
        pretrained.folder, tmp_path / "moved", ignore=shutil.ignore_patterns("data")
    )
    before = convbert_jax.load(pretrained.folder).encode(["The cat sat."])
    np.testing.assert_array_equal(convbert_jax.load(source).encode(["The cat sat."]), before)
    run = tmp_path / "run"
    run.mkdir()
    # As if the run had been killed after a rollback.
    kept = {"skipped": [{"after": 2, "batches": 1}]}
    (run / "skipped_batches.json").write_text(json.dumps(kept))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # the data folder is given by a relative path
    config = replace(pretraining_config, {"data.directory": "shards"})
    config = dataclasses.replace(config, init_from=str(source))
    seen = []

    def judge(self, loss, norm):
        seen.append(loss)
        return "the loss is not finite <nan>" if len(seen) == 4 else ""

    with monkeypatch.context() as patch:
        patch.setattr(LossGuard, "judge", judge)
        with pytest.raises(TrainingError) as raised:
            recipes.pretrain(config, run)
        page = Page((run / "report.html").read_text())
        assert str(raised.value) in page.text
        assert page.texts("pre") == [resume_command(run)]
        assert any(row.startswith("3") and "step 2" in row for row in page.texts("tr"))
        seen.clear()
        patch.setattr(pretraining, "_begin_report", lambda *_, **__: {}["mlm_loss"])
        with pytest.raises(TrainingError):  # an error in the report does not hide it
            recipes.pretrain(config, run)
    recipes.pretrain(config, run)
    moved = shutil.copytree(run, tmp_path / "second")
    monkeypatch.chdir(tmp_path)
    for folder in ("here", "moved", "run"):
        shutil.rmtree(tmp_path / folder)
    assert convbert_jax.load(moved).encode(["The cat sat."]).shape == before.shape


# --- vocabularies ---


def test_a_run_keeps_to_the_vocabulary_that_it_was_trained_with(pretrained, text, tmp_path):
    """Another vocabulary of the same size assigns other ids."""
    run = shutil.copytree(
        pretrained.folder, tmp_path / "run", ignore=shutil.ignore_patterns("data")
    )
    (copy,) = (run / "vocabulary").glob("*.model")
    before = copy.read_bytes()
    other = tmp_path / "other.txt"
    words = pathlib.Path(text.removeprefix("text:")).read_text()
    other.write_text(words.replace("e", "o"))
    config = replace(Workdir(run).read_config(), {"data.source": f"text:{other}"})
    for use in (
        lambda: recipes.evaluate(config, run),
        lambda: recipes.inspect(str(run), output=str(tmp_path / "out")),
        lambda: recipes.pretrain(replace(config, {"train.steps": 6}), run),
    ):
        (run / "config.json").write_text(json.dumps(to_dict(config)))
        with refused(UserError, run / "data" / copy.name):
            use()
        assert (run / "data" / copy.name).read_bytes() != before
        assert copy.read_bytes() == before
    named = {"tokenizer.path": str(copy), "data.directory": str(tmp_path / "rows")}
    found = recipes.evaluate(replace(config, named), run, frozenset(named))
    assert math.isfinite(found.values["mlm_loss"])
    copy.write_bytes(before + b"\x1a\x00")  # the same tokens, different bytes
    (run / "config.json").write_text(json.dumps(to_dict(Workdir(pretrained.folder).read_config())))
    with refused(UserError, copy):
        convbert_jax.load(run)
