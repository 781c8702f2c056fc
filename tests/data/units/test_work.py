"""Units of work and their runners, without Apache Beam."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

from convbert_jax import storage
from convbert_jax.data import beam_pipeline
from convbert_jax.data.errors import DataError
from convbert_jax.data.units import (
    Processes,
    Work,
    do_units,
    make_attempts,
    record_path,
    remove_attempts,
)
from tests.refusals import refused


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
    """Write the text of a unit and its record."""
    assert unit in source.units
    if unit.text == "bad":
        raise DataError("It is bad.", value="bad")
    record = {"unit": index, "text": unit.text, "split": split}
    (job.directory / f"{index}.txt").write_text(unit.text)
    record_path(job.directory, index).write_text(json.dumps(record))
    return record


@pytest.fixture
def work(tmp_path):
    (tmp_path / "units").mkdir()
    train = Source((Unit(3, "one"), Unit(5, "two")))
    return Work(Job(tmp_path), {"train": train, "validation": Source((Unit(1, "held"),))}, process)


@pytest.fixture
def finished(tmp_path):
    """finished(index): the record of a unit, or None."""

    def of(index):
        path = record_path(tmp_path, index)
        return json.loads(path.read_text()) if path.exists() else None

    return of


def worker_of(work, attempts):
    return beam_pipeline._Worker(work, attempts, submitter=0)


def test_units_are_numbered_over_all_sources(work):
    fields = ("index", "source", "position", "split", "size")
    assert [tuple(getattr(each, f) for f in fields) for each in work.list_assignments()] == [
        (0, "train", 0, "train", 3),
        (1, "train", 1, "train", 5),
        (2, "validation", 0, "validation", 1),
    ]
    alone = dataclasses.replace(work, sources={"train": work.sources["train"]})
    assert [each.split for each in alone.list_assignments()] == ["", ""]


@pytest.mark.parametrize("workers", [1, 2])
def test_finished_units_are_not_done_again(work, tmp_path, finished, workers):
    record_path(tmp_path, 1).write_text('{"unit": 1, "text": "before"}')
    old = make_attempts(tmp_path)  # left by a start that was killed
    (old / "00000-1").mkdir()
    records = do_units(work, finished, Processes(workers))
    assert [record["text"] for record in records] == ["one", "before", "held"]
    assert do_units(work, finished, None) == records  # no runner is needed
    assert not list(tmp_path.glob("attempts-*"))
    with refused(DataError, path=old, field="config.data.directory"):  # a worker that still runs
        worker_of(work, old).do(work.list_assignments()[0])
    remove_attempts(tmp_path)


def test_runners_that_cannot_do_it(work, tmp_path, finished, monkeypatch):
    class Idle:
        def run(self, work, assignments):
            work.do(assignments[0])

    with refused(DataError, path=record_path(tmp_path, 1)):
        do_units(work, finished, Idle())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refused(DataError, "convbert_jax[beam]", field="--runner", value="DirectRunner"):
        beam_pipeline.open_runner("DirectRunner")


def test_attempts_are_apart_and_end_in_the_same_place(work, tmp_path, finished):
    """A runner may execute a unit twice, concurrently or after it is done."""
    attempts = make_attempts(tmp_path)
    for _ in range(2):
        worker_of(work, attempts).do(work.list_assignments()[0])
        assert (tmp_path / "0.txt").read_text() == "one"
        assert finished(0)["unit"] == 0
    assert not list(attempts.iterdir())


def test_after_a_unit_that_cannot_be_done_no_other_is_begun(work, tmp_path, monkeypatch):
    bad = dataclasses.replace(work, sources={"train": Source((Unit(1, "bad"), Unit(1, "good")))})
    attempts = make_attempts(tmp_path)
    for each in bad.list_assignments():
        worker_of(bad, attempts).do(each)
    (failed,) = attempts.glob("*.failed")
    assert failed.read_text() == "It is bad."
    assert not list((tmp_path / "units").iterdir())
    failed.unlink()

    def refuse(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "write_text", refuse)
    with refused(DataError, "It is bad."):
        worker_of(bad, attempts).do(bad.list_assignments()[0])
