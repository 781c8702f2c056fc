"""Hugging Face's classes with random weights, in both directions: equal outputs, equal bits."""

import json
import logging

import numpy as np
import pytest

from convbert_jax.interop import huggingface, networks, parity, weight_files
from tests.interop.conftest import assert_same, random_network, with_head
from tests.refusals import refused

pytestmark = pytest.mark.parity
torch = transformers = None  # set by imported_late

TINY = dict(
    embedding_size=16, vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=64, max_position_embeddings=40, pad_token_id=0, layer_norm_eps=1e-12,
)  # fmt: skip
SIZES = {
    "grouped": dict(num_groups=4),
    "one head": dict(num_attention_heads=1),
    "ratio 4": dict(num_attention_heads=8, head_ratio=4),
    "three taps": dict(embedding_size=8, conv_kernel_size=3, type_vocab_size=3),
}
FULL = {
    "small": dict(hidden_size=256, embedding_size=128, num_attention_heads=4,
                  intermediate_size=1024),
    "medium_small": dict(hidden_size=384, embedding_size=128, num_attention_heads=8,
                         intermediate_size=1536, num_groups=2),
    "base": dict(hidden_size=768, embedding_size=768, num_attention_heads=12,
                 intermediate_size=3072),
}  # fmt: skip
HEADS = {
    "Model": None,
    "ForMaskedLM": "mlm_head",
    "ForPreTraining": "rtd_head",
    "ForSequenceClassification": "sequence_head",
    "ForTokenClassification": "token_head",
    "ForQuestionAnswering": "span_head",
}


@pytest.fixture(scope="module", autouse=True)
def imported_late():
    """Import PyTorch for the tests, but not for collecting them."""
    global torch, transformers
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))


def save_theirs(folder, family, suffix, **fields):
    """Write a folder with Hugging Face's class, with weights large enough to expose mistakes."""
    config_class = getattr(transformers, f"{family}Config")
    sizes = TINY | fields
    if family == "Bert":
        sizes.pop("embedding_size", None)
    labels = {"num_labels": 2 if suffix == "ForQuestionAnswering" else 3}
    model = getattr(transformers, f"{family}{suffix}")(config_class(**sizes, **labels))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.05 * torch.randn_like(parameter)
            parameter.copy_(noise + 1 if "LayerNorm.weight" in name else noise)
    model.save_pretrained(folder)
    return folder


def check_round_trip(folder, again):
    """Read their folder and write it again: the tensors must be bit-identical."""
    network = huggingface.read_folder(folder).networks["main"]
    huggingface.write_network(again, network, pad_id=0)
    first, second = (weight_files.read_weights(f) for f in (folder, again))
    ignored = {n.removeprefix("main:") for n in huggingface.read_folder(folder).ignored}
    assert first.keys() - ignored == second.keys()
    for name in second:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    return network


def check_outputs(folder, network, logits=1e-5):
    tokens, mask, types = parity.sample_inputs(network)
    leaks = network.family == "convbert"  # padded positions agree too
    for rows in (np.ones_like(mask), mask):
        ours = parity.our_outputs(network, tokens, rows, types)
        theirs = parity.pytorch_outputs(folder, network, tokens, rows, types)
        assert ours.keys() == theirs.keys()
        for name in ours:
            shown = slice(None) if leaks or ours[name].ndim < 2 else rows.astype(bool)
            if ours[name].shape[:2] != rows.shape:
                shown = slice(None)
            limit = logits if name == "mlm_head" else 1e-5
            np.testing.assert_allclose(ours[name][shown], theirs[name][shown], atol=limit)


# There is no ConvBertForPreTraining; two Bert classes have a pooler.
CLASSES = [("ConvBert", suffix) for suffix in HEADS if suffix != "ForPreTraining"]
CLASSES += [("Electra", "ForPreTraining"), ("Electra", "ForMaskedLM"), ("Bert", "ForMaskedLM")]
MORE = [("Electra", suffix) for suffix in HEADS] + [
    ("Bert", "Model"), ("Bert", "ForTokenClassification"), ("Bert", "ForQuestionAnswering")
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "suffix"),
    CLASSES + [pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE if pair not in CLASSES],
)
def test_every_class(tmp_path, family, suffix):
    folder = save_theirs(tmp_path / "theirs", family, suffix)
    network = check_round_trip(folder, tmp_path / "again")
    head = HEADS[suffix]
    assert head is None or network.has(head)
    check_outputs(folder, network)


