"""SQuAD from files to scores and answer files, with a tiny model and easy questions."""

import dataclasses
import json
import random

import jax
import numpy as np
import pytest

from benchmarks.fidelity import squad_evaluation
from configs import squad
from convbert_jax.config import Config, ConfigError, from_config_dict
from convbert_jax.data.errors import DataError
from convbert_jax.data.tasks.labelled_text import Example
from convbert_jax.data.tasks.squad import Answer, Question
from convbert_jax.data.tokenizer.tokenizer import train_tokenizer
from convbert_jax.finetuning import question_answering, run
from convbert_jax.finetuning.fitting import Programs
from convbert_jax.finetuning.task import FinetuningError
from convbert_jax.inference.loading import read_finetuned
from convbert_jax.inference.predictor import QuestionAnswerer, make_predictor
from convbert_jax.interfaces import AnswerBatch
from convbert_jax.training import partitioning
from convbert_jax.workdir import Workdir
from tests.batches import check_batch
from tests.refusals import refused

PLACES = ["Lamu", "Bade Dume", "Rafa", "Tiko", "Sane Nifo"]
WORDS = ["the", "town", "of", "river", "is", "near", "and", "has", "many", "small", "old", "boats"]


def make_questions(count, seed, impossible=0.0):
    """Make contexts with one place name, which is the answer, or without any."""
    rng = random.Random(seed)
    questions = []
    for number in range(count):
        words = rng.choices(WORDS, k=rng.randint(4, 60))
        without = rng.random() < impossible
        place = rng.choice(PLACES)
        at = rng.randint(0, len(words))
        parts = words if without else [*words[:at], place, *words[at:]]
        context = " ".join(parts)
        start = len(" ".join([*words[:at], ""])) if at else 0
        answers = () if without else (Answer(place, start),)
        questions.append(Question(f"{seed}-{number}", "Which town?", context, answers, without))
    return questions


DEV = make_questions(40, 2)


