"""Checkpoint formats of different fairseq versions give the same model; others are refused."""

import argparse
import functools
import re
import sys
import tempfile
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convbert_jax.config import UserError
from convbert_jax.interop.fairseq import SPECIAL, SPECIAL_IDS, Dictionary, read, read_dictionary
from tests.interop.conftest import limits
from tests.interop.fairseq.checkpoints import arguments, build, write
from tests.refusals import refused

SIZES = (23, 23)
LIGHT = {"encoder_conv_type": "lightweight", "decoder_conv_type": "lightweight"}
LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True}
TRANSFORMER = {"arch": "transformer_wmt_en_de"}


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def make(folder, a=None, change=lambda tensors: tensors, **state):
    """Write a checkpoint with changed tensors; return its path."""
    a = a or arguments(**LIGHT, share_all_embeddings=True)
    model = build(a, SIZES)
    tensors = change({name: t.detach().clone() for name, t in model.state_dict().items()})
    return write(folder, model, a, SIZES, **{"model": tensors} | state)


def assert_same(first, second):
    assert (first.model, first.sequence) == (second.model, second.sequence)
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)


# --- Equivalent formats ---


def old_attention(torch, tensors):
    """Merge the query, key and value projections, as before 2019."""
    for first in [name for name in tensors if "q_proj" in name]:
        names = [first.replace("q_proj", part) for part in ("q_proj", "k_proj", "v_proj")]
        stem, leaf = first.split("q_proj.")
        tensors[f"{stem}in_proj_{leaf}"] = torch.cat([tensors.pop(name) for name in names])
    return tensors


def old_norms(torch, tensors):
    order = {"self_attn_layer_norm": 0, "encoder_attn_layer_norm": 1}
    for name in [name for name in tensors if re.search(r"layers\.\d+\.\w+_layer_norm\.", name)]:
        side, _, layer, norm, leaf = name.split(".")
        number = order.get(norm, 2 if side == "decoder" else 1)
        tensors[f"{side}.layers.{layer}.layer_norms.{number}.{leaf}"] = tensors.pop(name)
    return tensors


def old_output(torch, tensors):
    return tensors | {"decoder.embed_out": tensors.pop("decoder.output_projection.weight")}


def of_gpus(torch, tensors):
    return {name: t[:, 0] if name.endswith("conv.weight") else t for name, t in tensors.items()}


def with_sinusoids(torch, tensors):
    return tensors | {"encoder.embed_positions.weights": torch.ones(9, 16)}


def without_versions(torch, tensors):
    dropped = ("version", "_float_tensor")
    return {name: t for name, t in tensors.items() if not name.endswith(dropped)}


def with_copies(torch, tensors):
    """Add zero tensors, as fairseq 0.12 does after training."""
    names = [f"{part}_{leaf}" for part in ("in_proj", "fc1") for leaf in ("weight", "bias")]
    copies = {f"encoder.layers.{i}.{name}": torch.zeros(24) for i in range(3) for name in names}
    return tensors | copies


SPELLINGS = [
    (TRANSFORMER, (old_attention, old_norms, with_copies, old_output)),
    (LIGHT, (of_gpus, with_sinusoids, without_versions)),
]


@pytest.mark.parametrize(("fields", "changes"), SPELLINGS, ids=["Transformer", "light"])
def test_other_spellings_are_the_same_model(fields, changes, tmp_path, torch):
    a = arguments(**fields)
    found = read(make(tmp_path, a))
    assert_same(read(tmp_path), found)  # the file name in a released folder
    for change in changes:
        assert_same(read(make(tmp_path, a, functools.partial(change, torch))), found)
    # All changes together, in the format used before zip archives.
    path = make(tmp_path, a, lambda t: functools.reduce(lambda t, c: c(torch, t), changes, t))
    torch.save(torch.load(path, weights_only=False), path, _use_new_zipfile_serialization=False)
    assert_same(read(path), found)


def test_half_precision_is_read_exactly(tmp_path, torch):
    path = make(tmp_path, change=lambda t: {name: x.half() for name, x in t.items()})
    params = read(path).params
    tensors = torch.load(path, weights_only=False)["model"]
    filters = params["encoder"]["stages"]["0"]["mixer"]["filters"][0]
    wanted = tensors["encoder.layers.0.conv.weight"].float()
    np.testing.assert_array_equal(filters, wanted[:, 0])
    table = params["target"]["word"]["embedding"]
    np.testing.assert_array_equal(table, tensors["decoder.embed_tokens.weight"].float())


def test_args_may_be_in_a_config(tmp_path, monkeypatch):
    """Since 2020: a dict or omegaconf containers, read without importing omegaconf."""
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


