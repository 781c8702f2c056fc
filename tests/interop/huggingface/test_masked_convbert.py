"""The Python classes in the folder of a ConvBERT that ignores padding."""

import json

import numpy as np
import pytest

import convbert_jax
from convbert_jax.interop import conversion, huggingface, parity
from tests.interop.conftest import random_network, with_head

pytestmark = pytest.mark.parity
NETWORKS = {  # class of transformers -> network
    "AutoModel": lambda: random_network(),
    "AutoModelForMaskedLM": lambda: random_network("generator"),
    "AutoModelForSequenceClassification": lambda: tuned("sequence_head"),
    "AutoModelForTokenClassification": lambda: tuned("token_head"),
    "AutoModelForQuestionAnswering": lambda: tuned("span_head"),
}
torch = transformers = None  # set by imported_late


def tuned(head):
    return with_head(random_network(ffn_groups=2), head, ("start", "end"))


@pytest.fixture(autouse=True)
def imported_late(monkeypatch, tmp_path):
    """Import PyTorch only when the tests run, and copy no code into the home directory."""
    global torch, transformers
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    modules = str(tmp_path / "modules")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
    monkeypatch.syspath_prepend(modules)


def outputs(model, arrays):
    names = ("input_ids", "attention_mask", "token_type_ids")
    with torch.no_grad():
        return model(**dict(zip(names, map(torch.tensor, arrays), strict=True)))


@pytest.mark.parametrize("auto_class", NETWORKS)
def test_outputs_are_ours_with_padding(tmp_path, auto_class):
    network = NETWORKS[auto_class]()
    huggingface.write_network(tmp_path / "it", network, pad_id=0)
    model = getattr(transformers, auto_class).from_pretrained(
        tmp_path / "it", trust_remote_code=True
    )
    arrays = parity.sample_inputs(network)
    found, ours = outputs(model.eval(), arrays), parity.our_outputs(network, *arrays)
    if auto_class == "AutoModel":
        found, expected = found.last_hidden_state, ours["hidden"]
    elif auto_class == "AutoModelForQuestionAnswering":
        found = torch.stack([found.start_logits, found.end_logits], -1)
        expected = ours["span_head"]
    else:
        (head,) = ours.keys() - {"hidden"}
        found, expected = found.logits, ours[head]
    real = arrays[1] > 0 if expected.ndim > 2 else slice(None)
    np.testing.assert_allclose(found.numpy()[real], expected[real], atol=1e-5)


def test_a_text_alone_has_the_outputs_of_a_batch(tmp_path):
    network = random_network()
    huggingface.write_network(tmp_path / "it", network, pad_id=0)
    model = transformers.AutoModel.from_pretrained(tmp_path / "it", trust_remote_code=True).eval()
    tokens, mask, types = parity.sample_inputs(network)
    length = int(mask[-1].sum())
    batch = outputs(model, (tokens, mask, types)).last_hidden_state[-1:, :length]
    alone = (array[-1:, :length] for array in (tokens, mask, types))
    assert length < mask.shape[1]
    np.testing.assert_allclose(outputs(model, alone).last_hidden_state, batch, atol=1e-5)


def test_the_class_of_transformers_is_the_default(tmp_path):
    huggingface.write_network(tmp_path / "it", random_network(), pad_id=0)
    transformers.AutoModel.from_pretrained(tmp_path / "it", trust_remote_code=True)
    model = transformers.AutoModel.from_pretrained(tmp_path / "it")
    assert type(model) is transformers.ConvBertModel


@pytest.mark.parametrize("fields", [{"mask_convolution": False}, {"mixer": "attention"}])
def test_other_models_need_no_code(tmp_path, fields):
    huggingface.write_network(tmp_path, random_network(**fields), pad_id=0)
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
    assert not list(tmp_path.glob("*.py"))


@pytest.mark.slow
def test_sentence_transformers_gives_our_vectors_with_padding(make_run, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    run, _ = make_run(recipe="embedding")
    folder = conversion.export(run)
    reference = library.SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
    texts = ["the river", "a great house under the sun and the moon", "", "stone " * 40]
    found, expected = convbert_jax.load(run).encode(texts), reference.encode(texts)
    assert (found * expected).sum(axis=1).min() > 0.99999
