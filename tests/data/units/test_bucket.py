"""Shards in a bucket: put there whole, copied to the disk of each machine, and what goes wrong."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from convbert_jax import files
from convbert_jax.data.errors import DataError
from convbert_jax.data.records import write_record
from convbert_jax.data.units import bucket
from convbert_jax.doctor.start import Start
from convbert_jax.interop.runs.vocabulary import read_tokenizer
from convbert_jax.recipes import prepared
from convbert_jax.training.environment import roll_call
from convbert_jax.workdir import Workdir
from tests.buckets import objects

__all__ = ["objects"]  # the fixture
SHARDS = "gs://bucket/shards"


@pytest.fixture
def machine(config, change, tmp_path):
    """machine(name): the config as another machine has it, with a disk of its own."""
    return lambda name: change(config, data={"directory": SHARDS, "cache": str(tmp_path / name)})


@pytest.fixture
def published(machine, objects, tmp_path, monkeypatch, small_units):
    """The folder that the bucket's shards are in, prepared by a machine that is gone."""
    config = machine("first")
    monkeypatch.setattr(bucket, "_AT_ONCE", 2)
    prepared.prepare(config, Workdir("unused").data(config))
    return objects / "shards"


@pytest.fixture(autouse=True)
def _hear(caplog):
    caplog.set_level("INFO")


def open_data(config):
    return prepared.open_data(config, Workdir("unused"))


def test_another_machine_has_the_same_rows(published, machine, tmp_path, caplog):
    config = machine("second")
    found = open_data(config).corpus
    assert found.directory.is_relative_to(tmp_path / "second")
    first = next((tmp_path / "first").iterdir())
    names = {path.name for path in first.glob("*.*")}
    assert {path.name for path in published.iterdir()} == names
    for name in names:
        assert (found.directory / name).read_bytes() == (first / name).read_bytes()
    assert f"Copying {SHARDS} to {found.directory}: {len(names) - 1} files" in caplog.text
    caplog.clear()
    times = {path: path.stat().st_mtime_ns for path in found.directory.glob("*record")}
    assert open_data(config).corpus.fingerprint == found.fingerprint
    assert "Copying" not in caplog.text
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_nothing_is_measured_again(published, machine, monkeypatch):
    monkeypatch.setattr(bucket, "_measure", lambda path: pytest.fail(f"reads all of {path}"))
    open_data(machine("first"))


def test_a_vocabulary_comes_without_shards(published, machine, tmp_path):
    tokenizer, _ = read_tokenizer(Workdir("unused"), machine("second"))
    assert tokenizer.vocab_size == 300
    here = tokenizer.path.parent
    assert here.is_relative_to(tmp_path / "second")
    assert not list(here.glob("*record"))
    assert open_data(machine("second")).corpus.directory == here
    assert list(here.glob("*record"))


def test_pairs_with_two_vocabularies(change, objects, tmp_path, pairs_config):
    config = change(pairs_config, data={"directory": SHARDS, "cache": str(tmp_path / "first")})
    first = prepared.prepare(config, Workdir("unused").data(config))
    config = change(config, data={"cache": str(tmp_path / "second")})
    second = open_data(config).pairs
    assert first.fingerprint == second.fingerprint
    assert np.array_equal(first.splits["train"].lengths, second.splits["train"].lengths)
    assert (objects / "shards" / "target" / "tokenizer.model").is_file()


@pytest.fixture
def pairs_config(tmp_path):
    from tests.data.parallel import conftest

    source = conftest.write_files(tmp_path, conftest.make_pairs(200))
    made = conftest.make_config.__wrapped__()(source, shared_vocabulary=False)
    return dataclasses.replace(made, recipe="translation")


def test_what_is_half_there_is_not_there(published, machine, caplog):
    (published / bucket.LIST).unlink()
    config = machine("second")
    here = bucket.fetch(Workdir("unused").data(config), config.data.cache)
    assert not list(here.glob("*record"))
    open_data(config)  # prepares it anew, and puts it there
    assert (published / bucket.LIST).is_file()
    assert "Prepared" in caplog.text


