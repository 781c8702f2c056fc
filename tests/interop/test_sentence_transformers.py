"""Folders of sentence-transformers: read, refused, written, and used by `encode`."""

import dataclasses
import json

import numpy as np
import pytest

import convbert_jax
from convbert_jax.config.training import POOLINGS
from convbert_jax.inference.model import ModelError
from convbert_jax.interop import conversion, sentence_transformers
from convbert_jax.interop.networks import ConversionError
from convbert_jax.interop.sentence_transformers import VectorConfig
from tests.interop.conftest import make_config
from tests.refusals import refused

TEXTS = ["the river", "a great house under the sun and the moon", "stone " * 40, "", "light"]
PROMPTS = {"query": "the river: ", "document": ""}


def write(folder, vectors):
    """Write the files into a folder and return it."""
    folder.mkdir(exist_ok=True)
    sentence_transformers.write(folder, vectors, hidden_size=32, positions=24)
    return folder


def edit(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.fixture(scope="module")
def exported(make_run):
    """pooling -> (folder of a run, its export)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion.parity, "pytorch_is_there", lambda: False)
        found = {}
        for pooling in POOLINGS:
            run, _ = make_run(recipe="embedding", mixer="attention", pooling=pooling)
            found[pooling] = run, conversion.export(run)
        return found


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("normalize", [True, False])
def test_settings_are_read_as_they_were_written(tmp_path, pooling, normalize):
    vectors = VectorConfig(pooling, normalize, PROMPTS, "query", 20)
    assert sentence_transformers.read(write(tmp_path, vectors)) == vectors


def test_other_folders_have_no_settings(tmp_path):
    assert sentence_transformers.read(tmp_path) is None
    write(tmp_path, VectorConfig())
    edit(tmp_path / "config_sentence_transformers.json", model_type="SparseEncoder")
    assert sentence_transformers.read(tmp_path) is None


@pytest.mark.parametrize(
    ("mode", "pooling"),
    [("cls", "cls"), (["mean"], "mean"), (["cls", "mean"], "first_and_mean")],
)
def test_the_pooling_of_version_6(tmp_path, mode, pooling):
    write(tmp_path, VectorConfig("mean"))
    content = {"embedding_dimension": 32, "pooling_mode": mode, "include_prompt": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(content))
    assert sentence_transformers.read(tmp_path).pooling == pooling


def test_the_maximum_length_of_version_6(tmp_path):
    write(tmp_path, VectorConfig())
    (tmp_path / "sentence_bert_config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 17}')
    assert sentence_transformers.read(tmp_path).length == 17


@pytest.mark.parametrize(
    ("file", "fields", "field"),
    [
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling_mode"),
        ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, "pooling_mode"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]}, "pooling_mode"),
        ("1_Pooling/config.json", {"pooling_mode": 3}, "pooling_mode"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
        ("config_sentence_transformers.json", {"prompts": {"query": 3}}, "prompts"),
        ("config_sentence_transformers.json", {"default_prompt_name": "other"}, "prompts"),
        ("config_sentence_transformers.json", {"default_prompt_name": ["query"]}, "prompts"),
    ],
)
def test_unsupported_settings_are_refused(tmp_path, file, fields, field):
    write(tmp_path, VectorConfig(prompts=PROMPTS))
    edit(tmp_path / file, **fields)
    with refused(ConversionError, field=field):
        sentence_transformers.read(tmp_path)


@pytest.mark.parametrize(
    "types",
    [
        ["Transformer", "Pooling", "Dense", "Normalize"],
        ["Transformer"],
        ["Transformer", "mine.Pooling"],
    ],
)
def test_unsupported_modules_are_refused(tmp_path, types):
    write(tmp_path, VectorConfig())
    own = [name if "." in name else f"sentence_transformers.models.{name}" for name in types]
    (tmp_path / "modules.json").write_text(json.dumps([{"type": name} for name in own]))
    with refused(ConversionError, types[-1], field="modules.json", value=types):
        sentence_transformers.read(tmp_path)


@pytest.mark.parametrize("content", ["{}", "[3]", '[{"type": 3}]', "[", ""])
def test_a_damaged_list_of_modules_is_refused(tmp_path, content):
    write(tmp_path, VectorConfig())
    (tmp_path / "modules.json").write_text(content)
    with refused(ConversionError, path=tmp_path / "modules.json"):
        sentence_transformers.read(tmp_path)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_an_exported_run_gives_the_vectors_of_the_run(exported, pooling):
    run, folder = exported[pooling]
    model, again = convbert_jax.load(run), convbert_jax.load(folder)
    assert again.vectors == model.vectors == VectorConfig(pooling, True, length=model.length)
    assert again.length == model.length
    expected = model.encode(TEXTS)
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1, atol=1e-6)
    np.testing.assert_array_equal(again.encode(TEXTS), expected)
    raw = model.encode(TEXTS, pooling=pooling, normalize=False)
    np.testing.assert_allclose(sentence_transformers.normalize(raw), expected, atol=1e-6)


def test_token_states_are_not_normalized(exported):
    model = convbert_jax.load(exported["mean"][0])
    states, mean = model.encode("light", pooling="none"), model.encode("light", normalize=False)
    np.testing.assert_allclose(states.mean(axis=0), mean, atol=1e-5)


def test_prompts_are_put_before_texts(exported, tmp_path):
    model = convbert_jax.load(exported["mean"][0])
    model.vectors = VectorConfig(prompts=PROMPTS)
    expected = model.encode(["the river: light", ("the river: sun", "moon")])
    found = model.encode(["light", ("sun", "moon")], prompt="query")
    np.testing.assert_allclose(found, expected, atol=1e-6)
    model.vectors = VectorConfig(prompts=PROMPTS, default_prompt="query")
    np.testing.assert_allclose(model.encode("light"), expected[0], atol=1e-6)
    with refused(ModelError, "query", field="prompt", value="other"):
        model.encode("light", prompt="other")


def test_a_run_has_the_prompts_that_it_was_trained_with():
    config = make_config(recipe="embedding")
    parallel = dataclasses.replace(config.parallel, prompts=("query:", ""))
    vectors = sentence_transformers.of_run(dataclasses.replace(config, parallel=parallel))
    assert vectors.prompts == {"query": "query: ", "document": ""}
    assert sentence_transformers.of_run(make_config()) is None


def test_a_zero_vector_stays_zero():
    assert (sentence_transformers.normalize(np.zeros((2, 3), np.float32)) == 0).all()


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.parametrize("pooling", POOLINGS)
def test_sentence_transformers_gives_our_vectors(exported, pooling):
    """Texts of several lengths in one padded batch; the model is an attention-only encoder."""
    library = pytest.importorskip("sentence_transformers")
    run, folder = exported[pooling]
    reference = library.SentenceTransformer(str(folder), device="cpu")
    found, expected = convbert_jax.load(run).encode(TEXTS), reference.encode(TEXTS)
    assert (found * expected).sum(axis=1).min() > 0.99999
