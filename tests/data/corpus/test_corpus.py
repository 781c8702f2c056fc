import csv
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax import progress
from convbert_jax.config import Config
from convbert_jax.data.corpus import preparation
from convbert_jax.data.corpus.batching import evaluation_batches, training_batches
from convbert_jax.data.corpus.corpus import prepare
from convbert_jax.data.corpus.rows import ShardReader
from convbert_jax.data.errors import DataError, TokenizerError
from convbert_jax.data.sources.documents import cut_document


def all_rows(corpus, split):
    shards = corpus.splits[split]
    reader = ShardReader(shards.shards, corpus.row_dtype)
    return reader.read(np.arange(shards.rows))


def texts_of(corpus, split) -> list[str]:
    """Decoded text of all pieces of a split, in order."""
    special, result = corpus.tokenizer.special, []
    for row in all_rows(corpus, split):
        for segment in range(1, int(row["segment_ids"].max()) + 1):
            ids = row["tokens"][row["segment_ids"] == segment].tolist()
            assert ids[0] == special.cls
            assert ids[-1] == special.sep
            result.append(corpus.tokenizer.decode(ids[1:-1]))
    return result


def test_prepare_keeps_all_text_and_fills_rows(config, documents, tmp_path, small_units):
    corpus = prepare(config, tmp_path / "prepared")
    assert corpus.length == 64
    assert corpus.layout == "packed"
    train, validation = corpus.splits["train"], corpus.splits["validation"]
    assert train.documents + validation.documents == len(documents)
    assert 10 <= validation.documents <= 55  # 10 % of 300
    assert len(train.shards) > 3
    texts = texts_of(corpus, "train") + texts_of(corpus, "validation")
    expected = "".join(sorted("".join(documents).lower().replace("\n", "").replace(" ", "")))
    assert "".join(sorted("".join(texts).replace(" ", ""))) == expected
    rows = all_rows(corpus, "train")
    assert np.count_nonzero(rows["segment_ids"]) == train.tokens
    assert train.tokens / rows["tokens"].size > 0.85  # short rows, short documents, small units
    metadata = json.loads((tmp_path / "prepared" / "metadata.json").read_text())
    assert metadata["complete"]
    assert metadata["bytes"] == sum(len(text.encode()) for text in documents)
    assert metadata["unknown_rate"] < 0.01


@pytest.mark.parametrize("kind", ["sentencepiece", "wordpiece"])
def test_reading_and_training_the_vocabulary_show_progress(
    config, change, tmp_path, monkeypatch, caplog, kind
):
    monkeypatch.setattr(progress, "LOG_EVERY", 0.001)
    with caplog.at_level("INFO", "absl"):
        prepare(change(config, tokenizer={"kind": kind}), tmp_path / "prepared")
    lines = [message for message in caplog.messages if " left." in message or "so far" in message]
    said = {line.split()[0] for line in lines}
    assert said >= {"Reading", "Training", "Tokenizing:"}


def test_validation_source(config, change, documents, tmp_path):
    held = tmp_path / "held.txt"
    held.write_text("\n\n".join(documents[:7]))
    fields = {"validation_source": f"text:{held}", "heldout_fraction": 0.0}
    corpus = prepare(change(config, data=fields), tmp_path / "prepared")
    assert corpus.splits["train"].documents == len(documents)
    assert corpus.splits["validation"].documents == 7


@pytest.mark.parametrize("validation", ["corpus.txt", "*.txt", "same/corpus.txt"])
def test_text_that_is_trained_on_is_not_held_out(config, change, validation, tmp_path):
    """Held-out numbers were of the training text, without a word."""
    (tmp_path / "held.txt").write_text("One.\n\nTwo.\n")
    (tmp_path / "same").mkdir()
    (tmp_path / "same" / "corpus.txt").write_bytes((tmp_path / "corpus.txt").read_bytes())
    fields = {"validation_source": f"text:{tmp_path / validation}"}
    what = "is the text that" if "same" in validation else r"reads .*corpus\.txt, which"
    with pytest.raises(DataError, match=f"validation_source=.* {what} config.data.source=.* train"):
        prepare(change(config, data=fields), tmp_path / "prepared")
    assert not list((tmp_path / "prepared").glob("*.json"))


