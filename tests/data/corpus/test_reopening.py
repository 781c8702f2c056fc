"""What a prepared folder accepts and refuses, and in which words."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from sentencepiece import sentencepiece_model_pb2

from convbert_jax.data.corpus import corpus, preparation
from convbert_jax.data.corpus.corpus import prepare
from convbert_jax.data.corpus.metadata import VERSIONS
from convbert_jax.data.corpus.rows import ShardReader
from convbert_jax.data.errors import DataError
from convbert_jax.data.records import write_record
from convbert_jax.files import DamagedFileError


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("data", "length", 32, r"length \(64 there, 32 wanted\)"),
        ("data", "layout", "electra", r"layout \('packed' there, 'electra' wanted\)"),
        ("data", "heldout_fraction", 0.2, r"heldout_fraction \(0\.1 there, 0\.2 wanted\)"),
        ("data", "format", "lines", "the train source"),
        ("tokenizer", "vocab_size", 290, r"tokenizer\.vocab_size \(300 there, 290 wanted\)"),
        ("tokenizer", "lowercase", False, r"tokenizer\.lowercase \(True there, False wanted\)"),
        ("tokenizer", "kind", "wordpiece", r"tokenizer\.kind \('sentencepiece' there"),
    ],
)
@pytest.mark.parametrize("complete", [True, False])
def test_another_corpus_is_refused(
    config, change, prepared, section, field, value, message, complete, contents
):
    folder = prepared
    if not complete:
        unfinish(folder)
    before = contents(folder)
    with pytest.raises(DataError, match=f"{message}.*--config.data.directory="):
        prepare(change(config, **{section: {field: value}}), folder)
    assert contents(folder) == before


def test_whole_rows_of_an_earlier_version_are_used_and_others_not_mixed_in(
    config, prepared, monkeypatch, caplog
):
    """Runs on them go on: their rows are those that they know."""
    before = prepare(config, prepared).fingerprint
    monkeypatch.setitem(VERSIONS, "packed", VERSIONS["packed"] + 1)
    with caplog.at_level("WARNING"):
        assert prepare(config, prepared).fingerprint == before
    assert "was prepared by an earlier version" in caplog.text
    unfinish(prepared)
    with pytest.raises(DataError, match=r"version \(1 there, 2 wanted\)"):
        prepare(config, prepared)


def test_units_of_which_nothing_says_of_what_are_refused(config, prepared, contents):
    (prepared / "metadata.json").unlink()
    before = contents(prepared)
    with pytest.raises(DataError, match=r"has finished units but no metadata\.json"):
        prepare(config, prepared)
    assert contents(prepared) == before


def test_changed_source_and_changed_tokenizer_are_refused(config, corpus_file, prepared):
    folder = prepared
    text = corpus_file.read_text()
    corpus_file.write_text(text + "\n\nOne more document.\n")
    with pytest.raises(DataError, match="differs in the train source"):
        prepare(config, folder)
    corpus_file.write_text(text)
    prepare(config, folder)
    model = folder / "tokenizer.model"
    changed = sentencepiece_model_pb2.ModelProto.FromString(model.read_bytes())
    changed.pieces[100].score -= 1
    model.write_bytes(changed.SerializeToString())
    with pytest.raises(DataError, match="another vocabulary or normalization"):
        prepare(config, folder)


def test_changed_vocabulary_file_is_refused(config, change, tmp_path, documents):
    path = tmp_path / "vocab.txt"
    trained = prepare(change(config, tokenizer={"kind": "wordpiece"}), tmp_path / "trained")
    path.write_text("".join(f"{entry}\n" for entry in trained.tokenizer.entries))
    fields = {"kind": "wordpiece", "path": str(path), "vocab_size": 300}
    config = change(config, tokenizer=fields)
    corpus = prepare(config, tmp_path / "prepared")
    assert np.array_equal(all_rows(corpus, "train"), all_rows(trained, "train"))
    moved = tmp_path / "moved.txt"
    path.rename(moved)
    again = prepare(change(config, tokenizer={"path": str(moved)}), tmp_path / "prepared")
    assert again.fingerprint == corpus.fingerprint
    entries = trained.tokenizer.entries
    entries[200], entries[201] = entries[201], entries[200]
    path.write_text("".join(f"{entry}\n" for entry in entries))
    with pytest.raises(DataError, match="another vocabulary or normalization"):
        prepare(config, tmp_path / "prepared")


def test_source_may_be_gone_once_prepared(config, change, corpus_file, tmp_path):
    folder = tmp_path / "prepared"
    expected = prepare(config, folder)
    corpus_file.rename(tmp_path / "elsewhere.txt")
    assert prepare(config, folder).fingerprint == expected.fingerprint
    with pytest.raises(DataError, match="differs in source"):
        prepare(change(config, data={"source": "text:absent.txt"}), folder)
    (tmp_path / "moved").mkdir()
    (tmp_path / "elsewhere.txt").rename(tmp_path / "moved" / "corpus.txt")
    moved = change(config, data={"source": f"text:{tmp_path}/moved/*.txt"})
    assert prepare(moved, folder).fingerprint == expected.fingerprint


def test_damaged_shard_is_named(config, prepared):
    corpus = prepare(config, prepared)
    path, _ = corpus.splits["train"].shards[0]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DamagedFileError, match=r"train-00000\.array_record is damaged \(it has "):
        prepare(config, prepared)


def test_fingerprint_covers_what_changes_rows(config, change, prepared, tmp_path):
    prints = {prepare(config, prepared).fingerprint}
    for i, sections in enumerate(
        (
            {"data": {"length": 32}},
            {"data": {"heldout_fraction": 0.2}},
            {"data": {"layout": "electra"}},
            {"tokenizer": {"vocab_size": 290}},
        )
    ):
        prints.add(prepare(change(config, **sections), tmp_path / f"{i + 1}").fingerprint)
    assert len(prints) == 5


def test_prepared_corpus_opens_without_work(config, prepared, monkeypatch, contents):
    before = contents(prepared)
    for name in ("prepare_tokenizer", "process_units"):
        monkeypatch.setattr(preparation, name, None)
    monkeypatch.setattr(corpus, "lock", None)
    first, second = (prepare(config, prepared) for _ in range(2))
    assert second.fingerprint == first.fingerprint
    assert second.splits == first.splits
    assert contents(prepared) == before


def unfinish(folder) -> None:
    path = folder / "metadata.json"
    content = json.loads(path.read_text())
    del content["crc32"]
    write_record(path, content | {"complete": False})


def all_rows(corpus, split):
    shards = corpus.splits[split]
    reader = ShardReader(shards.shards, corpus.row_dtype)
    return reader.read(np.arange(shards.rows))


def test_nothing_finished_binds_nothing(config, change, corpus_file, tmp_path, caplog):
    """A vocabulary without a shard, as Ctrl-C leaves it, is made again for the next settings."""
    folder = tmp_path / "begun"
    prepare(config, folder)
    unfinish(folder)
    for unit in (folder / "units").iterdir():
        unit.unlink()
    changed = change(
        config,
        tokenizer={"kind": "wordpiece", "vocab_size": 290},
        data={"length": 32, "heldout_fraction": 0.2},
    )
    with caplog.at_level("INFO", logger="absl"):  # an earlier test may have set its level
        prepared = prepare(changed, folder)
    assert "begins anew" in caplog.text
    assert prepared.tokenizer.kind == "wordpiece"
    fresh = prepare(changed, tmp_path / "fresh")
    assert prepared.fingerprint == fresh.fingerprint
    for (shard, _), (other, _) in zip(
        prepared.splits["train"].shards, fresh.splits["train"].shards, strict=True
    ):
        assert shard.read_bytes() == other.read_bytes()


def test_the_way_out_of_another_corpus_works(config, change, prepared):
    changed = change(config, data={"length": 32})
    with pytest.raises(DataError) as refused:
        prepare(changed, prepared)
    flag = re.search(r"--config\.data\.directory=(\S+)\.$", str(refused.value))
    assert prepare(changed, Path(flag[1])).length == 32
    assert prepare(config, prepared).length == 64
