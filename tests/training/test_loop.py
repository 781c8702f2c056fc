"""The loop: exact resuming, reports without gaps or repeats, and errors in words."""

import concurrent.futures
import dataclasses
import json
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

from convbert_jax import progress
from convbert_jax.config import MeshSection, TrainSection
from convbert_jax.training import evaluation, loop, memory, sharding
from convbert_jax.training.checkpoints import reading as checkpoint_reading
from convbert_jax.training.checkpoints import saving as checkpoint
from convbert_jax.training.environment.watchdog import Watchdog
from convbert_jax.training.evaluation import EvaluationError
from convbert_jax.training.reports import reporting, timing
from convbert_jax.training.reports.timing import Profiler
from tests.training.tiny_run import EVALUATOR, Rows, linear_task, make_config, make_rows, run

STEPS = 12


class Until(Rows):
    """Sends this process a signal while it draws batch `position`."""

    def __init__(self, position: int, number: int = signal.SIGTERM):
        super().__init__()
        self._last, self._number = position, number

    def __next__(self):
        rows = super().__next__()
        if self.position == self._last:
            os.kill(os.getpid(), self._number)
        return rows


class Growing(Rows):
    """Twice the rows from batch 5 on."""

    def __next__(self):
        rows = super().__next__()
        return rows if self.position < 5 else {n: np.concatenate([v, v]) for n, v in rows.items()}


class Mixed(Rows):
    """Three shapes, new in batches 1, 3 and 5: within an interval of four and at its beginning."""

    def __next__(self):
        rows = super().__next__()
        times = {3: 2, 5: 3}.get(self.position, 1)
        return {name: np.concatenate([value] * times) for name, value in rows.items()}


def read_lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def read_curves(workdir):
    """(split, step) -> numbers that do not depend on the machine's speed."""
    timed = {"seconds_per_step", "tokens_per_second", "mfu", "host_memory"}
    lines = read_lines(workdir)
    curves = {
        (line["split"], line["step"]): {n: v for n, v in line.items() if n not in timed}
        for line in lines
    }
    assert len(curves) == len(lines), "a step is reported twice"
    return curves


