"""Workers share runs, record results and survive failures; runs are simulated."""

import dataclasses
import errno
import subprocess
import sys
import threading
import time

import pytest

from convbert_jax.config import UserError, to_dict
from convbert_jax.sweeps import Sweep, Task, Variant, runner
from convbert_jax.sweeps.runs import expand
from convbert_jax.sweeps.table import FAILED, FINISHED, STARTED, Folder, Record
from tests.sweeps.fake_runs import FakeRuns, in_threads

SWEEP = Sweep(
    "tiny",
    {"attention": Variant({"model.mixer": "attention"}), "mixed": Variant()},
    seeds=(0, 1),
    tasks={"trec": Task("text:trec")},
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return expand(SWEEP, Folder(tmp_path_factory.mktemp("sweep")))


@pytest.fixture
def fake(folder) -> FakeRuns:
    return FakeRuns(folder)


def test_each_run_is_executed_once_and_tasks_after_their_weights(fake, runs):
    lines = []
    summary = fake.work(runs, lines)
    assert summary == runner.Summary(8, {}, False)
    assert sorted(fake.started) == sorted(run.id for run in runs)
    for run in runs:
        if run.after:
            assert fake.started.index(run.after) < fake.started.index(run.id)
    record = fake.folder.read("mixed/seed-1/trec")
    assert (record.state, record.values) == (FINISHED, {"loss": 1.5, "odd": None})
    assert f"--workdir={fake.folder.run(record.run)}" in record.command
    assert "--config.finetune.save_models=False" in record.command
    finished = [line for line in lines if "loss 1.5" in line]
    assert len(finished) == 8
    assert all(f"{i + 1} of 8" in line for i, line in enumerate(finished))
    assert fake.work(runs) == summary
    assert len(fake.started) == 8


def test_a_failed_run_is_reported_and_retried_by_the_next_worker_only(fake, runs):
    bad, after = "attention/seed-0/pretrain", "attention/seed-0/trec"
    fake.errors[bad] = "error: the disk is full; free some."
    summary = fake.work(runs)
    assert summary.finished == 6
    assert summary.failed.keys() == {bad, after}
    assert summary.failed[bad] == "the disk is full; free some."
    assert bad in summary.failed[after]
    assert fake.started.count(bad) == 1
    record = fake.folder.read(bad)
    assert (record.state, record.failures) == (FAILED, 1)
    assert fake.work(runs).failed == summary.failed
    assert fake.started.count(bad) == 2
    fake.errors.clear()
    assert fake.work(runs) == runner.Summary(8, {}, False)
    assert len(fake.started) == 7 + 1 + 2


def test_a_run_that_fails_in_one_worker_is_not_retried_by_another(fake, runs):
    """The second worker waits for the run that the first one executes."""
    run = runs[0]
    fake.errors[run.id] = "error: no."
    fake.seconds = 0.3
    first, second = in_threads(2, lambda: fake.work([run]))
    assert first == second == runner.Summary(0, {run.id: "no."}, False)
    assert fake.started == [run.id]


def test_metrics_that_cannot_be_read_fail_a_run(fake, runs):
    def read(run, folder):
        raise UserError("metrics.jsonl is damaged")

    assert set(fake.work(runs[:1], read=read).failed.values()) == {"metrics.jsonl is damaged"}


def test_a_process_that_exits_before_the_last_step_has_failed(fake, runs):
    summary = fake.work(runs[:1], read=lambda run, folder: None)
    assert summary.finished == 0
    assert summary.failed.keys() == {runs[0].id}


def test_the_reason_why_a_process_failed():
    for code, printed, reason in (
        (1, "12:00:01 hello\nerror: a\nerror: no such file; name another.\n", "no such file"),
        (3, "Traceback\nValueError: x\n\n", "3: ValueError: x"),
        (-9, "error: no\n", "SIGKILL, probably out of memory"),
        (-11, "", "SIGSEGV"),
        (-250, "", "250"),
    ):
        found = runner.explain(code, printed)
        assert reason in found
        assert ("memory" in found) == (code == -9)


def test_workers_divide_the_runs(fake, runs):
    fake.seconds = 0.05
    assert in_threads(3, lambda: fake.work(runs)) == [runner.Summary(8, {}, False)] * 3
    assert sorted(fake.started) == sorted(run.id for run in runs)


def test_a_run_of_another_worker_is_awaited(fake, runs):
    lines, held = [], runs[0].id
    with fake.folder.hold(held) as lock:
        assert lock
        thread = threading.Thread(target=fake.work, args=(runs, lines))
        thread.start()
        deadline = time.monotonic() + 30
        while not any(held in line for line in lines) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert held not in fake.started
        assert len(fake.started) == 6
    thread.join(60)
    assert sum(held in line for line in lines) == 3  # waited for, started, finished
    assert len(fake.started) == 8


def test_a_lock_is_held_by_the_process_that_inherits_it(fake):
    def is_free():
        with fake.folder.hold("a/seed-0/pretrain") as lock:
            return lock is not None

    with fake.folder.hold("a/seed-0/pretrain") as lock:
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock.fileno(),)
        )
    assert not is_free()
    child.communicate(b"\n")
    assert is_free()


def test_one_worker_at_a_time_writes_the_report(fake):
    inside, most = [], []

    def write():
        with fake.folder.alone("report"):
            inside.append(0)
            most.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    in_threads(3, write)
    assert most == [1, 1, 1]


def test_a_full_disk_stops_the_worker_before_a_run_starts(fake, runs, monkeypatch):
    def write(self, record):
        raise OSError(errno.ENOSPC, "No space left on device", "x")

    monkeypatch.setattr(Folder, "write", write)
    with pytest.raises(OSError) as caught:  # noqa: PT011
        fake.work(runs)
    assert caught.value.errno == errno.ENOSPC
    assert fake.started == []


def test_a_signal_stops_the_run_once_and_keeps_it_for_the_next_worker(fake, runs, monkeypatch):
    signals = []

    class Process:
        def poll(self):
            return 0 if signals else None

        def send_signal(self, number):
            signals.append(number)

    requests = iter([None, None, "SIGTERM"])
    monkeypatch.setattr(runner.StopSignals, "requested", lambda self: next(requests, "SIGTERM"))
    summary = fake.work(
        runs, start=lambda run, folder, lock: Process(), read=lambda run, folder: None
    )
    assert dataclasses.astuple(summary) == (0, {}, True)
    assert len(signals) == 1
    assert fake.folder.read(runs[0].id).state == STARTED
    monkeypatch.undo()
    assert fake.work(runs).finished == 8


def test_an_interrupted_run_is_resumed_before_others_start(fake, runs):
    run = next(run for run in reversed(runs) if not run.after)
    record = Record(run.id, STARTED, to_dict(run.config), command=(), seconds=1.0)
    fake.folder.write(record)
    assert fake.work(runs).finished == 8
    assert fake.started[0] == run.id
    assert fake.folder.read(run.id).seconds > 1.0
    assert sorted(fake.started) == sorted(run.id for run in runs)
