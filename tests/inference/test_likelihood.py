"""Probabilities of texts, and minimal pairs."""

import gzip
import json
import math
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import convbert_jax
from convbert_jax import minimal_pairs
from convbert_jax.data.errors import DataError
from convbert_jax.data.input_rows import ArgumentError
from convbert_jax.inference.model import ModelError
from convbert_jax.inference.network import predict_masked
from convbert_jax.models import build
from convbert_jax.models.networks import MODELS
from tests.inference.test_writing import config_of, make_writer, tokenizer  # noqa: F401
from tests.refusals import refused

TEXTS = ["the tree is old", "a river", "the tree is old", "sun"]


@pytest.fixture(scope="module")
def model(pretrained):
    return convbert_jax.load(str(pretrained.folder))


def test_each_token_is_masked_alone(model):
    """By `fill_mask`, which predicts all entries of the vocabulary."""
    for text, found in zip(TEXTS, model.log_likelihood(TEXTS), strict=True):
        (ids,) = model.tokenizer.encode([text])
        expected = 0.0
        for place, token in enumerate(ids):
            rows = model._encode_texts([(text,)], model.length)
            rows.by_token["tokens"][0, place + 1] = model.tokenizer.special.mask
            columns = {"places": np.array([[place + 1]], np.int32)}
            option = (model.tokenizer.vocab_size,) * 2
            best = model.network("generator").apply(
                rows.with_columns(**columns), predict_masked, option, batch_size=1
            )
            tokens, scores = best["tokens"][0][0], best["scores"][0][0]
            expected += math.log(scores[tokens == token][0])
        assert found == pytest.approx(expected, abs=1e-4)


def test_the_discriminator_reads_a_text_once(model):
    found = model.log_likelihood(TEXTS, by="replaced_tokens")
    for text, value in zip(TEXTS, found, strict=True):
        expected = sum(math.log1p(-token["probability"]) for token in model.replaced(text))
        assert value == pytest.approx(expected, abs=1e-5)
    assert model.log_likelihood(TEXTS[0], by="replaced_tokens") == pytest.approx(found[0])


def test_a_language_model_predicts_each_token_from_the_earlier_ones(tokenizer):  # noqa: F811
    writer = make_writer(tokenizer, "causal_lm")
    texts = ["a b c a", "b", "c c " * 10]
    network = nnx.merge(build(MODELS["causal_lm"], config_of("causal_lm"))[0], writer._params)
    for text, found in zip(texts, writer.log_likelihood(texts), strict=True):
        ids = jnp.asarray([[tokenizer.special.cls, *tokenizer.encode([text])[0]]])
        logits = nnx.log_softmax(network(ids, jnp.ones_like(ids))[0])
        expected = sum(logits[place, token] for place, token in enumerate(ids[0, 1:].tolist()))
        assert found == pytest.approx(float(expected), abs=1e-3)
    with refused(ArgumentError, field="texts[1]"):
        writer.log_likelihood(["a", ""])


def test_a_model_without_a_head_gives_no_probability(model):
    with refused(ModelError, "masked_words", field="by", value="next_tokens"):
        model.log_likelihood("a", by="next_tokens")


def write(folder, name: str, pairs, term: str = "") -> None:
    lines = [
        json.dumps({"sentence_good": a, "sentence_bad": b, "linguistics_term": term}) + "\n"
        for a, b in pairs
    ]
    with gzip.open(folder / f"{name}.jsonl.gz", "wt") as file:
        file.writelines(lines)


class Lengths:
    """A model that prefers long texts."""

    likelihoods = ("length",)

    def log_likelihood(self, texts, by):
        assert by == "length"
        return np.array([float(len(text)) for text in texts])


def test_equal_probabilities_are_wrong_and_counted(tmp_path):
    write(tmp_path, "one", [("aa", "a"), ("a", "aa"), ("a", "b"), ("aaa", "a")], "x")
    write(tmp_path, "two", [("aa", "a")], "x")
    write(tmp_path, "three", [("a", "aa")], "y")
    scores = minimal_pairs.score(Lengths(), minimal_pairs.read(tmp_path), "length")
    found = {each.paradigm.name: (each.right, each.ties) for each in scores}
    assert found == {"one": (2, 1), "two": (1, 0), "three": (0, 0)}
    assert minimal_pairs.mean_accuracy(scores) == pytest.approx((0.5 + 1 + 0) / 3)
    table = minimal_pairs.describe({"length": scores})
    rows = [line.split(" | ")[1:] for line in table.splitlines() if line.startswith("| ")]
    assert rows[1:] == [["5", "75.0 |"], ["1", "0.0 |"], ["6", "50.0 |"]]
    assert len(minimal_pairs.read(tmp_path, limit=2)[0].pairs) == 2


@pytest.mark.parametrize("line", ["{}", "no", '{"sentence_good": "a", "sentence_bad": " "}', "[1]"])
def test_bad_lines_are_refused(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"sentence_good": "a", "sentence_bad": "b"}}\n{line}\n')
    with refused(DataError, path=path, line=2):
        minimal_pairs.read(tmp_path)


def test_a_folder_without_pairs_is_refused(tmp_path):
    with refused(DataError, path=tmp_path):
        minimal_pairs.read(tmp_path)
    (tmp_path / "a.jsonl").touch()
    with refused(DataError, path=tmp_path / "a.jsonl"):
        minimal_pairs.read(tmp_path)


def test_the_command(pretrained, tmp_path):
    write(tmp_path, "one", [("the tree is old", "the tree are old"), ("a river", "an river")])
    command = [sys.executable, "-m", "convbert_jax.minimal_pairs", f"--model={pretrained.folder}"]
    command += [f"--folder={tmp_path}", f"--output={tmp_path / 'out.json'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads((tmp_path / "out.json").read_text())
    assert {"masked_words", "replaced_tokens"} <= found.keys()
    assert f"{100 * found['masked_words']['one']:.1f}" in done.stdout
