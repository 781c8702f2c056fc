"""Translation models: generated texts, scores, decoding settings, and predictions."""

# ruff: noqa: RUF001  (full-width punctuation)

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest
import sacrebleu

import convbert_jax
from convbert_jax import recipes
from convbert_jax.analysis import text_scores
from convbert_jax.config import Config, UserError, to_dict
from convbert_jax.data import parallel_text
from convbert_jax.data.parallel_text import read_heldout, read_whole
from convbert_jax.data.shards import ShardReader, records_to_pairs
from convbert_jax.inference import generation, stream
from convbert_jax.interop import conversion, importing, sources
from convbert_jax.interop.matching import replace
from convbert_jax.recipes import scoring
from convbert_jax.storage import write_json
from convbert_jax.workdir import Workdir
from tests.html import Page
from tests.refusals import refused
from tests.runs import LEXICON, make_config, write_pairs


def translate(text):
    return " ".join(LEXICON[word] for word in text.split()) + "."


def texts_of(folder, name):
    return (folder / f"{name}.txt").read_text().splitlines()


def one_each(texts):
    return [(text,) for text in texts]


def test_after_training_the_heldout_pairs_are_written_and_scored(translated, pairs):
    folder = translated.folder / "evaluation" / "step-300"
    written, right = texts_of(folder, "validation"), texts_of(folder, "validation.reference")
    assert len(written) == len(right) == 24
    assert right == [translate(text) for text in texts_of(folder, "validation.source")]
    scores = translated.scores["validation"]
    assert scores["bleu"] == pytest.approx(
        sacrebleu.corpus_bleu(written, [right], lowercase=False).score
    )
    assert scores["chrf"] == pytest.approx(sacrebleu.corpus_chrf(written, [right]).score)
    lowered = sum(a == b.lower() for a, b in zip(written, right, strict=True))
    assert lowered > len(right) / 2, list(zip(written, right, strict=True))
    kept = json.loads((translated.folder / "evaluation" / "step-300.json").read_text())
    assert kept["scores"]["validation"]["bleu"] == scores["bleu"]
    assert "version:" in kept["scores"]["validation"]["signature"]
    assert kept["scores"]["validation"]["decoding"]["checkpoints"] == [300]
    assert kept["token_loss"] == translated.evaluation["token_loss"]
    for part in (f"BLEU {scores['bleu']:.1f}", "nrefs:1", right[0], written[0], str(folder)):
        assert part in translated.report
    page = Page((translated.folder / "report.html").read_text())
    assert f"BLEU{scores['bleu']:.1f}" in page.texts("tr")
    shown = page.texts("p")
    assert any(text.endswith(f" {right[0]}") for text in shown)
    assert any(text.endswith(f" {written[0]}") for text in shown)


def test_raw_references_are_the_rows_that_training_holds_out(translation_config, translated):
    text = parallel_text.prepare(translation_config, translated.folder / "data")
    for rows in (0, 7):
        found = read_heldout(translation_config, text, rows).pairs
        assert len(found) == (rows or text.splits["validation"].rows)
    everything = read_heldout(translation_config, text, 0).pairs
    source, target = text.vocabularies
    split = text.splits["validation"]
    to_pairs = functools.partial(records_to_pairs, form=text.form)
    reader = ShardReader(split.shards, text.id_dtype, to_pairs, returned=np.dtype(object))
    stored = reader.read(np.arange(split.rows))
    reader.close()
    assert len(stored) == len(everything) > 24
    for pair, row in zip(everything, stored, strict=True):
        assert source.encode([pair[0]])[0] == list(row.ids[0])
        assert target.encode([pair[1]])[0] == list(row.ids[1])


