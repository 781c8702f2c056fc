"""Training loop: exact resume, reports without gaps or repeats, errors, and initial weights."""

import concurrent.futures
import dataclasses
import json
import logging
import math
import multiprocessing
import os
import re
import shutil
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax import console
from convbert_jax.config import TrainSection
from convbert_jax.training import checkpoints, loop, memory, metrics_writer, timing
from convbert_jax.training.loop import EvaluationError
from convbert_jax.training.signals import Watchdog
from convbert_jax.training.timing import Profiler
from tests.refusals import refused
from tests.training.tiny_run import EVALUATOR, Rows, linear_task, make_config, make_rows, run

STEPS = 12


class Until(Rows):
    """Dataset that sends this process a signal while drawing batch `position`."""

    def __init__(self, position: int, number: int = signal.SIGTERM):
        super().__init__()
        self._last, self._number = position, number

    def __next__(self):
        rows = super().__next__()
        if self.position == self._last:
            os.kill(os.getpid(), self._number)
        return rows


class Repeated(Rows):
    """Dataset that repeats batch n `times(n)` times, which changes its shape."""

    def __init__(self, times):
        super().__init__()
        self._times = times

    def __next__(self):
        rows = super().__next__()
        return {n: np.concatenate([v] * self._times(self.position)) for n, v in rows.items()}


def read_lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def read_curves(workdir):
    """Returns (split, step) -> metrics, without timings."""
    timed = {"seconds_per_step", "tokens_per_second", "mfu", "host_memory"}
    lines = read_lines(workdir)
    curves = {
        (line["split"], line["step"]): {n: v for n, v in line.items() if n not in timed}
        for line in lines
    }
    assert len(curves) == len(lines), "a step is reported twice"
    return curves


def assert_same_checkpoint(first, second, step):
    a, b = (checkpoints.load_arrays(w / "checkpoints", step)[1] for w in (first, second))
    assert a.keys() == b.keys()
    assert [name for name in a if a[name].tobytes() != b[name].tobytes()] == []


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """An uninterrupted run: its folder, result and log."""
    workdir, log = tmp_path_factory.mktemp("straight"), []
    logger, handler = logging.getLogger("absl"), logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(console, "LOG_EVERY", 0.001)
            result = run(workdir, make_config(STEPS))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return workdir, result, log


@pytest.fixture
def copy(straight, tmp_path):
    return shutil.copytree(straight[0], tmp_path / "copy")


def test_a_whole_run(straight):
    workdir, result, _ = straight
    assert result.step == int(result.state.step) == STEPS
    assert not result.interrupted
    curves = read_curves(workdir)
    assert [step for split, step in curves if split == "train"] == [2, 4, 6, 8, 10, 12]
    assert [step for split, step in curves if split == "validation"] == [4, 8, 12]
    assert result.evaluation["error"] == curves["validation", 12]["error"]
    assert result.train["error"] == curves["train", 12]["error"]
    assert result.evaluation["error"] < curves["validation", 4]["error"]
    assert checkpoints.list_steps(workdir / "checkpoints") == [4, 8, 12]
    assert any(workdir.glob("events.out.tfevents.*"))
    line = read_lines(workdir)[-2]
    assert line["tokens"] == 12 * 64
    assert line["tokens_per_second"] == pytest.approx(64 / line["seconds_per_step"])
    devices = jax.device_count()
    assert line["mfu"] == pytest.approx(1e6 / line["seconds_per_step"] / (devices * 1e12))


def test_an_evaluation_counts_every_row_once(straight):
    """Three batches, the last with five real rows: the mean covers 37 rows."""
    params = jax.device_get(straight[1].state.params)["dense"]
    rows = [make_rows(10_000 + index)["x"] for index in range(3)]
    rows = np.concatenate([rows[0], rows[1], rows[2][:5]])
    errors = (rows @ params["kernel"] + params["bias"] - rows.sum(1) - 1.0) ** 2
    assert straight[1].evaluation["error"] == pytest.approx(errors.mean(), rel=1e-5)


