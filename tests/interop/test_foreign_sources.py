"""Folders and checkpoints published by others: missing, padded or split parts."""

import json
import shutil

import numpy as np
import pytest

import convbert_jax
from convbert_jax.config import ConfigError, UserError, from_config_dict, to_dict
from convbert_jax.data.errors import TokenizerError
from convbert_jax.inference import loading
from convbert_jax.interop import (
    conversion,
    huggingface,
    huggingface_tokenizer,
    importing,
    matching,
    sources,
    tensorflow1,
)
from convbert_jax.interop.networks import ConversionError
from convbert_jax.recipes import finetuning
from convbert_jax.recipes import start as starting
from convbert_jax.workdir import Workdir
from tests.interop.conftest import (
    assert_same,
    edit_config,
    make_config,
    random_network,
    random_parts,
    with_head,
    write_entries,
)
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("without_pytorch")
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CASED = [*SPECIAL, "Berlin", "caf\u00e9", *(f"w{i}" for i in range(53))]
UNCASED = [*SPECIAL, *(f"w{i}" for i in range(55))]
BERT = {"recipe": "masked_lm", "mixer": "attention", "embedding_size": 32}


def write_checkpoint(folder, entries):
    """Write a checkpoint of 60 rows with only a vocab.txt; return a matching config."""
    config, parts = random_parts(mask_convolution=False)
    tensorflow1.write_checkpoint(folder / "model.ckpt-7", parts, step=7)
    write_entries(folder, entries)
    return config


# --- Vocabulary settings ---


@pytest.mark.parametrize(
    ("entries", "settings", "lowercase", "strip_accents"),
    [
        (CASED, None, False, False),
        (UNCASED, None, True, True),
        (CASED, {"model_max_length": 512}, False, False),
        (UNCASED, {"do_lower_case": False}, False, False),
        (UNCASED, {"strip_accents": False}, True, False),
    ],
)
def test_a_vocabulary_tells_whether_it_is_cased_unless_settings_do(
    tmp_path, entries, settings, lowercase, strip_accents
):
    path = write_entries(tmp_path, entries)
    if settings:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    fields = huggingface_tokenizer.describe_vocabulary(tmp_path, path)
    assert (fields["lowercase"], fields["strip_accents"]) == (lowercase, strip_accents)


CHINESE = {"type": "BertNormalizer", "lowercase": True, "handle_chinese_chars": False}
ADDED = {"content": "NEW", "id": 60, "special": False}
CLASS = "tokenizer_class"
CASED_JSON = {"normalizer": {"type": "BertNormalizer", "lowercase": False}}
OTHER_ORDER = {"model": {"type": "WordPiece", "vocab": {"[PAD]": 0, "w3": 7, "w1": 6}}}
OTHERS = [
    ({"tokenizer_config.json": {"tokenize_chinese_chars": False}}, ["tokenize_chinese_chars"]),
    ({"tokenizer_config.json": {CLASS: "BertJapaneseTokenizer"}}, ["BertJapaneseTokenizer"]),
    ({"config.json": {CLASS: "RoFormerTokenizer"}}, [CLASS, "RoFormerTokenizer"]),
    ({"tokenizer.json": {"normalizer": CHINESE}}, ["handle_chinese_chars"]),
    ({"tokenizer.json": {"normalizer": {"type": "Sequence"}}}, ["normalizer", "Sequence"]),
    ({"tokenizer.json": {"pre_tokenizer": {"type": "Whitespace"}}}, ["pre_tokenizer"]),
    ({"tokenizer.json": {"added_tokens": [ADDED]}}, ["NEW"]),
    ({"tokenizer_config.json": {"added_tokens_decoder": {"60": ADDED}}}, ["NEW"]),
    ({"added_tokens.json": {"NEW": 60}}, ["NEW"]),
    (
        {"tokenizer.json": CASED_JSON, "tokenizer_config.json": {"do_lower_case": True}},
        ["do_lower_case", "tokenizer_config.json", "lowercase", "tokenizer.json"],
    ),
    ({"tokenizer.json": OTHER_ORDER}, ["w3", 7, "tokenizer.json", "vocab.txt"]),
]