def test_an_evaluation_scores_test_sets_too_by_the_mean_of_checkpoints(
    translation_config, translated, tmp_path
):
    spec = write_pairs(tmp_path, "test", 5, seed=5)
    with open(tmp_path / "test.aa", "a") as sources_, open(tmp_path / "test.bb", "a") as targets:
        sources_.write("ha " * 40 + "\n")
        targets.write("set.\n")
    config = replace(
        translation_config,
        {"decoding.test_sources": (f"mine={spec}",), "decoding.average": 2, "decoding.beam": 3},
    )
    output = tmp_path / "numbers.json"
    result = recipes.evaluate(config, translated.folder, output=str(output))
    assert set(result.scores) == {"validation", "mine"}
    written = texts_of(tmp_path / "numbers", "mine")
    assert len(written) == 6
    assert written[-1] == ""
    kept = json.loads(output.read_text())["scores"]["mine"]
    assert (kept["pairs"], kept["bad_pairs"], kept["unread_sources"]) == (6, 0, 1)
    (line,) = (line for line in result.report.splitlines() if "pair 6" in line)
    assert "41" in line
    assert "32" in line
    assert kept["decoding"] == {
        "method": "beam",
        "beam": 3,
        "length_penalty": 1.0,
        "length_ratio": 1.5,
        "length_extra": 10,
        "checkpoints": [200, 300],
        "dtype": "float32",
    }
    (line,) = {line for line in result.report.splitlines() if "beam 3" in line}
    assert not [part for part in ("length^1", "1.5", "10", "200", "300") if part not in line]
    assert result.values != translated.evaluation  # evaluated with averaged checkpoints


def test_the_mean_of_checkpoints(translation_config, translated):
    workdir = Workdir(translated.folder)
    config = replace(translation_config, {"decoding.average": 2})
    parts = {s: sources.read_params(workdir, config, s)[1] for s in (100, 200, 300)}
    for step, used in ((None, (200, 300)), (200, (100, 200))):
        found, mean = generation.read_mean(workdir, config, step)
        assert found == used
        wanted = jax.tree.map(
            lambda a, b: ((a.astype(np.float64) + b) / 2).astype(a.dtype), *(parts[s] for s in used)
        )
        jax.tree.map(np.testing.assert_array_equal, mean, wanted)
    assert generation.read_mean(workdir, translation_config)[0] == (300,)
    # At step 100 there is only one checkpoint to average.
    found, alone = generation.read_mean(workdir, config, 100)
    assert found == (100,)
    jax.tree.map(np.testing.assert_array_equal, alone, parts[100])


def test_a_damaged_checkpoint_is_not_left_out_of_a_mean(translation_config, translated, tmp_path):
    shutil.copytree(translated.folder, tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints" / "200").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-9])
    config = replace(translation_config, {"decoding.average": 3})
    with refused(UserError, tmp_path / "run" / "checkpoints" / "200"):
        generation.read_mean(Workdir(tmp_path / "run"), config)


@pytest.mark.parametrize("recipe", ["translation", "summarization"])
def test_a_missing_library_is_told_before_any_work(
    recipe, translation_config, tmp_path, monkeypatch
):
    module, package = text_scores.LIBRARIES[recipe]
    find = text_scores.util.find_spec
    monkeypatch.setattr(
        text_scores.util, "find_spec", lambda name: None if name == module else find(name)
    )
    config = dataclasses.replace(translation_config, recipe=recipe)
    with refused(UserError, package):
        recipes.pretrain(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("recipe", "wanted"),
    [
        ("translation", {"bleu": 100, "chrf": 100}),
        ("summarization", {"rouge1": 100, "rouge2": 100, "rougeL": 100}),
        ("text_to_text", {"exact_match": 100, "exact_match_normalized": 100}),
    ],
)
def test_what_is_right_has_all_points_and_what_is_wrong_none(recipe, wanted):
    right = ["The first of two sentences .", "And here is the second one ."]
    assert text_scores.score(recipe, right, one_each(right), str.lower).values == pytest.approx(
        wanted
    )
    wrong = text_scores.score(recipe, ["zzz"] * 2, one_each(right), str.lower).values
    assert max(wrong.values()) < 1
    assert set(wrong) <= set(text_scores.TITLES)


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        ("translation", "今天天气很好，我们一起去公园吧！"),
        ("summarization", "日本語の文章を読む。"),
        ("translation", "วันนี้อากาศดีมาก เราไปโรงเรียนด้วยกัน"),
    ],
)
def test_a_script_without_spaces_needs_score_words(recipe, text, caplog):
    """Without it, a perfect translation has a BLEU of 0."""
    right = [text] * 4
    text_scores.score(recipe, right, one_each(right), str, "intl")
    (record,) = caplog.records
    assert "config.decoding.score_words" in record.getMessage()
    caplog.clear()
    found = text_scores.score("translation", right, one_each(right), str, "char")
    assert found.values["chrf"] == pytest.approx(100)
    segmented = ["今天 天气 很 好 ， 我们 去 公园", "The café of 東京 is open."]
    text_scores.score("translation", segmented, one_each(segmented), str)
    assert not caplog.records
    right, ours = ["我们在河边看见一只很大的白色的鸟。"], ["我们在河边看见一只很大的黑色的鸟。"]
    found = text_scores.score("translation", ours, one_each(right), str, "zh")
    assert found.values["bleu"] > 60
    assert "tok:zh" in found.signature
    assert text_scores.score("translation", ours, one_each(right), str).values["bleu"] == 0