def test_the_log_has_numbers_of_steps_and_the_seconds_of_compiling(straight):
    _, _, log = straight
    line = next(message for message in log if message.startswith("step 4/12"))
    for name in ("loss", "error", "lr", "grad", "MFU"):
        assert re.search(rf" {name} [\d.e+-]+", line), line
    assert re.search(r"[\d,]+ tokens/s  256 tokens  MFU", line)
    assert any("compile cache" in message for message in log)
    compiled = {m.partition(" (")[0] for m in log if m.endswith(" s so far).")}
    assert len(compiled) == 3  # parameter initialization, step, evaluation


def test_compiling_does_not_count_as_the_speed_of_steps(tmp_path, monkeypatch):
    """Uses a simulated clock: one second per step, a thousand per compilation."""
    now, compiled = [0.0], set()
    look_at, call = loop._Run._look_at, Watchdog.call

    def waited_for(self, done):
        now[0] += done.step not in compiled  # the call waited for compiled steps
        look_at(self, done)

    def called(self, program, state, *arguments, batch):
        if self.compiles(batch):
            now[0] += 1_000
            compiled.add(int(state.step) + 1)
        return call(self, program, state, *arguments, batch=batch)

    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(loop._Run, "_look_at", waited_for)
    monkeypatch.setattr(Watchdog, "call", called)
    task = dataclasses.replace(linear_task(), batch_shapes=3)
    # Batches 1, 3 and 5 have new shapes: inside and at the start of an interval of four.
    mixed = Repeated(lambda position: {3: 2, 5: 3}.get(position, 1))
    run(tmp_path, make_config(12, train={"log_every": 4}), task=task, batches=mixed)
    assert compiled == {1, 3, 5}
    lines = [line for line in read_lines(tmp_path) if line["split"] == "train"]
    assert [line["seconds_per_step"] for line in lines] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("stop_at", "number"), [(1, signal.SIGTERM), (4, signal.SIGINT), (7, signal.SIGTERM)]
)
def test_an_interrupted_and_resumed_run_is_the_same_run(straight, tmp_path, stop_at, number):
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    first = run(tmp_path, make_config(STEPS), batches=Until(stop_at, number))
    assert handlers == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    assert first.stopped_by == number.name
    assert first.step == stop_at
    assert checkpoints.list_steps(tmp_path / "checkpoints")[-1] == stop_at
    second = run(tmp_path, make_config(STEPS))
    assert not second.interrupted
    assert_same_checkpoint(straight[0], tmp_path, STEPS)
    assert read_curves(straight[0]) == read_curves(tmp_path)


def test_sums_of_other_metrics_are_left_out(straight, tmp_path, caplog):
    run(tmp_path, make_config(STEPS), batches=Until(7))
    task = linear_task()

    def loss(params, batch, key):
        value, metrics = task.loss(params, batch, key)
        return value, {**metrics, "new": (jnp.zeros(3), jnp.ones(()))}

    run(tmp_path, make_config(STEPS), task=dataclasses.replace(task, loss=loss))
    assert [record for record in caplog.records if record.levelname == "WARNING"]
    assert read_curves(tmp_path).keys() == read_curves(straight[0]).keys()


def test_an_interval_that_the_end_cut_continues_in_a_longer_run(tmp_path):
    config = make_config(9, train={"log_every": 4}, optimizer={"learning_rate": 1e-30})
    run(tmp_path / "longer", config)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=12))
    assert run(tmp_path / "longer", config).step == 12
    run(tmp_path / "straight", config)
    longer, straight = (read_curves(tmp_path / name) for name in ("longer", "straight"))
    assert longer["train", 12]["error"] == straight["train", 12]["error"]
    assert longer["validation", 12]


def test_resuming_from_an_older_checkpoint_leaves_no_repeats(straight, copy):
    for step in ("8", "12"):
        (copy / "checkpoints" / step / "params" / "_METADATA").unlink()
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "spl')  # killed while writing
    drawn = Rows()
    run(copy, make_config(STEPS), batches=drawn)
    assert_same_checkpoint(straight[0], copy, STEPS)
    assert read_curves(copy) == read_curves(straight[0])


def test_a_finished_run_is_left_alone(straight, copy):
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.is_file()}
    rows = Rows()
    result = run(copy, make_config(STEPS), batches=rows)
    assert result.step == STEPS
    assert result.evaluation == straight[1].evaluation
    assert result.train["error"] == straight[1].train["error"]
    assert rows.closed
    assert {p: p.stat().st_mtime_ns for p in copy.rglob("*") if p.is_file()} == before


