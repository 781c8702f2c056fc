"""Hugging Face folders, written and read without PyTorch."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from convbert_jax.interop import huggingface
from convbert_jax.interop.networks import ConversionError
from tests.interop.conftest import (
    assert_same,
    edit_config,
    random_network,
    random_parts,
    with_head,
)
from tests.refusals import refused

FAMILIES = {
    "convbert": {},
    "grouped": {"ffn_groups": 2, "kernel_size": 5, "mask_convolution": False},
    "electra": {"mixer": "attention"},
    "bert": {"recipe": "masked_lm", "mixer": "attention", "embedding_size": 32},
}
PAIRS = {
    "BertForPreTraining": FAMILIES["bert"],
    "ElectraForMaskedLM": {"mixer": "attention"},
    "ConvBertForMaskedLM": {},
}
LABELS = ("no", "maybe", "yes")


def write(folder, network):
    huggingface.write_network(folder, network, pad_id=0, extra={"step": 5})
    return folder


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors) or tensors, folder / "model.safetensors", {"format": "pt"})


CLASSES = {
    "convbert": "ConvBertModel",
    "grouped": "ConvBertModel",
    "electra": "ElectraForPreTraining",
    "bert": "BertForMaskedLM",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(tmp_path, family):
    """Covers both networks; a masked language model has only one."""
    _, parts = random_parts(**FAMILIES[family])
    assert huggingface.architecture(parts["main"]) == CLASSES[family]
    for name, network in parts.items():
        source = huggingface.read_folder(write(tmp_path / name, network))
        back = source.networks["main"]
        assert_same(network, back)
        assert back.family == network.family
        assert back.embeddings == network.embeddings
        assert back.layer == network.layer
        assert source.extra["main"]["step"] == 5
        assert not source.ignored


@pytest.mark.parametrize("name", PAIRS)
def test_the_head_for_pairs(tmp_path, name):
    network = random_network(**PAIRS[name] | {"recipe": "masked_lm", "pairs": "next"})
    assert network.has("pair_head")
    assert network.has("mlm_head")
    folder = write(tmp_path / "it", network)
    assert json.loads((folder / "config.json").read_text())["architectures"] == [name]
    source = huggingface.read_folder(folder)
    assert_same(network, source.networks["main"])
    assert not source.ignored
    theirs = {"cls.seq_relationship.weight", "bert.pooler.dense.weight"}
    assert (theirs <= load_file(folder / "model.safetensors").keys()) == name.startswith("Bert")


@pytest.mark.parametrize("family", ["convbert", "electra", "bert"])
def test_heads_of_fine_tuned_models(tmp_path, family):
    network = random_network(**FAMILIES[family])
    for head in ("sequence_head", "token_head", "span_head"):
        labels = ("start", "end") if head == "span_head" else LABELS
        tuned = with_head(network, head, labels)
        if (family, head) == ("bert", "sequence_head"):  # Hugging Face's class adds a pooler
            with refused(ConversionError, "sequence_head", "config.finetune.head"):
                write(tmp_path / head, tuned)
            continue
        back = huggingface.read_folder(write(tmp_path / head, tuned)).networks["main"]
        assert_same(tuned, back)
        assert back.labels == (() if head == "span_head" else LABELS)
    if family == "convbert":
        assert huggingface.architecture(tuned) == "ConvBertForQuestionAnswering"


@pytest.mark.parametrize("family", ["convbert", "electra"])
def test_a_choice_among_texts_is_no_tag(tmp_path, family):
    """A multiple-choice head, whose one logit uses the parameter names of token classification."""
    tuned = with_head(random_network(**FAMILIES[family]), "token_head", ("LABEL_0",))
    folder = write(tmp_path / "it", tuned)
    file = folder / "config.json"
    file.write_text(file.read_text().replace("ForTokenClassification", "ForMultipleChoice"))
    source = huggingface.read_folder(folder)
    assert not source.networks["main"].has("token_head")
    assert source.ignored == ("main:classifier.bias", "main:classifier.weight")


NAMES = [
    (["no", "may be", 1], ("no", "may be", "1")),
    ({"0": "no", "2": False}, ("no", "LABEL_1", "False")),
    (None, ("LABEL_0", "LABEL_1", "LABEL_2")),
]
WRONG_NAMES = [
    ({"0": "no", "1": "yes", "2": "no"}, "no", (0, 2)),
    ({"0": "LABEL_1"}, "LABEL_1", (0, 1)),
    ({"0": "a", "1": None, "2": "c"}, None, ("None", 1)),
    *((names, names, (3,)) for names in (dict(zip("0123", "abcd", strict=True)), ["a", "b"], "x")),
]


def test_names_of_labels(tmp_path):
    """Label names must be unique; errors name the wrong one."""
    folder = write(tmp_path / "it", with_head(random_network(), "sequence_head", LABELS))
    for id2label, names in NAMES:
        edit_config(folder, id2label=id2label)
        assert huggingface.read_folder(folder).networks["main"].labels == names
    for id2label, value, mentions in WRONG_NAMES:
        edit_config(folder, id2label=id2label)
        with refused(ConversionError, *mentions, field="id2label", value=value):
            huggingface.read_folder(folder)


def test_what_config_json_must_say(tmp_path):
    folder = write(tmp_path / "it", random_network())
    content = json.loads((folder / "config.json").read_text())
    # ConvBertConfig defaults to 1, which would freeze the embedding of another token.
    assert content["pad_token_id"] == 0
    assert content["architectures"] == ["ConvBertModel"]
    assert content["layer_norm_eps"] == 1e-12
    assert content["convbert_jax"]["mask_convolution"] is True
    with safe_open(folder / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
        names = set(file.keys())
    assert "embeddings.word_embeddings.weight" in names
    assert "discriminator_predictions.dense_prediction.bias" in names
    assert not [name for name in names if name.endswith((".gamma", ".beta"))]


def test_weights_from_elsewhere_read_padding(tmp_path):
    folder = write(tmp_path / "it", random_network())
    edit_config(folder, convbert_jax="absent")
    assert huggingface.read_folder(folder).networks["main"].layer.mixer.mask_convolution is False


def test_networks_that_their_classes_cannot_compute_are_refused(tmp_path):
    folder = tmp_path / "it"
    for fields, *mentions in (
        ({"head_ratio": 4, "heads": 4}, "head_ratio=2"),
        ({"kernel_size": 4}, "kernel_size=4"),
        ({"mixer": "attention", "ffn_groups": 2}, "config.model.ffn_groups=2"),
        ({"mixer": "bottleneck"}, "config.model.mixer=bottleneck", 2, 8),
    ):
        network = random_network(generator={"kind": "uniform"}, **fields)
        with refused(ConversionError, *mentions):
            write(folder, network)
    network = random_network("generator", generator={"size": 0.25})
    with refused(ConversionError, "release_heads=false"):
        write(folder, network)
    network = random_network()
    stage = network.encoder.stages[0]
    mixer = dataclasses.replace(stage.layer.mixer, kernel_size=7)
    other = stage.map(lambda layer: dataclasses.replace(layer, mixer=mixer))
    encoder = dataclasses.replace(network.encoder, stages=(stage, other))
    with refused(ConversionError, "--format=stablehlo"):
        write(folder, dataclasses.replace(network, encoder=encoder))
    assert not folder.exists()
    narrow = random_network("generator", generator={"size": 0.25, "release_heads": False})
    write(folder, narrow)
    assert_same(narrow, huggingface.read_folder(folder).networks["main"])


def test_their_other_ratios_are_read(tmp_path):
    """Hugging Face's ratio 4 with 8 heads equals our ratio 2 with larger heads."""
    folder = write(tmp_path / "it", random_network())  # 2 + 2 heads of 8
    edit_config(folder, num_attention_heads=8, head_ratio=4)
    network = huggingface.read_folder(folder).networks["main"]
    assert (network.layer.mixer.attention_heads, network.layer.mixer.head_size) == (2, 8)