def test_what_changed_there_is_copied_again(published, machine, change):
    config = machine("second")
    old = open_data(config).corpus.fingerprint
    for path in published.iterdir():
        path.unlink()
    new = change(machine("third"), data={"length": 32})
    prepared.prepare(new, Workdir("unused").data(new))
    now = change(config, data={"length": 32})
    assert open_data(now).corpus.fingerprint not in (old, None)
    with pytest.raises(DataError, match=f"{SHARDS} holds another corpus.*length") as error:
        open_data(config)
    assert config.data.cache not in str(error.value)


def test_a_damaged_object_is_named_and_not_kept(published, machine, tmp_path):
    shard = next(published.glob("train-*record"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(files.DamagedFileError, match=f"{SHARDS}/{shard.name} is damaged"):
        open_data(machine("second"))
    (here,) = (tmp_path / "second").iterdir()
    assert not (here / shard.name).exists()
    shard.unlink()
    with pytest.raises(DataError, match=f"{SHARDS}/{shard.name} is missing; delete"):
        open_data(machine("second"))


def test_what_a_stopped_copy_had_is_kept(published, machine, monkeypatch):
    monkeypatch.setattr(bucket, "_AT_ONCE", 1)
    missing = max(published.glob("validation-*record"))
    whole = missing.read_bytes()
    missing.unlink()
    with pytest.raises(DataError, match="is missing"):
        open_data(machine("second"))
    missing.write_bytes(whole)
    brought, bring = [], bucket._bring
    monkeypatch.setattr(bucket, "_bring", lambda *a: (brought.append(a[2]), bring(*a)))
    open_data(machine("second"))
    assert missing.name in brought
    assert len(brought) < len(list(published.iterdir())) - 1


def test_a_cut_copy_is_copied_again(published, machine):
    config = machine("second")
    found = open_data(config).corpus
    shard = found.splits["train"].shards[0][0]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-5])
    open_data(config)
    assert shard.read_bytes() == whole


def test_a_disk_without_room_is_one_sentence(published, machine, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "replacing", full)
    with pytest.raises(DataError, match=r"No space left.*--config\.data\.cache"):
        open_data(machine("second"))


def test_a_list_that_is_none(published, machine):
    content = json.loads((published / bucket.LIST).read_text())
    content["files"]["metadata.json"][0] += 1
    (published / bucket.LIST).write_text(json.dumps(content))
    with pytest.raises(files.DamagedFileError, match=f"{SHARDS}/{bucket.LIST} is damaged"):
        open_data(machine("second"))


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/elsewhere", "a/../../elsewhere"])
def test_a_list_names_no_other_place(published, machine, tmp_path, name):
    write_record(published / bucket.LIST, {"files": {name: [1, 1]}})
    with pytest.raises(files.DamagedFileError, match=f"it names {name}"):
        open_data(machine("second"))


def test_the_doctor_says_what_is_there(machine, objects, config):
    at = Workdir("unused").data(machine("first"))
    (before,) = Start(machine("first"), "unused", ()).check_data()
    prepared.prepare(machine("first"), at)
    (after,) = Start(machine("second"), "unused", ()).check_data()
    assert config.data.source in before.text
    assert f"{SHARDS} is prepared, 0.00 GB to copy to {machine('second').data.cache}" == after.text


def test_runners_and_buckets(machine, objects):
    config = machine("first")
    with pytest.raises(DataError, match="is a bucket, and the workers of a runner"):
        prepared.prepare(config, Workdir("unused").data(config), runner=object())


@pytest.mark.parametrize("place", ["bucket", "disk"])
def test_several_processes_do_not_wait_for_one_that_prepares(
    place, config, change, machine, objects, tmp_path, monkeypatch
):
    on_disk = change(config, data={"directory": str(tmp_path / "shards")})
    config = machine("first") if place == "bucket" else on_disk
    monkeypatch.setattr(jax, "process_count", lambda: 8)
    with pytest.raises(DataError, match=r"8 processes would wait for it.*--mode=prepare"):
        open_data(config)
    prepared.prepare(config, Workdir("unused").data(config))
    seen = []
    monkeypatch.setattr(roll_call, "check_data", lambda config, found: seen.append(found))
    assert [open_data(config).corpus.fingerprint] == seen
