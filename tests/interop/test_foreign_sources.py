"""Folders and checkpoints as others publish them: what they leave out, pad, or split up."""

import json
import shutil

import numpy as np
import pytest

import convbert_jax
from convbert_jax.config import ConfigError, UserError, from_config_dict, to_dict
from convbert_jax.data.errors import TokenizerError
from convbert_jax.inference import finetuned
from convbert_jax.interop import certificate, conversion, importing, matching, sources
from convbert_jax.interop.huggingface import folder as huggingface
from convbert_jax.interop.huggingface import tokenizer as huggingface_tokenizer
from convbert_jax.interop.networks import ConversionError, split
from convbert_jax.interop.tensorflow1 import checkpoint as tensorflow1
from convbert_jax.recipes import finetuning
from convbert_jax.recipes import start as starting
from convbert_jax.workdir import Workdir
from tests.interop.conftest import (
    assert_same,
    make_config,
    random_network,
    random_params,
    with_head,
)

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CASED = [*SPECIAL, "Berlin", "caf\u00e9", *(f"w{i}" for i in range(53))]
UNCASED = [*SPECIAL, *(f"w{i}" for i in range(55))]
BERT = {"recipe": "masked_lm", "mixer": "attention", "embedding_size": 32}


@pytest.fixture(autouse=True)
def without_pytorch(monkeypatch):
    monkeypatch.setattr(certificate, "pytorch_is_there", lambda: False)


def write_entries(folder, entries):
    path = folder / "vocab.txt"
    path.write_text("".join(f"{entry}\n" for entry in entries), encoding="utf-8")
    return path


def write_checkpoint(folder, entries, **fields):
    """A checkpoint of 60 rows beside a vocab.txt alone."""
    config = make_config(mask_convolution=False, **fields)
    parts = split(config, random_params(config))
    tensorflow1.write_checkpoint(folder / "model.ckpt-7", parts, step=7)
    write_entries(folder, entries)
    return config


def edit_config(folder, **fields):
    file = folder / "config.json"
    content = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({k: v for k, v in content.items() if v != "absent"}))


# --- a vocabulary alone says whether it is cased ---


@pytest.mark.parametrize(("entries", "kept"), [(CASED, False), (UNCASED, True)])
def test_a_vocabulary_alone(tmp_path, entries, kept):
    path = write_entries(tmp_path, entries)
    fields = huggingface_tokenizer.describe_vocabulary(tmp_path, path)
    assert (fields["lowercase"], fields["strip_accents"]) == (kept, kept)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    assert huggingface_tokenizer.describe_vocabulary(tmp_path, path) == fields


def test_settings_beside_a_vocabulary_win(tmp_path):
    path = write_entries(tmp_path, UNCASED)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text('{"do_lower_case": false}')
    fields = huggingface_tokenizer.describe_vocabulary(tmp_path, path)
    assert (fields["lowercase"], fields["strip_accents"]) == (False, False)
    settings.write_text('{"strip_accents": false}')
    fields = huggingface_tokenizer.describe_vocabulary(tmp_path, path)
    assert (fields["lowercase"], fields["strip_accents"]) == (True, False)


# --- a tokenizer that ours is not ---

CHINESE = {"type": "BertNormalizer", "lowercase": True, "handle_chinese_chars": False}
ADDED = {"content": "NEW", "id": 60, "special": False}
CLASS = "tokenizer_class"
CASED_JSON = {"normalizer": {"type": "BertNormalizer", "lowercase": False}}
OTHER_ORDER = {"model": {"type": "WordPiece", "vocab": {"[PAD]": 0, "w3": 7, "w1": 6}}}


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"tokenizer_config.json": {"tokenize_chinese_chars": False}}, "tokenize_chinese_chars"),
        ({"tokenizer_config.json": {CLASS: "BertJapaneseTokenizer"}}, "'BertJapaneseTokenizer'"),
        ({"config.json": {CLASS: "RoFormerTokenizer"}}, "tokenizer_class='RoFormerTokenizer'"),
        ({"tokenizer.json": {"normalizer": CHINESE}}, "handle_chinese_chars=false"),
        ({"tokenizer.json": {"normalizer": {"type": "Sequence"}}}, "the normalizer 'Sequence'"),
        ({"tokenizer.json": {"pre_tokenizer": {"type": "Whitespace"}}}, "pre_tokenizer 'Whitesp"),
        ({"tokenizer.json": {"added_tokens": [ADDED]}}, "the added token 'NEW'"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"60": ADDED}}}, "token 'NEW'"),
        ({"added_tokens.json": {"NEW": 60}}, "the added token 'NEW'"),
        (
            {"tokenizer.json": CASED_JSON, "tokenizer_config.json": {"do_lower_case": True}},
            "do_lower_case=True in tokenizer_config.json and lowercase=False in tokenizer.json",
        ),
        ({"tokenizer.json": OTHER_ORDER}, "the entry 'w3' as 7 in tokenizer.json, which vocab.txt"),
    ],
)
def test_a_tokenizer_that_ours_is_not_is_refused(tmp_path, files, says):
    """Its vocabulary would give other ids without a word."""
    path = write_entries(tmp_path, UNCASED)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ConversionError, match=f"has a tokenizer with .*{says}"):
        huggingface_tokenizer.describe_vocabulary(tmp_path, path)


