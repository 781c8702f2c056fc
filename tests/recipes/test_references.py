"""Test sets with several references per source text."""

import contextlib
import dataclasses
import json
import shutil

import pytest
import sacrebleu

from convbert_jax import recipes
from convbert_jax.analysis import text_scores
from convbert_jax.config import UserError, from_config_dict, to_dict
from convbert_jax.data.parallel_text import prepare, read_heldout
from convbert_jax.interop.matching import replace
from tests.refusals import refused
from tests.runs import write_pairs


def one_each(texts):
    return [(text,) for text in texts]


def test_corpus_scores_take_all_references():
    ours = ["a b c d e f g h", "one two three four five"]
    right = [
        ("a b c d x y z w", "p q r s e f g h"),
        ("one two three four", "one two three four five"),
    ]
    found = text_scores.score("translation", ours, right, str)
    streams = [list(texts) for texts in zip(*right, strict=True)]
    assert found.values["bleu"] == sacrebleu.corpus_bleu(ours, streams).score
    assert found.signature.count("nrefs:2") == 2
    for texts in streams:
        alone = text_scores.score("translation", ours, one_each(texts), str)
        assert alone.values["bleu"] < found.values["bleu"]


@pytest.mark.parametrize(
    ("recipe", "metric"), [("summarization", "rougeL"), ("text_to_text", "exact_match")]
)
def test_the_best_reference_counts_for_scores_of_single_texts(recipe, metric):
    ours, right = ["the second", "the only"], [("another", "the second"), ("the only",)]
    found = text_scores.score(recipe, ours, right, str)
    assert found.values[metric] == 100
    assert "1 to 2 references" in found.signature
    alone = text_scores.score(recipe, ours, one_each(["another", "the only"]), str)
    assert alone.values[metric] == 50
    assert "references" not in alone.signature


def test_a_set_is_scored_by_all_of_its_references(translation_config, translated, tmp_path):
    """The second reference file is the model's output, the first is entirely wrong."""
    folder = translated.folder / "evaluation" / "step-300"
    written = (folder / "validation.txt").read_text()
    (tmp_path / "wrong").write_text("".join("no.\n" for _ in written.splitlines()))
    spec = f"parallel:{folder}/validation.source.txt,{tmp_path}/wrong,{folder}/validation.txt"
    config = replace(translation_config, {"decoding.test_sources": (f"mine={spec}",)})
    result = recipes.evaluate(config, translated.folder, output=str(tmp_path / "n.json"))
    assert result.scores["mine"]["bleu"] == pytest.approx(100)
    assert "nrefs:2" in result.report
    assert (tmp_path / "n" / "mine.reference-2.txt").read_text() == written
    kept = json.loads((tmp_path / "n.json").read_text())
    assert "nrefs:2" in kept["scores"]["mine"]["signature"]