def test_no_readable_checkpoint_is_an_error_not_a_new_start(copy):
    for folder in (copy / "checkpoints").iterdir():
        (folder / "params" / "_METADATA").unlink()
    with refused(checkpoints.CheckpointError, 3, path=copy / "checkpoints"):
        run(copy, make_config(STEPS))


def test_training_numbers_are_of_the_whole_interval(tmp_path):
    run(tmp_path / "each", make_config(4, train={"log_every": 1}))
    run(tmp_path / "all", make_config(4, train={"log_every": 4}))
    each = [line for key, line in read_curves(tmp_path / "each").items() if key[0] == "train"]
    last = read_curves(tmp_path / "all")["train", 4]
    assert last["error"] == pytest.approx(np.mean([line["error"] for line in each]), rel=1e-6)


def test_nan_stops_the_run_and_keeps_the_batch(tmp_path):
    with pytest.raises(loop.TrainingError) as error:
        run(tmp_path, make_config(STEPS), batches=Rows(poison=8))
    (file,) = tmp_path.glob("bad_batch_step_8*.npz")
    for part in ("step 8", "nan", str(file), "of step 4", "config.optimizer.learning_rate"):
        assert part in str(error.value)
    kept = np.load(file)
    assert kept["step"] == 8
    assert np.isnan(kept["x"][3]).all()
    assert not np.isnan(kept["x"][2]).any()
    # Step 8 was due; the newest checkpoint precedes the NaN.
    assert checkpoints.list_steps(tmp_path / "checkpoints") == [4]
    assert all(step <= 8 for _, step in read_curves(tmp_path))


def test_infinite_gradients_stop_the_run(tmp_path):
    task = linear_task()

    def loss(params, batch, key):
        value, metrics = task.loss(params, batch, key)
        return value + jnp.sqrt(jnp.sum(params["dense"]["bias"] * 0.0)), metrics

    with refused(loop.TrainingError, "gradient norm"):
        run(tmp_path, make_config(4), task=dataclasses.replace(task, loss=loss))


def test_a_recompile_is_reported_once(tmp_path, caplog):
    run(tmp_path, make_config(8), batches=Repeated(lambda position: 1 if position < 5 else 2))
    (warning,) = [r for r in caplog.records if r.levelname == "WARNING" and 2 in r.args]
    assert 6 in warning.args  # the step


def test_errors_of_data_and_metrics_name_their_field(tmp_path):
    class Ending(Rows):
        def __next__(self):
            if self.position == 3:
                raise StopIteration
            return super().__next__()

    with refused(loop.TrainingError, "step 3", field="config.train.steps", value=8):
        run(tmp_path / "short", make_config(8), batches=Ending())
    metric = {"field": "config.checkpoint.best_metric", "value": "auc"}
    with refused(loop.TrainingError, "error", **metric):
        run(tmp_path / "metric", make_config(8, checkpoint={"best_metric": "auc"}))
    with refused(EvaluationError, field="config.data.heldout_fraction"):
        run(tmp_path / "empty", make_config(4), evaluation=lambda: {"": iter(())})


def test_the_best_is_saved_when_found(tmp_path):
    """Evaluations fall between the regular checkpoints."""
    best = {"every": 100, "best_metric": "error", "best_mode": "min"}
    run(tmp_path, make_config(12, train={"eval_every": 5}, checkpoint=best))
    assert checkpoints.list_steps(tmp_path / "checkpoints") == [5, 10, 12]


def test_health_warnings_are_given_once(tmp_path, caplog):
    task = linear_task(health=lambda step, values: [f"unhealthy: {step}"] if step != 6 else [])
    run(tmp_path / "on", make_config(8), task=task)
    found = [re.findall(r"unhealthy: (\d)", message) for message in caplog.messages]
    assert [each for each in found if each] == [["2"], ["8"]]
    caplog.clear()
    run(tmp_path / "off", make_config(8, train={"warn_health": False}), task=task)
    assert "unhealthy" not in caplog.text


def run_with_a_profile(folder):
    run(folder, make_config(4, train={"profile_start": 2, "profile_steps": 2}))