@pytest.mark.parametrize("suffix", ["", "Fast"])
@pytest.mark.parametrize("name", ["BertTokenizer", "ElectraTokenizer", "ConvBertTokenizer", None])
def test_the_usual_tokenizers_are_read(tmp_path, name, suffix):
    """As versions 4 and 5 of transformers write them, quick and slow."""
    path = write_entries(tmp_path, UNCASED)
    special = [{"content": entry, "id": i, "special": True} for i, entry in enumerate(SPECIAL)]
    special.append({"content": "<e>", "id": 60, "special": True})
    settings = {
        CLASS: name and name + suffix,
        "tokenize_chinese_chars": True,
        "do_basic_tokenize": False,  # what the quick ones, which all take, do not read
        "never_split": None,
        "mask_token": {"content": "[MASK]", "__type": "AddedToken"},
        "additional_special_tokens": ["<f>"],
        "added_tokens_decoder": {str(token["id"]): token for token in special},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "added_tokens.json").write_text('{"<e>": 60, "<f>": 61, "[MASK]": 4}')
    if suffix:
        normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
        pipeline = {
            "added_tokens": special,
            "normalizer": normalizer | {"strip_accents": None, "lowercase": True},
            "pre_tokenizer": {"type": "BertPreTokenizer"},
        }
        (tmp_path / "tokenizer.json").write_text(json.dumps(pipeline))
    fields = huggingface_tokenizer.describe_vocabulary(tmp_path, path)
    assert (fields["kind"], fields["lowercase"]) == ("wordpiece", True)


@pytest.mark.parametrize("name", [None, "PreTrainedTokenizerFast", "TokenizersBackend"])
def test_sentencepiece_beside_usual_classes_is_read(tmp_path, name):
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({CLASS: name, "mask_token": "<m>"}))
    (tmp_path / "added_tokens.json").write_text('{"<m>": 60}')
    path = tmp_path / "spiece.model"
    assert huggingface_tokenizer.describe_vocabulary(tmp_path, path)["kind"] == "sentencepiece"
    settings.write_text(json.dumps({CLASS: "BertJapaneseTokenizer"}))
    with pytest.raises(ConversionError, match="tokenizer_class='BertJapaneseTokenizer'"):
        huggingface_tokenizer.describe_vocabulary(tmp_path, path)


def test_another_vocabulary_may_be_named(tmp_path):
    """The way out of the refusals above, for who knows better."""
    start = write_checkpoint(tmp_path, UNCASED)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenize_chinese_chars": false}')
    with pytest.raises(UserError, match=r"tokenize_chinese_chars=false.*vocabulary='vocab.txt'"):
        convbert_jax.load(tmp_path)
    with pytest.raises(UserError, match=r"no vocabulary.*--config.tokenizer.path"):
        importing.import_run(str(tmp_path), start, tmp_path / "run")
    model = convbert_jax.load(tmp_path, vocabulary=str(tmp_path / "vocab.txt"))
    assert model.tokenizer.entries == UNCASED


def test_a_cased_checkpoint_is_exported_cased(tmp_path):
    write_checkpoint(tmp_path, CASED)
    out = conversion.convert(str(tmp_path), tmp_path / "out")
    content = json.loads((out / "tokenizer.json").read_text())
    assert content["normalizer"]["lowercase"] is False


def test_a_cased_checkpoint_is_imported_cased(tmp_path):
    start = write_checkpoint(tmp_path, CASED)
    config, _ = importing.import_run(str(tmp_path), start, tmp_path / "run")
    assert not config.tokenizer.lowercase
    assert not config.tokenizer.strip_accents


