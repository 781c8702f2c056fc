"""Units of work, whoever does them; what is said of a runner without Apache Beam being there."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

from convbert_jax import files
from convbert_jax.data.errors import DataError
from convbert_jax.data.units import beam_pipeline
from convbert_jax.data.units.processes import Processes
from convbert_jax.data.units.work import Work, do_units, make_attempts, record_path, remove_attempts


@dataclasses.dataclass(frozen=True)
class Job:
    directory: Path


@dataclasses.dataclass(frozen=True)
class Unit:
    size: int
    text: str


@dataclasses.dataclass(frozen=True)
class Source:
    units: tuple[Unit, ...]


def process(job, index, source, unit, split):
    """Says of a unit what it is."""
    assert unit in source.units
    if unit.text == "bad":
        raise DataError("It is bad.")
    record = {"unit": index, "text": unit.text, "split": split}
    (job.directory / f"{index}.txt").write_text(unit.text)
    record_path(job.directory, index).write_text(json.dumps(record))
    return record


def finished(directory):
    def of(index):
        path = record_path(directory, index)
        return json.loads(path.read_text()) if path.exists() else None

    return of


@pytest.fixture
def work(tmp_path):
    (tmp_path / "units").mkdir()
    sources = {
        "train": Source((Unit(3, "one"), Unit(5, "two"))),
        "validation": Source((Unit(1, "held"),)),
    }
    return Work(Job(tmp_path), sources, process)


def test_units_are_numbered_over_all_sources(work):
    told = [
        (each.index, each.source, each.position, each.split, each.size)
        for each in work.list_assignments()
    ]
    assert told == [
        (0, "train", 0, "train", 3),
        (1, "train", 1, "train", 5),
        (2, "validation", 0, "validation", 1),
    ]
    alone = dataclasses.replace(work, sources={"train": work.sources["train"]})
    assert [each.split for each in alone.list_assignments()] == ["", ""]


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_there_is_not_done_again(work, tmp_path, workers):
    of = finished(tmp_path)
    record_path(tmp_path, 1).write_text('{"unit": 1, "text": "before"}')
    records = do_units(work, of, Processes(workers))
    assert [record["text"] for record in records] == ["one", "before", "held"]
    assert do_units(work, of, None) == records  # nobody is asked


def test_a_runner_that_leaves_a_unit_out_is_told(work, tmp_path):
    class Idle:
        def run(self, work, assignments):
            work.do(assignments[0])

    with pytest.raises(DataError, match=r"00001\.json is not there, although its unit was done"):
        do_units(work, finished(tmp_path), Idle())


def test_beam_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"--runner=DirectRunner needs .*convbert_jax\[beam\]"):
        beam_pipeline.open_runner("DirectRunner")


def test_attempts_are_apart_and_end_in_the_same_place(work, tmp_path):
    """A runner may do a unit twice, side by side or after it is done."""
    attempts = make_attempts(tmp_path)
    worker = beam_pipeline._Worker(work, attempts, submitter=0)
    first, *_ = work.list_assignments()
    for _ in range(2):
        worker.do(first)
        assert (tmp_path / "0.txt").read_text() == "one"
        assert finished(tmp_path)(0)["unit"] == 0
    assert not list(attempts.iterdir())


def test_attempts_of_a_start_that_was_killed_are_removed(work, tmp_path):
    old = make_attempts(tmp_path)
    worker = beam_pipeline._Worker(work, old, submitter=0)
    (old / "00000-1").mkdir()
    do_units(work, finished(tmp_path), Processes(1))
    assert not list(tmp_path.glob("attempts-*"))
    with pytest.raises(DataError, match="is not there"):  # one that still runs
        worker.do(work.list_assignments()[0])
    remove_attempts(tmp_path)


def test_after_a_unit_that_cannot_be_done_no_other_is_begun(work, tmp_path):
    bad = dataclasses.replace(work, sources={"train": Source((Unit(1, "bad"), Unit(1, "good")))})
    attempts = make_attempts(tmp_path)
    worker = beam_pipeline._Worker(bad, attempts, submitter=0)
    for each in bad.list_assignments():
        worker.do(each)
    (failed,) = attempts.glob("*.failed")
    assert failed.read_text() == "It is bad."
    assert not list((tmp_path / "units").iterdir())


def test_what_cannot_be_written_down_is_raised(work, tmp_path, monkeypatch):
    def refuse(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_text", refuse)
    bad = dataclasses.replace(work, sources={"train": Source((Unit(1, "bad"),))})
    worker = beam_pipeline._Worker(bad, make_attempts(tmp_path), submitter=0)
    with pytest.raises(DataError, match=r"^It is bad\.$"):
        worker.do(bad.list_assignments()[0])


def test_a_worker_that_has_no_such_folder_says_so(work, tmp_path):
    worker = beam_pipeline._Worker(work, tmp_path / "attempts-of-elsewhere", submitter=0)
    with pytest.raises(DataError, match=r"attempts-of-elsewhere is not there on .* they share"):
        worker.do(work.list_assignments()[0])
