"""A model of pairs: what it writes after training, its scores, and its predictions."""

# ruff: noqa: RUF001  (full-width punctuation)

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import sacrebleu

import convbert_jax
from convbert_jax import recipes
from convbert_jax.analysis import text_scores
from convbert_jax.config import UserError, to_dict
from convbert_jax.data.corpus.rows import ShardReader
from convbert_jax.data.parallel import parallel_text
from convbert_jax.data.parallel.records import from_records
from convbert_jax.data.parallel.references import read_heldout, read_whole
from convbert_jax.files import write_json
from convbert_jax.inference import resume
from convbert_jax.inference.writing import reading
from convbert_jax.interop import conversion, importing, sources
from convbert_jax.interop.matching import replace
from convbert_jax.workdir import Workdir
from tests.html import Page
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
    assert right == [translate(text) for text in texts_of(folder, "validation.source")]  # raw
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
    for said in (f"BLEU {scores['bleu']:.1f}", "nrefs:1", "  reference  ", "  ours  ", str(folder)):
        assert said in translated.report
    page = Page((translated.folder / "report.html").read_text())
    assert f"BLEU{scores['bleu']:.1f}" in page.texts("tr")
    assert f"reference {right[0]}" in page.texts("p")
    assert f"ours {written[0]}" in page.texts("p")


def test_raw_references_are_the_rows_that_training_holds_out(translation_config, translated):
    text = parallel_text.prepare(translation_config, translated.folder / "data")
    for rows in (0, 7):
        found = read_heldout(translation_config, text, rows).pairs
        assert len(found) == (rows or text.splits["validation"].rows)
    everything = read_heldout(translation_config, text, 0).pairs
    source, target = text.vocabularies
    split = text.splits["validation"]
    reader = ShardReader(split.shards, text.id_dtype, from_records, returned=np.dtype(object))
    stored = reader.read(np.arange(split.rows))
    reader.close()
    assert len(stored) == len(everything) > 24
    for pair, row in zip(everything, stored, strict=True):
        assert source.encode([pair[0]])[0] == list(row.source)
        assert target.encode([pair[1]])[0] == list(row.target)


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
    assert "1 scored as empty; the first: pair 6 has 41 tokens, more than the 32" in result.report
    assert kept["decoding"] == {
        "method": "beam",
        "beam": 3,
        "length_penalty": 1.0,
        "length_ratio": 1.5,
        "length_extra": 10,
        "checkpoints": [200, 300],
        "dtype": "float32",
    }
    assert (
        "  beam 3, score / length^1; at most 1.5 times the source's tokens and 10 more; "
        "the mean of 2 checkpoints, 200 to 300; float32\n"
    ) in result.report
    assert result.values != translated.evaluation  # by the mean


def test_the_mean_of_checkpoints(translation_config, translated):
    workdir = Workdir(translated.folder)
    config = replace(translation_config, {"decoding.average": 2})
    parts = {s: sources.read_params(workdir, config, s)[1] for s in (100, 200, 300)}
    for step, used in ((None, (200, 300)), (200, (100, 200))):
        found, mean = reading.read_mean(workdir, config, step)
        assert found == used
        wanted = jax.tree.map(
            lambda a, b: ((a.astype(np.float64) + b) / 2).astype(a.dtype), *(parts[s] for s in used)
        )
        jax.tree.map(np.testing.assert_array_equal, mean, wanted)
    assert reading.read_mean(workdir, translation_config)[0] == (300,)
    found, alone = reading.read_mean(workdir, config, 100)  # of a short trial: what there is
    assert found == (100,)
    jax.tree.map(np.testing.assert_array_equal, alone, parts[100])