def test_references_that_the_vocabulary_cannot_write_are_told(
    translation_config, translated, tmp_path, caplog
):
    """Uses full-width punctuation, which a vocabulary with NFKC cannot produce."""
    spec = write_pairs(tmp_path, "test", 5)
    target = tmp_path / "test.bb"
    target.write_text(target.read_text().replace(".", "！"))
    config = replace(translation_config, {"decoding.test_sources": (f"mine={spec}",)})
    result = recipes.evaluate(config, translated.folder, output=str(tmp_path / "numbers.json"))
    (line,) = (line for line in result.report.splitlines() if "！" in line)
    assert line.strip() in caplog.text


def test_rouge_counts_words_of_any_script_where_they_are_asked_for(caplog):
    """rouge-score alone finds no words in Cyrillic text, which is logged."""
    right = ["Дождь идёт, и ветер дует.", "Снег лежит во дворе."]
    ours = ["Дождь идёт, но ветер дует.", "Снег лежит на дворе."]
    found = text_scores.score("summarization", ours, one_each(right), str, "intl")
    assert found.values["rouge1"] == pytest.approx(100 * (4 / 5 + 3 / 4) / 2)
    assert found.values["rouge2"] == pytest.approx(100 * (2 / 4 + 1 / 3) / 2)
    assert "tok:intl" in found.signature
    assert not caplog.text
    assert text_scores.score("summarization", right, one_each(right), str).values["rouge1"] == 0
    (record,) = caplog.records
    for part in ("100%", "config.decoding.score_words", "intl"):
        assert part in record.getMessage()
    caplog.clear()
    french = ["The naïve guest of the café asks for a piece of bread."]
    text_scores.score("summarization", french, one_each(french), str)
    assert not caplog.records
    chinese = ["我们在河边看见鸟。"]
    found = text_scores.score("summarization", chinese, one_each(chinese), str, "zh")
    assert found.values["rouge2"] == 100


def test_an_answer_in_another_case_is_equal_as_the_vocabulary_writes_it():
    scores = text_scores.score("text_to_text", [" yes"], [["Yes"]], str.lower).values
    assert scores == {"exact_match": 0, "exact_match_normalized": 100}


def test_sets_that_cannot_be_scored(translation_config, tmp_path):
    (tmp_path / "a.tsv").write_text("a\tb\nalone\nc\td\n")
    found = read_whole(f"tsv:{tmp_path / 'a.tsv'}", translation_config.parallel)
    assert found.pairs == (("a", "b"), ("c", "d"))
    assert found.bad[0] == 1
    assert "line 2" in found.bad[1]
    (tmp_path / "b.tsv").write_text("a\tb\nc\t \n")
    with refused(UserError, "b.tsv line 2"):
        read_whole(f"tsv:{tmp_path / 'b.tsv'}", translation_config.parallel)


@pytest.fixture(scope="module")
def model(translated):
    return convbert_jax.load(translated.folder)


@pytest.fixture
def predict(translated):
    def predict(source, output, **options):
        return recipes.predict(str(translated.folder), str(source), str(output), **options)

    return predict


