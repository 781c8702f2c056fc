"""Training runs alone and together, rows and batches, compilation per shape, recipes."""

import collections
import dataclasses
import itertools
import re
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.finetuning import classification, fitting
from convbert_jax.finetuning.fitting import Programs, narrow_head, widen_head
from convbert_jax.finetuning.run_files import Setting
from convbert_jax.finetuning.task import ROW, FinetuningError, rows_evaluator
from convbert_jax.interfaces import TextBatch
from convbert_jax.recipes.finetuning import make_mesh
from convbert_jax.training import signals
from tests.batches import check_batch
from tests.finetuning.conftest import make_source
from tests.refusals import refused

ONCE = Setting(3e-3, 1.0)


def close(first, second, tolerance):
    return all(
        np.allclose(a, b, atol=tolerance)
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    )


@pytest.fixture(scope="module")
def toy(make_config, make_programs, make_task):
    config = make_config()
    programs = make_programs(config)
    task = make_task(config)
    alone = [
        fitting.fit(programs, task, config, ONCE, [seed], None, vectorized=False) for seed in (0, 1)
    ]
    return config, programs, task, alone


def predict(*arguments, vectorized=False):
    """Predict logits of the held-out rows for each run."""
    found = fitting.predict(*arguments, "validation", vectorized=vectorized)
    return [collected.predicted()["logits"] for collected in found]


def test_runs_together_equal_runs_alone(toy):
    """Head, dropout and row order of a run depend only on its seed."""
    config, programs, task, alone = toy
    together = fitting.fit(programs, task, config, ONCE, [0, 1], None, vectorized=True)
    outputs = predict(programs, task, config, together.params, vectorized=True)
    for number, run in enumerate(alone):
        params = fitting.take_run(together, task, number, vectorized=True)
        assert close(params, fitting.take_run(run, task, 0, vectorized=False), 1e-5)
        assert np.isclose(together.losses[number], run.losses[0], atol=1e-5)
        expected = predict(programs, task, config, run.params)
        np.testing.assert_allclose(outputs[number], expected[0], atol=1e-5, rtol=1e-5)
    assert not close(alone[0].params, alone[1].params, 1e-3)


def test_nothing_is_compiled_after_the_first_epoch(toy):
    """Other learning rates, run lengths and seeds do not recompile either."""
    config, programs, task, _ = toy
    compiled = programs.count_compiled()
    setting = Setting(1e-3, 3.0)
    fitting.fit(programs, task, config, setting, [7], None, vectorized=False)
    assert programs.count_compiled() == compiled


def test_tasks_of_few_labels_share_their_programs(toy, make_task):
    """For two texts, three classes or regression only head initialization compiles again."""
    config, programs, toy_task, _ = toy
    weights = programs.new_params(toy_task, 0)
    del weights["head"]
    pairs = make_task(config, name="pairs", labels=3, texts=2)
    numbers = make_task(config, name="numbers", kind="regression")
    compiled = programs.count_compiled()
    for task in (pairs, numbers):
        fitted = fitting.fit(programs, task, config, ONCE, [0], weights, vectorized=False)
        params = fitting.take_run(fitted, task, 0, vectorized=False)
        assert params["head"]["output"]["bias"].shape == (len(task.outputs.labels),)
    assert programs.count_compiled() == compiled + 2


def test_outputs_that_a_task_lacks_stay_zero(toy):
    _, _, task, alone = toy
    assert task.width == 4
    kernel = np.asarray(alone[0].params["head"]["output"]["kernel"])
    assert not kernel[:, 2:].any()
    assert np.abs(kernel[:, :2]).min() > 0
    params = fitting.take_run(alone[0], task, 0, vectorized=False)
    wide = widen_head(params, 2, 4)
    assert close(narrow_head(wide, 2), params, 0)


def test_fillers_of_a_partial_batch_change_nothing(toy):
    """A step on 5 rows does not depend on its 3 filler rows; its loss is the mean over the 5."""
    _, programs, task, _ = toy
    program = programs.of(task, None)
    params = widen_head(programs.new_params(task, 0), 2, 4)
    constants = programs.put_constants(task)
    results = []
    for filler in (3, 11):
        index = np.asarray([0, 1, 2, 4, 5, *[filler] * 3])
        batch = task.train.batch(index, 16)
        batch["weight"] = np.asarray([1.0] * 5 + [0.0] * 3, np.float32)
        given = np.uint32(0), np.float32(1e-3), constants
        results.append(program.train_step(program.start(params), batch, *given))
    assert close(results[0], results[1], 1e-7)