def test_a_script_whose_letters_would_be_stripped_is_refused(config, change, tmp_path):
    word = "\u0939\u093f\u0928\u094d\u0926\u0940"
    (tmp_path / "corpus.txt").write_text("\n\n".join(f"{word} {i}" for i in range(300)))
    with pytest.raises(TokenizerError, match=r"set --config\.tokenizer\.strip_accents=False"):
        prepare(change(config, tokenizer={"strip_accents": True}), tmp_path / "prepared")
    config = change(config, tokenizer={"vocab_size": 24})
    tokenizer = prepare(config, tmp_path / "prepared").tokenizer
    assert tokenizer.decode(tokenizer.encode([word])[0]) == word


def test_held_out_documents_are_chosen_by_their_text_alone(config, documents, tmp_path):
    first = prepare(config, tmp_path / "first")
    path = tmp_path / "corpus.txt"
    path.write_text("\n\n".join(reversed(documents)))
    second = prepare(config, tmp_path / "second")
    assert first.splits["validation"].documents == second.splits["validation"].documents
    letters = [
        "".join(sorted("".join(texts_of(corpus, "validation")).replace(" ", "")))
        for corpus in (first, second)
    ]
    assert letters[0] == letters[1]


@pytest.mark.parametrize("count", [2, 3])
def test_of_few_documents_one_is_held_out(config, change, documents, tmp_path, caplog, count):
    texts = ["\n".join(documents[40 * i :][:40]) for i in range(count)]
    (tmp_path / "corpus.txt").write_text("\n\n".join(texts))
    config = change(config, data={"heldout_fraction": 1e-9}, tokenizer={"vocab_size": 100})
    with caplog.at_level("INFO", logger="absl"):
        corpus = prepare(config, tmp_path / "prepared")
    assert corpus.splits["validation"].documents == 1
    assert corpus.splits["train"].documents == count - 1
    assert sum("config.data.heldout_fraction=1e-09" in line for line in caplog.messages) == 1