def test_predictions_of_a_file(predict, model, tmp_path):
    texts = ["bo ce", "", "ha", "ha " * 40]
    (tmp_path / "in.txt").write_text("".join(text + "\n" for text in texts))
    assert predict(tmp_path / "in.txt", tmp_path / "out.jsonl").rows == 4
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    first, third = model.translate(["bo ce", "ha"])
    assert [line.get("prediction") for line in lines] == [first, None, third, None]
    assert first != third
    assert lines[0]["source"] == "bo ce"
    assert lines[0]["score"] < 0
    assert "line 2" in lines[1]["error"]
    for part in ("line 4", "41", "32", "config.parallel.max_length"):
        assert part in lines[3]["error"]
    predict(tmp_path / "in.txt", tmp_path / "out.txt", decoding={"method": "greedy"})
    first, third = model.translate(["bo ce", "ha"], method="greedy")
    assert (tmp_path / "out.txt").read_text() == f"{first}\n\n{third}\n\n"
    predict(tmp_path / "in.txt", tmp_path / "best.jsonl", decoding={"beam": 3, "n_best": 2})
    best = [json.loads(line) for line in (tmp_path / "best.jsonl").read_text().splitlines()]
    for line in (best[0], best[2]):
        assert len(line["n_best"]) == 2
        assert line["n_best"][0] == {name: line[name] for name in ("prediction", "score")}
        assert line["n_best"][0]["score"] >= line["n_best"][1]["score"]


