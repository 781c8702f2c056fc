"""Language models and encoder-decoders: training, resuming, starting from weights."""

import dataclasses
import json
import math
import pathlib
import shutil

import jax
import numpy as np
import pytest

from convbert_jax import recipes
from convbert_jax.analysis.verify_resume import compare
from convbert_jax.config import Config, ConfigError, UserError, from_config_dict, to_dict
from convbert_jax.interop import sources
from convbert_jax.interop.matching import replace
from convbert_jax.interop.networks import ConversionError
from convbert_jax.recipes import start, tasks
from convbert_jax.training import environment, partitioning
from convbert_jax.training.checkpoints import load_arrays
from convbert_jax.training.metrics_writer import read_metrics
from convbert_jax.training.partitioning import flatten_params
from convbert_jax.workdir import Workdir
from tests.data.parallel.conftest import make_pairs, write_files
from tests.html import Page
from tests.refusals import refused
from tests.runs import make_config

RECIPES = ("causal_lm", "span_corruption", "translation")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> str:
    return write_files(tmp_path_factory.mktemp("pairs"), make_pairs(300))


@pytest.fixture(scope="module")
def make(text, pairs):
    """make(recipe, section__field=value): a config of four steps.

    The learning rate is constant, so a run of three steps is a prefix of it.
    """

    def make(recipe: str, **fields) -> Config:
        fixed = {
            "recipe": recipe,
            "model__mixer": "dynamic",
            "model__kernel_size": 3,
            "model__activation": "relu",
            "model__position_embedding": "sinusoidal",
            "data__source": text,
            "parallel__source": pairs,
            "parallel__heldout_fraction": 0.1,
            "parallel__batch_tokens": 256,
            "parallel__max_length": 32,
            "parallel__shapes": 2,
            "tokenizer__sentinels": 4 if recipe == "span_corruption" else 0,
            "objective__label_smoothing": 0.1,
            "optimizer__schedule": "constant",
            "optimizer__warmup_steps": 0,
            "train__steps": 4,
            "train__batch_size": 8,
            "train__log_every": 1,
            "train__eval_every": 4,
            "train__eval_rows": 24,
            "checkpoint__every": 2,
        }
        return make_config(**fixed | fields)

    return make


