"""Runs in other languages: a run keeps the tokenizer settings that "auto" chose."""

# ruff: noqa: RUF001  (letters of Turkish)
import json

import pytest

import convbert_jax
from convbert_jax import recipes
from convbert_jax.config import Config, from_config_dict, to_dict
from convbert_jax.data import corpus
from convbert_jax.data.units import write_record
from convbert_jax.interop import conversion
from convbert_jax.interop.matching import replace
from convbert_jax.workdir import Workdir
from tests.language_texts import make_texts
from tests.runs import make_config

CHOSEN = ("lowercase", "strip_accents", "normalization")


def chosen(config: Config):
    return tuple(getattr(config.tokenizer, name) for name in CHOSEN)


@pytest.fixture
def config(tmp_path):
    source = tmp_path / "text.txt"
    source.write_text("\n\n".join(make_texts("turkish", 400)), encoding="utf-8")
    return make_config(
        recipe="masked_lm",
        data__source=f"text:{source}",
        tokenizer__kind="wordpiece",
        tokenizer__vocab_size=100,
        train__steps=2,
        train__batch_size=8,
        train__log_every=2,
        train__eval_every=2,
        train__eval_rows=16,
        optimizer__warmup_steps=1,
        checkpoint__every=2,
    )


@pytest.mark.slow
def test_a_run_keeps_the_settings_chosen_for_its_corpus(config, tmp_path):
    folder = tmp_path / "run"
    assert set(chosen(config)) == {"auto"}
    recipes.pretrain(config, folder)
    expected = (False, False, "identity")
    assert chosen(Workdir(folder).read_config()) == expected
    # Start again with the config file, then with a changed corpus.
    (tmp_path / "text.txt").unlink()
    recipes.pretrain(replace(config, {"train.steps": 3}), folder)
    assert chosen(Workdir(folder).read_config()) == expected
    model = convbert_jax.load(str(folder))
    text = "İstanbul ışık Irmak"
    assert model.tokenizer.decode(model.tokenizer.encode([text])[0]) == text
    conversion.export(folder, step=None, output=tmp_path / "exported")
    normalizer = json.loads((tmp_path / "exported" / "tokenizer.json").read_text())["normalizer"]
    assert (normalizer["lowercase"], normalizer["strip_accents"]) == expected[:2]


def test_a_run_with_byte_level_bpe(config, tmp_path):
    """The exported folder has the same ids and predictions."""
    config = replace(
        config,
        {"tokenizer.kind": "bpe", "tokenizer.vocab_size": 300, "train.steps": 4},
    )
    folder = tmp_path / "run"
    result = recipes.pretrain(config, folder)
    assert result.step == 4
    assert chosen(Workdir(folder).read_config()) == (False, False, "identity")
    documents = (tmp_path / "text.txt").read_text(encoding="utf-8").split("\n\n")
    model = convbert_jax.load(str(folder))
    conversion.export(folder, step=None, output=tmp_path / "exported")
    again = convbert_jax.load(str(tmp_path / "exported"))
    assert again.tokenizer.encode(documents) == model.tokenizer.encode(documents)
    ours, theirs = (m.fill_mask("Irmak [MASK].", top_k=3) for m in (model, again))
    assert [found["token"] for found in ours] == [found["token"] for found in theirs]
    assert all(found["sequence"].startswith("Irmak") for found in ours)


def test_prepared_rows_of_named_settings_serve_a_config_that_names_none(config, tmp_path):
    named = replace(config, {"tokenizer.lowercase": True, "data.directory": str(tmp_path / "rows")})
    recipes.prepare(named, tmp_path / "run")
    auto = replace(named, {"tokenizer.lowercase": "auto"})
    recipes.pretrain(auto, tmp_path / "run")
    assert Workdir(tmp_path / "run").read_config().tokenizer.lowercase is True


def test_settings_are_chosen_again_until_rows_are_finished(config, tmp_path):
    """A start that failed on another corpus does not fix the settings."""
    folder = tmp_path / "rows"
    config = replace(config, {"data.directory": str(folder)})
    recipes.prepare(config, tmp_path / "run")
    for file in [*folder.glob("*.array_record"), *folder.glob("units/*")]:
        file.unlink()
    content = corpus.read_metadata(folder)
    english = tmp_path / "english.txt"
    english.write_text("\n\n".join(make_texts("german", 400)), encoding="utf-8")
    config = replace(config, {"data.source": f"text:{english}"})
    write_record(folder / "metadata.json", content | {"complete": False})
    recipes.prepare(config, tmp_path / "run")
    made = corpus.read_metadata(folder)["made_from"]["tokenizer"]
    assert made["lowercase"] is True


def test_settings_survive_json_and_the_command_line():
    for value in ("auto", True, False):
        config = from_config_dict({"tokenizer": {"lowercase": value}})
        assert from_config_dict(json.loads(json.dumps(to_dict(config)))) == config
