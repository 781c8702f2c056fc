"""Folders of Hugging Face, written and read, without PyTorch."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from convbert_jax.interop.huggingface import config as huggingface_config
from convbert_jax.interop.huggingface import folder as huggingface
from convbert_jax.interop.networks import ConversionError
from tests.interop.conftest import assert_same, random_network, with_head

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
FIELDS = (
    "architectures", "model_type", "vocab_size", "hidden_size", "num_hidden_layers",
    "num_attention_heads", "intermediate_size", "hidden_act", "hidden_dropout_prob",
    "max_position_embeddings", "type_vocab_size", "layer_norm_eps", "pad_token_id",
    "embedding_size", "head_ratio", "conv_kernel_size", "num_groups", "id2label", "convbert_jax",
)  # fmt: skip


def write(folder, network):
    huggingface.write_network(folder, network, pad_id=0, extra={"step": 5})
    return folder


def edit_config(folder, **fields):
    file = folder / "config.json"
    content = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({k: v for k, v in content.items() if v != "absent"}))


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors) or tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", ["main", "generator"])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(tmp_path, family, name):
    if family == "bert" and name == "generator":
        pytest.skip("a masked language model has no generator")
    network = random_network(name, **FAMILIES[family])
    source = huggingface.read_folder(write(tmp_path / "it", network))
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


@pytest.mark.parametrize("head", ["sequence_head", "token_head", "span_head"])
@pytest.mark.parametrize("family", ["convbert", "electra", "bert"])
def test_heads_of_fine_tuned_models(tmp_path, family, head):
    network = random_network(**FAMILIES[family])
    labels = ("start", "end") if head == "span_head" else LABELS
    tuned = with_head(network, head, labels)
    if (family, head) == ("bert", "sequence_head"):  # theirs goes through a pooler
        with pytest.raises(ConversionError, match="no name for sequence_head"):
            write(tmp_path / "it", tuned)
        return
    back = huggingface.read_folder(write(tmp_path / "it", tuned)).networks["main"]
    assert_same(tuned, back)
    assert back.labels == (() if head == "span_head" else LABELS)


@pytest.mark.parametrize("family", ["convbert", "electra"])
def test_a_choice_among_texts_is_no_tag(tmp_path, family):
    """Its one logit is called as those of tokens are."""
    tuned = with_head(random_network(**FAMILIES[family]), "token_head", ("LABEL_0",))
    folder = write(tmp_path / "it", tuned)
    file = folder / "config.json"
    file.write_text(file.read_text().replace("ForTokenClassification", "ForMultipleChoice"))
    source = huggingface.read_folder(folder)
    assert not source.networks["main"].has("token_head")
    assert source.ignored == ("main:classifier.bias", "main:classifier.weight")


@pytest.mark.parametrize(
    ("id2label", "says"),
    [
        (["no", "may be", 1], ("no", "may be", "1")),
        ({"0": "no", "2": False}, ("no", "LABEL_1", "False")),
        (None, ("LABEL_0", "LABEL_1", "LABEL_2")),
        ({"0": "no", "1": "yes", "2": "no"}, "calls the labels 0 and 2 both 'no'"),
        ({"0": "LABEL_1"}, "calls the labels 0 and 1 both 'LABEL_1'"),
        ({"0": "a", "1": None, "2": "c"}, "has None as label 1 in id2label; write its name"),
        ({"0": "a", "1": "b", "2": "c", "3": "d"}, "'d'}, but the head gives 3 logits; name as"),
        (["a", "b"], r"id2label=\['a', 'b'\], but the head gives 3 logits"),
        ("abc", "id2label='abc', but the head gives 3 logits"),
    ],
)
def test_names_of_labels(tmp_path, id2label, says):
    """Each logit has a name of its own, or what is wrong is said."""
    tuned = with_head(random_network(), "sequence_head", LABELS)
    folder = write(tmp_path / "it", tuned)
    content = json.loads((folder / "config.json").read_text()) | {"id2label": id2label}
    (folder / "config.json").write_text(json.dumps(content))
    if isinstance(says, tuple):
        assert huggingface.read_folder(folder).networks["main"].labels == says
    else:
        with pytest.raises(ConversionError, match=says):
            huggingface.read_folder(folder)


def test_what_config_json_must_say(tmp_path):
    folder = write(tmp_path / "it", random_network())
    content = json.loads((folder / "config.json").read_text())
    # ConvBertConfig's own default is 1, which would freeze the row of another token.
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


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"head_ratio": 4, "heads": 4}, "head_ratio=2"),
        ({"kernel_size": 4}, "kernel_size=4 is even"),
        ({"mixer": "attention", "ffn_groups": 2}, "ffn_groups=2"),
        ({"mixer": "bottleneck"}, "2 attention heads of 8 .* no config.model.mixer=bottleneck"),
    ],
)
def test_what_their_classes_cannot_compute(tmp_path, fields, says):
    network = random_network(generator={"kind": "uniform"}, **fields)
    with pytest.raises(ConversionError, match=says):
        write(tmp_path / "it", network)
    assert not (tmp_path / "it").exists()


def test_the_small_generator_of_the_release(tmp_path):
    network = random_network("generator", generator={"size": 0.25})
    with pytest.raises(ConversionError, match="release_heads=false"):
        write(tmp_path / "it", network)
    narrow = random_network("generator", generator={"size": 0.25, "release_heads": False})
    write(tmp_path / "it", narrow)
    assert_same(narrow, huggingface.read_folder(tmp_path / "it").networks["main"])


def test_layers_that_differ(tmp_path):
    network = random_network()
    stage = network.encoder.stages[0]
    mixer = dataclasses.replace(stage.layer.mixer, kernel_size=7)
    other = dataclasses.replace(stage, layer=dataclasses.replace(stage.layer, mixer=mixer))
    encoder = dataclasses.replace(network.encoder, stages=(stage, other))
    with pytest.raises(ConversionError, match="layers of this encoder differ"):
        write(tmp_path / "it", dataclasses.replace(network, encoder=encoder))


def test_their_other_ratios_are_read(tmp_path):
    """At Hugging Face a ratio of 4 still gives heads that add up: it is our ratio 2, wider."""
    folder = write(tmp_path / "it", random_network())  # 2 + 2 heads of 8
    edit_config(folder, num_attention_heads=8, head_ratio=4)
    network = huggingface.read_folder(folder).networks["main"]
    assert (network.layer.mixer.attention_heads, network.layer.mixer.head_size) == (2, 8)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"is_decoder": True}, "is_decoder=True"),
        ({"hidden_size": "absent"}, "hidden_size=None"),
        ({"hidden_size": -3}, "hidden_size=-3"),
        ({"num_attention_heads": 12}, "does not divide into 12 heads"),
        ({"layer_norm_eps": "tiny"}, "layer_norm_eps='tiny'"),
        ({"num_hidden_layers": 3}, "lack 23 tensors"),
        ({"intermediate_size": 65}, "shape"),
        ({"vocab_size": 61}, r"shape \(60, 16\).*\(61, 16\)"),
    ],
)
def test_a_config_that_cannot_be_read(tmp_path, fields, says):
    folder = write(tmp_path / "it", random_network())
    edit_config(folder, **fields)
    with pytest.raises(ConversionError, match=says):
        huggingface.read_folder(folder)


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
VALUES |= st.lists(st.integers(), max_size=2) | st.sampled_from([0, 1, 2, 3, 64, 1 << 20])


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_no_config_hangs_or_crashes(any_folder, fields):
    """Whatever stands in config.json is read, or refused in one sentence."""
    original = (any_folder / "config.json").read_text()
    try:
        edit_config(any_folder, **fields)
        huggingface.read_folder(any_folder)
    except ConversionError as error:
        assert "\n" not in str(error)  # noqa: PT017
    finally:
        (any_folder / "config.json").write_text(original)


@pytest.fixture(scope="module")
def any_folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("any") / "it", random_network())


def test_no_folder_and_no_json(tmp_path):
    with pytest.raises(ConversionError, match=r"config\.json cannot be read"):
        huggingface.read_folder(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{oh")
    with pytest.raises(ConversionError, match="is damaged"):
        huggingface.read_folder(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConversionError, match="is damaged"):
        huggingface.read_folder(tmp_path)


def test_no_weights(tmp_path):
    folder = write(tmp_path / "it", random_network())
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConversionError, match="holds no weights"):
        huggingface.read_folder(folder)


def test_cut_off_weights(tmp_path):
    folder = write(tmp_path / "it", random_network())
    file = folder / "model.safetensors"
    for size in (0, 5, 100, file.stat().st_size - 1):
        data = file.read_bytes()
        file.write_bytes(data[:size])
        with pytest.raises(ConversionError, match="damaged or not a safetensors"):
            huggingface.read_folder(folder)
        file.write_bytes(data)


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

    index.write_text(json.dumps({"weight_map": table | {names[0]: "../a.safetensors"}}))
    with pytest.raises(ConversionError, match="not a plain file"):
        huggingface.read_folder(folder)
    index.write_text(json.dumps({"weight_map": table | {"more": "b.safetensors"}}))
    with pytest.raises(ConversionError, match="promises 'more'"):
        huggingface.read_folder(folder)
    index.write_text(json.dumps({"weight_map": table | {"more": "c.safetensors"}}))
    with pytest.raises(ConversionError, match=r"c\.safetensors, which is missing"):
        huggingface.read_folder(folder)
    index.write_text("{}")
    with pytest.raises(ConversionError, match="not an index"):
        huggingface.read_folder(folder)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_half_precision_is_read_exactly(tmp_path, kind):
    import ml_dtypes

    dtype = np.dtype(getattr(ml_dtypes, kind, kind))
    network = random_network()
    folder = write(tmp_path / "it", network)
    if kind == "float16":
        edit_weights(folder, lambda t: {name: x.astype(dtype) for name, x in t.items()})
    else:
        jax_numpy = pytest.importorskip("safetensors.flax")
        tensors = load_file(folder / "model.safetensors")
        import jax.numpy as jnp

        halves = {name: jnp.asarray(x, jnp.bfloat16) for name, x in tensors.items()}
        jax_numpy.save_file(halves, folder / "model.safetensors")
    back = huggingface.read_folder(folder).networks["main"]
    for path, array in network.parameters.items():
        expected = array.astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(back.parameters[path], expected)


def test_double_precision_is_refused(tmp_path):
    folder = write(tmp_path / "it", random_network())
    edit_weights(folder, lambda t: {name: x.astype(np.float64) for name, x in t.items()})
    with pytest.raises(ConversionError, match="float64"):
        huggingface.read_folder(folder)


def test_old_names(tmp_path):
    """gamma and beta, prefixed encoders, model_type conv_bert, buffers that are no parameters."""
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
    with pytest.raises(ConversionError, match=r"generator_lm_head\.weight differs"):
        huggingface.read_folder(folder)


def test_tensors_without_a_place_are_listed(tmp_path):
    folder = write(tmp_path / "it", random_network())
    edit_weights(folder, lambda t: t | {"pooler.dense.weight": np.zeros((2, 2), np.float32)})
    assert huggingface.read_folder(folder).ignored == ("main:pooler.dense.weight",)


def test_a_class_for_every_head():
    network = random_network()
    assert huggingface_config.architecture(network) == "ConvBertModel"
    electra = random_network(mixer="attention")
    assert huggingface_config.architecture(electra) == "ElectraForPreTraining"
    bert = random_network(recipe="masked_lm", mixer="attention", embedding_size=32)
    assert huggingface_config.architecture(bert) == "BertForMaskedLM"
    tuned = with_head(network, "span_head", ("start", "end"))
    assert huggingface_config.architecture(tuned) == "ConvBertForQuestionAnswering"
