"""Going back after a bad step, and ending a run that hangs."""

import functools
import json
import shutil
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from convbert_jax.files import DamagedFileError
from convbert_jax.training import distributed, loop, rollback
from convbert_jax.training.environment import watchdog
from convbert_jax.workdir import Workdir
from tests.conftest import REPOSITORY
from tests.training.tiny_run import Rows, evaluation, linear_task, make_config, run

STEPS = 12


class Without(Rows):
    """The rows of `Rows` with some left out, as a run that passes over them should see them."""

    def __init__(self, *left_out):
        super().__init__()
        self._left_out = left_out

    def __next__(self):
        while self.position + 1 in self._left_out:
            self.position += 1
        return super().__next__()


class Poisoned(Rows):
    """Several batches that are not finite, or whose loss is many times the usual."""

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
    """Of metrics.jsonl, without what depends on the clock."""
    read = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    clock = ("per_second", "mfu", "time", "memory", "seconds")
    return [{k: v for k, v in line.items() if not any(c in k for c in clock)} for line in read]


def test_a_run_goes_back_and_past_the_batch(tmp_path, caplog):
    """Checkpoints are at 4 and 8: batch 7 takes 5 and 6 with it, which were between."""
    with caplog.at_level("WARNING", "absl"):
        went_back = run(tmp_path / "back", config_of(), batches=Poisoned(7))
    same(went_back, run(tmp_path / "without", config_of(), batches=Without(5, 6, 7)))
    told = [m for m in caplog.messages if "Going back to the checkpoint of step 4" in m]
    assert len(told) == 1
    assert "past the 3 batches since: rollback 1 of 3" in told[0]
    assert json.loads((tmp_path / "back" / "skipped_batches.json").read_text()) == {
        "skipped": [{"after": 4, "batches": 3}]
    }
    assert lines(tmp_path / "back") == lines(tmp_path / "without")
    told = rollback.Rollbacks(Workdir(tmp_path / "back").skipped, 0).describe()
    assert told == [(7, "a bad step: went back to step 4 and past 3 batches")]
    steps = [line["step"] for line in lines(tmp_path / "back") if line["split"] == "train"]
    assert steps == [2, 4, 6, 8, 10, 12]


def test_before_the_first_checkpoint_it_begins_again(tmp_path):
    went_back = run(tmp_path / "back", config_of(), batches=Poisoned(2))
    same(went_back, run(tmp_path / "without", config_of(), batches=Without(1, 2)))


def test_twice_from_one_checkpoint(tmp_path):
    went_back = run(tmp_path / "back", config_of(), batches=Poisoned(6, 8))
    same(went_back, run(tmp_path / "without", config_of(), batches=Without(5, 6, 7, 8)))


@pytest.mark.parametrize("lost", [(12,), (8, 12)])
def test_a_start_after_a_kill_passes_over_the_same(tmp_path, lost):
    """From the checkpoint that it went back to, and from one behind it."""
    whole = run(tmp_path / "run", config_of(), batches=Poisoned(7))
    for step in lost:
        shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
    again = run(tmp_path / "run", config_of(), batches=Poisoned(7))
    assert again.step == STEPS
    same(again, whole)


def test_it_gives_up(tmp_path):
    with pytest.raises(rollback.TrainingError, match="gone back 2 times, as often as"):
        run(tmp_path, config_of(rollbacks=2), batches=Poisoned(*range(5, 40)))
    kept = json.loads((tmp_path / "skipped_batches.json").read_text())["skipped"]
    assert len(kept) == 2


def test_a_rollback_frees_the_state_before_it(tmp_path, monkeypatch):
    features, live = 37, []  # a size that nothing else has
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


def test_rollbacks_are_advised_only_where_they_are_off(tmp_path, caplog):
    with pytest.raises(rollback.BadStepError, match=r"config\.train\.rollbacks"):
        run(tmp_path / "off", config_of(rollbacks=0), batches=Poisoned(7))
    run(tmp_path / "on", config_of(rollbacks=1), batches=Poisoned(7))
    assert "step 7" in caplog.text
    assert "config.train.rollbacks" not in caplog.text