def test_predictions_do_not_depend_on_the_batch(toy):
    """Covers a partial last batch, one batch of all rows, a too large batch size, and padding."""
    config, programs, task, alone = toy
    expected = predict(programs, task, config, alone[0].params)
    for batch_size in (4, 21, 64):
        finetune = dataclasses.replace(config.finetune, eval_batch_size=batch_size, buckets=())
        other = dataclasses.replace(config, finetune=finetune)
        found = predict(programs, task, other, alone[0].params)
        np.testing.assert_allclose(found[0], expected[0], atol=1e-5)


def test_a_toy_task_is_learned(toy):
    config, programs, task, _ = toy
    fitted = fitting.fit(programs, task, config, Setting(1e-2, 20.0), [3], None, vectorized=False)
    found = fitting.predict(programs, task, config, fitted.params, "validation", vectorized=False)
    assert task.evaluators["validation"].finish(found[0])["accuracy"] > 0.9


def test_steps_are_those_of_the_release(make_config, make_task):
    """int(n // batch * epochs), with n rounded up to whole batches."""
    config = make_config()
    task = make_task(config, train=37)
    assert fitting.count_steps(task, config, 3.0) == 15
    assert fitting.count_steps(task, config, 0.5) == 2


def test_rates_warm_up_and_decay(make_config):
    """The official code (create_optimizer of model/optimization.py) multiplies warm-up and decay.

    The rate is 0 at step 0, and steps * 0.1 is not rounded. The default schedule reaches its peak.
    """
    setting, fields = Setting(1.0, 1.0), {"optimizer__decay_during_warmup": True}
    default = fitting.learning_rates(make_config(), setting, 100)
    assert default[10] == 1.0
    paper = fitting.learning_rates(make_config(**fields), setting, 100)
    steps = np.arange(100)
    np.testing.assert_allclose(paper, (1 - steps / 100) * np.minimum(1, steps / 10), atol=1e-6)
    release = make_config(**fields, finetune__release_warmup=True)
    found = fitting.learning_rates(release, setting, 257)
    steps = np.arange(257)
    np.testing.assert_allclose(found, (1 - steps / 257) * np.minimum(1, steps / 25.7), atol=1e-6)
    assert found[25] < 1 - 25 / 257  # with rounded warm-up steps it would be over here


WIDE = {  # large enough for parameters to be sharded
    "model__hidden_size": 128,
    "model__heads": 4,
    "model__ffn_size": 256,
    "finetune__buckets": (),
}


@pytest.mark.parametrize(
    ("axes", "together", "parts"),
    [
        ({"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2}, True, 4),
        pytest.param({"mesh__data": 8}, False, 1, marks=pytest.mark.slow),
    ],
    ids=["all axes, together", "data, in turn"],
)
def test_eight_devices_train_what_one_trains(make_config, make_task, axes, together, parts):
    """Parameters and predictions of both seeds agree to 1e-5, and parameters are sharded."""

    def fit(**mesh):
        config = make_config(
            **mesh,
            model__hidden_size=128,
            model__heads=4,
            model__ffn_size=256,
            finetune__buckets=(),
        )
        mesh = make_mesh(config, jax.devices())
        programs, task = Programs(config, jnp.float32, mesh), make_task(config)
        params, logits = [], []
        with jax.set_mesh(mesh):
            for seeds in [[0, 1]] if together else [[0], [1]]:
                fitted = fitting.fit(programs, task, config, ONCE, seeds, None, vectorized=together)
                params += [
                    fitting.take_run(fitted, task, run, vectorized=together)
                    for run in range(len(seeds))
                ]
                logits += predict(programs, task, config, fitted.params, vectorized=together)
        return params, logits, fitted.params

    expected, found = fit(mesh__data=1), fit(**axes)
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert close(ours, theirs, 1e-5)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    kernel = found[2]["encoder"]["stages"]["0"]["feed_forward"]["intermediate"]["kernel"]
    shard = kernel.addressable_shards[0].data
    assert shard.size == kernel.size // parts
    if together:
        assert shard.shape[0] == 2, "the axis of runs must not be sharded"


def test_a_run_whose_rows_are_fewer_than_its_steps_is_refused(toy):
    """The run would have no step and no loss."""
    config, programs, task, _ = toy
    state = programs.of(task, None).start(programs.new_params(task, 0))
    kept = types.SimpleNamespace(resume=lambda _: dataclasses.replace(state, step=jnp.asarray(5)))
    with refused(FinetuningError, "toy", 5, field="--workdir"):
        fitting.fit(programs, task, config, ONCE, [0], None, vectorized=False, unfinished=kept)


@pytest.mark.parametrize("hangs", ["training", "evaluating"])
def test_a_step_that_hangs_is_noticed(hangs, toy, monkeypatch):
    config, programs, task, (run, _) = toy
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, hang_seconds=1))
    program = programs.of(task, None)
    ended, told, steps = threading.Event(), [], itertools.count()
    monkeypatch.setattr(signals.distributed, "exit_after_hang", ended.set)
    name = {"training": "train_step", "evaluating": "eval_step"}[hangs]
    step = getattr(program, name)

    def hang(*arguments):
        if next(steps) == 1:
            told.append(ended.wait(60))
        return step(*arguments)

    monkeypatch.setattr(program, name, hang)
    if hangs == "training":
        fitting.fit(programs, task, config, ONCE, [0], None, vectorized=False)
    else:
        predict(programs, task, config, run.params)
    assert told == [True]