def test_predictions_of_a_table_keep_its_columns(predict, model, tmp_path):
    (tmp_path / "in.csv").write_text("id,source,target,score\n7,bo ce,x,9\n")
    predict(tmp_path / "in.csv", tmp_path / "out.jsonl")
    (line,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert (line["id"], line["source"], line["target"]) == ("7", "bo ce", "x")
    assert (line["prediction"], line["input_score"]) == (model.translate("bo ce"), "9")
    predict(tmp_path / "in.csv", tmp_path / "out.tsv", texts=("target",))
    assert (tmp_path / "out.tsv").read_text().startswith("id\tprediction\tscore\terror\ttarget\t")


def test_a_source_of_several_sentences_is_one_text(predict, tmp_path):
    rows = ({"source": ["bo ce", "ha"]}, {"source": ["bo", 3]})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    predict(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    good, bad = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert good["source"] == "bo ce ha"
    for part in ("line 2", "list", "'source'"):
        assert part in bad["error"]


def test_predictions_go_on_where_they_were_stopped(predict, tmp_path):
    (tmp_path / "in.txt").write_text("bo ce\nha\ndi\n")
    predict(tmp_path / "in.txt", tmp_path / "whole.jsonl")
    whole = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)

    def stop(name):
        (tmp_path / f"{name}.jsonl.unfinished").write_text(whole[0] + whole[1][:5])
        shutil.copy(tmp_path / "note", tmp_path / f"{name}.jsonl.unfinished.model")

    notes = []
    with pytest.MonkeyPatch.context() as patch:
        write = stream.write_json
        patch.setattr(stream, "write_json", lambda path, v: (notes.append(v), write(path, v)))
        predict(tmp_path / "in.txt", tmp_path / "again.jsonl")
    (tmp_path / "note").write_text(json.dumps(notes[0]))
    stop("half")
    result = predict(tmp_path / "in.txt", tmp_path / "half.jsonl")
    assert (result.rows, result.kept) == (3, 1)
    assert (tmp_path / "half.jsonl").read_text() == "".join(whole)
    stop("other")
    with refused(UserError, tmp_path / "other.jsonl"):
        predict(tmp_path / "in.txt", tmp_path / "other.jsonl", decoding={"beam": 1})
    with refused(UserError, field="--output", path=tmp_path / "whole.jsonl"):
        predict(tmp_path / "in.txt", tmp_path / "whole.jsonl")


@pytest.mark.parametrize(
    ("output", "options", "mentions"),
    [
        ("out.txt", {"decoding": {"n_best": 2}}, ["config.decoding.n_best", 2]),
        ("out.jsonl", {"decoding": {"beam": 4_000}}, ["config.decoding.beam", 4000]),
        ("out.jsonl", {"decoding": {"average": 3, "beam": 40}}, [40, 34]),
        ("out.jsonl", {"texts": ("a", "b")}, ["text"]),
    ],
)
def test_predictions_that_cannot_be_made_are_refused(predict, output, options, mentions, tmp_path):
    (tmp_path / "in.txt").write_text("bo\n")
    with refused(UserError, *mentions) as caught:
        predict(tmp_path / "in.txt", tmp_path / output, **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / output).exists()


def test_a_vocabulary_of_the_same_size_from_elsewhere_is_refused(translated, tmp_path):
    run = shutil.copytree(translated.folder, tmp_path / "run")
    model = run / "vocabulary" / "tokenizer.model"
    model.write_bytes(model.read_bytes() + b"\x1a\x00")  # the same pieces, different bytes
    with refused(UserError, model):
        convbert_jax.load(run)


def test_other_models_do_not_decode(tmp_path):
    (tmp_path / "in.txt").write_text("good\n")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    write_json(tmp_path / "run" / "config.json", to_dict(make_config(recipe="masked_lm")))
    model = str(tmp_path / "run")
    with refused(UserError, field="config.decoding.beam", path=model):
        recipes.predict(model, str(tmp_path / "in.txt"), "-", decoding={"beam": 2})


def test_from_python(translated, model):
    assert model.step == 300
    one = model.translate("bo ce")
    assert model.translate(["ha", "bo ce"]) == [model.write("ha"), one]
    assert model.write([]) == []
    (best, second) = model.translate("bo ce", n_best=2)
    assert best.text == one
    assert best.score > second.score
    for call, *mentions in (
        (lambda: model.summarize("ha"), "translate()", "summarize"),
        (lambda: model.translate(["ha", ""]), "texts[1]"),
        (lambda: model.translate("ha", bem=3), "bem", "beam"),
        (lambda: model.translate("ha", average=3), "convbert_jax.load", "average=3"),
        (lambda: model.translate("ha", top_k=3), "top_k=3"),
        (lambda: model.translate("ha", method="greedy", beam=3), "beam=3", "greedy"),
        (lambda: model.translate("ha", score_words="zh"), "score_words"),
        (lambda: model.encode("ha"), model.path),
    ):
        with refused(UserError, *mentions):
            call()


def test_models_that_generate_text_have_no_encoder_to_show_or_export(translated, tmp_path):
    run = str(translated.folder)
    for call, *mentions in (
        (lambda: recipes.inspect(run), "translation", run),
        (lambda: recipes.inspect("nowhere", beside=run, output=str(tmp_path)), "nowhere"),
        (lambda: conversion.export(translated.folder), "translation"),
        (lambda: importing.import_run(run, make_config(), Workdir(tmp_path).path), "translation"),
    ):
        with refused(UserError, *mentions) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "names", "parts"),
    [
        ({"method": "greedy", "length_penalty": 0.6}, set(), ["greedy"]),
        (
            {"method": "beam", "beam": 5, "length_penalty": 0.6},
            {"beam", "length_penalty"},
            ["beam 5", "length^0.6"],
        ),
        (
            {"method": "sample", "top_k": 20, "temperature": 0.7},
            {"n_best", "length_penalty", "temperature", "top_k", "top_p", "seed"},
            ["temperature 0.7", "top k 20", "top p 1", "seed 3"],
        ),
        (
            {"method": "sample", "n_best": 4},
            {"n_best", "length_penalty", "temperature", "top_k", "top_p", "seed"},
            ["temperature 1", "top k 0", "top p 1", "seed 3", "best of 4", "length^1"],
        ),
    ],
)
def test_settings_of_a_score_are_those_that_its_method_reads(fields, names, parts):
    fields = {"length_ratio": 0.0, "length_extra": 90, **fields}
    config = replace(
        Config(recipe="translation", seed=3),
        {f"decoding.{name}": value for name, value in fields.items()},
    )
    found = scoring.collect_settings(config, [7], "bfloat16")
    always = {"method", "length_ratio", "length_extra", "checkpoints", "dtype"}
    assert set(found) == always | names
    described = scoring.describe_settings(found)
    for part in (*parts, "90", "checkpoint 7", "bfloat16"):
        assert part in described
    assert ("length^" in described) == any(part.startswith("length^") for part in parts)
