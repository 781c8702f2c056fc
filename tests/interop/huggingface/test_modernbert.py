"""ModernBERT of Hugging Face in both directions: names, bits, outputs and gradients."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import convbert_jax
from configs import modern
from convbert_jax import recipes
from convbert_jax.config import from_config_dict
from convbert_jax.interop import conversion, huggingface, matching, networks, parity, tensorflow1
from convbert_jax.interop.networks import ConversionError
from convbert_jax.training.partitioning import flatten_params
from tests import runs
from tests.interop.conftest import (
    MODERN,
    assert_same,
    edit_config,
    make_config,
    random_network,
    with_head,
)
from tests.refusals import refused

torch = transformers = None  # set by imported_late

MASKED_LM = MODERN | {"recipe": "masked_lm", "layers": 5}
SHAPES = {
    "biases": {"biases": True},
    "all global": {"window": 0},
    "all local": {"global_every": 0},
    "first global": {"global_every": 5},
    "second global": {"global_every": 2, "rotary_base": 500.0, "local_rotary_base": 50.0},
    "one layer": {"layers": 1},
}


def write(folder, network):
    huggingface.write_network(folder, network, pad_id=0, ids={"cls": 2, "sep": 3})
    return folder


def read_json(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("shape", SHAPES)
def test_round_trip(tmp_path, shape):
    fields = MASKED_LM | SHAPES[shape]
    network = random_network(**fields)
    assert huggingface.architecture(network) == "ModernBertForMaskedLM"
    source = huggingface.read_folder(write(tmp_path, network))
    back = source.networks["main"]
    assert_same(network, back)
    assert not source.ignored
    assert (back.family, back.embeddings) == ("modernbert", network.embeddings)
    start = make_config(recipe="masked_lm")
    derived = matching.replace(start, matching.derive_fields(source.networks, start))
    for encoder in (back.encoder, derived.encoder):
        assert encoder.stages == network.encoder.stages
    # A config that describes the weights keeps its own spelling.
    config = make_config(**fields)
    assert not matching.differences(matching.derive_fields(source.networks, config), config)


@pytest.mark.parametrize("variant", ["tiny", "150m", "150m,mixed", "short_350m"])
def test_named_configs(variant):
    network = networks.outline(from_config_dict(modern.get_config(variant)))["main"]
    if variant in ("tiny", "150m"):
        assert network.family == "modernbert"
        huggingface.check_expressible(network)
    else:
        with refused(ConversionError, "stablehlo"):
            huggingface.check_expressible(network)


def test_files(tmp_path):
    network = random_network(**MASKED_LM)
    tensors = load_file(write(tmp_path, network) / "model.safetensors")
    values = [network.parameters[f"layers/1/mixer/{n}/kernel"] for n in ("query", "key", "value")]
    fused = np.concatenate([kernel.T for kernel in values])
    np.testing.assert_array_equal(tensors["model.layers.1.attn.Wqkv.weight"], fused)
    assert "model.layers.0.attn_norm.weight" not in tensors
    assert {"model.final_norm.weight", "head.norm.weight", "decoder.bias"} <= tensors.keys()
    content = read_json(tmp_path)
    ids = ("pad_token_id", "cls_token_id", "bos_token_id", "sep_token_id", "eos_token_id")
    assert [content[name] for name in ids] == [0, 2, 2, 3, 3]
    for kind, base in (("global", 160_000.0), ("local", 10_000.0)):
        name = {"global": "full_attention", "local": "sliding_attention"}[kind]
        assert content["rope_parameters"][name]["rope_theta"] == base
        assert content[f"{kind}_rope_theta"] == base


OLD = {"layer_types": "absent", "rope_parameters": "absent"}
NEW = dict.fromkeys(("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"), 7)


@pytest.mark.parametrize("form", [OLD, NEW], ids=["old", "new"])
def test_both_forms_of_config_json(tmp_path, form):
    network = random_network(**MASKED_LM | SHAPES["second global"])
    edit_config(write(tmp_path, network), **form)
    back = huggingface.read_folder(tmp_path).networks["main"]
    assert back.encoder.stages == network.encoder.stages


FULL, LOCAL = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}
WRONG = {
    "activation": {"hidden_activation": "silu"},
    "head": {"classifier_activation": "relu"},
    "untied bias": {"decoder_bias": False},
    "old scaling": {"rope_scaling": YARN},
    "biases": {"mlp_bias": True},
    "biases of the head": {"classifier_bias": True},
    "no flag": {"norm_bias": 1},
    "narrow": {"local_attention": 1},
    "irregular": {"layer_types": [FULL, LOCAL, FULL, FULL, LOCAL]},
    "local first": {"layer_types": [LOCAL, LOCAL, FULL, LOCAL, LOCAL]},
    "few": {"layer_types": [FULL]},
    "no list": {"layer_types": "full_attention"},
    "odd heads": {"hidden_size": 36},
    "every": {"layer_types": None, "global_attn_every_n_layers": 0},
    "positions": {"max_position_embeddings": "long"},
}


@pytest.mark.parametrize("what", WRONG)
def test_configs_that_are_not_supported(tmp_path, what):
    folder = write(tmp_path, random_network(**MASKED_LM))
    edit_config(folder, **WRONG[what])
    field, value = list(WRONG[what].items())[-1]
    with refused(ConversionError, field, field=field, value=value):
        huggingface.read_folder(folder)


@pytest.mark.parametrize("rotary", [YARN, {"rope_theta": 1.0}, {"rope_theta": None}, [1]])
def test_rotary_positions_that_are_not_supported(tmp_path, rotary):
    folder = write(tmp_path, random_network(**MASKED_LM))
    for kind, field in ((FULL, "global_rope_theta"), (LOCAL, "local_rope_theta")):
        edit_config(folder, rope_parameters={kind: rotary})
        is_base = isinstance(rotary, dict) and "factor" not in rotary
        with refused(ConversionError, kind, field=field if is_base else "rope_parameters"):
            huggingface.read_folder(folder)
    edit_config(folder, rope_parameters={"rope_theta": 10_000.0})
    with refused(ConversionError, field="rope_parameters"):
        huggingface.read_folder(folder)


UNSUPPORTED = {
    "norm": "post",
    "normalization": "rms",
    "activation": "swiglu",
    "position_embedding": "none",
    "embedding_norm": False,
    "types": 2,
    "embedding_size": 16,
    "qk_norm": True,
    "key_value_heads": 2,
    "ffn_groups": 2,
    "canon": "AC",
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_blocks_that_no_class_has(tmp_path, field):
    value = UNSUPPORTED[field]
    network = random_network(**MASKED_LM | {field: value})
    with refused(ConversionError, "stablehlo", field=f"config.model.{field}", value=value):
        write(tmp_path / "it", network)
    assert not (tmp_path / "it").exists()


def test_blocks_of_other_families(tmp_path):
    """The error names a field in which the block differs from the nearest class."""
    bert = {"recipe": "masked_lm", "mixer": "attention", "embedding_size": 32}
    mixed = {"recipe": "masked_lm", "mixer": "mixed"}
    for fields, field in (
        (bert | {"window": 3}, "window"),
        (bert | {"activation": "relu"}, "activation"),
        (mixed | {"position_embedding": "rotary"}, "position_embedding"),
        (mixed | {"norm": "pre"}, "norm"),
    ):
        network = random_network(**fields)
        with refused(ConversionError, field=f"config.model.{field}", value=fields[field]):
            write(tmp_path / "it", network)
    network = random_network(**MASKED_LM)
    with refused(ConversionError, "TensorFlow", field="config.model.norm", value="pre"):
        tensorflow1.write_checkpoint(tmp_path / "it", {"main": network}, step=0)


def test_tensors_that_do_not_fit(tmp_path):
    folder = write(tmp_path, random_network(**MASKED_LM))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    table = tensors["model.embeddings.tok_embeddings.weight"]
    for name, array, field in (
        ("model.layers.1.attn.Wqkv.weight", np.zeros((95, 32), np.float32), "Wqkv"),
        ("model.layers.1.mlp.Wi.weight", np.zeros((), np.float32), "Wi"),
        ("decoder.weight", table + 1, "decoder.weight"),
    ):
        save_file(tensors | {name: array}, file)
        with refused(ConversionError, field):
            huggingface.read_folder(folder)
    save_file(tensors | {"decoder.weight": table.copy()}, file)
    assert not huggingface.read_folder(folder).ignored


def test_heads_of_fine_tuned_models_are_refused(tmp_path):
    """Their heads have a norm that ours lack."""
    network = random_network(**MASKED_LM)
    for head in ("sequence_head", "token_head", "span_head"):
        with refused(ConversionError, "ModernBERT"):
            write(tmp_path / "it", with_head(network, head, ("start", "end")))
    folder = write(tmp_path / "it", network)
    tensors = load_file(folder / "model.safetensors")
    more = {"classifier.weight": np.zeros((2, 32), np.float32)}
    save_file(tensors | more, folder / "model.safetensors")
    classes = ["ModernBertForSequenceClassification"]
    edit_config(folder, architectures=classes)
    with refused(ConversionError, "from_pretrained", field="architectures", value=classes):
        huggingface.read_folder(folder)


# --- Against PyTorch ---


@pytest.fixture
def imported_late():
    """Import PyTorch for the tests, but not for collecting them."""
    global torch, transformers
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))


def save_theirs(folder, suffix, **fields):
    """Write a folder with Hugging Face's class and random weights; return the class."""
    config = transformers.ModernBertConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=5,
        num_attention_heads=4, local_attention=8, max_position_embeddings=40, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
        attn_implementation="eager", **fields,
    )  # fmt: skip
    model = getattr(transformers, f"ModernBert{suffix}")(config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.1 * torch.randn_like(parameter)
            parameter.copy_(noise + 1 if name.endswith("norm.weight") else noise)
    model.save_pretrained(folder)
    return model


BIASES = dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)
THEIRS = {
    "Model": ("Model", {}),
    "ForMaskedLM": ("ForMaskedLM", {}),
    "biases": ("ForMaskedLM", BIASES),
    "all local": ("ForMaskedLM", {"layer_types": [LOCAL] * 5}),
}


