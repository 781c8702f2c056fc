"""Corpus-specific properties: held-out documents, layouts and undecodable text."""

import json
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax import console
from convbert_jax.config import Config
from convbert_jax.data.batching import evaluation_batches, training_batches
from convbert_jax.data.corpus import prepare
from convbert_jax.data.errors import DataError, TokenizerError
from convbert_jax.data.readers.text_files import cut_document
from convbert_jax.data.shards import ShardReader
from tests.refusals import refused


def all_rows(corpus, split):
    shards = corpus.splits[split]
    return ShardReader(shards.shards, corpus.row_dtype).read(np.arange(shards.rows))


def letters(corpus, split):
    special = set(corpus.tokenizer.special.by_name.values())
    rows = all_rows(corpus, split)["tokens"].tolist()
    text = "".join(corpus.tokenizer.decode([i for i in row if i not in special]) for row in rows)
    return sorted(text.replace(" ", ""))


# --- Held-out documents ---


def test_held_out_documents_are_chosen_by_their_text_alone(config, documents, tmp_path):
    first = prepare(config, tmp_path / "first")
    (tmp_path / "corpus.txt").write_text("\n\n".join(reversed(documents)))
    second = prepare(config, tmp_path / "second")
    assert (
        first.splits["validation"].counts["documents"]
        == (second.splits["validation"].counts["documents"])
    )
    assert letters(first, "validation") == letters(second, "validation")


def test_rows_of_byte_level_bpe_hold_each_document_exactly(config, change, documents, tmp_path):
    config = change(config, tokenizer={"kind": "bpe"})
    corpus = prepare(config, tmp_path / "rows")
    decode, special = corpus.tokenizer.decode, set(corpus.tokenizer.special.by_name.values())
    texts = {
        split: decode([i for i in all_rows(corpus, split)["tokens"].ravel() if i not in special])
        for split in ("train", "validation")
    }
    for text in texts.values():
        assert text == "".join(document for document in documents if document in text)
    assert sum(map(len, texts.values())) == sum(map(len, documents))
    again = prepare(config, tmp_path / "rows")
    assert (again.fingerprint, again.tokenizer.kind) == (corpus.fingerprint, "bpe")
    with refused(DataError, "'bpe'", "'sentencepiece'", path=tmp_path / "rows"):
        prepare(change(config, tokenizer={"kind": "sentencepiece"}), tmp_path / "rows")