@pytest.mark.parametrize("suffix", ["ForPreTraining", "ForNextSentencePrediction"])
def test_bert_with_pairs(tmp_path, suffix):
    folder = save_theirs(tmp_path / "theirs", "Bert", suffix)
    network = check_round_trip(folder, tmp_path / "again")
    assert network.has("pair_head")
    assert network.has("mlm_head") == (suffix == "ForPreTraining")
    assert not huggingface.read_folder(folder).ignored
    check_outputs(folder, network)


def test_pairs_without_a_class(tmp_path):
    """The head is stored with ConvBERT's class and computed as in BERT's."""
    network = random_network(recipe="masked_lm", pairs="order")
    huggingface.write_network(tmp_path / "it", network, pad_id=0)
    proof = parity.check_parity(tmp_path / "it", network)
    assert {"hidden", "mlm_head", "pair_head"} <= set(proof.differences)


@pytest.mark.parametrize(
    "size",
    ["grouped", *(pytest.param(s, marks=pytest.mark.slow) for s in SIZES if s != "grouped")],
)
def test_odd_sizes(tmp_path, size):
    folder = save_theirs(tmp_path / "theirs", "ConvBert", "ForMaskedLM", **SIZES[size])
    check_outputs(folder, check_round_trip(folder, tmp_path / "again"))


@pytest.mark.slow
@pytest.mark.parametrize("size", FULL)
def test_published_sizes(tmp_path, size):
    fields = FULL[size] | dict(vocab_size=30_522, num_hidden_layers=12, max_position_embeddings=512)
    folder = save_theirs(tmp_path / "theirs", "ConvBert", "ForMaskedLM", **fields)
    # Sums of 768 products in another order: up to five of 15 million logits differ by 1.14e-5.
    check_outputs(folder, check_round_trip(folder, tmp_path / "again"), logits=2e-5)


FAMILIES = {
    "convbert": {"mask_convolution": False},
    "electra": {"mixer": "attention"},
    "bert": {"recipe": "masked_lm", "mixer": "attention", "embedding_size": 32},
}
# Family and network -> prefix of the unexpected keys that the model card documents.
DOCUMENTED = {
    ("convbert", "main"): "discriminator_predictions.",
    ("convbert", "generator"): "",
    ("electra", "main"): "",
    ("electra", "generator"): "",
    ("bert", "main"): "",
}


@pytest.mark.parametrize(("family", "name"), DOCUMENTED)
def test_a_class_reports_only_what_the_card_says(tmp_path, caplog, family, name):
    """The class warns only about the documented keys, and gives the same numbers."""
    network = random_network(name, **FAMILIES[family])
    folder = tmp_path / "it"
    huggingface.write_network(folder, network, pad_id=0)
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    transformers.logging.enable_propagation()
    try:
        with caplog.at_level(logging.WARNING):
            model, info = getattr(transformers, architecture).from_pretrained(
                folder, output_loading_info=True
            )
    finally:
        transformers.logging.disable_propagation()
    assert model.config.pad_token_id == 0
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    allowed = DOCUMENTED[family, name]
    assert all(allowed and key.startswith(allowed) for key in info["unexpected_keys"])
    assert bool(caplog.records) == bool(allowed)  # only the documented keys are reported
    proof = parity.check_parity(folder, network, name)
    assert max(proof.differences.values()) < 1e-5
    assert proof.padding == ""


