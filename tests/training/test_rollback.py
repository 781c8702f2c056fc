"""Rollback after a bad step."""

import functools
import json
import shutil
import time

import jax
import numpy as np
import pytest

from convbert_jax.storage import DamagedFileError
from convbert_jax.training import distributed, loop
from convbert_jax.workdir import Workdir
from tests.refusals import refused
from tests.training.tiny_run import Rows, evaluation, linear_task, make_config, run

STEPS = 12


class Without(Rows):
    """`Rows` without some batches, as seen by a run that skips them."""

    def __init__(self, *left_out):
        super().__init__()
        self._left_out = left_out

    def __next__(self):
        while self.position + 1 in self._left_out:
            self.position += 1
        return super().__next__()


class Poisoned(Rows):
    """Batches with non-finite values or with a loss far above the usual."""

    def __init__(self, *places, value=np.nan, features=4):
        super().__init__(features=features)
        self._places, self._value = places, value

    def __next__(self):
        rows = super().__next__()
        if self.position in self._places:
            rows["x"][3] = self._value
        return rows


def config_of(steps=STEPS, **train):
    return make_config(steps, train={"rollbacks": 3, **train})


def same(first, second) -> None:
    jax.tree.map(np.testing.assert_array_equal, first.state.params, second.state.params)


def lines(folder) -> list[dict]:
    """Returns the lines of metrics.jsonl without timings."""
    read = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    clock = ("per_second", "mfu", "time", "memory", "seconds")
    return [{k: v for k, v in line.items() if not any(c in k for c in clock)} for line in read]


def test_a_run_goes_back_and_past_the_batch(tmp_path, caplog):
    """Checkpoints exist at 4 and 8; batch 7 also discards batches 5 and 6."""
    with caplog.at_level("WARNING", "absl"):
        went_back = run(tmp_path / "back", config_of(), batches=Poisoned(7))
    same(went_back, run(tmp_path / "without", config_of(), batches=Without(5, 6, 7)))
    (record,) = [r for r in caplog.records if "rollback" in r.getMessage()]
    assert record.args[2:] == (3, 1, 3)  # bad batches, rollbacks so far, maximum
    assert json.loads((tmp_path / "back" / "skipped_batches.json").read_text()) == {
        "skipped": [{"after": 4, "batches": 3}]
    }
    assert lines(tmp_path / "back") == lines(tmp_path / "without")
    ((step, what),) = loop.Rollbacks(Workdir(tmp_path / "back").skipped, 0).describe()
    assert step == 7
    assert "step 4" in what
    assert "3 batches" in what
    steps = [line["step"] for line in lines(tmp_path / "back") if line["split"] == "train"]
    assert steps == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize(("poisoned", "passed"), [((2,), (1, 2)), ((6, 8), (5, 6, 7, 8))])
def test_before_the_first_checkpoint_and_twice_from_one(tmp_path, poisoned, passed):
    went_back = run(tmp_path / "back", config_of(), batches=Poisoned(*poisoned))
    same(went_back, run(tmp_path / "without", config_of(), batches=Without(*passed)))


@pytest.mark.parametrize("lost", [(12,), (8, 12)])
def test_a_start_after_a_kill_passes_over_the_same(tmp_path, lost):
    """Resumes from the checkpoint of the rollback and from a later one."""
    whole = run(tmp_path / "run", config_of(), batches=Poisoned(7))
    for step in lost:
        shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
    again = run(tmp_path / "run", config_of(), batches=Poisoned(7))
    assert again.step == STEPS
    same(again, whole)


def test_it_gives_up(tmp_path):
    with refused(loop.TrainingError, 2, "config.train.rollbacks"):
        run(tmp_path, config_of(rollbacks=2), batches=Poisoned(*range(5, 40)))
    kept = json.loads((tmp_path / "skipped_batches.json").read_text())["skipped"]
    assert len(kept) == 2


def test_a_rollback_frees_the_state_before_it(tmp_path, monkeypatch):
    features, live = 37, []  # a size that no other array has
    restore = loop.Checkpoints.restore

    def count(self, abstract):
        restored = restore(self, abstract)
        live.append(sum(array.shape == (features,) for array in jax.live_arrays()))
        return restored

    monkeypatch.setattr(loop.Checkpoints, "restore", count)
    run(
        tmp_path,
        config_of(),
        task=linear_task(features=features),
        batches=Poisoned(5, 7, 10, features=features),
        evaluation=functools.partial(evaluation, features=features),
    )
    assert live == [0, 3, 3, 3], "the kernel and its two moments"


def test_rollbacks_are_advised_only_if_they_are_off(tmp_path, caplog):
    with refused(loop.BadStepError, "config.train.rollbacks"):
        run(tmp_path / "off", config_of(rollbacks=0), batches=Poisoned(7))
    run(tmp_path / "on", config_of(rollbacks=1), batches=Poisoned(7))
    assert "step 7" in caplog.text
    assert "config.train.rollbacks" not in caplog.text


def test_a_spike_is_as_bad(tmp_path, caplog):
    steps, place = 140, 131
    config = config_of(steps, spike=50.0, log_every=10, eval_every=100)
    with caplog.at_level("WARNING", "absl"):
        went_back = run(tmp_path / "back", config, batches=Poisoned(place, value=1e5))
    assert any("config.train.spike=50" in m for m in caplog.messages)
    left_out = range(129, place + 1)  # since the checkpoint of step 128
    same(went_back, run(tmp_path / "without", config, batches=Without(*left_out)))
    ignored = run(
        tmp_path / "off", config_of(steps, eval_every=100), batches=Poisoned(place, value=1e5)
    )
    assert ignored.step == steps


def test_what_the_guard_remembers_is_kept():
    """An interrupted guard decides like an uninterrupted one."""
    losses = [1.0 + 0.1 * (i % 7) for i in range(150)] + [9.0]
    whole = loop.LossGuard(5.0)
    for loss in losses[:-1]:
        assert whole.judge(loss, 1.0) == ""
    cut = loop.LossGuard(5.0)
    for loss in losses[:120]:
        cut.judge(loss, 1.0)
    position = {"next_batch": 3, **json.loads(json.dumps(cut.to_json()))}
    again = loop.LossGuard(5.0)
    again.restore(position)
    assert position == {"next_batch": 3}
    for loss in losses[120:-1]:
        assert again.judge(loss, 1.0) == ""
    assert again.judge(9.0, 1.0) == whole.judge(9.0, 1.0) != ""


def test_a_damaged_record_is_refused(tmp_path):
    file = tmp_path / "skipped_batches.json"
    for content in (
        "[1",
        '{"skipped": [4]}',
        '{"skipped": [{"aftes": 4, "batches": 1}]}',
        '{"skipped": [{"after": 4, "batches": "1"}]}',
        '{"skipped": [{"after": 4, "batches": true}]}',
    ):
        file.write_text(content)
        with refused(DamagedFileError, file):
            loop.Rollbacks(Workdir(tmp_path).skipped, 1)


def test_the_first_evaluation_may_compile_as_long_as_the_first_step(tmp_path, monkeypatch):
    told, silences = [], []
    monkeypatch.setattr(distributed, "exit_after_hang", lambda: told.append("hangs"))
    evaluate = loop.evaluate

    def slow(task, step, params, heldout, **options):
        # Heartbeats come before any compilation.
        heldout = {name: list(batches) for name, batches in heldout.items()}
        if not silences:
            silences.append(time.sleep(3))
        return evaluate(task, step, params, heldout, **options)

    monkeypatch.setattr(loop, "evaluate", slow)
    run(tmp_path, config_of(hang_seconds=1))
    assert silences
    assert told == []