@pytest.mark.parametrize(("files", "mentions"), OTHERS)
def test_a_tokenizer_that_ours_cannot_be_is_refused(tmp_path, files, mentions):
    """Its vocabulary alone would silently give different ids."""
    path = write_entries(tmp_path, UNCASED)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with refused(ConversionError, *mentions, path=tmp_path):
        huggingface_tokenizer.describe_vocabulary(tmp_path, path)


@pytest.mark.parametrize("name", ["BertTokenizer", "ConvBertTokenizerFast", None])
def test_the_usual_tokenizers_are_read(tmp_path, name):
    """As written by transformers 4 and 5, fast and slow."""
    path = write_entries(tmp_path, UNCASED)
    special = [{"content": entry, "id": i, "special": True} for i, entry in enumerate(SPECIAL)]
    special.append({"content": "<e>", "id": 60, "special": True})
    settings = {
        CLASS: name,
        "tokenize_chinese_chars": True,
        "do_basic_tokenize": False,  # fast tokenizers, which everyone uses, ignore it
        "never_split": None,
        "mask_token": {"content": "[MASK]", "__type": "AddedToken"},
        "additional_special_tokens": ["<f>"],
        "added_tokens_decoder": {str(token["id"]): token for token in special},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "added_tokens.json").write_text('{"<e>": 60, "<f>": 61, "[MASK]": 4}')
    if name and name.endswith("Fast"):
        normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
        pipeline = {
            "added_tokens": special,
            "normalizer": normalizer | {"strip_accents": None, "lowercase": True},
            "pre_tokenizer": {"type": "BertPreTokenizer"},
        }
        (tmp_path / "tokenizer.json").write_text(json.dumps(pipeline))
    fields = huggingface_tokenizer.describe_vocabulary(tmp_path, path)
    assert (fields["kind"], fields["lowercase"]) == ("wordpiece", True)


def test_sentencepiece_with_usual_classes_is_read(tmp_path):
    settings, path = tmp_path / "tokenizer_config.json", tmp_path / "spiece.model"
    (tmp_path / "added_tokens.json").write_text('{"<m>": 60}')
    for name in (None, "PreTrainedTokenizerFast", "TokenizersBackend"):
        settings.write_text(json.dumps({CLASS: name, "mask_token": "<m>"}))
        fields = huggingface_tokenizer.describe_vocabulary(tmp_path, path)
        assert fields["kind"] == "sentencepiece"
    settings.write_text(json.dumps({CLASS: "BertJapaneseTokenizer"}))
    with refused(ConversionError, CLASS, "BertJapaneseTokenizer", path=tmp_path):
        huggingface_tokenizer.describe_vocabulary(tmp_path, path)


def test_another_vocabulary_may_be_named(tmp_path):
    """The workaround for the refusals above."""
    start = write_checkpoint(tmp_path, UNCASED)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenize_chinese_chars": false}')
    with refused(UserError, "tokenize_chinese_chars", "vocabulary='vocab.txt'"):
        convbert_jax.load(tmp_path)
    with refused(UserError, field="config.tokenizer.path"):
        importing.import_run(str(tmp_path), start, tmp_path / "run")
    model = convbert_jax.load(tmp_path, vocabulary=str(tmp_path / "vocab.txt"))
    assert model.tokenizer.entries == UNCASED


def test_a_cased_checkpoint_stays_cased(tmp_path, monkeypatch):
    """Checks the export, the import, and a retry after an interrupted import."""

    def killed(*_):
        raise KeyboardInterrupt

    start, place = write_checkpoint(tmp_path, CASED), tmp_path / "run"
    out = conversion.convert(str(tmp_path), tmp_path / "out")
    content = json.loads((out / "tokenizer.json").read_text())
    assert content["normalizer"]["lowercase"] is False
    with monkeypatch.context() as patch:
        patch.setattr(importing, "keep_vocabularies", killed)
        with pytest.raises(KeyboardInterrupt):
            importing.import_run(str(tmp_path), start, place)
    assert Workdir(place).steps() == []
    config, _ = importing.import_run(str(tmp_path), start, place)
    assert Workdir(place).steps() == [0]
    assert (place / "vocabulary" / "vocab.txt").is_file()
    assert not config.tokenizer.lowercase
    assert not config.tokenizer.strip_accents