def test_of_few_documents_one_is_held_out(config, change, documents, tmp_path, caplog):
    config = change(config, data={"heldout_fraction": 1e-9}, tokenizer={"vocab_size": 100})
    caplog.set_level(logging.INFO, logger="absl")
    for count in (2, 3):
        caplog.clear()
        texts = ["\n".join(documents[40 * i :][:40]) for i in range(count)]
        (tmp_path / "corpus.txt").write_text("\n\n".join(texts))
        corpus = prepare(config, tmp_path / str(count))
        assert corpus.splits["validation"].counts["documents"] == 1
        assert corpus.splits["train"].counts["documents"] == count - 1
        assert sum("config.data.heldout_fraction=1e-09" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("joint", ["\n", " ", ""])
def test_a_piece_of_a_single_document_is_held_out(
    config, change, documents, tmp_path, caplog, joint
):
    (tmp_path / "corpus.txt").write_text(joint.join(documents).replace("\n", joint))
    config = change(config, data={"format": "file"}, tokenizer={"vocab_size": 100})
    caplog.set_level(logging.INFO, logger="absl")
    corpus = prepare(config, tmp_path / "prepared")
    assert corpus.splits["validation"].counts["documents"] == 1
    assert 15 <= corpus.splits["train"].counts["documents"] <= 20
    assert sum("config.data.validation_source" in line for line in caplog.messages) == 1


@given(text=st.text("ab \n", max_size=60), pieces=st.integers(2, 20))
@settings(max_examples=50)
def test_pieces_are_the_whole_document(text, pieces):
    found = cut_document(text, pieces)
    assert "".join("".join(found).split()) == "".join(text.split())
    assert len(found) <= pieces


# --- Text ---


def test_undecodable_text_ends_it_and_keeps_what_is_done(
    config, change, corpus_file, tmp_path, small_units, monkeypatch, caplog
):
    monkeypatch.setattr(console, "LOG_EVERY", 0.001)
    caplog.set_level(logging.INFO, logger="absl")
    model = prepare(config, tmp_path / "model").tokenizer.path
    begun = {line.split()[0] for line in caplog.messages if " s" in line}
    assert begun >= {"Reading", "Training", "Tokenizing:"}
    monkeypatch.setattr("convbert_jax.data.corpus.CHECKED_BYTES", 3000)  # stops before the bad text
    with corpus_file.open("ab") as file:
        file.write(b"\n\nbad \xff text " + "漢字\n".encode())
    config = change(config, data={"workers": 2}, tokenizer={"path": str(model)})
    folder = tmp_path / "prepared"
    with refused(DataError, "utf-8", 1, path=corpus_file):
        prepare(config, folder)
    times = {path: path.stat().st_mtime_ns for path in folder.glob("units/*.json")}
    assert times
    # Finished units stay valid under any policy, since they contain no undecodable text.
    corpus = prepare(change(config, data={"encoding_errors": "skip"}), folder)
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())
    assert sum(split.counts["documents"] for split in corpus.splits.values()) == 300
    replacing = change(config, data={"encoding_errors": "replace"})
    with refused(DataError, "encoding_errors='skip'", path=folder):
        prepare(replacing, folder)
    other = prepare(replacing, tmp_path / "replaced")
    assert sum(split.counts["documents"] for split in other.splits.values()) == 301
    assert other.fingerprint != corpus.fingerprint
    assert json.loads((tmp_path / "replaced" / "metadata.json").read_text())["unknown"] >= 1


def test_a_vocabulary_that_cannot_be_trained_leaves_the_folder_free(config, change, tmp_path):
    with refused(TokenizerError, field="config.tokenizer.vocab_size", value=100_000):
        prepare(change(config, tokenizer={"vocab_size": 100_000}), tmp_path / "prepared")
    word = "\u0939\u093f\u0928\u094d\u0926\u0940"
    text = (tmp_path / "corpus.txt").read_text()
    (tmp_path / "corpus.txt").write_text("\n\n".join(f"{word} {i}" for i in range(300)))
    with refused(TokenizerError, field="config.tokenizer.strip_accents", value=True):
        prepare(change(config, tokenizer={"strip_accents": True}), tmp_path / "prepared")
    (tmp_path / "corpus.txt").write_text(text)
    prepare(config, tmp_path / "prepared")


def test_the_format_of_a_source_is_logged_once(config, change, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="absl")
    prepare(change(config, data={"format": "auto"}), tmp_path / "prepared")
    assert sum("config.data.format=auto" in line for line in caplog.messages) == 1


def test_a_tiny_corpus_trains_and_evaluates(config, change, tmp_path):
    (tmp_path / "corpus.txt").write_text("\n\n".join("abcdefgh"[i] * 3 for i in range(8)))
    fields = {"heldout_fraction": 0.3, "length": 8}
    corpus = prepare(
        change(config, data=fields, tokenizer={"vocab_size": 21, "kind": "wordpiece"}),
        tmp_path / "prepared",
    )
    batches = training_batches(corpus, batch_size=64, seed=0)  # several epochs
    assert next(batches)["tokens"].shape == (64, 8)
    batches.close()
    (batch,) = evaluation_batches(corpus, batch_size=64)
    assert batch["segment_ids"].any(axis=1).sum() == corpus.splits["validation"].rows


