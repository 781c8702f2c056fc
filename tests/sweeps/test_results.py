"""Metrics of runs, read from the files that runs write."""

import dataclasses
import json
import math

import pytest

from convbert_jax.analysis import flops, text_scores
from convbert_jax.config import to_dict
from convbert_jax.finetuning.run_files import RunResult, Setting, append_result
from convbert_jax.storage import DamagedFileError
from convbert_jax.sweeps import Search, Sweep, SweepError, Task, Variant, results
from convbert_jax.sweeps.runs import expand
from convbert_jax.sweeps.table import FAILED, FINISHED, Record
from tests.refusals import refused

SWEEP = Sweep(
    "tiny",
    {"plain": Variant({"model.mixer": "attention"}), "mixed": Variant()},
    seeds=(0,),
    changes={"train.steps": 40, "train.batch_size": 8, "data.length": 32},
    tasks={
        "trec": Task("text:trec", {"finetune.seeds": 2, "finetune.learning_rates": (1e-3, 1e-4)})
    },
)
PAIRS = {"train.steps": 40, "parallel.source": "parallel:a,b"}
SUMMARIES = Sweep("summarization:tiny", {"plain": Variant()}, seeds=(0,), changes=PAIRS)
METRICS = (
    {"step": 10, "split": "train", "tokens": 2560, "tokens_per_second": 500.0},
    {
        **{"step": 20, "split": "train", "seconds_per_step": 0.5, "tokens_per_second": 100.0},
        "host_memory": 7,
    },
    {"step": 20, "split": "validation", "mlm_loss": 5.0},
    {
        **{"step": 40, "split": "train", "seconds_per_step": 0.7, "tokens_per_second": 200.0},
        "host_memory": 9,
    },
    {"step": 40, "split": "validation", "mlm_loss": 4.0, "discriminator_precision": None},
)


@pytest.fixture
def runs(folder):
    return {run.id: run for run in expand(SWEEP, folder)}


def pretrain(folder, run, steps=(20, 40), scores=None):
    """Writes the files of a pre-training run."""
    workdir = folder.run(run.id)
    for step in steps:
        (workdir.checkpoints / str(step)).mkdir(parents=True)
    workdir.metrics.write_text("".join(json.dumps(record) + "\n" for record in METRICS))
    if scores:
        workdir.evaluation(40).parent.mkdir(parents=True, exist_ok=True)
        workdir.evaluation(40).write_text(json.dumps({"scores": {"validation": scores}}))


def finetune(folder, run, *found: tuple):
    """Appends results: (seed, learning rate, accuracy, changes)."""
    workdir = folder.run(run.id)
    workdir.path.mkdir(parents=True, exist_ok=True)
    for seed, rate, score, changes in found:
        scores = {"validation": {"accuracy": score}, "test": {"accuracy": score - 0.1}}
        result = RunResult("own", Setting(rate, 3.0), seed, 10, 0.1, scores, 1.0, 1.0)
        append_result(workdir, dataclasses.replace(result, **changes))


def test_metrics_of_pretraining_are_those_of_the_last_step(folder, runs):
    run = runs["plain/seed-0/pretrain"]
    assert results.read_values(run, folder) is None
    pretrain(folder, run, steps=(20,))
    assert results.read_values(run, folder) is None
    (folder.run(run.id).checkpoints / "40").mkdir()
    values = results.read_values(run, folder)
    assert math.isnan(values.pop("discriminator_precision"))
    # median of three values, and the peak
    assert values == {"mlm_loss": 4.0, "tokens_per_second": 200.0, "host_memory": 9}
    folder.run(run.id).metrics.unlink()
    with refused(SweepError, 40, path=folder.run(run.id).metrics):
        results.read_values(run, folder)


def test_a_curve_has_all_axes(folder, runs):
    run = runs["mixed/seed-0/pretrain"]
    pretrain(folder, run)
    first, last = results.read_curve(run, folder)
    assert (first["step"], first["tokens"], first["mlm_loss"]) == (20, 20 * 8 * 32, 5.0)
    # ten steps without a time get the median of the others, 0.6
    assert first["seconds"] == pytest.approx(10 * 0.6 + 10 * 0.5)
    assert last["seconds"] == pytest.approx(10 * 0.6 + 10 * 0.5 + 20 * 0.7)
    assert last["flops"] == pytest.approx(flops.training_flops(run.config))


def test_metrics_of_finetuning_are_means_of_the_best_setting(folder, runs):
    run = runs["plain/seed-0/trec"]
    finetune(folder, run, (0, 1e-3, 0.5, {}), (1, 1e-3, 0.6, {}), (0, 1e-4, 0.9, {}))
    assert results.read_values(run, folder) is None  # one of four is missing
    finetune(folder, run, (1, 1e-4, 0.7, {}), (7, 1e-4, 0.0, {}))  # a result of another seed
    values = results.read_values(run, folder)
    assert values == pytest.approx({"validation accuracy": 0.8, "test accuracy": 0.7})
    diverged = runs["mixed/seed-0/trec"]
    for seed in (0, 1):
        finetune(folder, diverged, (seed, 1e-3, math.nan, {}), (seed, 1e-4, 0.7, {}))
    assert results.read_values(diverged, folder)["validation accuracy"] == pytest.approx(0.7)


def test_tasks_of_one_run_may_have_different_settings(folder):
    variant = Variant({"finetune.tasks": ("cola", "rte")})
    (run,) = expand(Sweep("glue:all", {"x": variant}, (0,), {"init_from": "somewhere"}), folder)
    for task, epochs, score in (("cola", 3.0, 0.5), ("rte", 10.0, math.nan)):
        setting = Setting(1e-4, epochs)
        finetune(folder, run, (0, 1e-4, score, {"task": task, "setting": setting}))
    values = results.read_values(run, folder)
    assert values["cola validation accuracy"] == 0.5
    assert math.isnan(values["rte validation accuracy"])