# --- Fields set by the user ---


def import_with(folder, start, fields, given=None):
    """Import with fields set by the user; return (requested config, config of the run)."""
    start, given = matching.replace(start, fields), set(fields) if given is None else given
    config, _ = importing.import_run(str(folder), start, folder / "run", given)
    return start, config


def test_named_settings_of_a_vocabulary_stay(tmp_path):
    start = write_checkpoint(tmp_path, UNCASED)
    fields = {"tokenizer.lowercase": False, "tokenizer.strip_accents": False}
    start, config = import_with(tmp_path, start, fields)
    assert not config.tokenizer.lowercase
    values = {"recipe": "finetune", "init_from": str(tmp_path)}
    values |= {"tokenizer": to_dict(start)["tokenizer"]}
    config, _, _ = finetuning.read_start(from_config_dict(values), set(fields))
    assert not config.tokenizer.lowercase


def test_named_settings_that_cannot_be_are_refused(tmp_path):
    start = write_checkpoint(tmp_path, CASED)
    with refused(TokenizerError, "--config.tokenizer.lowercase="):
        import_with(tmp_path, start, {"tokenizer.lowercase": True})


def test_a_checkpoint_does_not_state_dropout(tmp_path):
    start = write_checkpoint(tmp_path, UNCASED)
    fields = {"model.dropout": 0.25, "model.attention_dropout": 0.0, "model.mask_convolution": True}
    _, config = import_with(tmp_path, start, fields, {"model.mask_convolution"})
    assert (config.model.dropout, config.model.attention_dropout) == (0.25, 0.0)
    assert config.model.mask_convolution


@pytest.mark.parametrize("named", ["dropout", "attention_dropout"])
def test_named_dropout_wins_over_that_of_a_folder(tmp_path, named):
    huggingface.write_network(tmp_path, random_network(), pad_id=0)
    edit_config(tmp_path, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2)
    write_entries(tmp_path, UNCASED)
    fields = {"model.dropout": 0.25, "model.attention_dropout": 0.25}
    start = make_config(mask_convolution=False)
    _, config = import_with(tmp_path, start, fields, {f"model.{named}"})
    found = {"dropout": config.model.dropout, "attention_dropout": config.model.attention_dropout}
    assert found == {"dropout": 0.2, "attention_dropout": 0.2} | {named: 0.25}


def test_named_fields_that_contradict_are_refused(tmp_path):
    start = write_checkpoint(tmp_path, UNCASED)
    for field, value in (
        *(("model.layers", 5), ("model.heads", 2), ("model.layer_norm_epsilon", 1e-5)),
        *(("generator.size", 1.0), ("tokenizer.vocab_size", 61)),
    ):
        with refused(ConversionError, field=f"config.{field}", value=value):
            import_with(tmp_path, start, {field: value})
        assert not (tmp_path / "run").exists()
        if field.startswith("model."):
            model = to_dict(matching.replace(start, {field: value}))["model"]
            values = {"recipe": "finetune", "init_from": str(tmp_path), "model": model}
            with refused(ConversionError, field=f"config.{field}", value=value):
                finetuning.read_start(from_config_dict(values), {field})
    values = {"recipe": "finetune", "init_from": str(tmp_path), "model": {"dropout": 0.25}}
    with refused(ConfigError, "config.finetune.dropout=0.25"):
        finetuning.read_start(from_config_dict(values), {"model.dropout"})
    values["finetune"] = {"dropout": 0.25}
    config, *_ = finetuning.read_start(from_config_dict(values), {"model.dropout"})
    assert config.model.attention_dropout == 0.25


# --- Output path equals source path ---


