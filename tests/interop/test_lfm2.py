"""Lfm2ForCausalLM of transformers: both directions, and errors for other models."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import convbert_jax
from convbert_jax.config import ModelSection, StageSection
from convbert_jax.config.network import derive_language_model
from convbert_jax.config.sequences import SequenceSection
from convbert_jax.interop import conversion, lfm2, parity
from convbert_jax.interop.importing import import_generative
from convbert_jax.interop.networks import ConversionError
from convbert_jax.models.networks import LanguageModel
from convbert_jax.training.partitioning import flatten_params
from tests.interop.conftest import edit_config, write_entries
from tests.refusals import refused

torch = transformers = None  # set by imported_late

WORDS = 70
MODEL = ModelSection(
    layers=4, hidden_size=64, embedding_size=64, heads=4, key_value_heads=2, mixer="short",
    stages=(StageSection(layers=2), StageSection(mixer="attention"), StageSection()),
    kernel_size=3, ffn_size=48, activation="swiglu", norm="pre", normalization="rms", biases=False,
    embedding_norm=False, qk_norm=True, position_embedding="rotary", rotary_base=5e5, positions=32,
    types=0, dropout=0.0, attention_dropout=0.0, layer_norm_epsilon=1e-5,
)  # fmt: skip
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FORMS = {
    "tied": ({}, {}),
    "untied": ({}, {"tied_output": False}),
    "attention only": ({"mixer": "attention", "stages": (), "layers": 2}, {}),
    "convolution only": ({"stages": (), "layers": 2, "kernel_size": 4}, {}),
    "48 channels": ({"hidden_size": 48, "embedding_size": 48}, {}),  # sqrt(C) is not exact
}


@pytest.fixture
def imported_late():
    """Import PyTorch for the tests, but not for collecting them."""
    global torch, transformers
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))


def random_model(model=None, sequence=None):
    """Returns the sections, the config and random parameters."""
    sections = dataclasses.replace(MODEL, **(model or {})), SequenceSection(**(sequence or {}))
    config = derive_language_model(*sections, WORDS)
    shapes = nnx.to_pure_dict(
        nnx.state(nnx.eval_shape(lambda: LanguageModel(config, nnx.Rngs(0))), nnx.Param)
    )
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        center = 1.0 if path[-1].key == "scale" else 0.0
        return np.float32(center + 0.2 * rng.standard_normal(leaf.shape))

    return *sections, config, jax.tree_util.tree_map_with_path(draw, shapes)


def write(folder, model=None, sequence=None):
    *_, config, params = random_model(model, sequence)
    lfm2.write_folder(folder, config, params, IDS)
    return folder


@pytest.mark.parity
@pytest.mark.usefixtures("imported_late")
@pytest.mark.parametrize("form", FORMS)
def test_round_trip_and_logits(tmp_path, form):
    _, sequence, config, params = random_model(*FORMS[form])
    lfm2.write_folder(tmp_path, config, params, IDS)
    found = lfm2.read_folder(tmp_path)
    assert found.sequence == sequence
    assert found.config.decoder.layers == config.decoder.layers
    assert found.config.tokens == config.tokens
    rtol = 1e-6 if form == "48 channels" else 0
    back = flatten_params(found.params)
    for path, leaf in flatten_params(params).items():
        np.testing.assert_allclose(back[path], leaf, rtol=rtol, err_msg=path)
    lines = parity.check_logits(tmp_path, found.config, found.params)
    assert "Lfm2ForCausalLM" in lines[0]


@pytest.mark.parity
@pytest.mark.usefixtures("imported_late")
def test_a_model_of_transformers_has_the_same_logits(tmp_path):
    """With the rounded feed-forward size, and as the bare Lfm2Model."""
    torch.manual_seed(0)
    config = transformers.Lfm2Config(
        vocab_size=WORDS, hidden_size=64, intermediate_size=100, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, block_multiple_of=8, conv_L_cache=4,
        layer_types=["full_attention", "conv", "full_attention"], max_position_embeddings=64,
    )  # fmt: skip
    theirs = transformers.Lfm2ForCausalLM(config).eval()
    with torch.no_grad():
        for weights in theirs.parameters():
            weights.copy_(0.2 * torch.randn_like(weights) + (weights.ndim == 1))
    theirs.save_pretrained(tmp_path / "whole")
    theirs.model.save_pretrained(tmp_path / "bare")
    whole, bare = (lfm2.read_folder(tmp_path / name) for name in ("whole", "bare"))
    assert whole.model.ffn_size == 72
    jax.tree.map(np.testing.assert_array_equal, whole.params, bare.params)
    tokens = np.random.default_rng(1).integers(0, WORDS, (2, 20))
    net = nnx.merge(
        nnx.graphdef(nnx.eval_shape(lambda: LanguageModel(whole.config, nnx.Rngs(0)))),
        whole.params,
    )
    ids = np.ones_like(tokens)
    with torch.no_grad():
        given = theirs(torch.tensor(tokens), output_hidden_states=True)
    assert given.logits.abs().max() > 1
    np.testing.assert_allclose(jax.jit(net)(tokens, ids), given.logits, atol=1e-5)
    # Logits are computed from states times sqrt(C), see the module.
    states = net.decoder(net.target(tokens, ids), ids)
    np.testing.assert_allclose(states / 8, given.hidden_states[-1], atol=1e-5)


@pytest.mark.parity
@pytest.mark.usefixtures("imported_late")
def test_a_folder_becomes_a_run_and_a_folder_again(tmp_path):
    folder = write(tmp_path / "theirs")
    words = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    write_entries(folder, ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, *"abcde"])
    asked = convbert_jax.load_config("configs/language_model.py:tiny")
    config = import_generative(str(folder), asked, tmp_path / "run")
    assert (config.model.layers, config.model.ffn_size, config.tokenizer.vocab_size) == (4, 48, 70)
    output = conversion.export(tmp_path / "run", output=tmp_path / "again")
    first, second = (load_file(place / "model.safetensors") for place in (folder, output))
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)
    # A prompt begins with [CLS] and does not end.
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    assert tokenizer("ba de")["input_ids"] == [2, *tokenizer.convert_tokens_to_ids(["ba", "de"])]
    with refused(ConversionError, field="config.recipe", value="translation"):
        other = convbert_jax.load_config("configs/translation.py:tiny")
        import_generative(str(folder), other, tmp_path / "other")


# --- Errors ---


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("conv_bias", True),
        ("head_dim", 32),
        ("layer_types", ["conv", "conv", "linear_attention", "conv"]),
        ("layer_types", ["conv"]),
        ("block_ffn_dim_multiplier", -1),
        ("hidden_size", 66),
        ("model_type", "llama"),
        ("num_hidden_layers", 1_000),
    ],
)
def test_other_models_are_refused(tmp_path, field, value):
    folder = write(tmp_path)
    changed = {"block_auto_adjust_ff_dim": True} if "multiplier" in field else {}
    if field == "num_hidden_layers":
        changed["layer_types"] = ["conv"] * value
    edit_config(folder, **{field: value}, **changed)
    with refused(ConversionError, field=field, value=value):
        lfm2.read_folder(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mixer", "light"),
        ("norm", "post"),
        ("activation", "geglu"),
        ("normalization", "layer"),
        ("biases", True),
        ("position_embedding", "none"),
        ("qk_norm", False),
        ("canon", "A"),
        ("ffn_groups", 2),
        ("window", 2),
    ],
)
def test_models_that_the_class_lacks_are_refused(tmp_path, field, value):
    fields = {field: value}
    if field == "mixer":
        fields["stages"] = ()
    if field == "window":
        fields["global_every"] = 0
    *_, config, params = random_model(fields)
    with refused(ConversionError, field=f"config.model.{field}"):
        lfm2.write_folder(tmp_path / "it", config, params, IDS)
    assert not (tmp_path / "it").exists()


def test_tensors_that_do_not_fit(tmp_path):
    file = write(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.conv.in_proj.weight"
    others = {
        name: tensors | {name: tensors[name][:-1]},
        "model.norm.weight": tensors | {"model.norm.weight": np.ones(3, np.float32)},
        "lm_head.weight": tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1},
        "model.layers.2.self_attn.k_layernorm.weight": {
            key: array for key, array in tensors.items() if "k_layernorm" not in key
        },
    }
    for field, changed in others.items():
        save_file(changed, file)
        with refused(ConversionError, field=field):
            lfm2.read_folder(tmp_path)


def test_config_json_is_what_transformers_reads(tmp_path):
    content = json.loads((write(tmp_path) / "config.json").read_text())
    assert content["layer_types"] == ["conv", "conv", "full_attention", "conv"]
    assert (content["num_attention_heads"], content["num_key_value_heads"]) == (4, 2)
    assert not content["block_auto_adjust_ff_dim"]
