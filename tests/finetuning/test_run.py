"""Complete runs: saved files, resuming after a kill, selection, predictions."""

import copy
import dataclasses
import json
import math
import os
import signal
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.config import Config, ConfigError, FinetuneSection, ModelSection
from convbert_jax.data.errors import DataError
from convbert_jax.data.tasks.labelled_text import Example, LabelledTask
from convbert_jax.finetuning import fitting, run, run_files
from convbert_jax.finetuning.fitting import Programs
from convbert_jax.finetuning.run_files import Setting
from convbert_jax.finetuning.task import FinetuningError, rows_evaluator
from convbert_jax.inference import loading
from convbert_jax.inference.predictor import Predictor
from convbert_jax.interop import sources
from convbert_jax.interop.networks import ConversionError, initial_params, split
from convbert_jax.recipes import finetuning as recipe
from convbert_jax.training.memory import OutOfMemoryError
from convbert_jax.training.partitioning import ShardingError, flatten_params
from convbert_jax.workdir import Workdir, WorkdirError
from tests.finetuning.conftest import make_source
from tests.refusals import refused


@pytest.fixture(scope="module")
def start(make_config, make_programs, make_task, vocabulary):
    """Return start(folder, **config fields) -> results of a complete run on the toy task."""
    known = {}

    def begin(folder, **fields):
        config = make_config(finetune__buckets=(), **fields)  # a single length compiles faster
        programs = make_programs(config)
        if "toy" not in known:
            known["toy"] = make_task(make_config())
        tasks = [lambda: known["toy"]]
        return run.finetune(config, Workdir(folder), tasks, programs, vocabulary, None)

    return begin


@pytest.fixture(scope="module")
def finished(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    return folder, start(folder)[0]


def test_every_seed_has_scores_a_model_and_predictions(finished):
    _, result = finished
    assert [r.seed for r in result.chosen_runs] == [0, 1]
    assert result.chosen == Setting(3e-3, 1.0)
    for r, place in zip(result.chosen_runs, result.folders, strict=True):
        assert 0 <= r.scores["validation"]["accuracy"] <= 1
        lines = (place / "predictions" / "test.jsonl").read_text().splitlines()
        assert len(lines) == 9
        is_drawn = (place / "predictions" / "validation-confusion.png").is_file()
        assert is_drawn == (r.seed == 0)
        assert (place / "vocabulary").is_dir()


def test_a_killed_run_goes_on_where_it_was(finished, start, tmp_path, monkeypatch):
    """The second seed is killed and leaves a partial line in the results.

    The first seed is not trained again; scores equal those of an uninterrupted run.
    """
    fit, trained = fitting.fit, []

    def dies(programs, task, config, setting, seeds, weights, **options):
        trained.extend(seeds)
        if seeds == [1] and trained.count(1) == 1:
            raise KeyboardInterrupt
        return fit(programs, task, config, setting, seeds, weights, **options)

    monkeypatch.setattr(fitting, "fit", dies)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path)
    with Workdir(tmp_path).results.open("a") as file:
        file.write('{"task": "toy", "sett')
    again = start(tmp_path)[0]
    assert trained == [0, 1, 1]
    scores = [r.scores for r in again.runs]
    assert scores == [r.scores for r in finished[1].runs]
    assert len(Workdir(tmp_path).results.read_text().splitlines()) == 2


