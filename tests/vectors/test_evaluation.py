"""Scores of text vectors: definitions, files, and the commands."""

import csv
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import convbert_jax
from convbert_jax.config import ParallelSection, UserError
from convbert_jax.data.errors import DataError
from convbert_jax.inference.search import Hit, normalize
from convbert_jax.vectors import __main__, evaluation, mining
from tests.refusals import refused

SECTION = ParallelSection(columns=("a", "b"), score_column="s")


@pytest.fixture(scope="module")
def model(pretrained):
    return convbert_jax.load(str(pretrained.folder))


class Fixed:
    """A model whose vectors of texts are given by name."""

    def __init__(self, vectors):
        self.vectors = vectors

    def encode(self, texts):
        return np.asarray([self.vectors[text] for text in texts], np.float32)

    encode_queries = encode_documents = encode


def test_similarity_is_the_correlation_of_cosines(model):
    rng = np.random.default_rng(0)
    fixed = Fixed({str(i): rng.normal(size=4) for i in range(20)})
    pairs = [(str(i), str(i + 10), float(i * i % 7)) for i in range(10)]
    found = evaluation.score_similarity(fixed, pairs)
    first, second = (normalize(fixed.encode([p[side] for p in pairs])) for side in (0, 1))
    cosines = (first * second).sum(axis=1)
    assert found["pearson"] == pytest.approx(np.corrcoef(cosines, [p[2] for p in pairs])[0, 1])
    assert -1 <= found["spearman"] <= 1
    scored = [(a, b, float(c)) for (a, b, _), c in zip(pairs, cosines**3, strict=True)]
    assert evaluation.score_similarity(fixed, scored)["spearman"] == pytest.approx(1.0)


def test_two_scores_are_classes():
    fixed = Fixed({"q": (1, 0), "a": (1, 0.1), "b": (1, 0.5), "c": (1, 0.5), "d": (1, 2)})
    pairs = [("q", "a", 1.0), ("q", "b", 0.0), ("q", "c", 1.0), ("q", "d", 0.0)]
    found = evaluation.score_similarity(fixed, pairs)
    assert found["average_precision"] == pytest.approx((1 + 2 / 3) / 2)  # b and c are tied
    assert found["accuracy"] == 3 / 4
    flipped = [(a, b, 1 - score) for a, b, score in pairs]
    assert evaluation.score_similarity(fixed, flipped)["accuracy"] == 2 / 4


def test_clusters_are_compared_with_labels():
    vectors = {f"{side}{i}": (1, 0.1 * i, 9 * side) for side in (0, 1) for i in range(5)}
    rows = [(text, text[0]) for text in vectors]
    assert evaluation.score_clusters(Fixed(vectors), rows) == pytest.approx(1.0)
    rows = [(text, text[1]) for text in vectors]
    assert evaluation.score_clusters(Fixed(vectors), rows) < 0.9


def test_a_reranker_sorts_what_was_found():
    class Backwards:
        def rerank(self, query, documents):
            return [Hit(place, documents[place], 0.0) for place in reversed(range(len(documents)))]

    fixed = Fixed({"q": (1, 0), "a": (1, 0.1), "b": (1, 0.5), "c": (1, 2)})
    data = evaluation.Retrieval(dict(zip("123", "abc", strict=True)), {"x": "q"}, {"x": {"3": 1}})
    assert evaluation.score_retrieval(fixed, data)["mrr@10"] == pytest.approx(1 / 3)
    assert evaluation.score_retrieval(fixed, data, Backwards())["mrr@10"] == 1.0


def test_scores_of_a_ranking_by_hand():
    found = evaluation.score_rankings({"q": ["x", "a", "y", "b"]}, {"q": {"a": 2, "b": 1}})
    gained = 2 / np.log2(3) + 1 / np.log2(5)
    assert found["ndcg@10"] == pytest.approx(gained / (2 + 1 / np.log2(3)))
    assert found["mrr@10"] == 1 / 2
    assert [found[f"recall@{k}"] for k in (1, 3, 5)] == [0.0, 0.5, 1.0]