def test_a_damaged_checkpoint_is_not_left_out_of_a_mean(translation_config, translated, tmp_path):
    shutil.copytree(translated.folder, tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints" / "200").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-9])
    config = replace(translation_config, {"decoding.average": 3})
    with pytest.raises(UserError, match=r"checkpoint .*/200 cannot be read"):
        reading.read_mean(Workdir(tmp_path / "run"), config)


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
    with pytest.raises(UserError, match=rf"pip install {package}"):
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


def test_words_of_chinese_are_counted_where_they_are_asked_for():
    right, ours = ["我们在河边看见一只很大的白色的鸟。"], ["我们在河边看见一只很大的黑色的鸟。"]
    found = text_scores.score("translation", ours, one_each(right), str, "zh")
    assert found.values["bleu"] > 60
    assert "tok:zh" in found.signature
    assert text_scores.score("translation", ours, one_each(right), str).values["bleu"] == 0


@pytest.mark.parametrize("text", [
    "今天天气很好，我们一起去公园吧！", "你好。日本。", "日本語の文章を読む。",
    "วันนี้อากาศดีมาก เราไปโรงเรียนด้วยกัน",
])  # fmt: skip
@pytest.mark.parametrize("recipe", ["translation", "summarization"])
def test_words_of_a_script_without_spaces_need_another_cut(recipe, text, caplog):
    """A perfect translation had 0 BLEU, and nothing was said."""
    right = [text] * 4
    text_scores.score(recipe, right, one_each(right), str, "intl")
    assert "config.decoding.score_words=zh" in caplog.text
    caplog.clear()
    found = text_scores.score("translation", right, one_each(right), str, "char")
    assert found.values["chrf"] == pytest.approx(100)
    segmented = ["今天 天气 很 好 ， 我们 去 公园", "The café of 東京 is open."]
    text_scores.score("translation", segmented, one_each(segmented), str)
    assert not caplog.text


def test_references_that_the_vocabulary_cannot_write_are_told(
    translation_config, translated, tmp_path, caplog
):
    """Full-width punctuation, which no output of a vocabulary with NFKC has."""
    spec = write_pairs(tmp_path, "test", 5)
    target = tmp_path / "test.bb"
    target.write_text(target.read_text().replace(".", "！"))
    config = replace(translation_config, {"decoding.test_sources": (f"mine={spec}",)})
    result = recipes.evaluate(config, translated.folder, output=str(tmp_path / "numbers.json"))
    lines = [line for line in result.report.splitlines() if line.startswith("  References")]
    (line,) = (line for line in lines if "！" in line)  # capitals of the other set cannot either
    assert line.strip() in caplog.text


def test_rouge_counts_words_of_any_script_where_they_are_asked_for(caplog):
    """rouge-score alone finds no word in them, which is said."""
    right = ["Дождь идёт, и ветер дует.", "Снег лежит во дворе."]
    ours = ["Дождь идёт, но ветер дует.", "Снег лежит на дворе."]
    found = text_scores.score("summarization", ours, one_each(right), str, "intl")
    assert found.values["rouge1"] == pytest.approx(100 * (4 / 5 + 3 / 4) / 2)
    assert found.values["rouge2"] == pytest.approx(100 * (2 / 4 + 1 / 3) / 2)
    assert "tok:intl" in found.signature
    assert not caplog.text
    assert text_scores.score("summarization", right, one_each(right), str).values["rouge1"] == 0
    assert "100% of the letters" in caplog.text
    assert "--config.decoding.score_words=intl" in caplog.text
    chinese = ["我们在河边看见鸟。"]
    found = text_scores.score("summarization", chinese, one_each(chinese), str, "zh")
    assert found.values["rouge2"] == 100


def test_rouge_of_few_other_letters_warns_of_nothing(caplog):
    right = ["The naïve guest of the café asks for a piece of bread."]
    text_scores.score("summarization", right, one_each(right), str)
    assert not caplog.text


def test_an_answer_in_another_case_is_equal_as_the_vocabulary_writes_it():
    scores = text_scores.score("text_to_text", [" yes"], [["Yes"]], str.lower).values
    assert scores == {"exact_match": 0, "exact_match_normalized": 100}


def test_sets_that_cannot_be_scored(translation_config, tmp_path):
    (tmp_path / "a.tsv").write_text("a\tb\nalone\nc\td\n")
    found = read_whole(f"tsv:{tmp_path / 'a.tsv'}", translation_config.parallel)
    assert found.pairs == (("a", "b"), ("c", "d"))
    assert found.bad[0] == 1
    assert "line 2 has 1 columns" in found.bad[1]
    (tmp_path / "b.tsv").write_text("a\tb\nc\t \n")
    with pytest.raises(UserError, match=r"b\.tsv line 2 has an empty reference"):
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
    assert lines[1]["error"] == "line 2 is empty"
    assert (
        "line 4 has 41 tokens, more than the 32 of config.parallel.max_length" in lines[3]["error"]
    )
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
    assert bad["error"] == "line 2 has list instead of text in 'source'"


def test_predictions_go_on_where_they_were_stopped(predict, tmp_path):
    (tmp_path / "in.txt").write_text("bo ce\nha\ndi\n")
    predict(tmp_path / "in.txt", tmp_path / "whole.jsonl")
    whole = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)

    def stop(name):
        (tmp_path / f"{name}.jsonl.unfinished").write_text(whole[0] + whole[1][:5])
        shutil.copy(tmp_path / "note", tmp_path / f"{name}.jsonl.unfinished.model")

    notes = []
    with pytest.MonkeyPatch.context() as patch:
        write = resume.write_json
        patch.setattr(resume, "write_json", lambda path, v: (notes.append(v), write(path, v)))
        predict(tmp_path / "in.txt", tmp_path / "again.jsonl")
    (tmp_path / "note").write_text(json.dumps(notes[0]))
    stop("half")
    result = predict(tmp_path / "in.txt", tmp_path / "half.jsonl")
    assert (result.rows, result.kept) == (3, 1)
    assert (tmp_path / "half.jsonl").read_text() == "".join(whole)
    stop("other")
    with pytest.raises(UserError, match="has predictions of another model"):
        predict(tmp_path / "in.txt", tmp_path / "other.jsonl", decoding={"beam": 1})


