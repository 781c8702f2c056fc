"""Runners deal out cells, keep what came out and survive each other, with processes made up."""

import dataclasses
import errno
import subprocess
import sys
import threading
import time

import pytest

from convbert_jax.config import UserError, to_dict
from convbert_jax.sweeps import Row, Sweep, SweepError, Task, runner
from convbert_jax.sweeps.cells import expand
from convbert_jax.sweeps.folder import FAILED, FINISHED, STARTED, Folder, Record
from convbert_jax.sweeps.queue import Queue
from tests.sweeps.machine import Machine

TABLE = Sweep(
    "tiny",
    {"attention": Row({"model.mixer": "attention"}), "mixed": Row()},
    seeds=(0, 1),
    tasks={"trec": Task("text:trec")},
)


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(runner, "_POLL", 0.02)


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(Folder(tmp_path / "sweep"))


@pytest.fixture
def cells(machine):
    return expand(TABLE, machine.folder)


def test_each_cell_is_run_once_and_tasks_after_their_weights(machine, cells):
    told = []
    summary = machine.run(cells, told)
    assert summary == runner.Summary(8, {}, False)
    assert sorted(machine.started) == sorted(cell.id for cell in cells)
    for cell in cells:
        if cell.after:
            assert machine.started.index(cell.after) < machine.started.index(cell.id)
    record = machine.folder.read("mixed/seed-1/trec")
    assert (record.state, record.values) == (FINISHED, {"loss": 1.5, "odd": None})
    assert f"--workdir={machine.folder.run(record.cell)}" in record.command
    assert "--config.finetune.save_models=False" in record.command
    assert any("8 of 8 done" in line and "loss 1.5" in line for line in told)
    assert any("cells/h" in line and "left for one runner" in line for line in told)
    assert machine.run(cells) == summary
    assert len(machine.started) == 8


def test_the_journal_may_be_deleted(machine, cells):
    machine.run(cells)
    machine.folder.journal.unlink()
    machine.run(cells)
    assert len(machine.started) == 8


def test_a_journal_deleted_under_a_runner_is_a_sentence_and_loses_nothing(machine, cells):
    def start(cell, folder, lock):
        folder.journal.unlink(missing_ok=True)
        return machine.start(cell, folder, lock)

    with pytest.raises(SweepError, match=r"journal\.log was deleted while a runner worked; start"):
        runner.run(cells, machine.folder, tell=print, start=start, read=machine.read)
    assert machine.folder.read(machine.started[0]).state == FINISHED
    machine.run(cells)
    assert sorted(machine.started) == sorted(cell.id for cell in cells)


def test_a_failed_cell_says_why_and_the_rest_go_on(machine, cells):
    bad = "attention/seed-0/pretrain"
    machine.ends[bad] = "error: the disk is full; free some."
    summary = machine.run(cells)
    assert summary.finished == 6
    assert summary.failed == {
        bad: "the disk is full; free some.",
        "attention/seed-0/trec": f"not begun, as {bad} failed.",
    }
    assert machine.started.count(bad) == 1
    assert machine.folder.read(bad).state == FAILED
    assert machine.run(cells).failed == summary.failed  # once more in each session
    assert machine.started.count(bad) == 2
    machine.ends.clear()
    assert machine.run(cells) == runner.Summary(8, {}, False)
    assert len(machine.started) == 7 + 1 + 2


def test_a_cell_fails_once_in_a_session_also_where_a_killed_one_had_offered_it(machine, cells):
    bad = cells[0].id
    killed = Queue(machine.folder)
    killed.offer([bad], lambda name: False)
    machine.ends[bad] = "error: no."
    machine.run(cells[:1])
    assert machine.started == [bad]
    # a runner that began before it failed does not try it either, one that begins later does
    early = Queue(machine.folder)
    machine.run(cells[:1])
    assert early.failed() == {bad}
    assert machine.started == [bad] * 2
    assert Queue(machine.folder).failed() == set()


def test_numbers_that_cannot_be_read_are_a_failed_cell(machine, cells):
    def read(cell, folder):
        raise UserError("metrics.jsonl is damaged; remove it.")

    summary = runner.run(cells, machine.folder, tell=str, start=machine.start, read=read)
    assert set(summary.failed.values()) > {"metrics.jsonl is damaged; remove it."}


def test_a_process_that_ends_well_and_did_not_finish_has_failed(machine, cells):
    summary = runner.run(
        cells[:1], machine.folder, tell=str, start=machine.start, read=lambda cell, folder: None
    )
    assert summary.failed == {cells[0].id: "ended with exit code 0: it printed nothing"}


@pytest.mark.parametrize(
    ("code", "printed", "says"),
    [
        (1, "12:00:01 hello\nerror: no such file; name another.\n", "no such file; name another."),
        (1, "Traceback\nValueError: x\n", "ended with exit code 1: ValueError: x"),
        (-9, "error: no\n", "killed by SIGKILL, most likely for want of memory."),
        (-11, "", "killed by SIGSEGV."),
        (-250, "", "killed by signal 250."),
    ],
)
def test_why_a_process_failed(code, printed, says):
    assert runner.explain(code, printed) == says