def test_a_folder_that_processes_do_not_share_is_refused(
    make_config, vocabulary, tmp_path, monkeypatch
):
    """The other process sees different results; the error comes before training."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(run.distributed, "barrier", lambda what: None)
    gather = run.distributed.multihost_utils
    monkeypatch.setattr(gather, "process_allgather", lambda mine: np.stack([mine, mine ^ 1]))
    results_file = Workdir(tmp_path).results
    with refused(FinetuningError, field="--workdir", path=results_file):
        run.finetune(make_config(), Workdir(tmp_path), [], None, vocabulary, None)


def test_seeds_can_be_added_but_nothing_else_changed(start, make_config, tmp_path):
    config = make_config(finetune__seeds=1)
    with Workdir(tmp_path).open(config):
        Workdir(tmp_path).results.write_text("one\n")
    with Workdir(tmp_path).open(make_config(finetune__seeds=5)):
        pass
    for field, value in (("finetune.batch_size", 4), ("optimizer.clip_norm", 0.5)):
        changed = make_config(**{field: value})
        with refused(WorkdirError, f"config.{field}"), Workdir(tmp_path).open(changed):
            pass


def test_a_search_is_chosen_by_the_median_and_keeps_all(start, tmp_path, caplog):
    """A rate of 1e-9 does not learn; both settings are reported and have their own folders."""
    rates = (1e-9, 1e-2)
    result = start(tmp_path, finetune__learning_rates=rates, finetune__epochs=(20.0,))[0]
    assert result.chosen == Setting(1e-2, 20.0)
    assert len(result.runs) == 4
    assert len(result.chosen_runs) == 2
    assert {p.parent.name for p in result.folders} == {"rate-0.01-epochs-20"}
    assert (tmp_path / "toy" / "rate-1e-09-epochs-20" / "seed-1" / "config.json").is_file()


def _run(seed, score, setting):
    return run_files.RunResult(
        task="toy", setting=setting, seed=seed, steps=1, loss=math.nan if score is None else 0.1,
        scores={"validation": {"accuracy": math.nan if score is None else score}},
        seconds=1.0, examples_per_second=1.0,
    )  # fmt: skip


def test_a_lucky_seed_is_not_chosen(start, make_task, make_config):
    """By median, 0.9 once and low twice loses to 0.6 three times; diverged runs are worst."""
    task = make_task(make_config())
    lucky, steady, lost = (Setting(rate, 1.0) for rate in (1.0, 2.0, 3.0))
    runs = [_run(i, s, lucky) for i, s in enumerate((0.9, 0.1, 0.2))]
    runs += [_run(i, 0.6, steady) for i in range(3)]
    runs += [_run(i, s, lost) for i, s in enumerate((None, None, 0.99))]
    assert run._choose(task, [lucky, steady, lost], runs) == steady
    with refused(FinetuningError, "toy", field="config.finetune.learning_rates", value="3"):
        run._choose(task, [lost], [_run(i, None, lost) for i in range(3)])


def test_a_run_that_diverges_is_told_and_kept(start, tmp_path):
    with refused(FinetuningError, "toy", field="config.finetune.learning_rates", value="1e+30"):
        start(tmp_path, finetune__seeds=1, finetune__learning_rates=(1e30,))
    line = json.loads(Workdir(tmp_path).results.read_text())
    assert line["loss"] is None
    assert line["scores"]["validation"]["accuracy"] is None
    assert math.isnan(run_files.read_results(Workdir(tmp_path))[0].loss)


def test_the_rate_is_that_of_the_width_unless_one_is_named():
    task, rates = SimpleNamespace(epochs=3.0), {}
    for width in (128, 256, 384, 768, 1024):
        config = Config(model=ModelSection(hidden_size=width))
        (setting,) = run.settings_of(config, task)
        rates[width] = setting.learning_rate
        assert setting.epochs == 3.0
    assert rates == {128: 1e-3, 256: 3e-4, 384: 3e-4, 768: 1e-4, 1024: 5e-5}
    asked = dataclasses.replace(config, finetune=FinetuneSection(learning_rates=(2e-3, 4e-3)))
    assert [s.learning_rate for s in run.settings_of(asked, task)] == [2e-3, 4e-3]


# --- Results ---


def test_a_saved_model_predicts_what_the_run_predicted(finished, make_config):
    """Config, vocabulary and labels come from the model's folder."""
    _, result = finished
    place = result.folders[0]
    config, params, tokenizer = loading.read_finetuned(str(place))
    assert config.outputs.labels == ("label 0", "label 1")
    predictor = Predictor(config, params, tokenizer, jnp.float32)
    lines = (place / "predictions" / "test.jsonl").read_text().splitlines()
    wanted = [json.loads(line) for line in lines]
    examples = [Example(line["id"], tuple(line["texts"]), None) for line in wanted]
    for found, line in zip(predictor.answer(examples), wanted, strict=True):
        assert found["prediction"] == line["prediction"]
        assert found["probabilities"] == pytest.approx(line["probabilities"], abs=1e-5)


def test_processes_that_spell_the_folder_differently_wait_at_one_place(
    make_config, make_task, vocabulary, tmp_path, monkeypatch
):
    places = []
    monkeypatch.setattr(run.distributed, "barrier", places.append)
    config, params = make_config(), {"kernel": np.ones((2, 3), np.float32)}
    for name in ("one", "other"):
        model = Workdir(tmp_path / name)
        run.save_model(model, config, make_task(config), vocabulary, params, steps=1, seed=0)
    assert places[: len(places) // 2] == places[len(places) // 2 :]
    assert places


def test_the_folder_of_a_sweep_is_no_model(finished):
    with refused(ConfigError, finished[0], 2):
        loading.read_finetuned(str(finished[0]))


# --- Teachers ---


def test_a_teacher_is_what_a_student_learns(finished, make_config, make_programs, vocabulary):
    """With wrong labels the student follows the teacher."""
    path = str(finished[1].folders[0])
    config = make_config(finetune__distill_from=path, finetune__buckets=())
    source = make_source("student")
    teacher = loading.open_teacher(path).for_task(source)
    texts = [example.texts for example in source.read("train")]
    shuffled = dataclasses.replace(source, labels=source.labels[::-1])
    swapped = loading.open_teacher(path).for_task(shuffled).logits_of(texts)
    np.testing.assert_allclose(swapped, teacher.logits_of(texts)[:, ::-1])
    task = recipe.classification.make_task(source, config, vocabulary, teacher=teacher)
    assert task.train.by_row["teacher"].shape == (37, 4)
    fitted = fitting.fit(
        make_programs(config), task, config, Setting(1e-2, 6.0), [0], None, vectorized=False
    )
    evaluators = {"train": rows_evaluator(len(texts))}
    taught = dataclasses.replace(task, evaluation={"train": task.train}, evaluators=evaluators)
    (collected,) = fitting.predict(
        make_programs(config), taught, config, fitted.params, "train", vectorized=False
    )
    found = collected.predicted()["logits"][:, :2]

    def shares(logits):
        return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)

    assert np.abs(shares(found) - shares(teacher.logits_of(texts))).mean() < 0.1


