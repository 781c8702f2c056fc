"""Preparing pairs: the same however it went, resumed, refused in a sentence."""

import dataclasses
import json

import numpy as np
import pytest

from convbert_jax.config import Config, ConfigError, from_config_dict
from convbert_jax.data.corpus.rows import ShardReader
from convbert_jax.data.errors import DataError
from convbert_jax.data.parallel import pair_source, parallel_text
from convbert_jax.data.parallel.parallel_text import prepare
from convbert_jax.data.parallel.records import Pair, from_records, id_dtype, to_records
from convbert_jax.data.sources import documents
from convbert_jax.files import DamagedFileError
from tests.data.parallel.conftest import write_files


def rows_of(text, split):
    reader = ShardReader(
        text.splits[split].shards, text.id_dtype, from_records, returned=np.dtype(object)
    )
    rows = reader.read(np.arange(text.splits[split].rows))
    reader.close()
    return rows


def texts_of(text):
    return {
        (text.vocabularies.source.decode(row.source), text.vocabularies.target.decode(row.target))
        for split in text.splits
        for row in rows_of(text, split)
    }


@pytest.fixture
def small_units(monkeypatch):
    monkeypatch.setattr(documents, "UNIT_BYTES", 4_000)
    monkeypatch.setattr(pair_source, "MARK_LINES", 16)


@pytest.mark.parametrize("vocab", [100, 70_000])
def test_records_come_back(vocab):
    dtype = id_dtype(vocab, 50)
    pairs = [Pair(np.array([1, vocab - 1]), np.array([3]), "ä b", "c"), Pair(np.array([7]), [])]
    back = from_records(to_records(pairs, dtype), dtype)
    assert [row.source.tolist() for row in back] == [[1, vocab - 1], [7]]
    assert [row.target.tolist() for row in back] == [[3], []]
    assert [(row.source_text, row.target_text) for row in back] == [("ä b", "c"), ("", "")]
    with pytest.raises(ValueError, match="another size"):
        from_records([to_records(pairs, dtype)[0] + b"x"], dtype)


def test_every_pair_is_there_with_its_lengths(prepared, pairs):
    _, text = prepared
    assert texts_of(text) == set(pairs)
    assert sum(split.rows for split in text.splits.values()) == len(pairs)
    assert text.splits["validation"].rows > 10
    for name, split in text.splits.items():
        sizes = [(len(row.source) + 1, len(row.target) + 1) for row in rows_of(text, name)]
        assert split.lengths.tolist() == [list(size) for size in sizes]
        assert split.tokens == tuple(split.lengths.sum(axis=0))


def test_units_and_workers_change_nothing_but_shards(
    prepared, pairs, make_config, small_units, tmp_path
):
    _, whole = prepared
    config = make_config(write_files(tmp_path, pairs))
    text = prepare(config, tmp_path / "prepared")
    assert len(text.splits["train"].shards) > 2
    assert texts_of(text) == texts_of(whole)
    # Opened again, and with a unit done again after its record was lost.
    again = prepare(config, tmp_path / "prepared")
    assert again.fingerprint == text.fingerprint
    before = (tmp_path / "prepared" / "train-00001.array_record").read_bytes()
    (tmp_path / "prepared" / "units" / "00001.json").unlink()
    (tmp_path / "prepared" / "train-00001.lengths").unlink()
    again = prepare(config, tmp_path / "prepared")
    assert (tmp_path / "prepared" / "train-00001.array_record").read_bytes() == before
    assert again.splits["train"].checksums == text.splits["train"].checksums
    assert (again.splits["train"].lengths == text.splits["train"].lengths).all()


def test_two_processes_give_the_same_files(pairs, make_config, small_units, tmp_path):
    config = make_config(write_files(tmp_path, pairs), sampling=0.1)
    alone = prepare(config, tmp_path / "alone")
    two = dataclasses.replace(config, data=dataclasses.replace(config.data, workers=2))
    text = prepare(two, tmp_path / "two")
    assert text.fingerprint == alone.fingerprint
    for name, split in text.splits.items():
        assert split.checksums == alone.splits[name].checksums
        assert (split.lengths == alone.splits[name].lengths).all()