def test_counts_that_differ_are_refused_before_any_work(
    translation_config, translated, tmp_path, monkeypatch
):
    rows = [{"source": "Ada", "target": ["un.", "un!"]}, {"source": "bo", "target": "do."}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = f"jsonl:{tmp_path / 'a.jsonl'}"
    mentions = (f"{tmp_path / 'a.jsonl'} line 2", "a.jsonl line 1")
    config = replace(translation_config, {"decoding.test_sources": (f"mine={spec}",)})
    monkeypatch.setattr(recipes.prepared, "open_prepared", None)  # never reached
    with refused(UserError, *mentions) as caught:
        recipes.evaluate(config, translated.folder)
    assert "\n" not in str(caught.value)
    config = replace(translation_config, {"parallel.validation_source": spec})
    with refused(UserError, *mentions):
        recipes.pretrain(config, tmp_path / "run")


@pytest.mark.parametrize("recipe", ["translation", "text_to_text"])
def test_a_further_reference_that_cannot_be_read_is_refused_before_any_work(
    translation_config, recipe, tmp_path
):
    """The bad reference is in the validation set, which is otherwise read only after training."""
    spec = write_pairs(tmp_path, "valid", 3)
    (tmp_path / "more").write_bytes(b"one.\ntr\xe8s.\nthree.\n")
    fields = {"parallel.validation_source": f"{spec},{tmp_path}/more"}
    config = dataclasses.replace(replace(translation_config, fields), recipe=recipe)
    with refused(UserError, f"{tmp_path}/more line 2", "byte 2") as caught:
        recipes.pretrain(config, tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_an_empty_reference_is_refused_before_any_work(
    translation_config, translated, tmp_path, monkeypatch
):
    spec = write_pairs(tmp_path, "test", 3)
    (tmp_path / "test.bb").write_text("un.\n \nDO.\n")
    config = replace(translation_config, {"decoding.test_sources": (f"mine={spec}",)})
    monkeypatch.setattr(recipes.prepared, "open_prepared", None)  # never reached
    with refused(UserError, f"{tmp_path / 'test.bb'} line 2"):
        recipes.evaluate(config, translated.folder)


@pytest.fixture
def without_pairs(pairs, tmp_path):
    """A context manager that hides the files from which `translated` was prepared."""
    there, *_ = pairs.removeprefix("parallel:").split(",")

    @contextlib.contextmanager
    def remove():
        kept = shutil.move(there, tmp_path / "kept")
        try:
            yield
        finally:
            shutil.move(kept, there)

    return remove


def test_scores_stay_beside_those_of_other_sets(
    translation_config, translated, without_pairs, tmp_path
):
    """Evaluates a run that was moved; each set of numbers names its checkpoints."""
    run = shutil.copytree(translated.folder, tmp_path / "run")
    tests = [f"{n}={write_pairs(tmp_path, n, 3, seed=int(n))}" for n in ("2016", "2017")]

    def kept():
        found = json.loads((run / "evaluation" / "step-300.json").read_text())
        return set(found["scores"]), found["checkpoints"]

    fields = {"decoding.test_sources": (tests[0],), "decoding.average": 2}
    mean = recipes.evaluate(replace(translation_config, fields), run)
    assert kept() == ({"validation", "2016"}, [200, 300])
    assert "200 to 300" in mean.report
    recipes.pretrain(translation_config, run)  # already finished
    assert kept() == ({"validation", "2016"}, [300])
    output = tmp_path / "other.json"
    output.write_text(json.dumps({"workdir": "another", "step": 300, "scores": {"x": {}}}))
    fields = {"decoding.test_sources": (tests[1],)}
    with without_pairs():
        alone = recipes.evaluate(replace(translation_config, fields), run)
        recipes.evaluate(translation_config, run, output=str(output))
    assert "scores" not in json.loads(output.read_text())
    assert kept() == ({"validation", "2016", "2017"}, [300])
    assert set(alone.scores) == {"2017"}
    assert alone.values == pytest.approx(translated.evaluation, rel=1e-5)
    for part in ("step 300", f"BLEU {alone.scores['2017']['bleu']:.1f}"):
        assert part in alone.report


def test_heldout_pairs_with_several_references_are_those_of_the_first(translation_config, tmp_path):
    """Further references do not change the held-out rows or their fingerprint."""
    spec = write_pairs(tmp_path, "valid", 12, seed=3)
    third = tmp_path / "third"
    third.write_text("".join(f"other {n}\n" for n in range(12)))
    texts = []
    for source in (spec, f"{spec},{third}"):
        config = replace(translation_config, {"parallel.validation_source": source})
        texts.append(prepare(config, tmp_path / "data"))
    assert texts[0].fingerprint == texts[1].fingerprint
    found = read_heldout(config, texts[1], 5).pairs
    assert [len(pair) for pair in found] == [3] * 5
    assert found[0][2] == "other 0"


def test_training_has_one_target(translation_config, tmp_path):
    config = replace(translation_config, {"parallel.source": "parallel:a.en,b.de,c.de"})
    with refused(UserError, 3, "a.en"):
        prepare(config, tmp_path / "data")
    config = replace(translation_config, {"parallel.columns": ("en", "en")})
    with refused(UserError, "columns", "en,en"):
        from_config_dict(to_dict(config))
    config = replace(translation_config, {"parallel.columns": ("en", "de", "de2")})
    with refused(UserError, "columns", "en,de,de2"):
        from_config_dict(to_dict(config))
