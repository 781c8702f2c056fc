"""What came out of a cell, read off files as runs write them."""

import dataclasses
import json
import math

import pytest

from convbert_jax.analysis import flops, text_scores
from convbert_jax.config import UserError, to_dict
from convbert_jax.finetuning.fitting import Setting
from convbert_jax.finetuning.results import RunResult, append_result
from convbert_jax.sweeps import Row, Search, Sweep, SweepError, Task, results
from convbert_jax.sweeps.cells import expand
from convbert_jax.sweeps.folder import FAILED, FINISHED, Folder, Record

TABLE = Sweep(
    "tiny",
    {"plain": Row({"model.mixer": "attention"}), "mixed": Row()},
    seeds=(0,),
    changes={"train.steps": 40, "train.batch_size": 8, "data.length": 32},
    tasks={
        "trec": Task("text:trec", {"finetune.seeds": 2, "finetune.learning_rates": (1e-3, 1e-4)})
    },
)
METRICS = (
    {"step": 10, "split": "train", "tokens": 2560, "tokens_per_second": 500.0},
    {
        "step": 20,
        "split": "train",
        "seconds_per_step": 0.5,
        "tokens_per_second": 100.0,
        "host_memory": 7,
    },
    {"step": 20, "split": "validation", "mlm_loss": 5.0},
    {
        "step": 40,
        "split": "train",
        "seconds_per_step": 0.7,
        "tokens_per_second": 200.0,
        "host_memory": 9,
    },
    {"step": 40, "split": "validation", "mlm_loss": 4.0, "discriminator_precision": None},
)


@pytest.fixture
def folder(tmp_path) -> Folder:
    return Folder(tmp_path / "sweep")


@pytest.fixture
def cells(folder):
    return {cell.id: cell for cell in expand(TABLE, folder)}


def pretrain(folder, cell, steps=(20, 40), records=METRICS):
    run = folder.run(cell.id)
    for step in steps:
        (run.checkpoints / str(step)).mkdir(parents=True)
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_the_numbers_of_a_pretraining_are_those_of_its_end(folder, cells):
    cell = cells["plain/seed-0/pretrain"]
    assert results.read_values(cell, folder) is None
    pretrain(folder, cell)
    values = results.read_values(cell, folder)
    assert values.pop("discriminator_precision") != values["mlm_loss"]
    # the median of three, and the peak
    assert values == {"mlm_loss": 4.0, "tokens_per_second": 200.0, "host_memory": 9}


def test_a_pretraining_without_its_last_checkpoint_is_not_finished(folder, cells):
    cell = cells["plain/seed-0/pretrain"]
    pretrain(folder, cell, steps=(20,))
    assert results.read_values(cell, folder) is None


def test_a_finished_pretraining_without_its_numbers_is_a_sentence(folder, cells):
    cell = cells["plain/seed-0/pretrain"]
    pretrain(folder, cell)
    folder.run(cell.id).metrics.unlink()
    with pytest.raises(UserError, match=r"lacks the held-out numbers of step 40: put a copy"):
        results.read_values(cell, folder)


def test_a_curve_has_every_axis(folder, cells):
    cell = cells["mixed/seed-0/pretrain"]
    pretrain(folder, cell)
    first, last = results.read_curve(cell, folder)
    assert (first["step"], first["tokens"], first["mlm_loss"]) == (20, 20 * 8 * 32, 5.0)
    # ten steps that nobody timed count as the median of the others, 0.6
    assert first["seconds"] == pytest.approx(10 * 0.6 + 10 * 0.5)
    assert last["seconds"] == pytest.approx(10 * 0.6 + 10 * 0.5 + 20 * 0.7)
    assert last["flops"] == pytest.approx(flops.training_flops(cell.config))


def run_of(seed, rate, score, loss=0.1) -> RunResult:
    scores = {"validation": {"accuracy": score}, "test": {"accuracy": score - 0.1}}
    return RunResult("own", Setting(rate, 3.0), seed, 10, loss, scores, 1.0, 1.0)


def test_the_numbers_of_a_fine_tuning_are_means_of_the_best_setting(folder, cells):
    cell = cells["plain/seed-0/trec"]
    run = folder.run(cell.id)
    run.path.mkdir(parents=True)
    scores = {(0, 1e-3): 0.5, (1, 1e-3): 0.6, (0, 1e-4): 0.9}
    for (seed, rate), score in scores.items():
        append_result(run, run_of(seed, rate, score))
    assert results.read_values(cell, folder) is None  # one of four is not there
    append_result(run, run_of(1, 1e-4, 0.7))
    assert results.read_values(cell, folder) == pytest.approx(
        {"validation accuracy": 0.8, "test accuracy": 0.7}
    )