def test_the_results_of_a_sweep_are_collected(folder, runs):
    done, bad = runs["plain/seed-0/pretrain"], runs["mixed/seed-0/pretrain"]
    for run in (done, bad):
        pretrain(folder, run)
    config = to_dict(done.config)
    folder.write(Record(done.id, FINISHED, config, (), "", 12.0, {"mlm_loss": 4.0, "x": None}))
    folder.write(Record(bad.id, FAILED, config, (), "killed by SIGKILL."))
    outcome = results.collect("table", SWEEP, list(runs.values()), folder)
    found = {run.id: run for run in outcome.runs}
    assert found[done.id].values["mlm_loss"] == 4.0
    assert math.isnan(found[done.id].values["x"])
    assert len(found[done.id].curve) == 2
    assert (found[bad.id].state, found[bad.id].why) == (FAILED, "killed by SIGKILL.")
    assert found["plain/seed-0/trec"].state == "new"
    assert outcome.baseline == "plain"
    assert outcome.variants["mixed"].tokens == 40 * 8 * 32
    assert outcome.variants["plain"].changes == "model.mixer=attention"
    assert outcome.metrics == results.METRICS
    # with a damaged metrics file only the curve is missing; the record has the metrics
    folder.run(done.id).metrics.write_text("{\n}\n")
    sweep = dataclasses.replace(SWEEP, metrics=("tokens_per_second",))
    outcome = results.collect("table", sweep, list(runs.values()), folder)
    damaged = next(run for run in outcome.runs if run.id == done.id)
    assert (damaged.curve, damaged.values["mlm_loss"]) == ((), 4.0)
    assert "metrics.jsonl" in damaged.why
    assert outcome.metrics == sweep.metrics
    with refused(DamagedFileError, folder.run(done.id).metrics):
        results.read_values(done, folder)


GLUE, QA = {"two": Task("glue:all")}, {"qa": Task("squad:v1")}
FINETUNING = Sweep("text:trec", {"plain": Variant()})


@pytest.mark.parametrize(
    ("sweep", "stage", "metric", "measured"),
    [
        (SWEEP, None, "validation bleu", "discriminator_auc"),
        (SUMMARIES, None, "validation rougel", "validation rougeL"),
        (SUMMARIES, None, "validation bleu", "perplexity"),
        (FINETUNING, None, "mlm_loss", None),
        (SWEEP, "pretrain", "acu", "discriminator_auc"),
        (SWEEP, "trec", "vaildation accuracy", "test accuracy"),
        (SWEEP, "trek", "validation accuracy", None),
        (dataclasses.replace(SWEEP, tasks=GLUE), "two", "validation mcc", "CoLA validation mcc"),
        (dataclasses.replace(SWEEP, tasks=QA), "qa", "validation f", "validation exact_match"),
    ],
)
def test_an_unknown_metric_of_a_sweep_or_a_search_is_refused(
    folder, sweep, stage, metric, measured
):
    def check(name):
        search = Search({"model.layers": (1, 2)}, 1, name, True, stage) if stage else None
        metrics = () if stage else (name,)
        results.check_metrics(dataclasses.replace(sweep, metrics=metrics, search=search), runs)

    runs = expand(sweep, folder)
    field = "search.metric" if stage else "metrics"
    with refused(SweepError, measured or "none", field=field, value=metric):
        check(metric)
    if measured:
        check(measured)
    results.check_metrics(sweep, runs)


def test_scores_of_generated_texts_are_metrics(folder):
    (run,) = expand(SUMMARIES, folder)
    scores = text_scores.score("summarization", ["a b c"], [["a b d"]], str).values
    pretrain(folder, run, scores=scores)
    values = results.read_values(run, folder)
    shown = [name for name in results.choose_metrics(SUMMARIES, run.config) if name in values]
    assert shown[:3] == ["validation rouge1", "validation rouge2", "validation rougeL"]
    assert values["validation rougeL"] == pytest.approx(100 * 2 / 3)


def test_metrics_of_translation(folder):
    variants = {"attention": Variant({"model.mixer": "attention"}), "dynamic": Variant()}
    sweep = Sweep("translation", variants, seeds=(0,), changes=PAIRS)
    run, other = expand(sweep, folder)
    assert run.config.data.directory == other.config.data.directory
    longer = dataclasses.replace(sweep, changes=PAIRS | {"parallel.max_length": 99})
    assert expand(longer, folder)[0].config.data.directory != run.config.data.directory
    pretrain(folder, run, scores={"bleu": 31.5, "chrf": 55.0, "signature": "nrefs:1"})
    values = results.read_values(run, folder)
    assert values["validation bleu"] == 31.5
    assert "validation signature" not in values
    assert results.choose_metrics(sweep, run.config)[:2] == ("validation bleu", "validation chrf")
    first, last = results.read_curve(run, folder)
    assert (first["tokens"], last["tokens"]) == (20 * 256, 40 * 256)  # as counted by the run
    assert math.isnan(last["flops"])
    outcome = results.collect("translation", sweep, (run, other), folder)
    assert outcome.variants["attention"].flops is None


def test_a_task_of_text_pairs_has_scores_only(folder):
    task = Task("text_to_text:tiny", {"parallel.source": "tsv:a", "train.steps": 40})
    sweep = Sweep("span_corruption:tiny,light", {"plain": Variant()}, seeds=(0,), tasks={"t": task})
    run = next(run for run in expand(sweep, folder) if run.after)
    pretrain(folder, run, scores={"exact_match": 70.0, "pairs": 500})
    assert results.read_values(run, folder) == {"validation exact_match": 70.0}