def test_a_spike_is_as_bad(tmp_path, caplog):
    steps, place = 140, 131
    config = config_of(steps, spike=50.0, log_every=10, eval_every=100)
    with caplog.at_level("WARNING", "absl"):
        went_back = run(tmp_path / "back", config, batches=Poisoned(place, value=1e5))
    assert any("config.train.spike=50 times" in m for m in caplog.messages)
    left_out = range(129, place + 1)  # since the checkpoint of step 128
    same(went_back, run(tmp_path / "without", config, batches=Without(*left_out)))
    ignored = run(
        tmp_path / "off", config_of(steps, eval_every=100), batches=Poisoned(place, value=1e5)
    )
    assert ignored.step == steps


def test_what_the_guard_remembers_is_kept():
    """Cut anywhere, it judges as one that was never cut."""
    losses = [1.0 + 0.1 * (i % 7) for i in range(150)] + [9.0]
    whole = rollback.LossGuard(5.0)
    for loss in losses[:-1]:
        assert whole.judge(loss, 1.0) == ""
    cut = rollback.LossGuard(5.0)
    for loss in losses[:120]:
        cut.judge(loss, 1.0)
    position = {"next_batch": 3, **json.loads(json.dumps(cut.to_json()))}
    again = rollback.LossGuard(5.0)
    again.restore(position)
    assert position == {"next_batch": 3}
    for loss in losses[120:-1]:
        assert again.judge(loss, 1.0) == ""
    assert again.judge(9.0, 1.0) == whole.judge(9.0, 1.0) != ""


@pytest.mark.parametrize(
    "content",
    [
        "[1",
        '{"skipped": [4]}',
        '{"skipped": [{"aftes": 4, "batches": 1}]}',
        '{"skipped": [{"after": 4, "batches": "1"}]}',
        '{"skipped": [{"after": 4, "batches": true}]}',
    ],
)
def test_a_damaged_record_is_told(tmp_path, content):
    (tmp_path / "skipped_batches.json").write_text(content)
    with pytest.raises(DamagedFileError, match=r"skipped_batches\.json"):
        rollback.Rollbacks(Workdir(tmp_path).skipped, 1)


HANGS = """
import time
from convbert_jax.training.environment.watchdog import Watchdog
watchdog = Watchdog({seconds})
with watchdog.watching():
    for _ in range(4):
        watchdog.beat()
        time.sleep(0.3)
    print("alive", flush=True)
    a_place_to_find = time.sleep
    a_place_to_find(60)
"""


def test_the_first_evaluation_may_compile_as_long_as_the_first_step(tmp_path, monkeypatch):
    told, silences = [], []
    monkeypatch.setattr(distributed, "exit_after_hang", lambda: told.append("hangs"))
    evaluate = loop.evaluation_lib.run

    def slow(task, step, params, batches, **options):
        batches = list(batches)  # beats, before anything is compiled
        if not silences:
            silences.append(time.sleep(3))
        return evaluate(task, step, params, batches, **options)

    monkeypatch.setattr(loop.evaluation_lib, "run", slow)
    run(tmp_path, config_of(hang_seconds=1))
    assert silences
    assert told == []


def test_a_run_that_hangs_ends_with_its_stacks():
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", HANGS.format(seconds=3.0)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.stdout == "alive\n"
    assert done.returncode == distributed.EXIT_CODE
    assert "config.train.hang_seconds=3" in done.stderr
    assert 'File "<string>", line 11' in done.stderr
    assert time.monotonic() - started < 60


def test_a_first_step_has_longer_and_not_forever(monkeypatch):
    """Compiling takes as long as it takes; restoring, and waiting for others, can hang too."""
    ended = threading.Event()
    monkeypatch.setattr(watchdog.distributed, "exit_after_hang", ended.set)
    with watchdog.Watchdog(0.1).watching():
        assert not ended.wait(0.5)
    monkeypatch.setattr(watchdog, "_FIRST", 0.2)
    with watchdog.Watchdog(0.1).watching():
        assert ended.wait(60)
