"""Search: exact results, saved indices, and what is refused."""

import shutil
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import convbert_jax
from convbert_jax.inference import search
from convbert_jax.inference.search import SearchError, most_similar, normalize
from convbert_jax.storage import DamagedFileError
from tests.refusals import refused
from tests.running import NO_USEARCH

TEXTS = ["the sun", "a moon", "trees and rivers", "a moon"]


@pytest.fixture(scope="module")
def model(pretrained):
    return convbert_jax.load(str(pretrained.folder))


@pytest.fixture
def saved(model, tmp_path):
    model.index(TEXTS).save(tmp_path / "index")
    return tmp_path / "index"


@given(
    st.integers(1, 30),
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(0, 99),
    st.integers(4, 64),
)
@settings(deadline=None, max_examples=25)
def test_results_are_those_of_sorting_all_cosines(count, queries, k, seed, at_once):
    rng = np.random.default_rng(seed)
    vectors, asked = (rng.normal(size=(n, 5)) for n in (count, queries))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_AT_ONCE", at_once)
        places, scores = most_similar(asked, vectors, k)
    vectors, asked = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (vectors, asked))
    cosines = asked @ vectors.T
    best = np.argsort(-cosines, axis=1)[:, :k]
    np.testing.assert_array_equal(places, best)
    np.testing.assert_allclose(scores, np.take_along_axis(cosines, best, 1), atol=1e-6)


def test_a_saved_index_finds_the_same(model, saved):
    again = model.load_index(saved)
    hits = again.search(["a moon", "the sun"], k=2)
    assert hits == model.index(TEXTS).search(["a moon", "the sun"], k=2)
    assert {hit.place for hit in hits[0]} == {1, 3}
    assert (hits[1][0].text, round(hits[1][0].score, 5)) == ("the sun", 1.0)
    again.save(saved)  # its own files may be replaced


def test_a_single_query_and_small_indices(model):
    index = model.index(TEXTS[:1])
    assert [hit.text for hit in index.search("the sun", k=10)] == ["the sun"]
    assert index.search([]) == []
    assert model.index([]).search("the sun") == []


def test_approximate_search_of_few_vectors_is_exact():
    pytest.importorskip("usearch", reason=NO_USEARCH)
    rng = np.random.default_rng(0)
    vectors, asked = normalize(rng.normal(size=(50, 8))), rng.normal(size=(9, 8))
    places, scores = search.Graph(vectors).search(asked, 5)
    expected = most_similar(asked, vectors, 5)
    np.testing.assert_array_equal(places, expected[0])
    np.testing.assert_allclose(scores, expected[1], atol=1e-6)


def test_an_approximate_index_is_saved_and_loaded(model, saved, tmp_path):
    pytest.importorskip("usearch", reason=NO_USEARCH)
    index = model.index(TEXTS, approximate=True)
    index.save(tmp_path / "again")
    assert {f.name for f in (tmp_path / "again").iterdir()} == {f.name for f in saved.iterdir()}
    for approximate in (index, model.load_index(saved, approximate=True)):
        assert approximate.search("the sun", k=9)[0].text == "the sun"
        first, _ = approximate.search(["a moon", "the sun"], k=2)
        assert {hit.place for hit in first} == {1, 3}
    assert model.index([], approximate=True).search("the sun") == []


def test_an_approximate_index_without_usearch(model, saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "usearch.index", None)
    with refused(SearchError, "pip install"):
        model.index(TEXTS, approximate=True)
    with refused(SearchError, "pip install"):
        model.load_index(saved, approximate=True)


def test_an_index_of_another_model_is_refused(model, saved):
    index = model.load_index(saved)
    index.vectors = np.roll(index.vectors, 1, axis=1)
    index.save(saved)
    with refused(SearchError, path=saved):
        model.load_index(saved)


@pytest.mark.parametrize("name", ["index.json", "texts.jsonl", "vectors.npy"])
def test_an_incomplete_index_is_refused(model, saved, name):
    (saved / name).unlink()
    with refused(SearchError, name, path=saved):
        model.load_index(saved)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("texts.jsonl", b'"a"\n'),
        ("texts.jsonl", b"1\n2\n3\n4\n"),
        ("texts.jsonl", b"{\n"),
        ("vectors.npy", b""),
        ("vectors.npy", b"\x93NUMPY"),
    ],
)
def test_a_damaged_index_is_refused(model, saved, name, content):
    (saved / name).write_bytes(content)
    with refused(DamagedFileError):
        model.load_index(saved)


def test_a_pickle_is_not_opened(model, saved):
    np.save(saved / "vectors.npy", np.array([{}], object), allow_pickle=True)
    with refused(DamagedFileError):
        model.load_index(saved)


def test_other_files_are_not_replaced(model, tmp_path):
    (tmp_path / "notes.txt").write_text("keep")
    with refused(SearchError, path=tmp_path):
        model.index(TEXTS).save(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "keep"
    shutil.rmtree(tmp_path)