@st.composite
def rankings(draw):
    documents = [f"d{i}" for i in range(draw(st.integers(1, 15)))]
    queries = [f"q{i}" for i in range(draw(st.integers(1, 4)))]
    ranked = {q: draw(st.permutations(documents)) for q in queries}
    chosen = st.sets(st.sampled_from(documents), min_size=1)
    return ranked, {q: dict.fromkeys(draw(chosen), 1) for q in queries}


@pytest.mark.parity
@given(rankings())
@settings(deadline=None, max_examples=50)
def test_scores_are_those_of_sentence_transformers(given_rankings):
    evaluators = pytest.importorskip("sentence_transformers.evaluation")
    ranked, relevant = given_rankings
    theirs = evaluators.InformationRetrievalEvaluator(
        queries=dict.fromkeys(ranked, ""),
        corpus=dict.fromkeys(next(iter(ranked.values())), ""),
        relevant_docs={q: set(found) for q, found in relevant.items()},
        precision_recall_at_k=list(evaluation.CUTS),
    )
    hits = [[{"corpus_id": d, "score": -i} for i, d in enumerate(ranked[q])] for q in ranked]
    expected = theirs.compute_metrics(hits)
    found = evaluation.score_rankings(ranked, relevant)
    assert found["ndcg@10"] == pytest.approx(expected["ndcg@k"][10])
    assert found["mrr@10"] == pytest.approx(expected["mrr@k"][10])
    for k in evaluation.CUTS:
        assert found[f"recall@{k}"] == pytest.approx(expected["recall@k"][k])


def write_beir(folder, **changes: str) -> None:
    files = {
        "corpus.jsonl": '{"_id": "1", "title": "A", "text": "b"}\n{"_id": "2", "text": "c"}\n',
        "queries.jsonl": '{"_id": "q", "text": "c"}\n{"_id": "r", "text": "b"}\n',
        "qrels/test.tsv": "query-id\tcorpus-id\tscore\nq\t2\t1\nr\t2\t0\n",
    } | changes
    (folder / "qrels").mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content)


def test_a_folder_in_the_layout_of_beir(tmp_path):
    write_beir(tmp_path)
    data = evaluation.read_retrieval(tmp_path)
    assert data.documents == {"1": "A b", "2": "c"}
    assert (data.queries, data.relevant) == ({"q": "c"}, {"q": {"2": 1}})
    fixed = Fixed({"A b": (0, 1), "c": (1, 0)})
    assert evaluation.score_retrieval(fixed, data)["ndcg@10"] == 1.0


def test_a_document_is_not_the_answer_of_itself():
    """As the duplicates of Quora."""
    fixed = Fixed({"a": (1, 0), "b": (1, 0.1)})
    data = evaluation.Retrieval({"1": "a", "2": "b"}, {"1": "a"}, {"1": {"2": 1}})
    assert evaluation.score_retrieval(fixed, data)["mrr@10"] == 1.0


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"corpus.jsonl": "{}\n"}, 1),
        ({"corpus.jsonl": "no\n"}, 1),
        ({"corpus.jsonl": '{"_id": "1", "text": "b"}\n' * 2}, 2),
        ({"qrels/test.tsv": "query-id\tcorpus-id\tscore\nq\t2\n"}, 2),
        ({"qrels/test.tsv": "query-id\tcorpus-id\tscore\nq\t2\tx\n"}, 2),
        ({"qrels/test.tsv": "query-id\tcorpus-id\tscore\nq\t9\t1\n"}, 2),
        ({"qrels/test.tsv": "query-id\tcorpus-id\tscore\nz\t2\t1\n"}, 2),
        ({"qrels/test.tsv": "query-id\tcorpus-id\tscore\nq\t2\t0\n"}, None),
    ],
)
def test_bad_files_are_refused(tmp_path, changes, line):
    write_beir(tmp_path, **changes)
    with refused(DataError, path=tmp_path / next(iter(changes)), line=line):
        evaluation.read_retrieval(tmp_path)


@pytest.mark.parametrize("name", ["corpus.jsonl", "queries.jsonl", "qrels/test.tsv"])
def test_a_missing_file_is_named(tmp_path, name):
    write_beir(tmp_path)
    (tmp_path / name).unlink()
    with refused(DataError, name, path=tmp_path / name):
        evaluation.read_retrieval(tmp_path)


