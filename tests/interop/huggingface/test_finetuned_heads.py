"""Exported fine-tuned heads: the same outputs, in the unit of the labels."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from convbert_jax.config import OutputsSection
from convbert_jax.interop import huggingface, networks, parity
from convbert_jax.models.networks import FinetunedModel
from tests.interop.conftest import make_config, random_params
from tests.refusals import refused


def make_model(outputs, **model):
    """Return (config, parameters with random weights) of a fine-tuned model."""
    config = dataclasses.replace(make_config(recipe="finetune", **model), outputs=outputs)
    return config, random_params(config)


def rows(seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(5, 60, (4, 16)).astype(np.int32)
    segment_ids = (np.arange(16) < np.array([16, 9, 5, 12])[:, None]).astype(np.int32)
    return tokens * segment_ids, segment_ids, np.zeros_like(tokens)


def classify(config, params, arrays):
    """Return the trained model's logits [B, labels]."""
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: FinetunedModel(config, nnx.Rngs(0))))
    model = nnx.merge(graphdef, jax.tree.map(jax.numpy.asarray, params))
    return np.asarray(model.classify(*arrays))


@pytest.mark.parametrize("labels", [1, 3, 16])
def test_one_dense_on_cls_is_written_as_dense_gelu_dense(labels):
    names = tuple("abcdefghijklmnop"[:labels])
    config, params = make_model(OutputsSection(head="first_token", labels=names))
    network = networks.split(config, params)["main"]
    assert huggingface.architecture(network).endswith("SequenceClassification")
    theirs = parity.our_outputs(network, *rows())["sequence_head"]
    np.testing.assert_allclose(theirs, classify(config, params, rows()), atol=2e-6)


def test_too_many_labels_for_that_are_refused_with_the_way_out():
    labels = tuple("abcdefghijklmnopq")  # 17; the hidden size is 32
    config, params = make_model(OutputsSection(head="first_token", labels=labels))
    network = networks.split(config, params)["main"]
    with refused(networks.ConversionError, "first_token_head", "finetune.head=auto"):
        huggingface.to_tensors(network)


@pytest.mark.parametrize("head", ["sequence", "first_token"])
def test_a_regression_leaves_in_the_unit_of_its_labels(head):
    outputs = OutputsSection(kind="regression", head=head, labels=("value",), scale=5.0)
    config, params = make_model(outputs)
    network = networks.split(config, params)["main"]
    theirs = parity.our_outputs(network, *rows())["sequence_head"]
    np.testing.assert_allclose(theirs, 5 * classify(config, params, rows()), atol=1e-5)


@pytest.mark.parity
@pytest.mark.parametrize("mixer", ["mixed", "attention"])
def test_hugging_face_computes_the_same_from_the_releases_head(tmp_path, mixer):
    pytest.importorskip("torch")
    outputs = OutputsSection(head="first_token", labels=("no", "maybe", "yes"))
    config, params = make_model(outputs, mixer=mixer, mask_convolution=False)
    network = networks.split(config, params)["main"]
    huggingface.write_network(tmp_path, network, pad_id=0)
    tokens, segment_ids, types = rows()
    theirs = parity.pytorch_outputs(tmp_path, network, tokens, segment_ids, types)
    ours = classify(config, params, (tokens, segment_ids, types))
    np.testing.assert_allclose(theirs["sequence_head"], ours, atol=1e-5)