def test_a_setting_that_diverged_is_not_the_best(folder, cells):
    cell = cells["plain/seed-0/trec"]
    run = folder.run(cell.id)
    run.path.mkdir(parents=True)
    for seed in (0, 1):
        append_result(run, run_of(seed, 1e-3, math.nan, math.nan))
        append_result(run, run_of(seed, 1e-4, 0.7))
    assert results.read_values(cell, folder)["validation accuracy"] == pytest.approx(0.7)


def test_a_task_that_diverged_has_settings_of_its_own(folder):
    """Tasks of one run may have different epochs, so that one has no run of another's setting."""
    row = Row({"finetune.tasks": ("cola", "rte")})
    (cell,) = expand(Sweep("glue:all", {"row": row}, (0,), {"init_from": "somewhere"}), folder)
    run = folder.run(cell.id)
    run.path.mkdir(parents=True)
    for task, epochs, score in (("cola", 3.0, 0.5), ("rte", 10.0, math.nan)):
        of_task = run_of(0, 1e-4, score, score)
        setting = Setting(1e-4, epochs)
        append_result(run, dataclasses.replace(of_task, task=task, setting=setting))
    values = results.read_values(cell, folder)
    assert values["cola validation accuracy"] == 0.5
    assert math.isnan(values["rte validation accuracy"])


def test_everything_together(folder, cells):
    done, bad = cells["plain/seed-0/pretrain"], cells["mixed/seed-0/pretrain"]
    for cell in (done, bad):
        pretrain(folder, cell)
    config = to_dict(done.config)
    folder.write(Record(done.id, FINISHED, config, (), "", 12.0, {"mlm_loss": 4.0, "x": None}))
    folder.write(Record(bad.id, FAILED, config, (), "killed by SIGKILL."))
    outcome = results.collect("table", TABLE, list(cells.values()), folder)
    found = {cell.id: cell for cell in outcome.cells}
    assert found[done.id].values["mlm_loss"] == 4.0
    assert math.isnan(found[done.id].values["x"])
    assert (found[bad.id].state, found[bad.id].why) == (FAILED, "killed by SIGKILL.")
    assert found["plain/seed-0/trec"].state == "not begun"
    assert outcome.baseline == "plain"
    assert outcome.rows["mixed"].tokens == 40 * 8 * 32
    assert outcome.rows["plain"].changes == "model.mixer=attention"

    # a damaged file of numbers costs the curve, and is told; the numbers were kept
    folder.run(done.id).metrics.write_text("{\n}\n")
    again = results.collect("table", TABLE, list(cells.values()), folder)
    damaged = next(cell for cell in again.cells if cell.id == done.id)
    assert (damaged.curve, damaged.values["mlm_loss"]) == ((), 4.0)
    assert "metrics.jsonl is damaged" in damaged.why
    with pytest.raises(UserError, match="is damaged"):
        results.read_values(done, folder)


def test_what_a_sweep_shows_is_its_choice(folder, cells):
    sweep = dataclasses.replace(TABLE, metrics=("tokens_per_second",))
    assert results.collect("t", sweep, list(cells.values()), folder).metrics == (
        "tokens_per_second",
    )


PAIRS = {"train.steps": 40, "parallel.source": "parallel:a,b"}
SUMMARIES = Sweep("summarization:tiny", {"plain": Row()}, seeds=(0,), changes=PAIRS)
SEARCH = Search({"model.layers": (1, 2)}, rows=1, metric="", maximize=True)


@pytest.mark.parametrize(
    ("sweep", "metric", "measured"),
    [
        (TABLE, "mlm_los", "mlm_loss"),
        (TABLE, "validation bleu", "discriminator_auc"),
        (SUMMARIES, "validation rougel", "validation rougeL"),
        (SUMMARIES, "validation bleu", "perplexity"),
        (Sweep("text:trec", {"plain": Row()}), "mlm_loss", None),
    ],
)
def test_a_metric_that_no_row_measures_is_refused(folder, sweep, metric, measured):
    cells = expand(sweep, folder)
    with pytest.raises(SweepError, match=metric) as raised:
        results.check_metrics(dataclasses.replace(sweep, metrics=(metric,)), cells)
    if measured:
        assert measured in str(raised.value)
        results.check_metrics(dataclasses.replace(sweep, metrics=(measured,)), cells)
    results.check_metrics(sweep, cells)


