"""Damaged files of a prepared folder: one sentence with what to do, never a wrong value."""

import dataclasses
import json
import random
import shutil

import numpy as np
import pytest

from convbert_jax.config import UserError
from convbert_jax.data import records
from convbert_jax.data.corpus import metadata, preparation
from convbert_jax.data.corpus.batching import evaluation_batches, training_batches
from convbert_jax.data.corpus.corpus import prepare
from convbert_jax.data.corpus.rows import ShardReader
from convbert_jax.data.corpus.shards import Verification
from convbert_jax.data.errors import DataError
from convbert_jax.data.sources import documents
from convbert_jax.data.tokenizer import tokenizer
from convbert_jax.files import DamagedFileError

STORED = ["metadata.json", "unfinished metadata.json", "units/00001.json"]
STORED += ["tokenizer_settings.json", "tokenizer.json", "tokenizer.model"]


@pytest.fixture(scope="module")
def folders(make_config, tmp_path_factory):
    """{kind of tokenizer: (config, prepared folder)}, of several units."""
    result = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "UNIT_BYTES", 12_000)
        for kind in ("sentencepiece", "wordpiece"):
            folder = tmp_path_factory.mktemp(kind)
            config = make_config(folder)
            section = dataclasses.replace(config.tokenizer, kind=kind)
            config = dataclasses.replace(config, tokenizer=section)
            prepare(config, folder / "prepared")
            result[kind] = config, folder / "prepared"
    return result


@pytest.fixture
def stored(folders, tmp_path, request, monkeypatch, small_units):
    """(config, copy of the folder, path) with the folder in a state that reads `path`."""
    name = request.param
    config, folder = folders["wordpiece" if name == "tokenizer.json" else "sentencepiece"]
    folder = shutil.copytree(folder, tmp_path / "prepared")
    if name.startswith(("unfinished", "units")):
        content = json.loads((folder / "metadata.json").read_text())
        records.write_record(
            folder / "metadata.json",
            {key: content[key] for key in ("made_from", "tokenizer", "heldout", "stamps")}
            | {"complete": False},
        )
    return config, folder, folder / name.removeprefix("unfinished ")


def damages(content: bytes, seed: int):
    """Every kind of damage that was seen or feared, the same for a seed."""
    rng = random.Random(seed)
    yield from (b"", b"[]", b"5", b"null", b"{}", b'"text"', b"\xff\xfe{}", b"\x00" * len(content))
    yield from (b"[" * 50_000, b'{"a":' * 50_000, b"9" * 10_000, b'{"complete": "\\ud800"}')
    for _ in range(6):
        yield content[: rng.randrange(len(content))]
    for _ in range(12):
        changed = bytearray(content)
        changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        yield bytes(changed)
    yield content + content


def retyped(value):
    """`value` with one thing in it, however deep, of another type or gone."""
    for other in ([], {}, "text", None, 1.5, -(10**30)):
        if type(other) is not type(value):
            yield other
    if isinstance(value, dict):
        for name in value:
            yield {key: item for key, item in value.items() if key != name}
            for changed in retyped(value[name]):
                yield value | {name: changed}
    elif isinstance(value, list) and value:
        for changed in retyped(value[0]):
            yield [changed, *value[1:]]


def rows_of(corpus) -> list[bytes]:
    return [
        ShardReader(split.shards, corpus.row_dtype).read(np.arange(split.rows)).tobytes()
        for split in corpus.splits.values()
    ]


def attempt(config, folder, expected) -> bool:
    """Opens a damaged folder; False if it was refused, in one line."""
    try:
        corpus = prepare(config, folder)
        assert rows_of(corpus) == expected
        return True
    except UserError as error:
        message = str(error)
        assert message.endswith(".")
        assert "\n" not in message
        assert len(message) < 900
        return False


@pytest.mark.parametrize("stored", STORED, indirect=True, ids=lambda name: name.replace(" ", "-"))
def test_damage_is_one_sentence_or_nothing(stored, folders, monkeypatch):
    config, folder, path = stored
    kept = folders["wordpiece" if path.name == "tokenizer.json" else "sentencepiece"]
    expected = rows_of(prepare(*kept))
    content = path.read_bytes()
    metadata_content = (folder / "metadata.json").read_bytes()
    accepted = 0
    for damaged in damages(content, seed=len(str(path.name))):
        (folder / "metadata.json").write_bytes(metadata_content)
        path.write_bytes(damaged)
        accepted += attempt(config, folder, expected)
    assert accepted <= 2  # a bit that is not of a value, as in white space
    path.write_bytes(content)
    (folder / "metadata.json").write_bytes(metadata_content)
    assert attempt(config, folder, expected)


@pytest.mark.parametrize("stored", STORED[:5], indirect=True, ids=lambda n: n.replace(" ", "-"))
def test_fields_of_another_type(stored, folders):
    """Also without a checksum: as in folders that were prepared before there was one."""
    config, folder, path = stored
    kept = folders["wordpiece" if path.name == "tokenizer.json" else "sentencepiece"]
    expected = rows_of(prepare(*kept))
    content = json.loads(path.read_bytes())
    content.pop("crc32", None)
    metadata_content = (folder / "metadata.json").read_bytes()
    if path.name == "tokenizer.json":
        content["model"]["vocab"] = dict(list(content["model"]["vocab"].items())[:12])
        content["added_tokens"] = content["added_tokens"][:2]
    for changed in retyped(content):
        (folder / "metadata.json").write_bytes(metadata_content)
        path.write_text(json.dumps(changed))
        attempt(config, folder, expected)