def test_a_killed_import_leaves_no_run_without_its_vocabulary(tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    start, place = write_checkpoint(tmp_path, CASED), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(importing, "keep_vocabularies", killed)
        with pytest.raises(KeyboardInterrupt):
            importing.import_run(str(tmp_path), start, place)
    assert Workdir(place).steps() == []
    importing.import_run(str(tmp_path), start, place)  # begins again
    assert Workdir(place).steps() == [0]
    assert (place / "vocabulary" / "vocab.txt").is_file()


def test_named_settings_of_a_vocabulary_stay(tmp_path):
    start = write_checkpoint(tmp_path, UNCASED)
    fields = {"tokenizer.lowercase": False, "tokenizer.strip_accents": False}
    start = matching.replace(start, fields)
    config, _ = importing.import_run(str(tmp_path), start, tmp_path / "run", set(fields))
    assert not config.tokenizer.lowercase
    values = {"recipe": "finetune", "init_from": str(tmp_path)}
    values |= {"tokenizer": to_dict(start)["tokenizer"]}
    config, _, _ = finetuning.read_start(from_config_dict(values), set(fields))
    assert not config.tokenizer.lowercase


def test_named_settings_that_cannot_be_are_one_error(tmp_path):
    start = write_checkpoint(tmp_path, CASED)
    start = matching.replace(start, {"tokenizer.lowercase": True})
    with pytest.raises(TokenizerError, match=r"can never be used.*--config\.tokenizer\.lowercase="):
        importing.import_run(str(tmp_path), start, tmp_path / "run", {"tokenizer.lowercase"})


# --- fields that the user named ---


@pytest.mark.parametrize("named", [(), ("model.dropout", "model.attention_dropout")])
def test_a_checkpoint_does_not_state_dropout(tmp_path, named):
    start = write_checkpoint(tmp_path, UNCASED)
    fields = {"model.dropout": 0.25, "model.attention_dropout": 0.0}
    start = matching.replace(start, fields)
    config, _ = importing.import_run(str(tmp_path), start, tmp_path / "run", named)
    assert config.model.dropout == 0.25
    assert config.model.attention_dropout == 0.0


@pytest.mark.parametrize("named", ["dropout", "attention_dropout"])
def test_named_dropout_wins_over_that_of_a_folder(tmp_path, named):
    folder = tmp_path / "it"
    huggingface.write_network(folder, random_network(), pad_id=0)
    edit_config(folder, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2)
    write_entries(folder, UNCASED)
    start = matching.replace(
        make_config(mask_convolution=False),
        {"model.dropout": 0.25, "model.attention_dropout": 0.25},
    )
    config, _ = importing.import_run(str(folder), start, tmp_path / "run", {f"model.{named}"})
    found = {"dropout": config.model.dropout, "attention_dropout": config.model.attention_dropout}
    assert found == {"dropout": 0.2, "attention_dropout": 0.2} | {named: 0.25}


def test_named_masking_of_convolutions_wins(tmp_path):
    start = write_checkpoint(tmp_path, UNCASED)
    start = matching.replace(start, {"model.mask_convolution": True})
    config, _ = importing.import_run(
        str(tmp_path), start, tmp_path / "run", {"model.mask_convolution"}
    )
    assert config.model.mask_convolution


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model.layers", 5),
        ("model.heads", 2),
        ("model.layer_norm_epsilon", 1e-5),
        ("generator.size", 1.0),
        ("tokenizer.vocab_size", 61),
    ],
)
def test_named_fields_that_contradict_are_refused(tmp_path, field, value):
    start = write_checkpoint(tmp_path, UNCASED)
    start = matching.replace(start, {field: value})
    with pytest.raises(ConversionError, match=rf"config\.{field}={value}"):
        importing.import_run(str(tmp_path), start, tmp_path / "run", {field})
    assert not (tmp_path / "run").exists()
    if field.startswith("model."):
        values = {
            "recipe": "finetune",
            "init_from": str(tmp_path),
            "model": to_dict(start)["model"],
        }
        with pytest.raises(ConversionError, match=rf"config\.{field}={value}"):
            finetuning.read_start(from_config_dict(values), {field})


def test_named_dropout_of_pretraining_is_refused_by_finetuning(tmp_path):
    write_checkpoint(tmp_path, UNCASED)
    values = {"recipe": "finetune", "init_from": str(tmp_path), "model": {"dropout": 0.25}}
    with pytest.raises(ConfigError, match=r"config\.finetune\.dropout=0\.25"):
        finetuning.read_start(from_config_dict(values), {"model.dropout"})
    values["finetune"] = {"dropout": 0.25}
    config, *_ = finetuning.read_start(from_config_dict(values), {"model.dropout"})
    assert config.model.attention_dropout == 0.25


# --- an output in the place of its source ---


@pytest.mark.parametrize("named", ["it", "it/", "it/model.ckpt-3", "it/../it", "link"])
def test_an_export_onto_its_source(make_run, tmp_path, named):
    out = conversion.export(
        make_run(mask_convolution=False)[0], form="tensorflow1", output=tmp_path / "it"
    )
    (tmp_path / "link").symlink_to(out)
    before = sorted(out.iterdir())
    with pytest.raises(ConversionError, match=r"is where the weights are.*another --output"):
        conversion.convert(str(tmp_path / named), out, form="huggingface")
    assert sorted(out.iterdir()) == before
    conversion.convert(str(tmp_path / named), tmp_path / "it2")