def test_what_a_killed_run_finished_is_kept(pairs, make_config, small_units, tmp_path, monkeypatch):
    config = make_config(write_files(tmp_path, pairs))
    real, done = parallel_text.process_pairs, []

    def killed(job, index, *rest):
        if len(done) == 2 and not killed.over:
            raise KeyboardInterrupt
        done.append(index)
        return real(job, index, *rest)

    killed.over = False
    monkeypatch.setattr(parallel_text, "process_pairs", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(config, tmp_path / "prepared")
    killed.over = True
    text = prepare(config, tmp_path / "prepared")
    assert len(done) == len(set(done)) == len(text.splits["train"].shards)
    assert texts_of(text) == set(pairs)


def test_bad_pairs_are_counted_and_the_first_is_named(pairs, make_config, change, tmp_path, caplog):
    bad = [
        *pairs[:50],
        ("ba", "  "),
        ("", "ba"),
        ("ba " * 200, "ba"),
        ("ba", "di do du de da di do du"),
        *pairs[50:],
    ]
    config = make_config(write_files(tmp_path, bad), max_length=100, max_ratio=6.0)
    with caplog.at_level("INFO", logger="absl"):
        text = prepare(config, tmp_path / "prepared")
    said = [record.getMessage() for record in caplog.records]
    (empty,) = (line for line in said if "(empty)" in line)
    assert f"2 of {len(bad)} pairs left out" in empty
    assert "train.bb line 51 has an empty target" in empty  # the file that it is in
    (long,) = (line for line in said if "(long)" in line)
    assert "line 53 has a source of" in long
    (uneven,) = (line for line in said if "(uneven)" in line)
    assert "config.parallel.max_ratio=6" in uneven
    lengths = np.concatenate([split.lengths for split in text.splits.values()])
    assert lengths.max() <= 100
    assert (lengths.max(axis=1) <= 6 * lengths.min(axis=1)).all()
    strict = change(config, bad_pairs="error")
    with pytest.raises(DataError, match=r"line 51 has an empty target"):
        prepare(strict, tmp_path / "prepared")
    with pytest.raises(DataError, match=r"train\.bb line 51 has an empty target; mend it"):
        prepare(strict, tmp_path / "elsewhere")


def test_long_sources_are_cut_where_that_is_asked_for_and_targets_never(
    pairs, make_config, change, tmp_path, caplog
):
    more = [("ba " * 200, "ba di"), ("ba", "di " * 200), ("du " * 150, "ba do")]
    config = make_config(write_files(tmp_path, pairs + more), max_length=100, cut_sources=True)
    with caplog.at_level("INFO", logger="absl"):
        text = prepare(config, tmp_path / "prepared")
    rows = [row for split in text.splits for row in rows_of(text, split)]
    longest = [row for row in rows if len(row.source) == 99]
    found = {text.vocabularies.target.decode(row.target): row.source for row in longest}
    assert set(found) == {"ba di", "ba do"}
    whole = text.vocabularies.source.encode(["ba " * 200])[0]
    np.testing.assert_array_equal(found["ba di"], whole[:99])
    assert len(rows) == len(pairs) + 2
    (said,) = (line for line in caplog.messages if "sources cut" in line)
    assert f"2 of {len(pairs) + 3} sources cut to config.parallel.max_length; the first:" in said
    assert f"line {len(pairs) + 1} has a source of {len(whole) + 1} tokens" in said
    (long,) = (line for line in caplog.messages if "(long)" in line)
    assert f"1 of {len(pairs) + 3} pairs left out" in long
    assert f"line {len(pairs) + 2} has a target of" in long
    with pytest.raises(DataError, match=r"cut_sources \(True there, None wanted\)"):
        prepare(change(config, cut_sources=False), tmp_path / "prepared")


def test_two_vocabularies(pairs, make_config, tmp_path):
    config = make_config(
        write_files(tmp_path, pairs), shared_vocabulary=False, target_vocab_size=120
    )
    text = prepare(config, tmp_path / "prepared")
    source, target = text.vocabularies
    assert (source.vocab_size, target.vocab_size) == (160, 120)
    assert source.path.parent.name == "source"
    assert texts_of(text) == set(pairs)
    one = prepare(make_config(f"parallel:{tmp_path}/train.aa,{tmp_path}/train.bb"), tmp_path / "b")
    assert one.vocabularies.source is one.vocabularies.target
    assert one.fingerprint != text.fingerprint


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_length": 30}, r"max_length \(256 there, 30 wanted\)"),
        ({"max_ratio": 2.0}, r"max_ratio \(0.0 there, 2.0 wanted\)"),
        ({"shared_vocabulary": False}, "vocabularies"),
        ({"sampling": 0.1}, r"sampling \(0.0 there, 0.1 wanted\)"),
        ({"cut_sources": True}, r"cut_sources \(None there, True wanted\)"),
    ],
)
def test_a_folder_of_other_pairs_is_refused(prepared, change, fields, says):
    config, text = prepared
    with pytest.raises(DataError, match=f"holds something else.*{says}"):
        prepare(change(config, **fields), text.directory)