WRONG = [
    ("model_type", "gpt2", ()),
    ("hidden_act", "relu", ()),
    ("position_embedding_type", "relative_key", ()),
    ("is_decoder", True, ()),
    ("hidden_size", -3, ()),
    ("layer_norm_eps", "tiny", ()),
    ("num_attention_heads", 12, ("hidden_size", 32, "12")),
    ("num_hidden_layers", 3, (23,)),
    ("intermediate_size", 65, (64, 65)),
    ("vocab_size", 61, ("(60, 16)", "(61, 16)")),
]


@pytest.mark.parametrize(("field", "value", "mentions"), WRONG)
def test_a_config_that_does_not_fit_is_refused(tmp_path, field, value, mentions):
    folder = write(tmp_path / "it", random_network())
    edit_config(folder, **{field: value})
    parts = {} if mentions else {"field": field, "value": value}
    with refused(ConversionError, *mentions, **parts):
        huggingface.read_folder(folder)


def test_a_folder_without_config_or_weights_is_refused(tmp_path):
    with refused(ConversionError, path=tmp_path / "nothing" / "config.json"):
        huggingface.read_folder(tmp_path / "nothing")
    for content in ("{oh", "[1]"):
        (tmp_path / "config.json").write_text(content)
        with refused(ConversionError, path=tmp_path / "config.json"):
            huggingface.read_folder(tmp_path)
    folder = write(tmp_path / "it", random_network())
    edit_config(folder, hidden_size="absent")
    with refused(ConversionError, "None", field="hidden_size"):
        huggingface.read_folder(folder)
    (folder / "model.safetensors").unlink()
    edit_config(folder, hidden_size=32)
    with refused(ConversionError, "model.safetensors", path=folder):
        huggingface.read_folder(folder)