def test_an_export_onto_its_source_is_refused(make_run, tmp_path):
    folder, _ = make_run(mask_convolution=False)
    out = conversion.export(folder, form="tensorflow1", output=tmp_path / "it")
    (tmp_path / "link").symlink_to(out)
    before = sorted(out.iterdir())
    for named in ("it", "it/", "it/model.ckpt-3", "it/../it", "link"):
        with refused(ConversionError, field="--output", value=str(out)):
            conversion.convert(str(tmp_path / named), out, form="huggingface")
    assert sorted(out.iterdir()) == before
    exported = conversion.convert(str(out), tmp_path / "it2")
    shutil.copytree(folder, exported / "run")
    with refused(ConversionError, field="--output", value=str(exported)):
        conversion.export(exported / "run", output=exported)
    assert Workdir(exported / "run").read_config()


# --- Vocabulary size differs ---


@pytest.mark.parametrize("beside", [True, False])
def test_padded_tables_are_refused_with_the_way_out(tmp_path, beside):
    start = write_checkpoint(tmp_path, UNCASED[:-2])
    path = tmp_path / "vocab.txt"
    if not beside:
        path = path.rename(tmp_path / "mine.txt")
        start = matching.replace(start, {"tokenizer.path": str(path)})
    with refused(ConversionError, 60, value=58, path=path):
        importing.import_run(str(tmp_path), start, tmp_path / "run")
    start = from_config_dict(to_dict(start) | {"init_from": str(tmp_path)})
    with refused(ConversionError, 60, value=58, path=path):
        starting.read_start(start, Workdir(tmp_path / "run"))
    with path.open("a") as file:
        file.write("[unused58]\n[unused59]\n")
    assert starting.read_start(start, Workdir(tmp_path / "run"))[0].tokenizer.vocab_size == 60


def test_ids_without_a_row_are_refused_wherever_texts_become_ids(tmp_path):
    """A missing row would be read as the last one."""
    start = write_checkpoint(tmp_path, [*UNCASED, "more"])
    with refused(ConversionError, 60, value=61, path=tmp_path / "vocab.txt"):
        importing.import_run(str(tmp_path), start, tmp_path / "run")
    tuned = with_head(random_network(), "sequence_head", ("no", "yes"))
    folder, out = tmp_path / "it", tmp_path / "out"
    huggingface.write_network(folder, tuned, pad_id=0)
    path = write_entries(folder, [*UNCASED, "more"])
    for use in (
        *(loading.read_finetuned, convbert_jax.load),
        lambda folder: conversion.convert(folder, out),
    ):
        with refused(ConversionError, 60, value=61, path=path):
            use(str(folder))
    assert not out.exists()


# --- Hugging Face folders, TensorFlow checkpoints ---


def test_a_folder_without_a_model_type(tmp_path):
    network = random_network(**BERT)
    huggingface.write_network(tmp_path, network, pad_id=0)
    edit_config(tmp_path, model_type="absent", position_embedding_type=None)
    assert_same(network, huggingface.read_folder(tmp_path).networks["main"])
    edit_config(tmp_path, architectures="absent")
    with refused(ConversionError, "bert", field="model_type", path=tmp_path / "config.json"):
        huggingface.read_folder(tmp_path)


@pytest.mark.filterwarnings("ignore")  # PyTorch warns about read-only arrays
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
    with refused(ConversionError, value=names[1], path=index):
        sources.read_source(str(tmp_path))


def test_moments_that_are_no_numbers_are_left_out(tmp_path, caplog):
    _, parts = random_parts(mask_convolution=False)
    _, second = random_parts(1, mask_convolution=False)
    second["generator"].parameters["mlm_head/output_bias"][7] = np.nan
    tensorflow1.write_checkpoint(tmp_path / "m", parts, step=70, moments=(parts, second))
    read = sources.read_source(str(tmp_path))
    assert (read.moments, read.ignored) == (None, ())
    assert_same(read.networks["main"], parts["main"])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{tmp_path}/m" in caplog.text