def test_fields_are_those_that_are_written(folders):
    """So that a folder of today is never refused for want of a field."""
    _, folder = folders["sentencepiece"]
    for path, fields in (
        ("metadata.json", metadata.METADATA_FIELDS | metadata.SUMMARY_FIELDS),
        ("units/00000.json", preparation.RECORD_FIELDS),
        ("tokenizer_settings.json", tokenizer.SETTINGS_FIELDS),
    ):
        content = records.read_record(folder / path, remedy="", fields=fields)
        assert set(fields) <= set(content)
        assert "crc32" in json.loads((folder / path).read_text())


# --- Shards ---


@pytest.fixture
def corpus(folders, tmp_path):
    config, folder = folders["sentencepiece"]
    shutil.copytree(folder, tmp_path / "prepared")
    return prepare(config, tmp_path / "prepared")


def flip(path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


def test_a_flipped_byte_is_named_when_its_row_is_read(corpus):
    """No place of a file can change a value: a row has a hash, which is checked when it is read."""
    split = corpus.splits["train"]
    path, rows = split.shards[1]
    content = path.read_bytes()

    def read():
        return ShardReader([(path, rows)], corpus.row_dtype).read(np.arange(rows))

    expected, named = read(), 0
    for place in random.Random(0).sample(range(12_000), 100):
        flip(path, place)
        try:
            assert np.array_equal(read(), expected)
        except DamagedFileError as error:
            named += f"{path} is damaged (" in str(error) and "delete it and" in str(error)
        path.write_bytes(content)
    assert named > 60  # the others are of no row


@pytest.mark.parametrize("split", ["train", "validation"])
def test_damage_ends_a_run_at_its_beginning(corpus, split):
    """Whatever row it is in, and if it is in none."""
    path, _ = corpus.splits[split].shards[-1]
    flip(path, path.stat().st_size - 1)
    batches = training_batches(corpus, batch_size=2, seed=0)
    with pytest.raises(DamagedFileError, match=f"{path.name} is damaged .its checksum"):
        batches._verification.wait()
    with pytest.raises(DamagedFileError, match=f"{path.name} is damaged .its checksum"):
        next(batches)
    batches.close()


def test_processes_verify_all_shards_between_them(corpus, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "convbert_jax.data.corpus.batching.Verification",
        lambda shards: seen.extend(shards) or Verification(()),
    )
    for process in range(4):
        training_batches(corpus, batch_size=4, seed=0, process_index=process, process_count=4)
    names = {path.name for path, checksum in seen if checksum is not None}
    there = {path.name for path in corpus.directory.glob("*.array_record")}
    assert names == there
    assert len(seen) == len(there)


def test_every_flipped_byte_is_found(corpus):
    path, _ = corpus.splits["train"].shards[0]
    checksum = corpus.splits["train"].checksums[0]
    content = path.read_bytes()
    for place in random.Random(1).sample(range(len(content)), 50):
        flip(path, place)
        with pytest.raises(DamagedFileError):
            Verification([(path, checksum)]).wait()
        path.write_bytes(content)
    Verification([(path, checksum)]).wait()
    path.unlink()
    with pytest.raises(DamagedFileError, match="No such file"):
        Verification([(path, checksum)]).wait()


def test_a_deleted_shard_alone_is_prepared_anew(folders, corpus, small_units, contents, tmp_path):
    config, folder = folders["sentencepiece"]
    before = contents(corpus.directory)
    times = {path: path.stat().st_mtime_ns for path in corpus.directory.glob("units/*.json")}
    (corpus.directory / "train-00001.array_record").unlink()
    again = prepare(config, corpus.directory)
    assert contents(corpus.directory) == before == contents(folder)
    assert again.fingerprint == corpus.fingerprint
    changed = [path.name for path, time in times.items() if path.stat().st_mtime_ns != time]
    assert changed == ["00001.json"]


def test_a_shard_that_is_gone_when_it_is_read_may_need_a_copy(corpus):
    """The reader does not know whether the source still exists."""
    path, rows = corpus.splits["train"].shards[0]
    path.unlink()
    with pytest.raises(DataError, match=rf"{path.name}.* if its source .* copy"):
        ShardReader([(path, rows)], corpus.row_dtype).read(np.arange(rows))


def test_a_shard_whose_source_is_gone_must_be_put_back(make_config, tmp_path):
    config = make_config(tmp_path)
    prepare(config, tmp_path / "prepared")
    (tmp_path / "corpus.txt").unlink()
    shard = tmp_path / "prepared" / "train-00000.array_record"
    content = shard.read_bytes()
    says = "put a copy back, as it cannot be prepared anew: No file matches"
    shard.write_bytes(content[:-1])
    with pytest.raises(DamagedFileError, match=f"is damaged .it has .*; {says}"):
        prepare(config, tmp_path / "prepared")
    shard.unlink()
    with pytest.raises(DataError, match=f"is missing; {says}"):
        prepare(config, tmp_path / "prepared")
    shard.write_bytes(content)
    prepare(config, tmp_path / "prepared")


def test_shards_without_checksums_open_and_say_so(folders, corpus, caplog):
    config, _ = folders["sentencepiece"]
    path = corpus.directory / "metadata.json"
    content = json.loads(path.read_text())
    del content["crc32"]
    for split in content["splits"].values():
        split["shards"] = [shard[:3] for shard in split["shards"]]
    path.write_text(json.dumps(content))
    old = prepare(config, corpus.directory)
    assert old.fingerprint == corpus.fingerprint
    assert set(old.splits["train"].checksums) == {None}
    with caplog.at_level("WARNING"):
        batches = training_batches(old, batch_size=4, seed=0)
        next(batches)
        batches.close()
    assert caplog.text.count("before checksums were kept") == 1
    list(evaluation_batches(old, batch_size=4))