def test_units_of_which_nothing_says_of_what_are_refused(pairs, make_config, tmp_path):
    config = make_config(write_files(tmp_path, pairs))
    vocabulary = prepare(config, tmp_path / "prepared").vocabularies.source.path
    (tmp_path / "prepared" / "metadata.json").unlink()
    before = vocabulary.stat().st_mtime_ns
    with pytest.raises(DataError, match=r"has finished units but no metadata\.json"):
        prepare(config, tmp_path / "prepared")
    assert vocabulary.stat().st_mtime_ns == before


def test_prepared_pairs_outlive_their_files(pairs, make_config, tmp_path):
    config = make_config(write_files(tmp_path, pairs))
    text = prepare(config, tmp_path / "prepared")
    (tmp_path / "train.aa").unlink()
    assert prepare(config, tmp_path / "prepared").fingerprint == text.fingerprint
    lengths = tmp_path / "prepared" / "train-00000.lengths"
    whole = lengths.read_bytes()
    lengths.write_bytes(b"\1" + whole[1:])
    with pytest.raises(DamagedFileError, match="lengths is damaged"):
        prepare(config, tmp_path / "prepared")
    lengths.unlink()
    with pytest.raises(DataError, match="lengths is missing; put a copy back"):
        prepare(config, tmp_path / "prepared")


def test_pairs_that_are_trained_on_are_not_held_out(pairs, make_config, tmp_path):
    source = write_files(tmp_path, pairs)
    config = make_config(source, validation_source=source, heldout_fraction=0.0)
    with pytest.raises(
        DataError, match=r"validation_source=.* reads .*/train\.aa, which config\.parallel"
    ):
        prepare(config, tmp_path / "prepared")


def test_no_pairs_is_one_sentence(make_config, tmp_path):
    with pytest.raises(DataError, match=r"config\.parallel\.source is empty"):
        prepare(Config(), tmp_path / "prepared")
    with pytest.raises(DataError, match="has no text"):
        prepare(make_config(write_files(tmp_path, [("", "")] * 3)), tmp_path / "prepared")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"columns": ["a"]}, "two columns"),
        ({"max_ratio": 0.5}, "would leave no pair"),
        ({"from_scratch": True}, "of config.init_from, which is empty"),
        ({"heldout_fraction": 0.0}, "nothing to evaluate on"),
        ({"target_vocab_size": 99}, "shared_vocabulary=False"),
        ({"sampling": 1.5}, "must be at least 0"),
        ({"batch_tokens": 100}, "less than one text"),
        ({"bad_pairs": "skipp"}, "did you mean 'skip'"),
    ],
)
def test_fields_that_cannot_be_are_one_sentence(fields, says):
    with pytest.raises(ConfigError, match=says):
        from_config_dict({"parallel": fields})


def test_a_record_says_what_was_done(prepared, pairs):
    _, text = prepared
    record = json.loads((text.directory / "units" / "00000.json").read_text())
    assert record["pairs"] == len(pairs)
    assert record["faults"] == {}