@pytest.mark.parametrize(
    ("tasks", "stage", "metric", "measured"),
    [
        ({}, "pretrain", "acu", "discriminator_auc"),
        (TABLE.tasks, "trec", "validation acc", "validation accuracy"),
        (TABLE.tasks, "trec", "vaildation accuracy", "test accuracy"),
        (TABLE.tasks, "trek", "validation accuracy", None),
        ({"two": Task("glue:all")}, "two", "validation mcc", "CoLA validation mcc"),
        ({"qa": Task("squad:v1")}, "qa", "validation bleu", "validation exact_match"),
    ],
)
def test_a_search_by_a_metric_that_is_not_measured_is_refused(
    folder, tasks, stage, metric, measured
):
    def check(name):
        search = dataclasses.replace(SEARCH, metric=name, stage=stage)
        sweep = dataclasses.replace(TABLE, tasks=tasks, search=search)
        results.check_metrics(sweep, expand(sweep, folder))

    with pytest.raises(SweepError, match=metric) as raised:
        check(metric)
    if measured:
        assert measured in str(raised.value)
        check(measured)


def test_a_summarizer_has_rouge_l(folder):
    (cell,) = expand(SUMMARIES, folder)
    pretrain(folder, cell)
    run = folder.run(cell.id)
    run.evaluation(40).parent.mkdir(parents=True)
    scores = text_scores.score("summarization", ["a b c"], [["a b d"]], str).values
    run.evaluation(40).write_text(json.dumps({"scores": {"validation": scores}}))
    values = results.read_values(cell, folder)
    shown = [name for name in results.choose_metrics(SUMMARIES, cell.config) if name in values]
    assert shown[:3] == ["validation rouge1", "validation rouge2", "validation rougeL"]
    assert values["validation rougeL"] == pytest.approx(100 * 2 / 3)


def test_what_a_translator_writes_counts(folder):
    sweep = Sweep(
        "translation",
        {"attention": Row({"model.mixer": "attention"}), "dynamic": Row()},
        seeds=(0,),
        changes=PAIRS,
    )
    cell, other = expand(sweep, folder)
    assert cell.config.data.directory == other.config.data.directory  # prepared once
    elsewhere = dataclasses.replace(sweep, changes=sweep.changes | {"parallel.max_length": 99})
    assert expand(elsewhere, folder)[0].config.data.directory != cell.config.data.directory
    pretrain(folder, cell)
    run = folder.run(cell.id)
    run.evaluation(40).parent.mkdir(parents=True)
    scores = {"validation": {"bleu": 31.5, "chrf": 55.0, "signature": "nrefs:1"}}
    run.evaluation(40).write_text(json.dumps({"step": 40, "scores": scores}))
    values = results.read_values(cell, folder)
    assert values["validation bleu"] == 31.5
    assert not any("signature" in name for name in values)
    shown = results.choose_metrics(sweep, cell.config)
    assert shown[:2] == ("validation bleu", "validation chrf")
    assert results.choose_metrics(TABLE, expand(TABLE, folder)[0].config) == results.METRICS
    first, last = results.read_curve(cell, folder)
    assert (first["tokens"], last["tokens"]) == (20 * 256, 40 * 256)  # as the run counts them
    assert math.isnan(last["flops"])
    outcome = results.collect("translation", sweep, (cell, other), folder)
    assert outcome.rows["attention"].flops is None


def test_of_pairs_after_pretraining_the_scores_count(folder):
    task = Task("text_to_text:tiny", {"parallel.source": "tsv:a", "train.steps": 40})
    sweep = Sweep("span_corruption:tiny,light", {"plain": Row()}, seeds=(0,), tasks={"t": task})
    cell = next(cell for cell in expand(sweep, folder) if cell.after)
    pretrain(folder, cell)
    run = folder.run(cell.id)
    run.evaluation(40).parent.mkdir()
    scores = {"validation": {"exact_match": 70.0, "pairs": 500}}
    run.evaluation(40).write_text(json.dumps({"scores": scores}))
    assert results.read_values(cell, folder) == {"validation exact_match": 70.0}
