"""Shards in a bucket: uploaded completely, copied to each machine's disk, damage detected."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from convbert_jax import storage
from convbert_jax.data import bucket
from convbert_jax.data.errors import DataError
from convbert_jax.data.units import write_record
from convbert_jax.doctor import run_checks
from convbert_jax.interop.sources import read_tokenizer
from convbert_jax.recipes import prepared, tasks
from convbert_jax.training import consistency
from convbert_jax.workdir import Workdir
from tests.buckets import objects
from tests.data.parallel.conftest import make_pairs, pair_config, write_files
from tests.refusals import refused

__all__ = ["objects"]  # the fixture
SHARDS = "gs://bucket/shards"


@pytest.fixture
def machine(config, change, tmp_path):
    """machine(name): the config of another machine with a separate disk."""
    return lambda name: change(config, data={"directory": SHARDS, "cache": str(tmp_path / name)})


@pytest.fixture
def published(machine, objects, tmp_path, monkeypatch, small_units):
    """The bucket's shards, prepared by a machine that no longer exists."""
    config = machine("first")
    monkeypatch.setattr(bucket, "_AT_ONCE", 2)
    prepared.prepare(config, Workdir("unused").data(config))
    return objects / "shards"


@pytest.fixture(autouse=True)
def _hear(caplog):
    caplog.set_level("INFO")


def open_data(config):
    return tasks.open_data(config, Workdir("unused"))


def test_another_machine_has_the_same_rows(published, machine, tmp_path, caplog, monkeypatch):
    config = machine("second")
    found = open_data(config).corpus
    assert found.directory.is_relative_to(tmp_path / "second")
    first = next((tmp_path / "first").iterdir())
    names = {path.name for path in first.glob("*.*")}
    assert {path.name for path in published.iterdir()} == names
    for name in names:
        assert (found.directory / name).read_bytes() == (first / name).read_bytes()
    (copied,) = (record.args for record in caplog.records if "Copying" in str(record.args))
    assert copied[1] == len(names) - 1  # without the list
    caplog.clear()
    times = {path: path.stat().st_mtime_ns for path in found.directory.glob("*record")}
    monkeypatch.setattr(bucket, "_measure", lambda path: pytest.fail(f"reads all of {path}"))
    for name in ("first", "second"):
        assert open_data(machine(name)).corpus.fingerprint == found.fingerprint
    assert not any("Copying" in str(record.args) for record in caplog.records)
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_a_vocabulary_comes_without_shards(published, machine, tmp_path):
    tokenizer, _ = read_tokenizer(Workdir("unused"), machine("second"))
    assert tokenizer.vocab_size == 300
    here = tokenizer.path.parent
    assert here.is_relative_to(tmp_path / "second")
    assert not list(here.glob("*record"))
    corpus = open_data(machine("second")).corpus
    assert corpus.directory == here
    shard = corpus.splits["train"].shards[0][0]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-5])  # a truncated copy is copied again
    open_data(machine("second"))
    assert shard.read_bytes() == whole


def test_pairs_with_two_vocabularies(change, objects, tmp_path):
    made = pair_config(write_files(tmp_path, make_pairs(200)), shared_vocabulary=False)
    made = dataclasses.replace(made, recipe="translation")
    config = change(made, data={"directory": SHARDS, "cache": str(tmp_path / "first")})
    first = prepared.prepare(config, Workdir("unused").data(config))
    second = open_data(change(config, data={"cache": str(tmp_path / "second")})).pairs
    assert first.fingerprint == second.fingerprint
    assert np.array_equal(first.splits["train"].lengths, second.splits["train"].lengths)
    assert (objects / "shards" / "target" / "tokenizer.model").is_file()


def test_a_folder_without_its_list_is_prepared_anew(published, machine):
    (published / bucket.LIST).unlink()
    config = machine("second")
    here = bucket.fetch(Workdir("unused").data(config), config.data.cache)
    assert not list(here.glob("*record"))
    assert open_data(config).corpus.splits["train"].rows
    assert (published / bucket.LIST).is_file()


def test_a_folder_that_changed_is_copied_again(published, machine, change):
    config = machine("second")
    old = open_data(config).corpus.fingerprint
    for path in published.iterdir():
        path.unlink()
    new = change(machine("third"), data={"length": 32})
    prepared.prepare(new, Workdir("unused").data(new))
    now = change(config, data={"length": 32})
    assert open_data(now).corpus.fingerprint not in (old, None)
    with refused(DataError, "length", path=SHARDS) as caught:
        open_data(config)
    assert config.data.cache not in str(caught.value)


def test_damaged_and_missing_objects(published, machine, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket, "_AT_ONCE", 1)
    shard = max(published.glob("validation-*record"))
    whole = shard.read_bytes()
    shard.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with refused(storage.DamagedFileError, path=f"{SHARDS}/{shard.name}"):
        open_data(machine("second"))
    (here,) = (tmp_path / "second").iterdir()
    assert not (here / shard.name).exists()
    shard.unlink()
    with refused(DataError, path=f"{SHARDS}/{shard.name}"):
        open_data(machine("second"))
    shard.write_bytes(whole)
    brought, bring = [], bucket._bring  # an interrupted copy is continued
    monkeypatch.setattr(bucket, "_bring", lambda *a: (brought.append(a[2]), bring(*a)))
    open_data(machine("second"))
    assert shard.name in brought
    assert len(brought) < len(list(published.iterdir())) - 1


def test_damaged_lists(published, machine):
    at = f"{SHARDS}/{bucket.LIST}"
    content = json.loads((published / bucket.LIST).read_text())
    content["files"]["metadata.json"][0] += 1
    (published / bucket.LIST).write_text(json.dumps(content))
    with refused(storage.DamagedFileError, path=at):
        open_data(machine("second"))
    for name in ("../elsewhere", "/etc/elsewhere", "a/../../elsewhere"):
        write_record(published / bucket.LIST, {"files": {name: [1, 1]}})
        with refused(storage.DamagedFileError, name, path=at):
            open_data(machine("second"))


def test_a_disk_without_room(published, machine, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "replacing", full)
    with refused(DataError, "No space left", "--config.data.cache"):
        open_data(machine("second"))


def test_the_doctor_reports_what_is_there(machine, objects, config):
    at = Workdir("unused").data(machine("first"))
    (before,) = run_checks.check_data(machine("first"), "unused")
    with refused(DataError, SHARDS):  # a runner's workers cannot access the bucket
        prepared.prepare(machine("first"), at, runner=object())
    prepared.prepare(machine("first"), at)
    (after,) = run_checks.check_data(machine("second"), "unused")
    assert config.data.source in before.text
    for part in (SHARDS, "0.00 GB", machine("second").data.cache):
        assert part in after.text


@pytest.mark.parametrize("place", ["bucket", "disk"])
def test_several_processes_do_not_wait_for_one_that_prepares(
    place, config, change, machine, objects, tmp_path, monkeypatch
):
    on_disk = change(config, data={"directory": str(tmp_path / "shards")})
    config = machine("first") if place == "bucket" else on_disk
    monkeypatch.setattr(jax, "process_count", lambda: 8)
    with refused(DataError, 8, "--mode=prepare", config.data.directory):
        open_data(config)
    prepared.prepare(config, Workdir("unused").data(config))
    seen = []
    monkeypatch.setattr(consistency, "check_data", lambda config, found: seen.append(found))
    assert [open_data(config).corpus.fingerprint] == seen