@pytest.mark.parity
@pytest.mark.usefixtures("imported_late")
@pytest.mark.parametrize("kind", THEIRS)
def test_their_classes(tmp_path, kind):
    suffix, fields = THEIRS[kind]
    save_theirs(tmp_path / "theirs", suffix, **fields)
    source = huggingface.read_folder(tmp_path / "theirs")
    network = source.networks["main"]
    assert not source.ignored
    assert network.has("mlm_head") == (suffix == "ForMaskedLM")
    write(tmp_path / "again", network)
    for folder in ("theirs", "again"):  # checks full rows and padded ones
        differences = parity.check_parity(tmp_path / folder, network).differences
        assert len(differences) == 2 * (1 + network.has("mlm_head"))
        assert max(differences.values()) < 1e-5
    first, second = (load_file(tmp_path / f / "model.safetensors") for f in ("theirs", "again"))
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)


def padded_rows():
    tokens = np.random.default_rng(0).integers(3, 60, (3, 24))
    mask = (np.arange(24) < np.array([24, 17, 5])[:, None]).astype(int)
    return tokens * mask, mask


@pytest.mark.parity
@pytest.mark.usefixtures("imported_late")
@pytest.mark.parametrize("fields", [{}, BIASES], ids=["plain", "biases"])
def test_gradients(tmp_path, fields):
    model = save_theirs(tmp_path, "ForMaskedLM", **fields)
    tokens, mask = padded_rows()
    weights = np.random.default_rng(1).standard_normal((*tokens.shape, 60)) / tokens.size
    weights = (weights * mask[..., None]).astype(np.float32)
    logits = model(input_ids=torch.tensor(tokens), attention_mask=torch.tensor(mask)).logits
    (logits * torch.tensor(weights)).sum().backward()
    grads = {name: leaf.grad.numpy() for name, leaf in model.named_parameters()}
    theirs, _ = huggingface.from_tensors(grads, huggingface.read_config(tmp_path))

    forward = networks.forward(huggingface.read_folder(tmp_path).networks["main"])

    def loss(params):
        found = forward.func(params, tokens, mask, np.zeros_like(tokens))
        return (found["mlm_head"] * weights).sum()

    ours = networks.unstack(flatten_params(jax.grad(loss)(*forward.args)))
    assert ours.keys() == theirs.parameters.keys()
    for path, array in theirs.parameters.items():
        assert np.abs(array).max() > 1e-4, path
        np.testing.assert_allclose(ours[path], array, atol=1e-5, err_msg=path)