def as_articles(questions):
    paragraphs = [
        {
            "context": q.context,
            "qas": [
                {
                    "id": q.id,
                    "question": q.text,
                    "is_impossible": q.impossible,
                    "answers": [{"text": a.text, "answer_start": a.start} for a in q.answers],
                }
            ],
        }
        for q in questions
    ]
    return [{"title": "Towns", "paragraphs": paragraphs}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write SQuAD files of both versions."""
    folder = tmp_path_factory.mktemp("squad")
    for version, impossible in (("v1.1", 0.0), ("v2.0", 0.4)):
        for split, count, seed in (("train", 192, 1), ("dev", 40, 2)):
            content = {"data": as_articles(make_questions(count, seed, impossible))}
            (folder / f"{split}-{version}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    section = dataclasses.replace(Config().tokenizer, kind="wordpiece", vocab_size=100)
    texts = [f"{q.text} {q.context}" for q in make_questions(300, 0)]
    return train_tokenizer(texts, section, tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="module")
def make_config(folder, tokenizer):
    def make(**finetune):
        config = Config(recipe="finetune")
        sizes = {
            "mixer": "attention",
            "layers": 1,
            "hidden_size": 32,
            "embedding_size": 32,
            "heads": 2,
            "ffn_size": 32,
        }
        settings = {
            "data": str(folder),
            "length": 48,
            "buckets": (),
            "query_length": 8,
            "stride": 16,
            "answer_length": 4,
            "n_best": 5,
            "beam": 5,
            "seeds": 1,
            "dropout": 0.0,
            "learning_rates": (3e-2,),
            "epochs": (4.0,),
            "layer_decay": 1.0,
            "eval_batch_size": 64,
        }
        return dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, **sizes, dropout=0.0, attention_dropout=0.0),
            tokenizer=dataclasses.replace(
                config.tokenizer, kind="wordpiece", vocab_size=100, path=str(tokenizer.path)
            ),
            finetune=dataclasses.replace(config.finetune, **(settings | finetune)),
        )

    return make


def finetune(config, name, folder, tokenizer):
    mesh = partitioning.make_mesh(config.mesh, jax.devices()[:1])
    programs = Programs(config, np.dtype(np.float32), mesh)
    make = lambda: question_answering.make_task(name, config, tokenizer)  # noqa: E731
    with jax.set_mesh(mesh):
        (result,) = run.finetune(config, Workdir(folder), [make], programs, tokenizer, None)
    return result


@pytest.mark.parametrize(("version", "head"), [("v1.1", "span_beam"), ("v2.0", "span")])
def test_squad(make_config, tokenizer, folder, tmp_path, version, head):
    """The model learns, scores equal an independent script's, answers occur in the context."""
    task = f"squad_{version[:2]}"
    result = finetune(make_config(head=head), task, tmp_path, tokenizer)
    scores = result.runs[0].scores["validation"]
    assert scores["f1"] > 0.9
    place = tmp_path / task / "seed-0" / "predictions" / "validation"
    read = lambda name: json.loads((place / name).read_text())  # noqa: E731
    predictions, n_best = read("predictions.json"), read("nbest_predictions.json")
    articles = json.loads((folder / f"dev-{version}.json").read_text())["data"]
    theirs = squad_evaluation.evaluate(articles, predictions)
    assert theirs == {k: pytest.approx(100 * scores[k]) for k in ("exact_match", "f1")}
    assert all(sum(c["probability"] for c in cs) == pytest.approx(1) for cs in n_best.values())
    if version == "v2.0":
        assert scores["best_f1"] >= scores["f1"]
        assert scores["no_answer_f1"] > 0.8
        everything = read("scores.json")
        assert scores.items() <= everything.items()
        assert "best_f1_threshold" in everything
        odds = read("null_odds.json")
        assert {key for key, text in predictions.items() if not text} == {
            key for key, value in odds.items() if value > 0
        }
        return
    contexts = {q.id: q.context for q in DEV}
    assert all(text in contexts[key] and text for key, text in predictions.items())
    assert not (place / "null_odds.json").exists()

    # The saved model gives the same answers when the questions are passed as new text.
    own, params, vocabulary = read_finetuned(str(tmp_path / task / "seed-0"))
    answerer = make_predictor(own, params, vocabulary, np.dtype(np.float32))
    assert isinstance(answerer, QuestionAnswerer)
    lines = answerer.answer([Example(q.id, (q.text, q.context), None) for q in DEV])
    for question, line in zip(DEV, lines, strict=True):
        assert line["prediction"] == predictions[question.id]
        assert question.context.startswith(line["prediction"], line["start"])
        assert max(line["probabilities"], key=line["probabilities"].get) == line["prediction"]


def test_rows(make_config, tokenizer):
    """Rows match their windows."""
    config = make_config()
    questions = make_questions(20, 3, impossible=0.3)
    train = question_answering.read_questions(questions, config, tokenizer, "t", targets=True)
    dev = question_answering.read_questions(questions, config, tokenizer, "d")
    assert len(train.rows) == len(train.windows.rows) > len(questions)
    for rows in (train.rows, dev.rows):
        batch = rows.batch(np.arange(len(rows)), 48)
        check_batch(batch, AnswerBatch)
        assert (batch["segment_ids"].sum(1) == rows.lengths).all()
        assert ((batch["tokens"] == tokenizer.special.sep).sum(1) == 2).all()
    for index, window in enumerate(train.windows.rows):
        size = len(window.tokens)
        assert train.rows.by_token["tokens"][index, :size].tolist() == window.tokens.tolist()
        types = [0] * window.context_at + [1] * (size - window.context_at) + [0] * (48 - size)
        assert train.rows.by_token["type_ids"][index].tolist() == types
        assert train.rows.by_row["start"][index] == window.start
        assert train.rows.by_row["end"][index] == window.end
        assert train.rows.by_row["impossible"][index] == questions[window.question].impossible
        best = np.flatnonzero(dev.rows.by_token["best"][index])
        assert best.tolist() == (window.context_at + np.flatnonzero(window.best)).tolist()


def test_configs():
    """Each variant is valid; `paper` has the settings of the official code."""
    for task in ("v1", "v2"):
        default = from_config_dict(squad.get_config(task))
        paper = from_config_dict(squad.get_config(f"{task},paper"))
        assert default.finetune.tasks == paper.finetune.tasks == (f"squad_{task}",)
        f = paper.finetune
        assert (f.length, f.query_length, f.stride, f.answer_length) == (512, 64, 128, 30)
        assert (f.head, f.n_best, f.beam, f.buckets) == ("span_beam", 20, 20, ())
        assert f.sum_loss
        assert not paper.optimizer.bias_correction
    with refused(ConfigError, "v3"):
        squad.get_config("v3")


def test_faults(make_config, tokenizer, tmp_path):
    make = question_answering.make_task
    with refused(ConfigError, "head=sequence", "squad_v1"):
        make("squad_v1", make_config(head="sequence"), tokenizer)
    with refused(DataError, tmp_path, "train-v2.0.json"):
        make("squad_v2", make_config(data=str(tmp_path)), tokenizer)
    with refused(DataError, 64):
        make("squad_v1", make_config(query_length=64), tokenizer)
    config = make_config()
    one_type = dataclasses.replace(config, model=dataclasses.replace(config.model, types=1))
    with refused(FinetuningError, "squad_v1", field="config.model.types", value=1):
        make("squad_v1", one_type, tokenizer)


def test_part_of_the_training_set(make_config, tokenizer):
    first, again = (
        question_answering.make_task("squad_v1", make_config(train_rows=40), tokenizer)
        for _ in range(2)
    )
    assert 40 <= len(first.train) < 100
    assert (first.train.by_token["tokens"] == again.train.by_token["tokens"]).all()
    assert first.predict is again.predict  # equal settings share a program
