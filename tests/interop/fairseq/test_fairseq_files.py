"""Checkpoints of fairseq's versions are the same model; what has no counterpart is refused by name,
what is damaged in one sentence.
"""

import argparse
import functools
import os
import random
import re
import sys
import types

import jax
import numpy as np
import pytest

from convbert_jax.config import UserError
from convbert_jax.interop.fairseq.model import read
from tests.interop.conftest import limits

torch = pytest.importorskip("torch")

from tests.interop.fairseq.published import Published, arguments, write  # noqa: E402

SIZES = (23, 23)
FLIPS = int(os.environ.get("CONVBERT_FLIPS", "60"))
LIGHT = {"encoder_conv_type": "lightweight", "decoder_conv_type": "lightweight"}
LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True}


def make(folder, a=None, sizes=SIZES, change=lambda tensors: tensors, **state):
    """The path of a checkpoint whose tensors were changed."""
    a = a or arguments(**LIGHT, share_all_embeddings=True)
    torch.manual_seed(0)
    model = Published(a, sizes[-1], *sizes[:-1])
    tensors = change({name: t.detach().clone() for name, t in model.state_dict().items()})
    return write(folder, model, a, sizes, **{"model": tensors} | state)


def assert_same(first, second):
    assert (first.model, first.sequence) == (second.model, second.sequence)
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)


def refused(path):
    """The sentence that refuses a file."""
    with pytest.raises(UserError) as found:
        read(path)
    text = str(found.value)
    assert "\n" not in text
    assert len(text) < 600
    assert str(path.parent) in text
    return text


# --- Other spellings of the same ---


def old_attention(tensors):
    """Queries, keys and values in one, as before 2019."""
    for first in [name for name in tensors if "q_proj" in name]:
        names = [first.replace("q_proj", part) for part in ("q_proj", "k_proj", "v_proj")]
        stem, leaf = first.split("q_proj.")
        tensors[f"{stem}in_proj_{leaf}"] = torch.cat([tensors.pop(name) for name in names])
    return tensors


def old_norms(tensors):
    order = {"self_attn_layer_norm": 0, "encoder_attn_layer_norm": 1}
    for name in [name for name in tensors if re.search(r"layers\.\d+\.\w+_layer_norm\.", name)]:
        side, _, layer, norm, leaf = name.split(".")
        number = order.get(norm, 2 if side == "decoder" else 1)
        tensors[f"{side}.layers.{layer}.layer_norms.{number}.{leaf}"] = tensors.pop(name)
    return tensors


def of_gpus(tensors):
    return {name: t[:, 0] if name.endswith("conv.weight") else t for name, t in tensors.items()}


def with_sinusoids(tensors):
    return tensors | {"encoder.embed_positions.weights": torch.ones(9, 16)}


def without_versions(tensors):
    dropped = ("version", "_float_tensor")
    return {name: t for name, t in tensors.items() if not name.endswith(dropped)}


def with_copies(tensors):
    """As fairseq 0.12 leaves them behind training: zeros."""
    names = [f"{part}_{leaf}" for part in ("in_proj", "fc1") for leaf in ("weight", "bias")]
    copies = {f"encoder.layers.{i}.{name}": torch.zeros(24) for i in range(3) for name in names}
    return tensors | copies