@pytest.fixture(scope="module")
def run(make, tmp_path_factory):
    """run(recipe) -> (config, result) of a run of four steps, cached."""
    made = {}

    def run(recipe: str):
        if recipe not in made:
            config = make(recipe)
            folder = tmp_path_factory.mktemp(recipe) / "run"
            made[recipe] = config, recipes.pretrain(config, folder)
        return made[recipe]

    return run


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_resumes_exactly_and_reports_its_metrics(run, recipe, tmp_path):
    config, whole = run(recipe)
    folder = shutil.copytree(whole.folder, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints" / "4")  # as if killed before saving it
    again = recipes.pretrain(config, folder)
    assert again.step == whole.step == 4
    assert again.evaluation == whole.evaluation
    (_, first), (_, second) = (load_arrays(Workdir(r.folder).checkpoints) for r in (whole, again))
    assert compare(first, second) == []
    assert read_metrics(Workdir(again.folder).metrics)[-1]["token_loss"] > 0

    found = whole.evaluation
    assert found.keys() == set(config.heldout_metrics)
    assert found["perplexity"] == pytest.approx(math.exp(found["token_loss"]))
    assert 0 <= found["token_accuracy"] < 1
    # Label smoothing of 0.1 raises the loss above the cross-entropy here.
    assert found["token_loss"] < found["loss"] < 2 * found["token_loss"]
    page = Page((whole.folder / "report.html").read_text())
    number = f"{found['perplexity']:.2f}"
    assert number in whole.report
    assert any(row.endswith(number) for row in page.texts("tr"))
    if recipe == "causal_lm":
        assert found["word_perplexity"] > found["perplexity"]
        assert f"{found['word_perplexity']:.2f}" in whole.report
    evaluated = recipes.evaluate(config, whole.folder)
    for name in config.heldout_metrics:
        assert evaluated.values[name] == pytest.approx(found[name], rel=1e-6)


def test_words_of_a_language_model_are_those_of_its_text(run):
    """Per-word perplexity divides the same nats by the words and ends of held-out documents."""
    config, result = run("causal_lm")
    data = tasks.open_data(config, Workdir(result.folder))
    tokenizer, words, tokens = data.tokenizer, 0, 0
    mesh = partitioning.make_mesh(config.mesh, jax.devices()[:1])
    for batch in data.heldout(mesh)()[""]:
        for row, ids in zip(batch["tokens"], batch["segment_ids"], strict=True):
            for document in range(1, ids.max() + 1):
                piece = row[ids == document][1:]  # all but [CLS] are predicted,
                if ids[-1] == document and piece[-1] == tokenizer.special.sep:
                    piece = piece[:-1]  # except a [SEP] where the row cuts a document
                words += sum(p.startswith("\u2581") for p in tokenizer.pieces(piece))
                words += int(piece[-1] == tokenizer.special.sep)
                tokens += len(piece)
    found = result.evaluation
    expected = math.exp(found["token_loss"] * tokens / words)
    assert found["word_perplexity"] == pytest.approx(expected, rel=1e-4)


def test_a_vocabulary_that_marks_no_blanks_counts_no_words(make, tmp_path):
    """WordPiece also starts a new word at each punctuation mark."""
    config = make("causal_lm", tokenizer__kind="wordpiece", train__steps=2, train__eval_every=2)
    result = recipes.pretrain(config, tmp_path / "run")
    assert result.evaluation.keys() == {"loss", "token_loss", "token_accuracy", "perplexity"}
    assert not any("word_loss" in record for record in result.metrics)
    assert f"{result.evaluation['perplexity']:.2f}" in result.report


def test_translation_starts_from_span_corruption(make, run, tmp_path):
    config, source = run("span_corruption")
    asked = make("translation", init_from=str(source.folder), model__ffn_size=48)
    found, weights = start.read_start(asked, Workdir(tmp_path / "run"))
    assert found.model == config.model  # sizes come from the source
    assert pathlib.Path(found.tokenizer.path).is_file()
    assert weights.step == 4
    _, there = sources.read_params(Workdir(source.folder), config)
    jax.tree.map(np.testing.assert_array_equal, weights.params, there)
    with refused(ConversionError, "config.model.ffn_size", 48, 64):
        start.read_start(asked, Workdir(tmp_path / "run"), {"model.ffn_size"})
    field = "model.activation_dropout"  # is not a property of the weights
    for named in ((), (field,)):
        other, _ = start.read_start(replace(asked, {field: 0.25}), Workdir(tmp_path / "run"), named)
        assert other.model == dataclasses.replace(found.model, activation_dropout=0.25)
    scratch = replace(asked, {"parallel.from_scratch": True})
    sized, nothing = start.read_start(scratch, Workdir(tmp_path / "run"))
    assert (sized.model, sized.tokenizer, nothing) == (found.model, found.tokenizer, None)


def test_a_run_resumes_without_the_folder_that_it_started_from(run, tmp_path):
    _, result = run("translation")
    folder = shutil.copytree(result.folder, tmp_path / "run")
    began = Workdir(folder).read_config()
    began = dataclasses.replace(began, init_from=str(tmp_path / "gone"))
    (folder / "config.json").write_text(json.dumps(to_dict(began)))
    assert recipes.pretrain(began, folder).step == 4
    other = dataclasses.replace(began, init_from=str(tmp_path))
    with refused(UserError, "config.init_from"):
        recipes.pretrain(other, folder)


def test_weights_of_another_kind_are_refused(make, run, pretrained, tmp_path):
    for folder, recipe, *mentions in (
        (pretrained.folder, "translation", "replaced_token"),
        (run("causal_lm")[1].folder, "translation", "causal_lm"),
        (run("translation")[1].folder, "causal_lm", "translation"),
        (tmp_path, "translation"),
    ):
        asked = make(recipe, init_from=str(folder))
        with refused(ConfigError, *mentions, field="config.init_from", value=str(folder)):
            start.read_start(asked, Workdir(tmp_path / "new"))
    encoder = make_config(init_from=str(run("translation")[1].folder))
    with refused(UserError, "translation"):
        start.read_start(encoder, Workdir(tmp_path / "new"))


# recipe -> fields, and the parts of the message after the first field
WRONG = {
    "translation": [
        ({"model.embedding_size": 16}, [16]),
        ({"model.norm": "prae"}, ["'pre'"]),
        ({"model.normalization": "rsm"}, ["'rms'"]),
        ({"model.last_dropout": 0.1, "model.norm": "post"}, []),
        ({"model.position_embedding": "learned", "model.positions": 16}, [16]),
        ({"decoding.beam": 101}, [200]),
        ({"decoding.n_best": 5}, ["config.decoding.beam", 4]),
        ({"decoding.n_best": 2, "decoding.method": "greedy"}, ["greedy"]),
        ({"decoding.length_ratio": 0.0, "decoding.length_extra": 0}, []),
        ({"decoding.average": 4}, ["checkpoint.keep", 3]),
        ({"decoding.test_sources": ("a",)}, ["NAME=SOURCE"]),
        ({"checkpoint.huggingface_every": 2}, []),
        ({"distillation.teacher": "x"}, []),
        ({"optimizer.release_replicas": 2}, []),
        ({"optimizer.schedule": "root"}, ["root"]),
        ({"optimizer.decay_to": 0.5}, []),
        ({"optimizer.schedule": "inverse_sqrt"}, ["warmup_steps"]),
        ({"sequence.decoder_kernel_sizes": (3, 5), "sequence.decoder_layers": 3}, [2, 3]),
        ({"sequence.decoder_mixer": "lite"}, ["lite"]),
        (
            {"sequence.decoder_mixer_fields": ("glue=1",), "sequence.decoder_mixer": "dynamic"},
            ["glue=1", "dynamic"],
        ),
    ],
    "causal_lm": [
        (
            {"checkpoint.best_metric": "word_perplexity", "tokenizer.kind": "wordpiece"},
            ["word_perplexity"],
        ),
        ({"sequence.shared_vocabulary": False}, []),
        ({"data.layout": "electra"}, []),
        ({"sequence.decoder_layers": 3}, []),
        ({"sequence.decoder_mixer": "light"}, ["light"]),
        ({"sequence.decoder_kernel_sizes": (3, 5)}, ["config.model.kernel_sizes"]),
        ({"model.kernel_sizes": (3, 3), "model.mixer": "span_dynamic"}, []),
        ({"model.mask_convolution": False}, ["True"]),
    ],
    "span_corruption": [
        ({"sequence.decoder_dilations": (1, 2), "sequence.decoder_kernel_sizes": (3,)}, [2, 1]),
        ({"objective.mean_span": 0.5}, [1]),
        (
            {
                "model.mask_convolution": False,
                "model.mixer": "attention",
                "sequence.decoder_mixer": "light",
            },
            [],
        ),
    ],
}


@pytest.mark.parametrize("recipe", WRONG)
def test_configs_that_cannot_run_are_refused(make, recipe):
    for fields, mentions in WRONG[recipe]:
        values = to_dict(make(recipe))
        for path, value in fields.items():
            section, _, field = path.partition(".")
            values[section][field] = value
        with refused(ConfigError, next(iter(fields)), *mentions) as caught:
            from_config_dict(values)
        assert "\n" not in str(caught.value)


def test_fields_of_a_mixer_that_the_decoder_alone_has_are_its_own(make):
    """They are accepted where the encoder's layers use another mixer."""
    values = to_dict(make("translation"))
    layers = values["model"]["layers"]
    values["model"] |= {"mixer": "light", "mixer_fields": ["glu=false"], "kernel_sizes": []}
    values["model"]["stages"] = [{"layers": layers, "mixer": "attention"}]
    (stage,) = from_config_dict(values).encoder_decoder.decoder.stages
    assert not stage.layer.mixer.glu
    values["sequence"]["decoder_mixer"] = "dynamic"
    with refused(ConfigError, "mixer_fields", "glu=false"):
        from_config_dict(values)


def test_too_few_sentinels_are_told_before_anything_is_made(make, tmp_path):
    config = make("span_corruption", tokenizer__sentinels=1)
    with refused(ConfigError, 1, 2, field="config.tokenizer.sentinels"):
        recipes.pretrain(config, tmp_path / "run")
    assert not (tmp_path / "run" / "data").exists()


def test_a_run_knows_shapes_and_tokens_of_its_batches(run):
    """Tokens per second count both texts of a batch, including padding."""
    config, result = run("translation")
    data = tasks.open_data(config, Workdir(result.folder))
    mesh = partitioning.make_mesh(config.mesh, jax.devices()[:1])
    batches = data.training(mesh)
    epoch = [next(batches) for _ in range(batches._plan.batches)]
    shapes = {batch["source"].shape for batch in epoch}
    shapes |= {next(batches)["source"].shape for _ in range(40)}
    batches.close()
    effort = data.effort(mesh)
    assert len(shapes) == effort.shapes == 2
    sizes = [b["source"].size + b["tokens"].size for b in epoch]
    assert effort.tokens == round(np.mean(sizes))
    _, params = sources.read_params(Workdir(result.folder), config)
    assert flatten_params(params).keys() >= {"target/word/embedding"}


def test_a_batch_that_does_not_split_is_refused_before_anything(make, tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "find_devices", lambda config: jax.devices())
    config = make("causal_lm", train__batch_size=12)
    with refused(partitioning.ShardingError, "config.train.batch_size", 12):
        recipes.pretrain(config, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    mesh = partitioning.make_mesh(config.mesh, jax.devices())
    # Translation fits its batches to the devices.
    translation = dataclasses.replace(config, recipe="translation")
    tasks.recipe_of(translation).check_batches(translation, mesh)


def test_spans_whose_lengths_do_not_split_are_refused(make):
    config = make("span_corruption", data__length=64, train__batch_size=16)
    axes = dataclasses.replace(config.mesh, sequence=2)
    tasks.recipe_of(config).check_batches(config, partitioning.make_mesh(axes, jax.devices()))
    mesh = partitioning.make_mesh(dataclasses.replace(axes, sequence=4), jax.devices())
    with refused(partitioning.ShardingError, "config.data.length", 64, 58):
        tasks.recipe_of(config).check_batches(config, mesh)
