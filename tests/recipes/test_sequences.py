"""Models that write text as runs: every recipe trains and goes on to the bit; one
starts from another's weights; what cannot be is a sentence.
"""

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
from convbert_jax.interop import conversion, sources
from convbert_jax.interop.matching import replace
from convbert_jax.interop.networks import ConversionError
from convbert_jax.recipes import prepared, start
from convbert_jax.training import sharding
from convbert_jax.training.checkpoints.reading import load_arrays
from convbert_jax.training.environment import devices
from convbert_jax.training.reports.reporting import read_metrics
from convbert_jax.training.state import flatten
from convbert_jax.workdir import Workdir
from tests.data.parallel.conftest import make_pairs, write_files
from tests.html import Page
from tests.runs import make_config

RECIPES = ("causal_lm", "span_corruption", "translation")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> str:
    return write_files(tmp_path_factory.mktemp("pairs"), make_pairs(300))


@pytest.fixture(scope="module")
def make(text, pairs):
    """make(recipe, section__field=value): four steps, a constant rate, so that three are their
    beginning.
    """

    def make(recipe: str, **fields) -> Config:
        fixed = {
            "recipe": recipe,
            "model__mixer": "dynamic",
            "model__kernel_size": 3,
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
    """run(recipe): (config, result) of a run of four steps, made once."""
    made = {}

    def run(recipe: str):
        if recipe not in made:
            config = make(recipe)
            folder = tmp_path_factory.mktemp(recipe) / "run"
            made[recipe] = config, recipes.pretrain(config, folder)
        return made[recipe]

    return run


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_goes_on_to_the_bit(run, recipe, tmp_path):
    config, whole = run(recipe)
    shutil.copytree(whole.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")  # as if killed before it
    again = recipes.pretrain(config, tmp_path / "run")
    assert again.step == whole.step == 4
    assert again.evaluation == whole.evaluation
    (_, first), (_, second) = (load_arrays(Workdir(r.folder).checkpoints) for r in (whole, again))
    assert compare(first, second) == []
    assert read_metrics(Workdir(again.folder).metrics)[-1]["token_loss"] > 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_it_measures(run, recipe):
    config, result = run(recipe)
    found = result.evaluation
    assert found.keys() == set(config.heldout_metrics)
    assert found["perplexity"] == pytest.approx(math.exp(found["token_loss"]))
    assert 0 <= found["token_accuracy"] < 1
    # With a tenth of the target's probability everywhere, the loss is above the cross-entropy here.
    assert found["token_loss"] < found["loss"] < 2 * found["token_loss"]
    assert "perplexity, per token" in result.report
    page = Page((result.folder / "report.html").read_text())
    assert f"perplexity, per token{found['perplexity']:.2f}" in page.texts("tr")
    if recipe == "causal_lm":
        assert found["word_perplexity"] > found["perplexity"]
        assert "perplexity, per word" in result.report
    evaluated = recipes.evaluate(config, result.folder)
    for name in config.heldout_metrics:
        assert evaluated.values[name] == pytest.approx(found[name], rel=1e-6)


def test_words_of_a_language_model_are_those_of_its_text(run):
    """Per-word perplexity spreads the same nats over the words and ends of held-out documents."""
    config, result = run("causal_lm")
    data = prepared.open_data(config, Workdir(result.folder))
    tokenizer, words, tokens = data.tokenizer, 0, 0
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    for batch in data.heldout(mesh)():
        for row, ids in zip(batch["tokens"], batch["segment_ids"], strict=True):
            for document in range(1, ids.max() + 1):
                piece = row[ids == document][1:]  # all but [CLS] are told,
                if ids[-1] == document and piece[-1] == tokenizer.special.sep:
                    piece = piece[:-1]  # and [SEP] where the row cuts a document
                words += sum(p.startswith("\u2581") for p in tokenizer.pieces(piece))
                words += int(piece[-1] == tokenizer.special.sep)
                tokens += len(piece)
    found = result.evaluation
    expected = math.exp(found["token_loss"] * tokens / words)
    assert found["word_perplexity"] == pytest.approx(expected, rel=1e-4)


def test_a_vocabulary_that_marks_no_blanks_counts_no_words(make, tmp_path):
    """WordPiece begins one at each sign of punctuation, which no other vocabulary does."""
    config = make("causal_lm", tokenizer__kind="wordpiece", train__steps=2, train__eval_every=2)
    result = recipes.pretrain(config, tmp_path / "run")
    assert result.evaluation.keys() == {"loss", "token_loss", "token_accuracy", "perplexity"}
    assert not any("word_loss" in record for record in result.metrics)
    assert "perplexity, per token" in result.report
    assert "per word" not in result.report


def test_translation_starts_from_span_corruption(make, run, tmp_path):
    config, source = run("span_corruption")
    asked = make("translation", init_from=str(source.folder), model__ffn_size=48)
    found, weights = start.read_start(asked, Workdir(tmp_path / "run"))
    assert found.model == config.model  # the sizes follow
    assert pathlib.Path(found.tokenizer.path).is_file()
    assert weights.step == 4
    _, there = sources.read_params(Workdir(source.folder), config)
    jax.tree.map(np.testing.assert_array_equal, weights.params, there)
    with pytest.raises(ConversionError, match=r"config\.model\.ffn_size=48 .* 64"):
        start.read_start(asked, Workdir(tmp_path / "run"), {"model.ffn_size"})
    field = "sequence.activation_dropout"  # is no property of the weights
    for named in ((), (field,)):
        other, _ = start.read_start(replace(asked, {field: 0.25}), Workdir(tmp_path / "run"), named)
        assert other.sequence == dataclasses.replace(found.sequence, activation_dropout=0.25)
    scratch = replace(asked, {"parallel.from_scratch": True})
    sized, nothing = start.read_start(scratch, Workdir(tmp_path / "run"))
    assert (sized.model, sized.tokenizer, nothing) == (found.model, found.tokenizer, None)
    began = recipes.pretrain(asked, tmp_path / "run")
    kept = json.loads((began.folder / "config.json").read_text())
    assert kept["model"]["ffn_size"] == 64
    # Goes on without the source, and says so of another one.
    again = recipes.pretrain(asked, tmp_path / "run")
    assert again.step == 4
    other = make("translation", init_from=str(tmp_path))
    with pytest.raises(UserError, match=r"config\.init_from was"):
        recipes.pretrain(other, tmp_path / "run")


def test_weights_of_another_kind_are_refused(make, run, pretrained, tmp_path):
    for folder, recipe, says in (
        (
            pretrained.folder,
            "translation",
            "is a run of config.recipe='replaced_token', an encoder",
        ),
        (
            run("causal_lm")[1].folder,
            "translation",
            "is a language model .* is of an encoder-decoder",
        ),
        (run("translation")[1].folder, "causal_lm", "is an encoder-decoder .* of a language model"),
        (tmp_path, "translation", "is no run"),
    ):
        asked = make(recipe, init_from=str(folder))
        with pytest.raises(ConfigError, match=says):
            start.read_start(asked, Workdir(tmp_path / "new"))
    encoder = make_config(init_from=str(run("translation")[1].folder))
    with pytest.raises(UserError, match="writes text; no class of Hugging Face's"):
        start.read_start(encoder, Workdir(tmp_path / "new"))


def test_no_other_software_has_it(run):
    with pytest.raises(ConversionError, match="'translation' writes text; no class"):
        conversion.export(run("translation")[1].folder)


@pytest.mark.parametrize(
    ("recipe", "fields", "says"),
    [
        ("translation", {"model.embedding_size": 16}, "embedding_size=16 is not"),
        ("translation", {"sequence.norm": "prae"}, "did you mean 'pre'"),
        ("translation", {"sequence.normalization": "rsm"}, "did you mean 'rms'"),
        (
            "translation",
            {"sequence.last_dropout": 0.1, "sequence.norm": "post"},
            "behind the last norm of pre-norm",
        ),
        ("translation", {"sequence.positions": "learned", "model.positions": 16}, "learned ones"),
        ("translation", {"decoding.beam": 101}, "more than the vocabulary's 200; make it at most"),
        ("translation", {"decoding.n_best": 5}, "than config.decoding.beam=4 finds"),
        ("translation", {"decoding.n_best": 2, "decoding.method": "greedy"}, "writes one text"),
        (
            "translation",
            {"decoding.length_ratio": 0.0, "decoding.length_extra": 0},
            "leave no room for a word",
        ),
        ("translation", {"decoding.average": 4}, "checkpoint.keep=3 are kept"),
        ("translation", {"decoding.test_sources": ("a",)}, "must be NAME=SOURCE"),
        ("translation", {"checkpoint.huggingface_every": 2}, "no class in Hugging Face"),
        ("translation", {"distillation.teacher": "x"}, "teaches encoders"),
        ("translation", {"optimizer.release_replicas": 2}, "of the release's encoders"),
        ("translation", {"optimizer.schedule": "root"}, "is unknown; choose one of"),
        ("translation", {"optimizer.decay_to": 0.5}, "has no effect"),
        ("translation", {"optimizer.schedule": "inverse_sqrt"}, "warmup_steps above 0"),
        (
            "causal_lm",
            {"tokenizer.kind": "wordpiece", "checkpoint.best_metric": "word_perplexity"},
            r"checkpoint\.best_metric='word_perplexity'",
        ),
        ("causal_lm", {"sequence.shared_vocabulary": False}, "one text and one vocabulary"),
        ("causal_lm", {"data.layout": "electra"}, "reads whole documents"),
        ("causal_lm", {"sequence.decoder_layers": 3}, "of an encoder-decoder"),
        ("causal_lm", {"sequence.decoder_mixer": "light"}, "decoder_mixer=light is of an encoder-"),
        (
            "causal_lm",
            {"sequence.decoder_kernel_sizes": (3, 5)},
            r"decoder_kernel_sizes=3,5 is of .* has config\.model\.kernel_sizes",
        ),
        (
            "translation",
            {"sequence.decoder_layers": 3, "sequence.decoder_kernel_sizes": (3, 5)},
            "decoder_kernel_sizes has 2 numbers, but the decoder has 3 layers",
        ),
        (
            "span_corruption",
            {"sequence.decoder_kernel_sizes": (3,), "sequence.decoder_dilations": (1, 2)},
            "decoder_dilations has 2 numbers, but the decoder has 1 layers",
        ),
        (
            "translation",
            {"sequence.decoder_mixer": "lite"},
            r"config\.sequence\.decoder_mixer='lite' is unknown",
        ),
        (
            "translation",
            {"sequence.decoder_mixer": "dynamic", "sequence.decoder_mixer_fields": ("glue=1",)},
            r"config\.sequence\.decoder_mixer_fields=glue=1 is no field of the mixer dynamic",
        ),
        (
            "causal_lm",
            {"model.mixer": "span_dynamic", "model.kernel_sizes": (3, 3)},
            "one for each",
        ),
        ("span_corruption", {"objective.mean_span": 0.5}, "must be at least 1"),
        ("causal_lm", {"model.mask_convolution": False}, "read each other; set it to True"),
        (
            "span_corruption",
            {
                "model.mask_convolution": False,
                "model.mixer": "attention",
                "sequence.decoder_mixer": "light",
            },
            "packed documents read each other",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(make, recipe, fields, says):
    values = to_dict(make(recipe))
    for path, value in fields.items():
        section, _, field = path.partition(".")
        values[section][field] = value
    with pytest.raises(ConfigError, match=says) as error:
        from_config_dict(values)
    assert "\n" not in str(error.value)


def test_fields_of_a_mixer_that_the_decoder_alone_has_are_its_own(make):
    """They were refused where the layers of the encoder have another mixer."""
    values = to_dict(make("translation"))
    layers = values["model"]["layers"]
    values["model"] |= {"mixer": "light", "mixer_fields": ["glu=false"], "kernel_sizes": []}
    values["model"]["stages"] = [{"layers": layers, "mixer": "attention"}]
    (stage,) = from_config_dict(values).encoder_decoder.decoder.stages
    assert not stage.layer.mixer.glu
    values["sequence"]["decoder_mixer"] = "dynamic"
    with pytest.raises(ConfigError, match="mixer_fields=glu=false is of no stage"):
        from_config_dict(values)


def test_too_few_sentinels_are_told_before_anything_is_made(make, tmp_path):
    config = make("span_corruption", tokenizer__sentinels=1)
    with pytest.raises(ConfigError, match=r"vocabulary has 1 sentinels .*tokenizer\.sentinels=2"):
        recipes.pretrain(config, tmp_path / "run")
    assert not (tmp_path / "run" / "data").exists()


def test_batches_have_as_many_shapes_as_the_trainer_is_told(run):
    _, result = run("translation")
    data = prepared.open_data(run("translation")[0], Workdir(result.folder))
    mesh = sharding.make_mesh(run("translation")[0].mesh, jax.devices()[:1])
    effort = data.effort(mesh)
    batches = data.training(mesh)
    shapes = {next(batches)["source"].shape for _ in range(40)}
    batches.close()
    assert effort.shapes == 2
    assert len(shapes) == 2


def test_parameters_of_the_log_line(run):
    """Tokens a second count both texts of a batch, padding too, as of rows of a corpus."""
    config, result = run("translation")
    data = prepared.open_data(config, Workdir(result.folder))
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    batches = data.training(mesh)
    epoch = [next(batches) for _ in range(batches.batches_in_epoch)]
    batches.close()
    sizes = [b["source"].size + b["tokens"].size for b in epoch]
    assert data.effort(mesh).tokens == round(np.mean(sizes))
    _, params = sources.read_params(Workdir(result.folder), config)
    assert flatten(params).keys() >= {"target/word/embedding"}


def test_a_batch_that_does_not_split_is_refused_before_anything(make, tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "find_devices", lambda config: jax.devices())
    config = make("causal_lm", train__batch_size=12)
    with pytest.raises(sharding.ShardingError, match=r"config\.train\.batch_size=12"):
        recipes.pretrain(config, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    mesh = sharding.make_mesh(config.mesh, jax.devices())
    prepared.check_batches(dataclasses.replace(config, recipe="translation"), mesh)  # made to fit


def test_spans_whose_lengths_do_not_split_are_refused(make):
    config = make("span_corruption", data__length=64, train__batch_size=16)
    axes = dataclasses.replace(config.mesh, sequence=2)
    prepared.check_batches(config, sharding.make_mesh(axes, jax.devices()))
    mesh = sharding.make_mesh(dataclasses.replace(axes, sequence=4), jax.devices())
    says = r"sources of rows of config\.data\.length=64: length=58 does not split"
    with pytest.raises(sharding.ShardingError, match=says):
        prepared.check_batches(config, mesh)
