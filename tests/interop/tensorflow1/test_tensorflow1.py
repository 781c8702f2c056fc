"""Checkpoints of the official code: written by TensorFlow, read here, and written back."""

import json
import pathlib

import numpy as np
import pytest

from convbert_jax.interop import huggingface, parity, tensorflow1
from convbert_jax.interop.networks import ConversionError, split
from convbert_jax.interop.tensor_bundle import Bundle, write_bundle
from tests.interop.conftest import (
    assert_same,
    make_config,
    random_network,
    random_params,
    random_parts,
    with_head,
)
from tests.interop.tensorflow1 import tf_values
from tests.refusals import refused

REAL = pathlib.Path(__file__).resolve().parent / "tensorflow"
NAME = f"model.ckpt-{tf_values.STEP}"
PREFIX = REAL / "convbert" / NAME


def test_what_tensorflow_wrote_is_read_whole():
    read = tensorflow1.read_checkpoint(PREFIX)
    assert read.step == tf_values.STEP
    assert read.ignored == ()
    main, generator = read.networks["main"], read.networks["generator"]
    assert (main.family, main.encoder.depth) == ("convbert", 2)
    assert main.layer.ffn_groups == tf_values.GROUPS
    assert (main.layer.mixer.attention_heads, main.layer.mixer.head_size) == (2, 4)
    assert (generator.layer.mixer.attention_heads, generator.layer.mixer.head_size) == (1, 4)
    assert main.layer.mixer.kernel_size == tf_values.TAPS
    assert main.embeddings.positions == tf_values.POSITIONS
    name = "electra/encoder/layer_1/attention/self/conv_attn_key/depthwise_kernel"
    np.testing.assert_array_equal(
        main.parameters["layers/1/mixer/key_conv/depthwise"],
        tf_values.value(name, (tf_values.TAPS, 16, 1))[..., 0],
    )
    assert read.moments is not None
    for slot, moments in zip(tensorflow1.SLOTS, read.moments, strict=True):
        variable = f"generator/encoder/layer_0/attention/self/query/kernel{slot}"
        np.testing.assert_array_equal(
            moments["generator"].parameters["layers/0/mixer/query/kernel"],
            tf_values.value(variable, (8, 4)),
        )


def test_what_tensorflow_computed():
    """Compares hidden states and logits of both networks, on full and padded rows."""
    read = tensorflow1.read_checkpoint(PREFIX)
    tokens, mask, types = tf_values.inputs()
    with np.load(REAL / "expected.npz") as expected:
        for name, scope in (("main", "electra"), ("generator", "generator")):
            ours = parity.our_outputs(read.networks[name], tokens, mask, types)
            np.testing.assert_allclose(ours.pop("hidden"), expected[f"{scope}_hidden"], atol=5e-6)
            for head, logits in ours.items():
                np.testing.assert_allclose(logits, expected[head], atol=5e-6)


@pytest.mark.parity
def test_tensorflow_to_pytorch(tmp_path):
    """TensorFlow -> ours -> Hugging Face -> PyTorch reproduces TensorFlow's numbers."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    read = tensorflow1.read_checkpoint(PREFIX)
    tokens, mask, types = tf_values.inputs()
    with np.load(REAL / "expected.npz") as expected:
        for name, scope in (("main", "electra"), ("generator", "generator")):
            network = read.networks[name]
            huggingface.write_network(tmp_path / name, network, pad_id=0)
            theirs = parity.pytorch_outputs(tmp_path / name, network, tokens, mask, types)
            np.testing.assert_allclose(theirs.pop("hidden"), expected[f"{scope}_hidden"], atol=5e-6)
            assert theirs
            for head, logits in theirs.items():
                np.testing.assert_allclose(logits, expected[head], atol=5e-6)


def test_the_head_for_pairs_is_named_as_in_bert(tmp_path):
    """In BERT's run_pretraining.py, logits are the pooled vector times the transposed weights."""
    _, parts = random_parts(**KINDS["bert with pairs"])
    tensorflow1.write_checkpoint(tmp_path / "model.ckpt-9", parts, step=9)
    bundle = Bundle(tmp_path / "model.ckpt-9")
    assert bundle.entry("bert/pooler/dense/kernel").shape == (128, 128)
    assert bundle.entry("cls/seq_relationship/output_bias").shape == (2,)
    np.testing.assert_array_equal(
        bundle.read("cls/seq_relationship/output_weights"),
        parts["main"].parameters["pair_head/output/kernel"].T,
    )
    convbert = {"main": random_network(recipe="masked_lm", pairs="next")}
    with refused(ConversionError, "pair_head/dense"):
        tensorflow1.write_checkpoint(tmp_path / "model.ckpt-10", convbert, step=10)


def test_without_adam_as_published():
    read = tensorflow1.read_checkpoint(REAL / "no_adam" / NAME)
    assert read.moments is None
    assert read.networks["main"].encoder.depth == 1