@pytest.mark.parity
@pytest.mark.usefixtures("imported_late")
def test_packed_texts_are_their_texts_alone(tmp_path):
    model = save_theirs(tmp_path, "ForMaskedLM")
    tokens = np.random.default_rng(0).integers(3, 60, (1, 30))
    segments = np.repeat([[1, 2, 3, 0]], [13, 4, 11, 2], axis=1)
    network = huggingface.read_folder(tmp_path).networks["main"]
    ours = parity.our_outputs(network, tokens, segments, np.zeros_like(tokens))["mlm_head"]
    for segment in (1, 2, 3):
        places = segments[0] == segment
        with torch.no_grad():
            theirs = model(torch.tensor(tokens[:, places])).logits.numpy()
        np.testing.assert_allclose(ours[:, places], theirs, atol=1e-5)


@pytest.mark.parity
@pytest.mark.usefixtures("imported_late")
def test_a_discriminator_is_their_encoder_and_further_tensors(tmp_path):
    network = random_network(**MODERN, generator={"kind": "uniform"})
    assert huggingface.architecture(network) == "ModernBertModel"
    proof = parity.check_parity(write(tmp_path, network), network)
    assert {"hidden", "rtd_head", "rtd_head, padded"} <= proof.differences.keys()
    assert max(proof.differences.values()) < 1e-5
    card = parity.write_card(network, title="", made_by="", report=proof, notes=())
    assert "discriminator_predictions" in card