def assert_same_checkpoint(first, second, step):
    a, b = (checkpoint_reading.load_arrays(w / "checkpoints", step)[1] for w in (first, second))
    assert a.keys() == b.keys()
    assert [name for name in a if a[name].tobytes() != b[name].tobytes()] == []


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run without a break: its folder and result."""
    workdir = tmp_path_factory.mktemp("straight")
    return workdir, run(workdir, make_config(STEPS))


def test_a_whole_run(straight):
    workdir, result = straight
    assert result.step == int(result.state.step) == STEPS
    assert not result.interrupted
    curves = read_curves(workdir)
    assert [step for split, step in curves if split == "train"] == [2, 4, 6, 8, 10, 12]
    assert [step for split, step in curves if split == "validation"] == [4, 8, 12]
    assert result.evaluation["error"] == curves["validation", 12]["error"]
    assert result.train["error"] == curves["train", 12]["error"]
    assert result.evaluation["error"] < curves["validation", 4]["error"]
    assert checkpoint.list_steps(workdir / "checkpoints") == [4, 8, 12]
    assert any(workdir.glob("events.out.tfevents.*"))
    line = read_lines(workdir)[-2]
    assert line["tokens"] == 12 * 64
    assert line["tokens_per_second"] == pytest.approx(64 / line["seconds_per_step"])
    devices = jax.device_count()
    assert line["mfu"] == pytest.approx(1e6 / line["seconds_per_step"] / (devices * 1e12))


def test_what_is_compiled_does_not_count_as_the_speed_of_steps(tmp_path, monkeypatch):
    """By a clock on which a step takes a second, and compiling a thousand."""
    now, compiled = [0.0], set()
    look_at, call = loop._Run._look_at, Watchdog.call

    def waited_for(self, done):
        now[0] += done.step not in compiled  # those were waited for by the call
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
    run(tmp_path, make_config(12, train={"log_every": 4}), task=task, batches=Mixed())
    assert compiled == {1, 3, 5}
    lines = [line for line in read_lines(tmp_path) if line["split"] == "train"]
    assert [line["seconds_per_step"] for line in lines] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("stop_at", "number"), [(1, signal.SIGTERM), (4, signal.SIGINT), (7, signal.SIGTERM)]
)
def test_interrupted_and_resumed_is_the_same_run(straight, tmp_path, caplog, stop_at, number):
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    first = run(tmp_path, make_config(STEPS), batches=Until(stop_at, number))
    assert handlers == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    assert first.interrupted
    assert first.step == stop_at
    assert checkpoint.list_steps(tmp_path / "checkpoints")[-1] == stop_at
    second = run(tmp_path, make_config(STEPS))
    assert not second.interrupted
    assert "compiled again" not in caplog.text
    assert_same_checkpoint(straight[0], tmp_path, STEPS)
    assert read_curves(straight[0]) == read_curves(tmp_path)


def test_a_checkpoint_without_sums_is_gone_on_from(straight, tmp_path):
    """As they were written before: the first interval counts from there."""
    first = run(tmp_path, make_config(STEPS), batches=Until(7))
    shutil.rmtree(tmp_path / "checkpoints" / "7")
    saved = checkpoint.Checkpoints(tmp_path / "checkpoints", make_config().checkpoint)
    saved.save(first.state, {"position": 7})
    saved.close()
    run(tmp_path, make_config(STEPS))
    wanted, found = read_curves(straight[0]), read_curves(tmp_path)
    assert [key for key in wanted if wanted[key] != found[key]] == [("train", 8)]
    assert_same_checkpoint(straight[0], tmp_path, STEPS)


def test_sums_of_other_metrics_are_left_out(straight, tmp_path, caplog):
    run(tmp_path, make_config(STEPS), batches=Until(7))
    task = linear_task()

    def loss(params, batch, key):
        value, metrics = task.loss(params, batch, key)
        return value, {**metrics, "new": (jnp.zeros(3), jnp.ones(()))}

    run(tmp_path, make_config(STEPS), task=dataclasses.replace(task, loss=loss))
    assert "The metrics have changed" in caplog.text
    assert read_curves(tmp_path).keys() == read_curves(straight[0]).keys()


def test_an_interval_that_the_end_cut_goes_on(tmp_path):
    config = make_config(9, train={"log_every": 4}, optimizer={"learning_rate": 1e-30})
    run(tmp_path / "longer", config)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=12))
    run(tmp_path / "longer", config)
    run(tmp_path / "straight", config)
    longer, straight = (read_curves(tmp_path / name) for name in ("longer", "straight"))
    assert longer["train", 12]["error"] == straight["train", 12]["error"]


def test_resuming_from_an_older_checkpoint_leaves_no_repeats(straight, tmp_path, caplog):
    workdir = shutil.copytree(straight[0], tmp_path / "copy")
    for step in ("8", "12"):
        (workdir / "checkpoints" / step / "params" / "_METADATA").unlink()
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 12, "spl')  # killed while writing
    with caplog.at_level("INFO", "absl"):
        run(workdir, make_config(STEPS))
    assert "Resuming from the checkpoint of step 4" in caplog.text
    assert_same_checkpoint(straight[0], workdir, STEPS)
    assert read_curves(workdir) == read_curves(straight[0])


def test_a_finished_run_is_left_alone(straight, tmp_path, caplog):
    workdir = shutil.copytree(straight[0], tmp_path / "copy")
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*") if path.is_file()}
    rows = Rows()
    with caplog.at_level("INFO", "absl"):
        result = run(workdir, make_config(STEPS), batches=rows)
    assert "Nothing to do" in caplog.text
    assert result.step == STEPS
    assert result.evaluation == straight[1].evaluation
    assert result.train["error"] == straight[1].train["error"]
    assert rows.closed
    assert {p: p.stat().st_mtime_ns for p in workdir.rglob("*") if p.is_file()} == before


def test_a_finished_run_can_be_made_longer(straight, tmp_path):
    workdir = shutil.copytree(straight[0], tmp_path / "copy")
    assert run(workdir, make_config(STEPS + 3)).step == STEPS + 3
    assert read_curves(workdir)["validation", STEPS + 3]


def test_nothing_readable_is_an_error_not_a_new_start(straight, tmp_path):
    workdir = shutil.copytree(straight[0], tmp_path / "copy")
    for folder in (workdir / "checkpoints").iterdir():
        (folder / "params" / "_METADATA").unlink()
    with pytest.raises(checkpoint.CheckpointError, match="none of the 3 checkpoints"):
        run(workdir, make_config(STEPS))


def test_evaluation_counts_every_row_once(straight):
    """Three batches, the last with five real rows: the mean over 37 rows."""
    _, result = straight
    params = jax.device_get(result.state.params)["dense"]
    rows = [make_rows(10_000 + index)["x"] for index in range(3)]
    rows = np.concatenate([rows[0], rows[1], rows[2][:5]])
    errors = (rows @ params["kernel"] + params["bias"] - rows.sum(1) - 1.0) ** 2
    assert result.evaluation["error"] == pytest.approx(errors.mean(), rel=1e-5)


def test_training_numbers_are_of_the_whole_interval(tmp_path):
    run(tmp_path / "each", make_config(4, train={"log_every": 1}))
    run(tmp_path / "all", make_config(4, train={"log_every": 4}))
    each = [line for key, line in read_curves(tmp_path / "each").items() if key[0] == "train"]
    last = read_curves(tmp_path / "all")["train", 4]
    assert last["error"] == pytest.approx(np.mean([line["error"] for line in each]), rel=1e-6)


def test_the_log_line(tmp_path, caplog):
    with caplog.at_level("INFO", "absl"):
        run(tmp_path, make_config(4))
    line = next(m for m in caplog.messages if m.startswith("step 4/4"))
    pattern = (
        r"step 4/4  loss \S+  error \S+  lr \S+  grad \S+  [\d,]+ tokens/s  256 tokens  "
        r"MFU \S+%  host memory \S+ GiB  done"
    )
    assert re.fullmatch(pattern, line), line
    assert re.search(r"First step \S+ s after the program started; compile cache", caplog.text)


def test_compiling_logs_the_seconds_so_far(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(progress, "LOG_EVERY", 0.001)
    with caplog.at_level("INFO", "absl"):
        run(tmp_path, make_config(STEPS))
    lines = [m for m in caplog.messages if m.endswith(" s so far).")]
    assert {line.partition(" (")[0] for line in lines} == {
        "Initializing the parameters",
        "Compiling the training step",
        "Compiling and running the first evaluation",
    }


def test_nan_stops_the_run_and_keeps_the_batch(tmp_path):
    with pytest.raises(loop.TrainingError) as error:
        run(tmp_path, make_config(STEPS), batches=Rows(poison=8))
    (file,) = tmp_path.glob("bad_batch_step_8*.npz")
    message = str(error.value)
    assert message.startswith("step 8: loss nan")
    for part in (str(file), "of step 4", "config.optimizer.learning_rate"):
        assert part in message
    kept = np.load(file)
    assert kept["step"] == 8
    assert np.isnan(kept["x"][3]).all()
    assert not np.isnan(kept["x"][2]).any()
    # Step 8 was due to be saved; what is newest is the state before the poison.
    assert checkpoint.list_steps(tmp_path / "checkpoints") == [4]
    assert all(step <= 8 for _, step in read_curves(tmp_path))


def test_infinite_gradients_stop_the_run(tmp_path):
    task = linear_task()

    def loss(params, batch, key):
        value, metrics = task.loss(params, batch, key)
        return value + jnp.sqrt(jnp.sum(params["dense"]["bias"] * 0.0)), metrics

    with pytest.raises(loop.TrainingError, match=r"gradient norm (nan|inf)"):
        run(tmp_path, make_config(4), task=dataclasses.replace(task, loss=loss))


def test_a_recompile_is_told(tmp_path, caplog):
    run(tmp_path, make_config(8), batches=Growing())
    warnings = [m for m in caplog.messages if "was compiled again" in m]
    assert len(warnings) == 1
    assert "by step 6" in warnings[0]


def test_data_that_ends_is_told(tmp_path):
    class Ending(Rows):
        def __next__(self):
            if self.position == 3:
                raise StopIteration
            return super().__next__()

    with pytest.raises(loop.TrainingError, match="the training data ended at step 3 of"):
        run(tmp_path, make_config(8), batches=Ending())


def test_best_is_saved_when_found(tmp_path):
    """Evaluations that fall between the regular checkpoints."""
    config = make_config(
        12,
        train={"eval_every": 5},
        checkpoint={"every": 100, "best_metric": "error", "best_mode": "min"},
    )
    run(tmp_path, config)
    assert checkpoint.list_steps(tmp_path / "checkpoints") == [5, 10, 12]


def test_an_unknown_best_metric_is_refused_at_the_start(tmp_path):
    config = make_config(8, checkpoint={"best_metric": "auc"})
    with pytest.raises(loop.TrainingError, match=r"best_metric=auc is not measured.*: error\."):
        run(tmp_path, config)


def test_health_warnings_are_given_once(tmp_path, caplog):
    task = linear_task(health=lambda step, values: [f"too good: {step}"] if step != 6 else [])
    run(tmp_path / "on", make_config(8), task=task)
    assert [m for m in caplog.messages if "too good" in m] == [
        "step 2: too good: 2",
        "step 8: too good: 8",
    ]
    caplog.clear()
    run(tmp_path / "off", make_config(8, train={"warn_health": False}), task=task)
    assert "too good" not in caplog.text


def test_one_device_reaches_the_same_place(straight, tmp_path):
    config = make_config(STEPS)
    mesh = sharding.make_mesh(MeshSection(), jax.devices()[:1])
    result = run(tmp_path, config, mesh=mesh)
    np.testing.assert_allclose(
        result.state.params["dense"]["kernel"],
        straight[1].state.params["dense"]["kernel"],
        rtol=1e-5,
    )


def run_with_a_profile(folder):
    run(folder, make_config(4, train={"profile_start": 2, "profile_steps": 2}))


def test_profile(tmp_path):
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        pool.submit(run_with_a_profile, tmp_path).result()
    assert any((tmp_path / "profile").rglob("*.xplane.pb"))


@pytest.mark.parametrize(("first", "done", "told"), [(9, 0, 1), (2, 4, 1), (4, 0, 0), (0, 4, 0)])
def test_a_trace_that_cannot_be_is_told(first, done, told, tmp_path, caplog):
    section = TrainSection(steps=8, profile_start=first)
    Profiler(tmp_path / "profile", section, done)
    says = f"profile_start={first}: this start takes the steps {done + 1} to 8"
    assert caplog.text.count(says) == told
    (tmp_path / "profile").mkdir()  # of a start before
    caplog.clear()
    Profiler(tmp_path / "profile", section, done)
    assert not caplog.text


def test_out_of_memory_names_the_settings():
    with (
        pytest.raises(
            memory.OutOfMemoryError,
            match=r"config\.train\.accumulation.* pairs of texts config\.parallel\.batch_tokens",
        ) as error,
        memory.explain_out_of_memory("training", memory.LESS_TO_TRAIN),
    ):
        jnp.ones((2**50,), jnp.uint8).block_until_ready()
    assert "\n" not in str(error.value)


def test_out_of_memory_names_what_takes_it(tmp_path, monkeypatch):
    """Where a step is too much for the device, the sentence has its causes in bytes."""

    def too_much(self, *_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")

    monkeypatch.setattr(loop._Run, "_look_at", too_much, raising=True)
    with pytest.raises(memory.OutOfMemoryError) as error:
        run(tmp_path, make_config(4))
    for cause in ("parameters", "gradients", "moments of the optimizer", "activations"):
        assert re.search(rf"{cause}[a-z ]* [\d.]+ MiB", str(error.value)), cause


def test_out_of_memory_in_an_evaluation_names_what_lowers_that(tmp_path, monkeypatch):
    """Accumulation, the first knob of training, does nothing for it."""

    def take_too_much(*_, **__):
        return jnp.ones((2**50,), jnp.uint8).block_until_ready()

    monkeypatch.setattr(evaluation, "fetch", take_too_much)
    with pytest.raises(memory.OutOfMemoryError, match="while evaluating") as error:
        run(tmp_path, make_config(4))
    told = str(error.value)
    assert re.search(r"moments of the optimizer [\d.]+ MiB", told)
    assert "1125899906842624" in told  # bytes asked for
    assert "config.mesh.data" in told
    assert "raise config.train.accumulation" not in told


def test_other_device_errors_pass():
    with pytest.raises(jax.errors.JaxRuntimeError), memory.explain_out_of_memory("", ""):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_numbers_that_are_not_finite_are_null(tmp_path):
    unknown = {"error": math.nan}
    evaluator = dataclasses.replace(EVALUATOR, finish=lambda state: unknown)
    task = dataclasses.replace(linear_task(), summarize=lambda sums: unknown, evaluator=evaluator)
    run(tmp_path, make_config(4), task=task)
    assert all(line["error"] is None for line in read_lines(tmp_path))
    assert math.isnan(reporting.read_metrics(tmp_path / "metrics.jsonl")[-1]["error"])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5, "5 s"), (600, "10 min"), (12_000, "3 h 20 min"), (187_200, "2 d 4 h")],
)
def test_time_left(seconds, text):
    from convbert_jax.training.reports.timing import format_seconds

    assert format_seconds(seconds) == text


def test_evaluation_without_rows_is_told(tmp_path):
    with pytest.raises(EvaluationError, match="no held-out rows"):
        run(tmp_path, make_config(4), evaluation=lambda: iter(()))