def test_shards(tmp_path):
    network = random_network()
    folder = write(tmp_path / "it", network)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {"a.safetensors": names[:20], "b.safetensors": names[20:]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    table = {name: file for file, part in files.items() for name in part}
    index.write_text(json.dumps({"weight_map": table}))
    assert_same(network, huggingface.read_folder(folder).networks["main"])

    for name, file, parts in (
        (names[0], "../a.safetensors", {"value": "../a.safetensors"}),
        ("more", "b.safetensors", {"field": "more"}),
        ("more", "c.safetensors", {"value": "c.safetensors"}),
    ):
        index.write_text(json.dumps({"weight_map": table | {name: file}}))
        with refused(ConversionError, path=index, **parts):
            huggingface.read_folder(folder)
    index.write_text("{}")
    with refused(ConversionError, path=index):
        huggingface.read_folder(folder)


def test_half_precision_is_read_exactly_and_double_precision_is_refused(tmp_path):
    import ml_dtypes
    from safetensors.flax import save_file as save_with_jax

    network = random_network()
    folder = write(tmp_path / "it", network)
    tensors = load_file(folder / "model.safetensors")
    for dtype in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)):
        halves = {name: jax.numpy.asarray(x.astype(dtype)) for name, x in tensors.items()}
        save_with_jax(halves, folder / "model.safetensors")
        back = huggingface.read_folder(folder).networks["main"]
        for path, array in network.parameters.items():
            expected = array.astype(dtype).astype(np.float32)
            np.testing.assert_array_equal(back.parameters[path], expected)
    edit_weights(folder, lambda _: {name: x.astype(np.float64) for name, x in tensors.items()})
    with refused(ConversionError, "float64", path=folder):
        huggingface.read_folder(folder)


def test_old_names(tmp_path):
    """gamma and beta, prefixed encoders, model_type conv_bert, and buffers are accepted."""
    network = random_network("generator")
    folder = write(tmp_path / "it", network)

    def age(tensors):
        renamed = {}
        for name, array in tensors.items():
            name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
            renamed[name.replace("LayerNorm.bias", "LayerNorm.beta")] = array
        renamed["convbert.embeddings.position_ids"] = np.arange(24)[None]
        return renamed

    edit_weights(folder, age)
    edit_config(folder, model_type="conv_bert")
    source = huggingface.read_folder(folder)
    assert_same(network, source.networks["main"])
    assert source.ignored == ("main:convbert.embeddings.position_ids",)


def test_tied_copies(tmp_path):
    network = random_network("generator")
    folder = write(tmp_path / "it", network)
    table = network.parameters["embeddings/word/embedding"]
    edit_weights(folder, lambda t: t | {"generator_lm_head.weight": table.copy()})
    source = huggingface.read_folder(folder)
    assert_same(network, source.networks["main"])
    assert not source.ignored
    edit_weights(folder, lambda t: t | {"generator_lm_head.weight": table + 1})
    with refused(ConversionError, field="generator_lm_head.weight"):
        huggingface.read_folder(folder)


def test_tensors_without_a_place_are_listed(tmp_path):
    folder = write(tmp_path / "it", random_network())
    edit_weights(folder, lambda t: t | {"pooler.dense.weight": np.zeros((2, 2), np.float32)})
    assert huggingface.read_folder(folder).ignored == ("main:pooler.dense.weight",)