def test_the_held_out_document_is_the_same_after_a_kill(
    config, change, documents, tmp_path, small_units, contents, monkeypatch
):
    config = change(config, data={"heldout_fraction": 1e-9}, tokenizer={"vocab_size": 100})
    expected = prepare(config, tmp_path / "whole")
    real = preparation.process_unit

    def killed(job, index, *arguments):
        if index == 1:
            raise KeyboardInterrupt
        return real(job, index, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "process_unit", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(config, tmp_path / "prepared")
    corpus = prepare(config, tmp_path / "prepared")
    assert corpus.splits["validation"].documents == 1
    assert corpus.fingerprint == expected.fingerprint
    assert contents(tmp_path / "prepared") == contents(tmp_path / "whole")


def test_tiny_corpus_trains_and_evaluates(config, change, tmp_path):
    (tmp_path / "corpus.txt").write_text("\n\n".join("abcdefgh"[i] * 3 for i in range(8)))
    tiny = change(config, data={"heldout_fraction": 0.3, "length": 8}, tokenizer={"vocab_size": 20})
    try:
        corpus = prepare(tiny, tmp_path / "prepared")
    except TokenizerError as error:
        size = int(str(error).split("vocab_size=")[1].split()[0])
        corpus = prepare(change(tiny, tokenizer={"vocab_size": size}), tmp_path / "prepared")
    batches = training_batches(corpus, batch_size=64, seed=0)
    assert next(batches)["tokens"].shape == (64, 8)
    batches.close()
    (batch,) = evaluation_batches(corpus, batch_size=64)
    assert batch["segment_ids"].any(axis=1).sum() == corpus.splits["validation"].rows


@pytest.mark.parametrize("text", ["", "\n\n \n\t\n"])
def test_no_text(config, tmp_path, text):
    (tmp_path / "corpus.txt").write_text(text)
    with pytest.raises(DataError, match="has no text"):
        prepare(config, tmp_path / "prepared")


def test_a_vocabulary_that_cannot_be_trained_leaves_the_folder_free(config, change, tmp_path):
    with pytest.raises(TokenizerError, match="vocab_size="):
        prepare(change(config, tokenizer={"vocab_size": 100_000}), tmp_path / "prepared")
    prepare(config, tmp_path / "prepared")


@pytest.mark.parametrize("release_bug", [False, True])
def test_electra_layout(config, change, tmp_path, release_bug):
    fields = {"layout": "electra", "release_builder_bug": release_bug}
    corpus = prepare(change(config, data=fields), tmp_path / "prepared")
    rows = all_rows(corpus, "train")
    assert set(np.unique(rows["segment_ids"])) == {0, 1}
    assert set(np.unique(rows["type_ids"])) == {0, 1}
    batches = training_batches(corpus, batch_size=32, seed=0)
    batch = next(batches)
    batches.close()
    assert set(np.unique(batch["type_ids"])) <= {0, 1}
    assert not batch["type_ids"][batch["segment_ids"] == 0].any()
    other = change(config, data=fields | {"release_builder_bug": not release_bug})
    with pytest.raises(DataError, match="layout"):
        prepare(other, tmp_path / "prepared")


def test_folder_that_cannot_be_made(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="could not be made"):
        prepare(config, tmp_path / "file" / "prepared")


def test_unknown_tokens_are_counted(config, tmp_path, caplog):
    text = (tmp_path / "corpus.txt").read_text()
    (tmp_path / "corpus.txt").write_text(text + "\n\n漢字\n")
    prepare(config, tmp_path / "prepared")
    metadata = json.loads((tmp_path / "prepared" / "metadata.json").read_text())
    assert metadata["unknown"] >= 1


def test_wikipedia_fills_its_rows(real_data, change, tmp_path):
    config = Config()
    config = change(
        config,
        tokenizer={
            "kind": "wordpiece",
            "path": str(real_data / "vocab" / "bert-base-uncased-vocab.txt"),
        },
        data={
            "source": f"text:{real_data}/pretrain/enwiki-2015/valid/AB_wiki_00*",
            "heldout_fraction": 0.1,
            "workers": 1,
        },
    )
    corpus = prepare(config, tmp_path / "prepared")
    train = corpus.splits["train"]
    assert train.tokens / (train.rows * 128) > 0.97
    assert json.loads((tmp_path / "prepared" / "metadata.json").read_text())["unknown_rate"] < 0.005


def test_a_table_becomes_the_rows_of_its_column(config, change, documents, tmp_path):
    path = tmp_path / "b.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["id", "body"], *enumerate(documents)])
    fields = {"source": f"text:{path}", "format": "auto", "text_field": "body"}
    table = prepare(change(config, data=fields), tmp_path / "table")
    text = prepare(config, tmp_path / "text")
    assert np.array_equal(all_rows(table, "train"), all_rows(text, "train"))


@pytest.mark.parametrize("joint", ["\n", " ", ""])
def test_a_piece_of_a_single_document_is_held_out(
    config, change, documents, tmp_path, caplog, joint
):
    text = joint.join(documents).replace("\n", joint)
    (tmp_path / "corpus.txt").write_text(text)
    config = change(config, data={"format": "file"}, tokenizer={"vocab_size": 100})
    with caplog.at_level("INFO", logger="absl"):
        corpus = prepare(config, tmp_path / "prepared")
    assert corpus.splits["validation"].documents == 1
    assert 15 <= corpus.splits["train"].documents <= 20
    assert sum("config.data.validation_source" in line for line in caplog.messages) == 1


@settings(deadline=None)
@given(text=st.text("ab \n", max_size=60), pieces=st.integers(2, 20))
def test_pieces_are_the_whole_document(text, pieces):
    found = cut_document(text, pieces)
    assert "".join("".join(found).split()) == "".join(text.split())
    assert len(found) <= pieces