def test_a_teacher_of_another_task_is_refused(finished):
    teacher = loading.open_teacher(str(finished[1].folders[0]))
    for other in (make_source(labels=3), make_source(kind="regression")):
        with refused(FinetuningError, "config.finetune.distill_from=", "toy"):
            teacher.for_task(other)


# --- Bad input ---


def test_tasks_that_cannot_be(make_config, make_task, vocabulary):
    with refused(FinetuningError, "toy", field="config.model.types", value=1):
        make_task(make_config(model__types=1), texts=2)
    with refused(ConfigError, "config.finetune.head=token", "toy"):
        make_task(make_config(finetune__head="token"))
    source = make_source()
    unlabelled = LabelledTask(
        **{f.name: getattr(source, f.name) for f in dataclasses.fields(source)}
        | {"reader": lambda split: source.read("test")}
    )
    with refused(DataError, "toy", "train"):
        recipe.classification.make_task(unlabelled, make_config(), vocabulary)


def test_a_batch_that_does_not_split_is_named_as_it_was_given(make_config):
    for field in ("batch_size", "eval_batch_size"):
        config = make_config(**{"mesh__data": 8, f"finetune__{field}": 12})
        with refused(ShardingError, f"config.finetune.{field}=12", 8, 16):
            recipe.make_mesh(config, jax.devices())


def test_the_first_layers_of_weights(make_config, monkeypatch):
    """With two stages, the first layers of each parameter remain, and the config matches."""
    model = {"mixer": "light", "layers": 3, "kernel_sizes": (3, 3, 5)}
    whole = make_config(**{f"model__{name}": value for name, value in model.items()})
    whole = dataclasses.replace(whole, recipe="masked_lm")
    params = initial_params(whole)
    source = sources.Source("run", split(whole, params))
    monkeypatch.setattr(recipe.sources, "read_source", lambda path: source)
    before = flatten_params(params["encoder"])
    for layers, depths in ((1, [1]), (2, [2]), (3, [2, 1])):
        config = dataclasses.replace(make_config(finetune__layers=layers), init_from="a run")
        config, _, weights = recipe.read_start(config)
        assert config.model.layers == layers
        assert [stage.depth for stage in config.encoder.stages] == depths
        flat = flatten_params(weights["encoder"])
        assert any(path.startswith("stages/0/") for path in flat)
        for path, leaf in flat.items():
            assert len(leaf) == config.encoder.stages[int(path.split("/")[1])].depth
            np.testing.assert_array_equal(leaf, before[path][: len(leaf)])


def test_layers_that_weights_do_not_have_are_refused(finished, make_config):
    config = make_config(finetune__layers=3)
    with refused(ConfigError, "config.finetune.layers=3", "config.init_from"):
        recipe.read_start(config)
    model = str(finished[1].folders[0])
    with refused(ConfigError, "config.finetune.layers=3", model, 2):
        recipe.read_start(dataclasses.replace(config, init_from=model))


def test_no_weights_and_no_vocabulary_is_refused(make_config):
    with refused(ConfigError, "config.init_from", "--config.tokenizer.path"):
        recipe.read_start(make_config(tokenizer__path=""))


def test_absent_tasks_are_named_and_left_out(make_config, vocabulary, monkeypatch):
    """If all tasks are missing, the error describes the first."""

    def open_task(name, root):
        missing = {"train": f"GLUE {name} has no train split here."}
        return dataclasses.replace(make_source(name), absent={} if name == "cola" else missing)

    monkeypatch.setattr(recipe.glue, "open_task", open_task)
    makers = recipe.open_tasks(make_config(finetune__tasks=("rte", "cola", "mnli")), vocabulary)
    assert [make().name for make in makers] == ["cola"]
    with refused(DataError, "rte", "train"):
        recipe.open_tasks(make_config(finetune__tasks=("rte", "mnli")), vocabulary)
    with refused(ConfigError, "config.finetune.tasks", "'colla'"):
        recipe.open_tasks(make_config(finetune__tasks=("colla",)), vocabulary)