TRANSFORMER = {"arch": "transformer_wmt_en_de"}
SPELLINGS = {
    "one projection": (TRANSFORMER, old_attention),
    "norms by number": (TRANSFORMER, old_norms),
    "copies for a faster path": (TRANSFORMER, with_copies),
    "Transformer's output by its old name": (
        TRANSFORMER,
        lambda t: t | {"decoder.embed_out": t.pop("decoder.output_projection.weight")},
    ),
    "filters of the kernels for GPUs": (LIGHT, of_gpus),
    "sinusoids inside": ({}, with_sinusoids),
    "no versions": ({}, without_versions),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_spellings_are_the_same_model(spelling, tmp_path):
    fields, change = SPELLINGS[spelling]
    (tmp_path / "new").mkdir()
    (tmp_path / "old").mkdir()
    a = arguments(**fields)
    assert_same(read(make(tmp_path / "new", a)), read(make(tmp_path / "old", a, change=change)))


def test_a_file_before_the_archives_is_the_same_model(tmp_path):
    path = make(tmp_path)
    found = read(path)
    torch.save(torch.load(path, weights_only=False), path, _use_new_zipfile_serialization=False)
    assert_same(read(path), found)


def test_half_precision_is_read_exactly(tmp_path):
    path = make(tmp_path, change=lambda t: {name: x.half() for name, x in t.items()})
    params = read(path).params
    tensors = torch.load(path, weights_only=False)["model"]
    filters = params["encoder"]["stages"]["0"]["mixer"]["filters"][0]
    wanted = tensors["encoder.layers.0.conv.weight"].float()
    np.testing.assert_array_equal(filters, wanted[:, 0])
    table = params["target"]["word"]["embedding"]
    np.testing.assert_array_equal(table, tensors["decoder.embed_tokens.weight"].float())


def test_args_may_be_in_a_config(tmp_path, monkeypatch):
    """As since 2020: in a dict, and in containers of omegaconf, of which nothing is imported."""
    a = arguments(**LIGHT, share_all_embeddings=True)
    found = read(make(tmp_path, a))
    task = {"source_lang": "de", "target_lang": "en", "_name": "translation"}
    model = {**vars(a), "_name": a.arch}
    del model["arch"]

    def is_the_same(cfg):
        assert_same(read(make(tmp_path, a, args=None, cfg=cfg)), found)

    is_the_same({"model": a, "task": task})
    is_the_same({"model": model, "task": argparse.Namespace(**task)})
    nested = {name: v for name, v in model.items() if not name.startswith(("encoder_", "decoder_"))}
    for side in ("encoder", "decoder"):
        nested[side] = {
            name.removeprefix(f"{side}_"): value
            for name, value in model.items()
            if name.startswith(f"{side}_")
        }
    is_the_same({"model": nested, "task": task})

    fake = types.ModuleType("omegaconf")
    for name in ("DictConfig", "ListConfig", "AnyNode"):
        setattr(fake, name, type(name, (), {"__module__": "omegaconf"}))
    monkeypatch.setitem(sys.modules, "omegaconf", fake)

    def wrap(value, parent=None):
        kind = {dict: "DictConfig", list: "ListConfig"}.get(type(value), "AnyNode")
        node = getattr(fake, kind)()
        node._parent, node._metadata = parent, {"ref_type": fake.AnyNode}
        if kind == "AnyNode":
            node._val = value
        elif kind == "ListConfig":
            node._content = [wrap(inner, node) for inner in value]
        else:
            node._content = {name: wrap(inner, node) for name, inner in value.items()}
        return node

    is_the_same(wrap({"model": model, "task": task, "common": {"seed": 1}}))


def test_a_folder_is_read_by_the_name_of_the_release(tmp_path):
    assert_same(read(make(tmp_path)), read(tmp_path))


def test_what_only_training_knows_is_left_out_and_said(tmp_path):
    a = arguments(input_dropout=0.2, relu_dropout=0.3, weight_dropout=0.1, encoder_layerdrop=0.0)
    found = read(make(tmp_path, a))
    assert found.left_out == {"input_dropout": 0.2}
    assert found.sequence.activation_dropout == 0.3
    assert (found.model.dropout, found.model.attention_dropout) == (0.3, 0.1)


def test_without_the_last_norm_a_decoder_of_pre_norm_has_none(tmp_path):
    """As Transformers of 2018, which the tensors alone tell."""
    a = arguments("transformer", encoder_normalize_before=True, decoder_normalize_before=True)

    def drop(tensors):
        return {name: t for name, t in tensors.items() if "decoder.layer_norm." not in name}

    found = read(make(tmp_path, a, change=drop))
    assert not found.sequence.last_norm
    assert "norm" not in found.params["decoder"]


# --- Refusals ---

# Arguments that have no counterpart -> words of the sentence.
REFUSED = {
    "another model": ({"arch": "fconv_iwslt_de_en"}, "arch='fconv_iwslt_de_en'"),
    "adaptive softmax": ({"adaptive_softmax_cutoff": [100, 200]}, r"adaptive_softmax_cutoff=\[100"),
    "no softmax of filters": ({"weight_softmax": False}, "weight_softmax=False"),
    "even taps in the encoder": ({"encoder_kernel_size_list": [3, 4, 5]}, r"=\[3, 4, 5\]"),
    "taps of another depth": ({"decoder_kernel_size_list": [3, 5]}, "the 3 layers"),
    "taps as words": ({"decoder_kernel_size_list": "[3, 5]"}, "decoder_kernel_size_list"),
    "a wider convolution": ({"encoder_conv_dim": 32}, "encoder_conv_dim=32"),
    "another feed-forward": ({"decoder_ffn_embed_dim": 48}, "config.model.ffn_size"),
    "other heads": ({"decoder_attention_heads": 2}, "config.model.heads"),
    "heads that do not divide": (
        {"encoder_attention_heads": 3, "decoder_attention_heads": 3},
        "divisor of encoder_embed_dim=16",
    ),
    "norms on two sides": ({"decoder_normalize_before": True}, "config.sequence.norm"),
    "another convolution": ({"encoder_conv_type": "fft"}, "encoder_conv_type='fft'"),
    "words that are not scaled": ({"no_scale_embedding": True}, "no_scale_embedding=True"),
    "a norm of embeddings": ({"layernorm_embedding": True}, "layernorm_embedding=True"),
    "another activation": (
        {"arch": "transformer", "activation_fn": "tanh"},
        "activation_fn='tanh'",
    ),
    "learned places of two lengths": (
        {**LEARNED, "max_target_positions": 50},
        "max_target_positions=50.*config.model.positions",
    ),
    "no layers": ({"encoder_layers": 0}, "encoder_layers=0"),
    "layers without end": ({"encoder_layers": 10**9}, "encoder_layers=1000000000"),
    "layers as words": ({"decoder_layers": "six"}, "decoder_layers='six'"),
    "no width": ({"encoder_embed_dim": None}, "encoder_embed_dim=None"),
    "dropout of all": ({"dropout": 1.0}, "dropout=1.0"),
    "no language": ({"target_lang": None}, "source_lang and target_lang"),
    "a language that is a path": ({"source_lang": "../x"}, "'../x'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_counterpart_is_refused_by_name(name, tmp_path):
    changed, words = REFUSED[name]
    path = make(tmp_path)
    state = torch.load(path, weights_only=False)
    for field, value in changed.items():
        setattr(state["args"], field, value)
    torch.save(state, path)
    assert re.search(words, refused(path))


def _double(tensors):
    return tensors | {"encoder.layers.0.fc1.bias": tensors["encoder.layers.0.fc1.bias"].double()}


TENSORS = {
    "one is missing": (
        lambda t: {name: x for name, x in t.items() if "layers.1.fc1.bias" not in name},
        "lacks 'decoder.layers.1.fc1.bias', 'encoder.layers.1.fc1.bias';",
    ),
    "many are missing": (
        lambda t: {name: x for name, x in t.items() if "fc1" not in name},
        "and 9 more",
    ),
    "one is left": (lambda t: t | {"encoder.layers.0.conv.bias": torch.ones(16)}, "conv.bias"),
    "a layer is left": (lambda t: t | {"decoder.layers.3.fc1.bias": torch.ones(24)}, "layers.3"),
    "of another shape": (lambda t: t | {"encoder.layers.0.fc1.bias": torch.ones(25)}, r"\[25\]"),
    "a gate without its half": (
        lambda t: t | {"encoder.layers.0.linear1.bias": torch.ones(16)},
        r"linear1",
    ),
    "tables that are not one": (
        lambda t: t | {"encoder.embed_tokens.weight": torch.ones(23, 16)},
        "encoder.embed_tokens.weight is decoder.embed_tokens.weight",
    ),
    "no number": (
        lambda t: t | {"encoder.layers.0.fc1.bias": torch.full((24,), float("nan"))},
        "NaN",
    ),
    "too exact": (_double, "exact in float32"),
    "no table": (lambda t: list(t), "no table of tensors"),
    "a word": (lambda t: t | {"encoder.layers.0.fc1.bias": "x"}, "fc1.bias"),
    "nothing": (lambda t: {}, "encoder_layers=3"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_every_tensor_is_used_once(name, tmp_path):
    change, words = TENSORS[name]
    assert re.search(words, refused(make(tmp_path, change=change)))


def test_without_args_there_is_no_model(tmp_path):
    for changed in ({"args": None}, {"args": 7}, {"args": None, "cfg": {"model": []}}):
        assert "args and cfg" in refused(make(tmp_path, **changed))
    torch.save([1, 2], tmp_path / "model.pt")
    assert "args and cfg" in refused(tmp_path / "model.pt")


def test_no_flipped_bit_is_another_model(tmp_path):
    path = make(tmp_path)
    found, good = read(path), path.read_bytes()
    rng = random.Random(FLIPS)
    for _ in range(FLIPS):
        content = bytearray(good)
        content[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        try:
            flipped, text = read(path), ""
        except UserError as error:
            flipped, text = found, str(error)
        assert_same(flipped, found)
        assert text.startswith(str(path)) or not text


HOSTILE_ARGS = {
    "shared without end": lambda args: functools.reduce(lambda v, _: [v] * 10, range(12), []),
    "that holds itself": lambda args: vars(args),
    "deep": lambda args: functools.reduce(lambda v, _: [v], range(100), 1),
}


@pytest.mark.parametrize("name", HOSTILE_ARGS)
def test_args_without_end_are_refused(name, tmp_path):
    a = arguments()
    a.more = HOSTILE_ARGS[name](a)
    with limits():
        assert "larger than those of any model" in refused(make(tmp_path, a))


def test_dictionaries_belong_to_their_model(tmp_path):
    path = make(tmp_path)
    english = tmp_path / "dict.en.txt"
    text = english.read_text()
    english.write_text(text.replace("w3@@", "other"))
    assert "differ" in refused(path)
    english.write_text(text + "one 1\ntwo 1\n")
    assert "belongs to another model" in refused(path)
    english.unlink()
    assert str(english) in refused(path)