KINDS = {
    "mixed": {"mask_convolution": False},
    "small generator": {"mask_convolution": False, "generator": {"size": 0.25}},
    "untied": {"mask_convolution": False, "generator": {"tie_embeddings": False}},
    "disentangled": {"mask_convolution": False, "generator": {"disentangle_embeddings": True}},
    "shared": {"mask_convolution": False, "generator": {"kind": "shared"}},
    "uniform": {"mask_convolution": False, "generator": {"kind": "uniform"}},
    "grouped": {"mask_convolution": False, "ffn_groups": 2, "head_ratio": 4,
                "generator": {"size": 1.0}},
    "mlm": {"mask_convolution": False, "recipe": "masked_lm"},
    "electra": {"mixer": "attention", "hidden_size": 128, "heads": 2,
                "generator": {"size": 0.5}},
    "bottleneck": {"mixer": "bottleneck", "hidden_size": 256, "heads": 4,
                   "generator": {"size": 0.5}},
    "bert": {"mixer": "attention", "hidden_size": 128, "heads": 2, "embedding_size": 128,
             "recipe": "masked_lm"},
    "bert with pairs": {"mixer": "attention", "hidden_size": 128, "heads": 2, "pairs": "next",
                        "embedding_size": 128, "recipe": "masked_lm"},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(tmp_path, kind):
    config = make_config(**KINDS[kind])
    parts = split(config, random_params(config))
    moments = split(config, random_params(config, 1)), split(config, random_params(config, 2))
    prefix = tmp_path / "model.ckpt-9"
    tensorflow1.write_checkpoint(prefix, parts, step=9, moments=moments)
    read = tensorflow1.read_checkpoint(prefix)
    assert (read.step, read.ignored) == (9, ())
    assert read.networks.keys() == parts.keys()
    for name, network in parts.items():
        back = read.networks[name]
        assert_same(network, back)
        assert (back.family, back.embeddings) == (network.family, network.embeddings)
        for field in ("ffn_size", "ffn_groups", "hidden_size"):
            assert getattr(back.layer, field) == getattr(network.layer, field), field
        for field in ("attention_heads", "head_size"):
            assert getattr(back.layer.mixer, field) == getattr(network.layer.mixer, field), field
        for moment, of in zip(read.moments, moments, strict=True):
            assert_same(of[name], moment[name])


def test_networks_that_the_official_code_lacks_are_refused(tmp_path):
    """The official code pads (K - 1) // 2 on each side, so an even K loses its last tap."""
    for field, value in {"kernel_size": 4, "layer_norm_epsilon": 1e-5}.items():
        _, parts = random_parts(mask_convolution=False, **{field: value})
        with refused(ConversionError, f"{field}={value}"):
            tensorflow1.write_checkpoint(tmp_path / "it", parts, step=0)
    network = with_head(random_network(), "token_head", ("a", "b"))
    with refused(ConversionError, "token_head"):
        tensorflow1.write_checkpoint(tmp_path / "it", {"main": network}, step=0)


def test_heads_of_a_bert_come_from_its_json(tmp_path):
    network = random_network(
        recipe="masked_lm", mixer="attention", hidden_size=64, embedding_size=64, heads=4
    )
    tensorflow1.write_checkpoint(tmp_path / "bert.ckpt", {"main": network}, step=0)
    read = tensorflow1.read_checkpoint(tmp_path / "bert.ckpt")
    assert read.networks["main"].layer.mixer.attention_heads == 1  # assumes width 64, as published
    (tmp_path / "bert_config.json").write_text(json.dumps({"num_attention_heads": 4}))
    read = tensorflow1.read_checkpoint(tmp_path / "bert.ckpt")
    assert read.networks["main"].layer == network.layer


def test_the_prefix_is_found(tmp_path):
    for path in (PREFIX, PREFIX.parent, f"{PREFIX}.index", f"{PREFIX}.data-00000-of-00001"):
        assert tensorflow1.find_prefix(pathlib.Path(path)) == PREFIX
    assert tensorflow1.find_prefix(tmp_path) is None
    assert tensorflow1.find_prefix(tmp_path / "nothing") is None
    for step in (1, 2):
        write_bundle(tmp_path / f"model.ckpt-{step}", {"a": np.float32(0)})
    with refused(ConversionError, "model.ckpt-1", "model.ckpt-2", path=tmp_path):
        tensorflow1.find_prefix(tmp_path)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "/elsewhere/model.ckpt-2"\n')
    assert tensorflow1.find_prefix(tmp_path) == tmp_path / "model.ckpt-2"
    with refused(ConversionError, path=REAL / "v1" / NAME):
        tensorflow1.find_prefix(REAL / "v1" / NAME)


def change(tmp_path, change):
    """Write the real checkpoint with some variables changed."""
    bundle = Bundle(PREFIX)
    tensors = {name: bundle.read(name) for name in bundle.names()}
    change(tensors)
    write_bundle(tmp_path / NAME, tensors)
    return tmp_path / NAME


def test_foreign_and_incomplete_checkpoints(tmp_path):
    with refused(ConversionError, "part_0/kernel", path=REAL / "sharded" / NAME):
        tensorflow1.read_checkpoint(REAL / "sharded" / NAME)
    lost = "electra/encoder/layer_1/output/LayerNorm/gamma"
    prefix = change(tmp_path, lambda t: t.pop(lost))
    with refused(ConversionError, field=lost, path=prefix):
        tensorflow1.read_checkpoint(prefix)
    prefix = change(tmp_path, lambda t: t.update({lost: np.zeros(7, np.float32)}))
    with refused(ConversionError, (7,), (16,), field=lost, path=prefix):
        tensorflow1.read_checkpoint(prefix)


def test_unexpected_variables_are_listed(tmp_path):
    prefix = change(tmp_path, lambda t: t.update({"task_specific/kernel": np.zeros(3)}))
    assert tensorflow1.read_checkpoint(prefix).ignored == ("task_specific/kernel",)
    first = "electra/embeddings/word_embeddings/adam_v"
    prefix = change(tmp_path, lambda t: t.pop(first))
    read = tensorflow1.read_checkpoint(prefix)
    assert read.moments is None
    assert "electra/embeddings/word_embeddings/adam_m" in read.ignored