def test_profile(tmp_path):
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        pool.submit(run_with_a_profile, tmp_path).result()
    assert any((tmp_path / "profile").rglob("*.xplane.pb"))


def test_a_trace_that_cannot_be_taken_is_reported(tmp_path, caplog):
    for first, done, warned in ((9, 0, True), (2, 4, True), (4, 0, False), (0, 4, False)):
        section, folder = TrainSection(steps=8, profile_start=first), tmp_path / f"{first}"
        caplog.clear()
        Profiler(folder, section, done)
        assert (f"profile_start={first}" in caplog.text) == warned
        folder.mkdir()  # left by an earlier start
        caplog.clear()
        Profiler(folder, section, done)
        assert not caplog.text


def too_much(*_, **__):
    return jnp.ones((2**50,), jnp.uint8).block_until_ready()


@pytest.mark.parametrize("where", ["training", "evaluating"])
def test_out_of_memory_names_causes_and_settings(tmp_path, monkeypatch, where):
    """Accumulation is suggested in training, not in evaluation."""
    if where == "training":
        monkeypatch.setattr(loop._Run, "_look_at", too_much)
    else:
        monkeypatch.setattr(loop, "fetch_outputs", too_much)
    with pytest.raises(memory.OutOfMemoryError) as error:
        run(tmp_path, make_config(4))
    message = str(error.value)
    assert "\n" not in message
    assert str(2**50) in message
    for cause in ("parameters", "optimizer state"):
        assert re.search(rf"{cause}[a-z ]* [\d.]+ MiB", message), cause
    trains = where == "training"
    assert bool(re.search(r"gradients[a-z ]* [\d.]+ MiB", message)) or not trains
    assert ("raise config.train.accumulation" in message) == trains
    assert ("config.parallel.batch_tokens" in message) or not trains
    assert ("config.mesh.data" in message) or trains
    assert where in message


def test_other_device_errors_pass():
    with pytest.raises(jax.errors.JaxRuntimeError), memory.explain_out_of_memory("", ""):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_numbers_that_are_not_finite_are_null(tmp_path):
    unknown = {"error": math.nan}
    evaluator = dataclasses.replace(EVALUATOR, finish=lambda state: unknown)
    task = dataclasses.replace(linear_task(), summarize=lambda sums: unknown, evaluator=evaluator)
    run(tmp_path, make_config(4), task=task)
    assert all(line["error"] is None for line in read_lines(tmp_path))
    assert math.isnan(metrics_writer.read_metrics(tmp_path / "metrics.jsonl")[-1]["error"])


def test_durations_have_two_units():
    spelled = {5: "5 s", 600: "10 min", 12_000: "3 h 20 min", 187_200: "2 d 4 h"}
    assert {seconds: timing.format_seconds(seconds) for seconds in spelled} == spelled


# Initial weights and published weights


def publishing(folder, steps, **hooks):
    config = make_config(steps, checkpoint={"every": 4, "keep": 9, "huggingface_every": 3})
    return run(folder, config, **hooks)


def test_a_run_starts_from_given_weights_and_publishes_at_step_0_and_every_few(tmp_path):
    seen, asked = {}, []

    def initial_params():
        asked.append(1)
        return {"dense": {"kernel": np.full(4, 7.0, np.float32), "bias": np.float32(0)}}

    def publish(step, params):
        seen[step] = np.asarray(params["dense"]["kernel"])

    publishing(tmp_path, 7, initial_params=initial_params, publish=publish)
    np.testing.assert_array_equal(seen[0], np.full(4, 7.0))
    assert list(seen) == [0, 3, 6]
    publishing(tmp_path, 12, initial_params=initial_params, publish=publish)
    assert len(asked) == 1  # a resumed run has its weights
    assert list(seen) == [0, 3, 6, 9, 12]


def test_nothing_is_lost_by_a_kill_while_publishing(tmp_path):
    """Publishing step 3 fails; the next start publishes it again."""
    published = []

    def interrupted(step, params):
        if step == 3:
            raise KeyboardInterrupt
        published.append(step)

    with pytest.raises(KeyboardInterrupt):
        publishing(tmp_path, 6, publish=interrupted)
    assert published == [0]
    publishing(tmp_path, 6, publish=lambda step, params: published.append(step))
    assert published[-2:] == [3, 6]