def test_runners_share_the_work_and_repeat_nothing(machine, cells):
    machine.seconds = 0.05
    summaries = []
    threads = [
        threading.Thread(target=lambda: summaries.append(machine.run(cells))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert summaries == [runner.Summary(8, {}, False)] * 3
    assert sorted(machine.started) == sorted(cell.id for cell in cells)


def test_a_cell_of_a_dead_runner_is_taken_over(machine, cells):
    dead = Queue(machine.folder)
    dead.offer([cells[0].id], lambda name: False)
    assert dead.take().cell == cells[0].id  # and then it is killed
    assert machine.run(cells).finished == 8
    assert machine.started.count(cells[0].id) == 1


def test_a_cell_that_somebody_runs_is_waited_for(machine, cells):
    told = []
    held = cells[0].id
    with machine.folder.hold(held) as lock:
        assert lock
        thread = threading.Thread(target=machine.run, args=(cells, told))
        thread.start()
        deadline = time.monotonic() + 30
        while not any("waiting" in line for line in told) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert held not in machine.started
        assert len(machine.started) == 6
    thread.join(60)
    assert f"waiting for what other runners do: {held} (process " in "".join(told)
    assert len(machine.started) == 8


def test_a_lock_lives_as_long_as_the_process_that_inherits_it(machine):
    with machine.folder.hold("a/seed-0/pretrain") as lock:
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock.fileno(),)
        )
    assert machine.folder.holder("a/seed-0/pretrain")
    child.communicate(b"\n")
    assert not machine.folder.holder("a/seed-0/pretrain")


def test_one_runner_at_a_time_writes_the_report(machine):
    inside, most = [], []

    def write():
        with machine.folder.alone("report"):
            inside.append(threading.get_ident())
            most.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most == [1, 1, 1]


def test_a_journal_cut_off_by_a_full_disk_is_mended(machine, cells):
    machine.run(cells[:1])
    with machine.folder.journal.open("a") as file:
        file.write('{"op_code": 4, "work')
    assert machine.run(cells).finished == 8


@pytest.mark.parametrize("line", ["{", "null\n", "7\n", "[]\n", '"x"\n', "{}\n"])
def test_a_damaged_journal_is_a_sentence(machine, cells, line):
    machine.run(cells[:1])
    text = machine.folder.journal.read_text()
    machine.folder.journal.write_text(line + text)
    with pytest.raises(SweepError, match=r"journal\.log is damaged .*; delete it"):
        machine.run(cells)


def test_a_folder_in_place_of_a_journal_is_a_sentence(machine, cells):
    machine.folder.journal.mkdir(parents=True)
    with pytest.raises(SweepError, match=r"journal\.log is damaged"):
        machine.run(cells)


def test_a_full_disk_stops_the_runner(machine, cells, monkeypatch):
    def full(self, record):
        raise OSError(errno.ENOSPC, "No space left on device", "x")

    monkeypatch.setattr(Folder, "write", full)
    with pytest.raises(OSError, match="No space left"):
        machine.run(cells)
    assert machine.started == []


def test_a_cell_of_an_older_table_is_let_go(machine, cells):
    Queue(machine.folder).offer(["old/seed-0/pretrain"], lambda name: False)
    assert machine.run(cells[:1]).finished == 1
    assert machine.started == [cells[0].id]


def test_without_optuna_a_sentence_says_what_to_install(machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SweepError, match="pip install optuna"):
        Queue(machine.folder)


def test_a_stop_is_passed_on_once_and_keeps_the_cell(machine, cells, monkeypatch):
    signals = []

    class Process:
        def poll(self):
            return 0 if signals else None

        def send_signal(self, number):
            signals.append(number)

    asked = iter([None, None, "SIGTERM"])
    monkeypatch.setattr(runner.StopSignals, "requested", lambda self: next(asked, "SIGTERM"))
    summary = runner.run(
        cells,
        machine.folder,
        tell=str,
        start=lambda cell, folder, lock: Process(),
        read=lambda cell, folder: None,
    )
    assert dataclasses.astuple(summary) == (0, {}, True)
    assert len(signals) == 1
    assert machine.folder.read(cells[0].id).state == STARTED
    monkeypatch.undo()
    assert machine.run(cells).finished == 8


def test_what_was_stopped_goes_on_before_anything_begins(machine, cells):
    """Whatever stands before it in the queue: here the cells that had been offered with it."""
    queue = Queue(machine.folder)
    queue.offer([cell.id for cell in cells if not cell.after], lambda name: False)
    stopped = queue.take()
    config = to_dict(next(cell for cell in cells if cell.id == stopped.cell).config)
    record = Record(cell=stopped.cell, state=STARTED, config=config, command=(), seconds=1.0)
    machine.folder.write(record)
    queue.let_go(stopped)
    told = []
    assert machine.run(cells, told).finished == 8
    assert machine.started[0] == stopped.cell
    assert any(f"{stopped.cell} goes on" in line for line in told)
    assert sorted(machine.started) == sorted(cell.id for cell in cells)