@pytest.mark.parametrize("release_bug", [False, True])
def test_electra_layout(config, change, tmp_path, release_bug):
    fields = {"layout": "electra", "release_builder_bug": release_bug}
    corpus = prepare(change(config, data=fields), tmp_path / "prepared")
    rows = all_rows(corpus, "train")
    assert set(np.unique(rows["segment_ids"])) == set(np.unique(rows["type_ids"])) == {0, 1}
    batches = training_batches(corpus, batch_size=32, seed=0)
    batch = next(batches)
    batches.close()
    assert set(np.unique(batch["type_ids"])) <= {0, 1}
    assert not batch["type_ids"][batch["segment_ids"] == 0].any()
    other = change(config, data=fields | {"release_builder_bug": not release_bug})
    with refused(DataError, "layout", path=tmp_path / "prepared"):
        prepare(other, tmp_path / "prepared")


@pytest.fixture
def copied_corpus(config, tmp_path):
    prepare(config, tmp_path / "prepared")
    return config, tmp_path / "prepared"


def test_wikipedia_fills_its_rows(real_data, change, tmp_path):
    vocabulary = str(real_data / "vocab" / "bert-base-uncased-vocab.txt")
    source = f"text:{real_data}/pretrain/enwiki-2015/valid/AB_wiki_00*"
    fields = {"source": source, "heldout_fraction": 0.1, "workers": 1}
    config = change(Config(), tokenizer={"kind": "wordpiece", "path": vocabulary}, data=fields)
    train = prepare(config, tmp_path / "prepared").splits["train"]
    assert train.counts["tokens"] / (train.rows * 128) > 0.97
    metadata = json.loads((tmp_path / "prepared" / "metadata.json").read_text())
    assert metadata["unknown"] < 0.005 * metadata["characters"]


# --- Batches ---


def test_batches_span_epochs_and_begin_with_cls(copied_corpus):
    config, folder = copied_corpus
    corpus = prepare(config, folder)
    rows = corpus.splits["train"].rows
    size = rows + rows // 2
    whole, single = (training_batches(corpus, batch_size=n, seed=0) for n in (size, 1))
    batch = next(whole)
    keys = [row.tobytes() for row in batch["tokens"]]
    assert len(set(keys)) == rows
    assert keys == [next(single)["tokens"].tobytes() for _ in range(size)]
    assert (batch["tokens"][:, 0] == corpus.tokenizer.special.cls).all()
    pad = batch["tokens"] == corpus.tokenizer.special.pad
    assert (pad == (batch["segment_ids"] == 0)).all()
    for batches in (whole, single):
        batches.close()
    arguments = {"batch_size": 8, "seed": 2, "prefetch": 0}
    state = training_batches(corpus, **arguments).get_state()
    for changed in ({"batch_size": 4}, {"release_shuffle": True}):
        (name,) = changed
        with refused(DataError, field=name):
            training_batches(corpus, **arguments | changed).set_state(state)
    with refused(DataError, "'other'", field="corpus"):
        training_batches(corpus, **arguments).set_state(state | {"corpus": "other"})
    with refused(DataError, 4, field="config.train.batch_size", value=6):
        training_batches(corpus, batch_size=6, seed=0, process_count=4)


def test_batches_in_the_order_of_the_official_code(copied_corpus):
    config, folder = copied_corpus
    corpus = prepare(config, folder)
    arguments = {"batch_size": 8, "seed": 3, "release_shuffle": True, "prefetch": 2}

    def take(skipped=0, **process):
        batches = training_batches(corpus, **arguments, **process)
        batches.set_state(batches.get_state() | {"next_batch": skipped})
        found = [next(batches)["tokens"] for _ in range(20 - skipped)]
        batches.close()
        return np.stack(found)

    whole = take()
    assert np.array_equal(take(7), whole[7:])
    parts = [take(process_index=i, process_count=2) for i in range(2)]
    assert np.array_equal(np.concatenate(parts, axis=1), whole)