def test_every_row_of_a_test_set_counts(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("a,b,s\nx,y,1\nx,y,none\n")
    with refused(DataError, path=path, line=3):
        evaluation.read_rows(f"csv:{path}", SECTION, scored=True)


def test_rows_have_two_texts(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("a,b,s\nx,y,z\n")
    with refused(DataError, value="a,b,s"):
        evaluation.read_rows(f"csv:{path}", ParallelSection(columns=("a", "b", "s")), scored=False)


def test_mined_texts_are_similar_but_no_answers():
    vectors = {
        "q": (1, 0), "r": (0, 1), "right": (1, 0.1), "nearly": (1, 0.12), "far": (0.6, 0.8),
        "other": (0.1, 1),
    }  # fmt: skip
    pairs = [("q", "right"), ("r", "far"), ("r", "other"), ("q", "nearly")]
    found = list(mining.mine(Fixed(vectors), pairs))
    assert found[0] == ("q", "right", "far")  # "nearly" is another answer of q
    assert all(negative not in ("far", "other") for query, _, negative in found if query == "r")


def test_tasks_of_mteb_without_mteb(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "convbert_jax.vectors.mteb_tasks", None)
    monkeypatch.delattr("convbert_jax.vectors.mteb_tasks", raising=False)
    with refused(UserError, "pip install"):
        __main__._score_tasks("none", ["SciFact"], tmp_path)


def test_a_model_without_vectors_is_refused(monkeypatch):
    monkeypatch.setattr("convbert_jax.inference.loading.load", lambda path: object())
    with refused(UserError, field="--model", value="runs/translation"):
        __main__._load("runs/translation")


def test_classes_become_scored_pairs():
    rows = [("a", "x"), ("b", "x"), ("c", "y"), ("d", "y"), ("alone", "z"), ("a", "x")]
    classes = dict(rows)
    found = list(mining.pair_classes(rows))
    assert {first for first, _, score in found if score == 0} == set(classes)
    for first, second, score in found:
        assert first != second
        assert (classes[first] == classes[second]) == (score == 1)
    assert "alone" not in {first for first, _, score in found if score == 1}
    with refused(UserError, "classes"):
        list(mining.pair_classes([("a", "x"), ("b", "x")]))


def test_the_command_for_classes(monkeypatch, tmp_path):
    (tmp_path / "texts.csv").write_text("topic,text\nx,a\nx,b\ny,c\n")
    arguments = (f"--source=csv:{tmp_path}/texts.csv", "--columns=text,topic")
    output = tmp_path / "pairs.csv"
    monkeypatch.setattr(sys, "argv", ["vectors", "pairs", *arguments, f"--output={output}"])
    __main__.main()
    rows = list(csv.DictReader(output.open()))
    assert {tuple(row) for row in rows} == {("first", "second", "score")}
    assert [row["score"] for row in rows] == ["1.0", "0.0", "1.0", "0.0", "0.0"]


def test_the_commands(pretrained, tmp_path):
    source = tmp_path / "rows.csv"
    rows = [f"the {word},{word} tree,{i}\n" for i, word in enumerate(["sun", "moon", "sky", "sea"])]
    source.write_text("a,b,s\n" + "".join(rows))
    write_beir(tmp_path)

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "convbert_jax.vectors", *arguments]
        command.append(f"--model={pretrained.folder}")
        return subprocess.run(command, capture_output=True, text=True, check=False)

    pairs = (f"--source=csv:{source}", "--columns=a,b")
    scores = run("similarity", *pairs, "--score_column=s")
    assert (scores.returncode, scores.stdout.split()[::2]) == (0, ["spearman", "pearson"])
    assert "ndcg@10" in run("retrieval", f"--folder={tmp_path}").stdout
    mined = tmp_path / "mined.csv"
    assert run("mine", *pairs, f"--output={mined}").returncode == 0
    before = mined.read_text()
    assert before.startswith("first,second,negative")
    again = run("mine", *pairs, f"--output={mined}")
    assert (again.returncode, mined.read_text()) == (1, before)
    assert json.dumps(str(mined))[1:-1] in again.stderr