@pytest.mark.parametrize(("order", "compiling"), [("shuffled", 60.0), ("by length", 0.0)])
def test_the_time_left_is_right_from_the_first_line_on(monkeypatch, order, compiling):
    """The estimate excludes compilation and weighs rows by length.

    After a compilation, steps return as soon as the device has queued them.
    """
    lengths = np.random.default_rng(0).permutation([32] * 60 + [64] * 60 + [128] * 60)
    if order == "by length":  # the order of evaluation
        lengths = np.sort(lengths)
    now, end, waiting, compiled, lines = 0.0, 0.0, collections.deque(), set(), []
    monkeypatch.setattr(fitting.time, "perf_counter", lambda: now)
    monkeypatch.setattr(
        fitting.logging, "info", lambda *line: lines.append((now, len(compiled), line))
    )
    batches = ((length, None) for length in lengths)
    for length, _ in fitting._report(batches, 180, "toy", 32, float(lengths.mean())):
        if length not in compiled:  # compilation blocks
            compiled.add(length)
            now = end = max(now, end) + compiling + length / 32
        else:
            end = max(now, end) + length / 32
        waiting.append(end)
        if len(waiting) > fitting._IN_FLIGHT:
            now = max(now, waiting.popleft())
    assert len(lines) >= 3
    for at, count, (_, *values) in lines:
        minutes = re.fullmatch(r"(\d+) (s|min)", values[-1])
        left = int(minutes[1]) * {"s": 1, "min": 60}[minutes[2]]
        assert left == pytest.approx(end - at - compiling * (3 - count), rel=0.15, abs=31)


# --- Batches and collected rows ---

INDEX = np.asarray([2, 0, -1])


def test_batches_are_what_losses_read(make_config, vocabulary):
    for kind in ("classification", "regression"):
        task = classification.make_task(make_source(kind=kind), make_config(), vocabulary)
        assert task.evaluation.keys() == {"validation", "test"}
        for rows in (task.train, *task.evaluation.values()):
            check_batch(rows.batch(INDEX, 16) | task.constants, TextBatch)

    teacher = classification.Teacher(lambda texts: np.zeros((len(texts), 2)), "of its weights")
    task = classification.make_task(make_source(), make_config(), vocabulary, teacher=teacher)
    batch = task.train.batch(INDEX, 16) | task.constants
    check_batch(batch, TextBatch)
    assert {"teacher", "temperature", "teacher_weight"} < batch.keys()


def test_rows_come_in_their_order_without_fillers():
    evaluator = rows_evaluator(4, ("sum",), lambda found: {"sum": float(found["logits"].sum())})
    state = evaluator.init()
    for rows in ([2, 0], [3, -1], [1, -1]):
        logits = np.array([[10.0 * row] for row in rows])
        state = evaluator.update(state, {ROW: np.array(rows), "logits": logits})
    np.testing.assert_array_equal(state.predicted()["logits"], [[0.0], [10.0], [20.0], [30.0]])
    assert evaluator.finish(state) == {"sum": 60.0}
    assert evaluator.names == ("sum",)


def test_rows_of_two_lengths_stay_a_list():
    evaluator = rows_evaluator(2)
    state = evaluator.init()
    for row in (1, 0):
        state = evaluator.update(state, {ROW: np.array([row]), "tags": np.zeros((1, row + 1))})
    assert [values.shape for values in state.predicted()["tags"]] == [(1,), (2,)]
    assert evaluator.finish(state) == {}