def test_a_submission_is_collected_by_seed(tmp_path):
    """Each seed has eleven files; predicted ones come from the chosen runs."""
    places = tuple(tmp_path / "CoLA" / f"seed-{seed}" for seed in (0, 1))
    for place in places:
        (place / "predictions").mkdir(parents=True)
        (place / "predictions" / "CoLA.tsv").write_text(f"index\tprediction\n0\t{place.name}\n")
        (place / "predictions" / "notes.tsv").write_text("not for the server")
    chosen = Setting(1.0, 1.0)
    result = run_files.TaskResult("CoLA", ("mcc",), ("validation",), chosen, (), places)
    recipe._collect_server_files(Workdir(tmp_path), [result])
    for place in places:
        files = {path.name for path in (tmp_path / "glue_server" / place.name).iterdir()}
        assert len(files) == 11
        text = (tmp_path / "glue_server" / place.name / "CoLA.tsv").read_text()
        assert place.name in text


def test_a_vocabulary_of_another_size_is_refused(finished, make_config, tmp_path):
    other = tmp_path / "vocab.txt"
    other.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijkl"]))
    model = str(finished[1].folders[0])
    config = dataclasses.replace(make_config(tokenizer__path=str(other)), init_from=model)
    with refused(ConversionError, 17):
        recipe.read_start(config)


def count_steps(monkeypatch):
    """Record the numbers of steps trained from now on."""
    seen = []
    make = Programs.of

    def of(self, task, runs):
        program = copy.copy(make(self, task, runs))
        step = program.train_step

        def counted(state, *rest):
            seen.append(int(state.step))
            return step(state, *rest)

        program.train_step = counted
        return program

    monkeypatch.setattr(Programs, "of", of)
    return seen


@pytest.mark.parametrize(("by", "together"), [("kill", "true"), (signal.SIGTERM, "false")])
def test_a_run_killed_half_way_goes_on_from_its_checkpoint(
    start, tmp_path, monkeypatch, together, by
):
    fields = {"finetune__epochs": (3.0,), "finetune__vectorize_seeds": together}
    expected = start(tmp_path / "whole", **fields)[0]
    assert not Workdir(tmp_path / "whole").unfinished.path.exists()

    seen = count_steps(monkeypatch)
    keep = run_files.Unfinished.keep_if_due

    def dies_after(self, state, done):
        if by == "kill":
            keep(self, state, done)
        if done == 9:
            self.close()
            if by == "kill":
                raise KeyboardInterrupt
            os.kill(os.getpid(), by)

    monkeypatch.setattr(run_files.Unfinished, "keep_if_due", dies_after)
    folder = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt) as stopped:
        start(folder, **fields, finetune__checkpoint_minutes=1e-9)
    if by == signal.SIGTERM:
        assert stopped.value.by == "SIGTERM"  # determines the exit code
    monkeypatch.setattr(run_files.Unfinished, "keep_if_due", keep)
    first = len(seen)
    result = start(folder, **fields)[0]
    # A signal is handled after the next step, which is saved; a kill loses that step.
    assert seen[first] == (10 if by == signal.SIGTERM else 9)
    assert [r.scores for r in result.runs] == [r.scores for r in expected.runs]
    assert [r.loss for r in result.runs] == [r.loss for r in expected.runs]
    assert not Workdir(folder).unfinished.path.exists()


def test_a_run_of_other_seeds_does_not_go_on_from_it(start, tmp_path, monkeypatch):
    Workdir(tmp_path).unfinished.path.mkdir(parents=True)
    Workdir(tmp_path).unfinished.unfinished_run.write_text('{"task": "another"}')
    seen = count_steps(monkeypatch)
    start(tmp_path, finetune__seeds=1)
    assert seen[0] == 0
    assert not Workdir(tmp_path).unfinished.path.exists()


@pytest.mark.parametrize(
    ("works", "work", "knob"),
    [
        ("put_whole_batch", "1 x 8 rows", "config.finetune.batch_size"),
        ("fetch_outputs", "1 x 16 rows", "config.finetune.eval_batch_size"),
    ],
)
def test_out_of_memory_names_what_was_done_and_its_knob(
    start, tmp_path, monkeypatch, works, work, knob
):
    def too_much(*_, **__):
        return jnp.ones((2**50,), jnp.uint8).block_until_ready()

    owner = fitting.partitioning if works == "put_whole_batch" else fitting
    monkeypatch.setattr(owner, works, too_much)
    with refused(OutOfMemoryError, work, knob, "0.0 MiB"):
        start(tmp_path)