@pytest.mark.parametrize(
    ("output", "options", "says"),
    [
        ("out.txt", {"decoding": {"n_best": 2}}, "n_best=2 texts of a row are no plain line"),
        ("out.jsonl", {"decoding": {"beam": 4_000}}, r"config\.decoding\.beam=4000 must be"),
        ("out.jsonl", {"decoding": {"average": 3, "beam": 40}}, "more than the vocabulary's 34"),
        ("out.jsonl", {"texts": ("a", "b")}, "reads one text of each row"),
    ],
)
def test_predictions_that_cannot_be_are_one_sentence(predict, output, options, says, tmp_path):
    (tmp_path / "in.txt").write_text("bo\n")
    with pytest.raises(UserError, match=says) as error:
        predict(tmp_path / "in.txt", tmp_path / output, **options)
    assert "\n" not in str(error.value)
    assert not (tmp_path / output).exists()


def test_a_vocabulary_of_the_same_size_from_elsewhere_is_refused(translated, tmp_path):
    run = shutil.copytree(translated.folder, tmp_path / "run")
    model = run / "vocabulary" / "tokenizer.model"
    model.write_bytes(model.read_bytes() + b"\x1a\x00")  # the same pieces, as other bytes
    with pytest.raises(UserError, match=r"is not the vocabulary that .* learned with"):
        convbert_jax.load(run)


def test_other_models_do_not_decode(tmp_path):
    (tmp_path / "in.txt").write_text("good\n")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    write_json(tmp_path / "run" / "config.json", to_dict(make_config(recipe="masked_lm")))
    model = str(tmp_path / "run")
    with pytest.raises(UserError, match=r"config\.decoding\.beam has no effect: .* no model that"):
        recipes.predict(model, str(tmp_path / "in.txt"), "-", decoding={"beam": 2})
    with pytest.raises(UserError, match=r"average=2: .* is of models that write text"):
        convbert_jax.load(model, average=2)


def test_from_python(translated, model):
    assert model.step == 300
    one = model.translate("bo ce")
    assert model.translate(["ha", "bo ce"]) == [model.write("ha"), one]
    assert model.write([]) == []
    (best, second) = model.translate("bo ce", n_best=2)
    assert best.text == one
    assert best.score > second.score
    for call, says in (
        (lambda: model.summarize("ha"), r"call translate\(\) of it instead of summarize"),
        (lambda: model.translate(["ha", ""]), r"texts\[1\] is empty"),
        (lambda: model.translate("ha", bem=3), "decoding has no bem; it has method, beam"),
        (lambda: model.translate("ha", average=3), r"convbert_jax\.load\(.*average=3\)"),
        (lambda: model.translate("ha", top_k=3), "top_k=3 has no effect .*; leave it out, or set"),
        (lambda: model.translate("ha", method="greedy", beam=3), "beam=3 has no effect with"),
        (lambda: model.translate("ha", score_words="zh"), "score_words has no effect on what"),
        (lambda: model.encode("ha"), "writes text and has no vectors"),
    ):
        with pytest.raises(UserError, match=says):
            call()


def test_what_only_encoders_have_is_refused(translated, tmp_path):
    run = str(translated.folder)
    for call, says in (
        (lambda: recipes.inspect(run), "writes text; what layers do is shown of encoders"),
        (lambda: recipes.inspect("nowhere", beside=run, output=str(tmp_path)), "nowhere is no run"),
        (lambda: conversion.export(translated.folder), "writes text; no class of Hugging Face"),
        (lambda: importing.import_run(run, make_config(), Workdir(tmp_path).path), "writes text"),
    ):
        with pytest.raises(UserError, match=says) as error:
            call()
        assert "\n" not in str(error.value)