def test_arguments_of_training_are_left_out(tmp_path):
    a = arguments(input_dropout=0.2, relu_dropout=0.3, weight_dropout=0.1, encoder_layerdrop=0.0)
    found = read(make(tmp_path, a))
    assert found.left_out == {"input_dropout": 0.2}
    assert found.model.activation_dropout == 0.3
    assert (found.model.dropout, found.model.attention_dropout) == (0.3, 0.1)


def test_without_the_last_norm_a_decoder_of_pre_norm_has_none(tmp_path):
    """As in Transformers of 2018, where only the tensors show that it is missing."""
    a = arguments("transformer", encoder_normalize_before=True, decoder_normalize_before=True)

    def drop(tensors):
        return {name: t for name, t in tensors.items() if "decoder.layer_norm." not in name}

    found = read(make(tmp_path, a, drop))
    assert not found.sequence.last_norm
    assert "norm" not in found.params["decoder"]


# --- Errors ---

# Arguments without a counterpart; the error names the first one.
REFUSED = [
    {"arch": "fconv_iwslt_de_en"},
    {"adaptive_softmax_cutoff": [100, 200]},
    {"weight_softmax": False},
    {"encoder_kernel_size_list": [3, 4, 5]},
    {"decoder_kernel_size_list": [3, 5]},
    {"decoder_kernel_size_list": "[3, 5]"},
    {"encoder_conv_dim": 32},
    {"decoder_ffn_embed_dim": 48},
    {"decoder_attention_heads": 2},
    {"encoder_attention_heads": 3, "decoder_attention_heads": 3},
    {"decoder_normalize_before": True},
    {"encoder_conv_type": "fft"},
    {"no_scale_embedding": True},
    {"layernorm_embedding": True},
    {"activation_fn": "tanh", "arch": "transformer"},
    {"max_target_positions": 50, **LEARNED},
    {"encoder_layers": 0},
    {"encoder_layers": 10**9},
    {"decoder_layers": "six"},
    {"encoder_embed_dim": None},
    {"dropout": 1.0},
]
MENTIONS = {
    "decoder_ffn_embed_dim": "config.model.ffn_size",
    "decoder_attention_heads": "config.model.heads",
    "decoder_normalize_before": "config.model.norm",
    "max_target_positions": "config.model.positions",
    "encoder_attention_heads": "encoder_embed_dim=16",
}


def test_arguments_without_a_counterpart_are_refused(tmp_path, torch):
    path = make(tmp_path)
    state = torch.load(path, weights_only=False)
    for changed in REFUSED:
        (field, value), *_ = changed.items()
        torch.save(state | {"args": argparse.Namespace(**vars(state["args"]) | changed)}, path)
        with refused(UserError, MENTIONS.get(field, ""), field=field, path=path) as caught:
            read(path)
        assert caught.value.value == value
    for changed in ({"target_lang": None}, {"source_lang": "../x"}):
        torch.save(state | {"args": argparse.Namespace(**vars(state["args"]) | changed)}, path)
        (value,) = changed.values()
        with refused(UserError, "source_lang", "target_lang", repr(value or ""), path=path):
            read(path)


BIAS = "encoder.layers.0.fc1.bias"
TENSORS = {
    "decoder.layers.1.fc1.bias": lambda torch, t: {
        name: x for name, x in t.items() if "layers.1.fc1.bias" not in name
    },
    "encoder.layers.0.conv.bias": lambda torch, t: (
        t | {"encoder.layers.0.conv.bias": torch.ones(16)}
    ),
    "decoder.layers.3.fc1.bias": lambda torch, t: t | {"decoder.layers.3.fc1.bias": torch.ones(24)},
    BIAS: lambda torch, t: t | {BIAS: torch.ones(25)},
    "encoder.layers.0.linear1": lambda torch, t: (
        t | {"encoder.layers.0.linear1.bias": torch.ones(16)}
    ),
    "encoder.embed_tokens.weight": lambda torch, t: (
        t | {"encoder.embed_tokens.weight": torch.ones(23, 16)}
    ),
    "NaN": lambda torch, t: t | {BIAS: torch.full((24,), float("nan"))},
    "float64": lambda torch, t: t | {BIAS: t[BIAS].double()},
    "table": lambda torch, t: list(t),
    "fc1": lambda torch, t: t | {BIAS: "x"},
    "encoder_layers": lambda torch, t: {},
    "9 more": lambda torch, t: {name: x for name, x in t.items() if "fc1" not in name},
}


