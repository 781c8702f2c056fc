"""Streaming rows: stable order, resuming after a stop, and pipes."""

import json
import logging
import os
import threading
import time

import jax
import numpy as np
import pytest

from convbert_jax.config import UserError
from convbert_jax.data.errors import DataError
from convbert_jax.data.tasks.labelled_text import Example
from convbert_jax.inference import loading
from convbert_jax.inference import stream as prediction_stream
from convbert_jax.inference.predictor import choose_batch_size, choose_batch_sizes, make_predictor
from convbert_jax.recipes import prediction
from tests.inference.conftest import stop_after
from tests.refusals import refused


def test_a_stopped_prediction_goes_on(predict, models, tmp_path, monkeypatch, caplog):
    """Continues after the last complete row, if the input and the model are unchanged."""
    monkeypatch.setattr(prediction_stream, "AT_ONCE", 4)
    text = "\n".join(f"{'river ' * (n % 5)}stone {n}" if n % 7 else "" for n in range(30))
    expected = predict("one", text)
    unfinished = tmp_path / "out.jsonl.unfinished"
    for half in (b"", b'{"id": 12, "te'):
        with monkeypatch.context() as patch:
            stop_after(3, patch)
            with pytest.raises(KeyboardInterrupt):
                predict("one", text)
        unfinished.write_bytes(unfinished.read_bytes() + half)
        with caplog.at_level(logging.INFO):
            assert predict("one", text) == expected
        assert any(record.args == (12,) or 12 in (record.args or ()) for record in caplog.records)
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        with pytest.raises(KeyboardInterrupt):
            predict("one", text)
    kept = unfinished.read_bytes()
    with refused(DataError, "line 2", path=unfinished):
        predict("one", text.replace("river", "house"))
    assert unfinished.read_bytes() == kept
    with monkeypatch.context() as patch:  # the same folder after more training
        config, params, tokenizer = loading.read_finetuned(str(models["one"]), None)
        trained = jax.tree.map(lambda leaf: leaf * 1.01, params)
        patch.setattr(loading, "read_finetuned", lambda *_: (config, trained, tokenizer))
        with refused(DataError, models["one"], path=unfinished):
            predict("one", text)
    unfinished.write_bytes(b"\xff\n")
    with refused(DataError, "line 1", path=unfinished):
        predict("one", text)
    unfinished.write_bytes(kept.splitlines(keepends=True)[1].replace(b'"id": 1', b'"id": 0'))
    with refused(DataError, "line 1", path=unfinished):
        predict("one", text)
    note = tmp_path / "out.jsonl.unfinished.model"
    note.write_text("{")
    with refused(UserError, path=note):
        predict("one", text)
    note.unlink()
    with refused(DataError, note.name, path=unfinished):
        predict("one", text)
    unfinished.unlink()
    assert predict("one", text) == expected
    assert not list(tmp_path.glob("*unfinished*"))


def test_what_is_kept_is_compared_as_it_was_written(predict, monkeypatch, caplog):
    """NaN is null in the output, and reserved column names are renamed there."""
    monkeypatch.setattr(prediction_stream, "AT_ONCE", 2)
    odd = ['"prediction": "x", "error": 1', '"n": NaN, "m": [1e999]', '"id": -Infinity']
    text = (
        "\n".join(f'{{"text": "sun", {odd[n % 3]}}}' for n in range(9)) + '\n{"text": "", "m": NaN}'
    )
    expected = predict("one", text)
    with monkeypatch.context() as patch:
        stop_after(2, patch)
        with pytest.raises(KeyboardInterrupt):
            predict("one", text)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert predict("one", text) == expected
    counts = [[a for a in record.args or () if isinstance(a, int)] for record in caplog.records]
    assert counts.count([4]) == 2  # "resumed" and the summary, which excludes the earlier rows
    assert [5] in counts


def test_texts_that_are_cut_are_told_once(models, caplog):
    predictor = make_predictor(*loading.read_finetuned(str(models["one"]), None), "f4")
    predictor._told_cut = False
    full = predictor._config.finetune.length - 2  # words of one token each
    with caplog.at_level(logging.WARNING):
        for words in (3, full):
            predictor.answer([Example("0", ("a " * words,), None)])
        assert not caplog.text
        for words in (full + 1, 30):
            predictor.answer([Example("0", ("a " * words,), None)])
    (record,) = caplog.records
    assert record.args[-1] == 16


def test_questions_that_are_cut_are_told_once(predict, models, caplog):
    predictor = make_predictor(*loading.read_finetuned(str(models["answers"]), None), "f4")
    predictor._told_cut = False
    with caplog.at_level(logging.WARNING):
        for words in (4, 5, 6):
            predictor.answer([Example("0", ("a " * words, "the moon"), None)])
    (record,) = caplog.records
    assert record.args[-1] == 4


def test_long_sentences_are_tagged_in_windows(predict):
    """In the overlap of two windows, the nearer half of each decides."""
    words = ["a", "b", "b", "a", "b"] * 6  # one token each, in addition to [CLS] and [SEP]
    starts, cuts = (0, 7, 14, 21), (0, 11, 18, 25, 30)  # windows of 14 words
    rows = [{"words": words}, *({"words": words[start : start + 14]} for start in starts)]
    long, *windows = predict("tags", "\n".join(map(json.dumps, rows)))
    for name in ("prediction", "probabilities"):
        expected = []
        for start, begin, end, window in zip(starts, cuts, cuts[1:], windows, strict=False):
            expected += window[name][begin - start : end - start]
        assert len(long[name]) == len(words)
        if name == "prediction":
            assert long[name] == expected
        else:
            assert long[name] == pytest.approx(expected, abs=1e-5)