def test_the_certificate_of_a_masked_convolution(tmp_path):
    network = random_network(mask_convolution=True)
    huggingface.write_network(tmp_path / "it", network, pad_id=0)
    proof = parity.check_parity(tmp_path / "it", network)
    assert max(proof.differences.values()) < 1e-5
    assert proof.parameters == len(network.parameters)
    tokens, mask, types = parity.sample_inputs(network)
    ours = parity.our_outputs(network, tokens, mask, types)
    theirs = parity.pytorch_outputs(tmp_path / "it", network, tokens, mask, types)
    real = mask.astype(bool)
    moved = max(np.abs(ours[output] - theirs[output])[real].max() for output in ours)
    assert moved > 1e-3
    assert parity.measure_padding(network) == pytest.approx(moved, rel=1e-3)
    assert f"{moved:.1e}" in proof.padding


def test_a_wrong_weight_is_no_parity(tmp_path, monkeypatch):
    """A transpose missing in both directions is only visible in the other implementation."""
    network = random_network(mask_convolution=False)
    folder = tmp_path / "it"
    huggingface.write_network(folder, network, pad_id=0)
    changed = dict(network.parameters)
    changed["layers/0/mixer/query/kernel"] = changed["layers/0/mixer/query/kernel"] * 1.01
    other = networks.dataclasses.replace(network, parameters=changed)
    with refused(parity.ParityError, "layers/0/mixer/query/kernel", path=folder):
        parity.check_parity(folder, other)
    monkeypatch.setattr(parity, "_check_read_back", lambda *_: 1)
    with refused(parity.ParityError, "hidden", path=folder):
        parity.check_parity(folder, other)


def test_numbers_in_large_units(tmp_path):
    """Values like prices agree to seven digits, so they may differ by more than 1e-4."""
    tuned = with_head(random_network(mask_convolution=False), "sequence_head", ("price",))
    large = {
        path: np.float32(1e6) * leaf if path.startswith("sequence_head/output/") else leaf
        for path, leaf in tuned.parameters.items()
    }
    network = networks.dataclasses.replace(tuned, parameters=large)
    huggingface.write_network(tmp_path / "it", network, pad_id=0)
    difference = parity.check_parity(tmp_path / "it", network).differences["sequence_head"]
    assert parity.LIMIT < difference < 10


@pytest.mark.parametrize(
    "head",
    [
        "sequence_head",
        *(pytest.param(h, marks=pytest.mark.slow) for h in ("token_head", "span_head")),
    ],
)
def test_fine_tuned_heads_with_label_names(tmp_path, head):
    labels = ("start", "end") if head == "span_head" else ("no", "maybe", "yes")
    network = with_head(random_network(mask_convolution=False), head, labels)
    folder = tmp_path / "it"
    huggingface.write_network(folder, network, pad_id=0)
    config = transformers.AutoConfig.from_pretrained(folder)
    if head != "span_head":
        assert config.id2label == dict(enumerate(labels))
    assert max(parity.check_parity(folder, network).differences.values()) < 1e-5
    assert_same(network, huggingface.read_folder(folder).networks["main"])


def test_pickled_weights(tmp_path):
    network = random_network()
    huggingface.write_network(tmp_path, network, pad_id=0)
    tensors = weight_files.read_weights(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(
        {name: torch.tensor(array) for name, array in tensors.items()},
        tmp_path / "pytorch_model.bin",
    )
    assert_same(network, huggingface.read_folder(tmp_path).networks["main"])


def test_the_published_base_model(tmp_path):
    """YituTech/conv-bert-base on the six ids of Hugging Face's own test; needs the folder."""
    import os
    import pathlib

    folder = os.environ.get("CONVBERT_BASE_FOLDER")
    if not folder:
        pytest.skip("set CONVBERT_BASE_FOLDER to a download of YituTech/conv-bert-base")
    network = huggingface.read_folder(pathlib.Path(folder)).networks["main"]
    tokens = np.array([[1, 2, 3, 4, 5, 6]])
    out = parity.our_outputs(network, tokens, np.ones_like(tokens), np.zeros_like(tokens))
    wanted = [[-0.0864, -0.4898, -0.3677], [0.1434, -0.2952, -0.7640], [-0.0112, -0.4432, -0.5432]]
    np.testing.assert_allclose(out["hidden"][0, :3, :3], wanted, atol=1e-4)