def test_every_tensor_is_used_once(tmp_path, torch):
    for mention, change in TENSORS.items():
        path = make(tmp_path, change=functools.partial(change, torch))
        with refused(UserError, mention, path=path):
            read(path)


def test_files_without_sound_args_are_refused(tmp_path, torch):
    for changed in ({"args": None}, {"args": 7}, {"args": None, "cfg": {"model": []}}):
        path = make(tmp_path, **changed)
        with refused(UserError, "args", "cfg", path=path):
            read(path)
    torch.save([1, 2], path)
    with refused(UserError, "args", "cfg", path=path):
        read(path)
    for more in (
        lambda args: functools.reduce(lambda v, _: [v] * 10, range(12), []),  # nested shared lists
        vars,  # contains itself
        lambda args: functools.reduce(lambda v, _: [v], range(100), 1),
    ):
        a = arguments()
        a.more = more(a)
        path = make(tmp_path, a)
        with limits(), refused(UserError, "args", path=path):
            read(path)


# --- Dictionaries ---


def test_dictionaries_belong_to_their_model(tmp_path):
    path = make(tmp_path)
    english = tmp_path / "dict.en.txt"
    text = english.read_text()
    english.write_text(text.replace("w3@@", "other"))
    with refused(UserError, english, tmp_path / "dict.de.txt"):
        read(path)
    english.write_text(text + "one 1\ntwo 1\n")
    with refused(UserError, 25, 23, path=english):
        read(path)
    english.unlink()
    with refused(UserError, path=english):
        read(path)


def write_words(text: str | bytes) -> Path:
    path = Path(tempfile.mkdtemp()) / "dict.en.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_ids_begin_after_the_special_ones():
    found = read_dictionary(write_words("the 9\nlow@@ 5\ner 2\n"), 7)
    assert found.entries == ("<s>", "<pad>", "</s>", "<unk>", "the", "low@@", "er")
    assert found.encode("the low@@ er  lowest </s>") == [4, 5, 6, 3, 3, 2]
    assert found.decode([2, 4, 5, 6, 3, 2, 4]) == "the lower <unk>"
    assert found.decode([2, 5, 2, 1, 1]) == "low"
    assert found.decode([2, 2, 1]) == ""
    ids = SPECIAL_IDS
    assert (ids.pad, ids.cls, ids.sep, ids.unknown) == (1, 2, 2, 3)
    assert found.entries[ids.cls] == "</s>"


def test_later_lines_may_overwrite_and_made_up_words_fill_a_table():
    found = read_dictionary(write_words("a 3\nb 2\na 1 #fairseq:overwrite\n"), 7)
    assert found.entries[4:] == ("a", "b", "a")
    assert found.encode("a b") == [6, 5, 2]
    assert read_dictionary(write_words("a 1\nmadeupword0000 0\n"), 8).entries[4:] == (
        "a", "madeupword0000", "madeupword0001", "madeupword0002",
    )  # fmt: skip
    for rows in (4, 7, 9, 15):
        path = write_words("a 1\nb 1\n")
        with refused(UserError, 6, rows, path=path):
            read_dictionary(path, rows)


WORDS = st.lists(
    st.text(st.characters(codec="utf-8", exclude_categories=("Z", "C")), min_size=1), unique=True
)


@given(WORDS, st.sampled_from(["\n", "\r\n"]))
def test_written_words_are_read(words, end):
    words = [word for word in words if word not in SPECIAL]
    text = "".join(f"{word} {i}{end}" for i, word in enumerate(words))
    found = read_dictionary(write_words(text), 4 + len(words))
    assert found == Dictionary((*SPECIAL, *words))
    assert found.encode(" ".join(words)) == [*range(4, 4 + len(words)), 2]


@pytest.mark.parametrize(
    ("text", "line", "value"),
    [
        ("a\n", 1, "a"),
        ("a 1\n\nb 1\n", 2, ""),
        ("a 1\nb x\n", 2, "b x"),
        ("a 1.5\n", 1, "a 1.5"),
        (" 1\n", 1, " 1"),
        ("a 1\na 2\n", 2, "a"),
        ("<unk> 1\n", 1, "<unk>"),
        (b"\xff 1\n", None, None),
    ],
)
def test_a_wrong_line_is_refused(text, line, value):
    path = write_words(text)
    with refused(UserError, path=path, line=line, value=value):
        read_dictionary(path, 6)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(content):
    path = write_words(content)
    try:
        entries, refusal = read_dictionary(path, 8).entries, ""
    except UserError as error:
        entries, refusal = (), str(error)
    assert "\n" not in refusal
    assert bool(refusal) == (len(entries) != 8)