def test_a_word_that_does_not_fit_has_no_tag(predict):
    words = ["a", "e" * 40, "b"]
    content = json.dumps({"words": words})
    (found,) = predict("tags", content)
    for name in ("prediction", "probabilities"):
        assert [value is None for value in found[name]] == [False, True, False]
    table = predict("tags", content, output="out.tsv").splitlines()
    row = dict(zip(*(line.split("\t") for line in table), strict=True))
    assert row["words"].split(" ") == words


def test_long_files_keep_their_order(predict, monkeypatch):
    monkeypatch.setattr(prediction_stream, "AT_ONCE", 7)
    texts = [f"{'river ' * (n * 7 % 13)}stone" for n in range(40)]
    found = predict("one", "\n".join(texts))
    assert [line["texts"][0] for line in found] == texts
    one_by_one = {text: predict("one", text)[0]["probabilities"] for text in set(texts)}
    for text, line in zip(texts, found, strict=True):
        assert line["probabilities"] == pytest.approx(one_by_one[text], abs=1e-5)


def test_a_line_in_a_line_out(models, tmp_path):
    """On a pipe each line is answered before the next is written; bursts are read in chunks."""
    source, target = tmp_path / "source", tmp_path / "target"
    os.mkfifo(source)
    os.mkfifo(target)
    sizes = []
    found = {}
    chunks = prediction_stream.as_they_come

    def counted(rows):
        for chunk in chunks(rows):
            sizes.append(len(chunk))
            yield chunk

    def work():
        config, params, tokenizer = loading.read_finetuned(str(models["one"]), None)
        predictor = make_predictor(config, params, tokenizer, np.dtype(np.float32))
        from convbert_jax.data import input_rows
        from convbert_jax.data.readers.rows import Stream
        from convbert_jax.inference import stream as prediction_output

        reads = input_rows.describe_model_input(config)
        with open(source, "rb") as lines, open(target, "wb") as output:
            rows = input_rows.open_input(Stream("pipe", lines), "lines", reads)
            found["count"] = prediction_stream.predict_stream(
                counted(rows),
                predictor.answer,
                prediction_output.open_lines(output, ".jsonl"),
                reads,
                "pipe",
            )

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    with open(source, "wb", buffering=0) as lines, open(target, "rb") as answers:
        waited = []
        for number in range(4):
            start = time.monotonic()
            lines.write(b"the sun %d\n" % number)
            assert json.loads(answers.readline())["texts"] == [f"the sun {number}"]
            waited.append(time.monotonic() - start)
        assert min(waited[1:]) < 1.0  # the first one compiles
        assert sizes == [1, 1, 1, 1]
        burst = b"".join(b"a moon %d\n" % number for number in range(5_000))
        threading.Thread(target=lambda: (lines.write(burst), lines.close())).start()
        texts = [json.loads(line)["texts"][0] for line in answers]
    worker.join(60)
    assert texts == [f"a moon {number}" for number in range(5_000)]
    assert found["count"] == 5_004
    assert max(sizes) == prediction_stream.AT_ONCE
    assert len(sizes) < 40


def test_whoever_reads_may_have_enough(models, tmp_path):
    """Like `head -1`: no error, and prediction stops at once."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("the sun\n" * 20_000)
    os.mkfifo(target)
    counts = []
    arguments = map(str, (models["one"], source, target))
    worker = threading.Thread(
        target=lambda: counts.append(prediction.predict(*arguments)), daemon=True
    )
    worker.start()
    with open(target, "rb") as answers:
        assert json.loads(answers.readline())["id"] == 0
    worker.join(60)
    assert [result.rows for result in counts] == [0]


def test_a_fault_of_a_pipe_comes_after_its_rows():
    def rows():
        yield "a"
        raise DataError("broken")

    chunks = prediction_stream.as_they_come(rows())
    assert next(chunks) == ["a"]
    with refused(DataError, "broken"):
        next(chunks)


def test_batches_are_as_large_as_what_is_there():
    assert [choose_batch_size(n, 128) for n in (0, 1, 2, 64, 65, 1_024)] == [1, 1, 16, 16, 128, 128]
    assert [choose_batch_size(n, 4) for n in (1, 2, 3)] == [1, 4, 4]


def test_long_rows_make_small_batches_on_a_cpu(monkeypatch):
    buckets = (8, 16, 48, 512, 2_048)
    monkeypatch.setattr("convbert_jax.inference.predictor.available_threads", lambda: 2)
    assert choose_batch_sizes(1_000, 64, buckets) == (64, 64, 21, 2, 1)
    assert choose_batch_sizes(10, 64, buckets) == (16, 16, 16, 2, 1)
    assert choose_batch_sizes(1, 64, buckets) == (1,) * 5
    monkeypatch.setattr("convbert_jax.inference.predictor.dispatch.platform", lambda: "tpu")
    assert choose_batch_sizes(1_000, 64, buckets) == (64,) * 5