def test_an_export_around_its_run(make_run, tmp_path):
    folder, _ = make_run()
    out = conversion.export(folder, output=tmp_path / "out")
    shutil.copytree(folder, out / "run")
    with pytest.raises(ConversionError, match="is where the weights are"):
        conversion.export(out / "run", output=out)
    assert Workdir(out / "run").read_config()


# --- padded tables ---


@pytest.mark.parametrize("beside", [True, False])
def test_padded_tables_are_one_sentence(tmp_path, beside):
    start = write_checkpoint(tmp_path, UNCASED[:-2])
    if not beside:
        shutil.move(tmp_path / "vocab.txt", tmp_path / "mine.txt")
        start = matching.replace(start, {"tokenizer.path": str(tmp_path / "mine.txt")})
    says = r"txt has 58 entries, .* 60 rows; .* cut the weights to 58 rows"
    with pytest.raises(ConversionError, match=says):
        importing.import_run(str(tmp_path), start, tmp_path / "run")
    start = from_config_dict(to_dict(start) | {"init_from": str(tmp_path)})
    with pytest.raises(ConversionError, match=says):
        starting.read_start(start, Workdir(tmp_path / "run"))
    # As the sentence says:
    name = "vocab.txt" if beside else "mine.txt"
    with (tmp_path / name).open("a") as file:
        file.write("[unused58]\n[unused59]\n")
    assert starting.read_start(start, Workdir(tmp_path / "run"))[0].tokenizer.vocab_size == 60


def test_a_vocabulary_of_more_entries_than_the_weights(tmp_path):
    start = write_checkpoint(tmp_path, [*UNCASED, "more"])
    with pytest.raises(ConversionError, match=r"vocab\.txt has 61 entries, .* of 60; name theirs"):
        importing.import_run(str(tmp_path), start, tmp_path / "run")


@pytest.mark.parametrize(
    "use",
    [
        lambda path, _: finetuned.read_finetuned(path),
        lambda path, _: convbert_jax.load(path),
        lambda path, out: conversion.convert(path, out),
    ],
)
def test_ids_without_a_row_are_refused_wherever_texts_become_ids(tmp_path, use):
    """A row that is not there would be read as the last one."""
    tuned = with_head(random_network(), "sequence_head", ("no", "yes"))
    folder, out = tmp_path / "it", tmp_path / "out"
    huggingface.write_network(folder, tuned, pad_id=0)
    write_entries(folder, [*UNCASED, "more"])
    with pytest.raises(ConversionError, match=r"vocab\.txt has 61 entries, .* vocabulary of 60;"):
        use(str(folder), out)
    assert not out.exists()


# --- folders of Hugging Face ---


def test_a_folder_without_a_model_type(tmp_path):
    network = random_network(**BERT)
    huggingface.write_network(tmp_path, network, pad_id=0)
    edit_config(tmp_path, model_type="absent", position_embedding_type=None)
    assert_same(network, huggingface.read_folder(tmp_path).networks["main"])
    edit_config(tmp_path, architectures="absent")
    with pytest.raises(ConversionError, match='has no model_type; add "model_type": "bert"'):
        huggingface.read_folder(tmp_path)


@pytest.mark.filterwarnings("ignore")  # PyTorch's, of arrays that are read-only
def test_shards_that_pytorch_pickled(tmp_path):
    torch = pytest.importorskip("torch")
    network = random_network(**BERT)
    huggingface.write_network(tmp_path, network, pad_id=0)
    (tmp_path / "model.safetensors").unlink()
    tensors = {k: torch.tensor(v) for k, v in huggingface.to_tensors(network).items()}
    names = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")
    table = {name: names[i % 2] for i, name in enumerate(tensors)}
    for shard in names:
        torch.save({k: v for k, v in tensors.items() if table[k] == shard}, tmp_path / shard)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": table}))
    assert_same(network, sources.read_source(str(tmp_path)).networks["main"])
    (tmp_path / names[1]).unlink()
    with pytest.raises(ConversionError, match=f"names the shard {names[1]}, which is missing"):
        sources.read_source(str(tmp_path))


# --- checkpoints of TensorFlow ---


def test_moments_that_are_no_numbers(tmp_path, caplog):
    config = make_config(mask_convolution=False)
    parts = split(config, random_params(config))
    params = random_params(config, 1)
    params["generator_head"]["output_bias"][7] = np.nan
    moments = (parts, split(config, params))
    tensorflow1.write_checkpoint(tmp_path / "m", parts, step=70, moments=moments)
    with caplog.at_level("WARNING"):
        read = sources.read_source(str(tmp_path))
    assert (read.moments, read.ignored) == (None, ())
    assert_same(read.networks["main"], parts["main"])
    assert f"without the moments of Adam: {tmp_path}/m, /adam_v, has NaN" in caplog.text