@pytest.mark.parity
@pytest.mark.usefixtures("imported_late")
def test_a_run_in_their_pipeline(tmp_path, text):
    block = {f"model__{name}": value for name, value in MODERN.items()}
    config = runs.make_config(
        **block | {"model__layers": 4, "recipe": "masked_lm", "data__source": text},
        train__steps=4, train__batch_size=8, train__log_every=2, train__eval_every=4,
        train__eval_rows=16, optimizer__warmup_steps=1, checkpoint__every=4,
    )  # fmt: skip
    with runs.one_device():
        run = recipes.pretrain(config, tmp_path / "run").folder
    folder = conversion.export(run)  # checks parity with PyTorch
    model, theirs = convbert_jax.load(str(run)), convbert_jax.load(str(folder))
    texts = ["The stream of a process.", "Return the path."]
    encoded = model.encode(texts)
    np.testing.assert_allclose(theirs.encode(texts), encoded, atol=1e-6)
    hole = f"Return the {model.mask_token} of a file."
    ours, found = (m.fill_mask(hole, top_k=3) for m in (model, theirs))
    assert [each["token"] for each in ours] == [each["token"] for each in found]

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert "token_type_ids" not in batch
    with torch.no_grad():
        states = transformers.AutoModel.from_pretrained(folder)(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    mean = (states * mask).sum(1) / mask.sum(1)
    np.testing.assert_allclose(mean.numpy(), encoded, atol=1e-5)
    filled = transformers.pipeline("fill-mask", model=str(folder))(hole, top_k=3)
    for mine, other in zip(ours, filled, strict=True):
        assert mine["score"] == pytest.approx(other["score"], abs=1e-5)
    content = read_json(folder)
    assert content["cls_token_id"] == tokenizer.cls_token_id
    assert content["sep_token_id"] == tokenizer.sep_token_id
