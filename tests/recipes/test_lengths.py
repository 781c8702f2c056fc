"""Lengths of a run in tokens, words, epochs and shares, as numbers of steps."""

import dataclasses
import pathlib
from fractions import Fraction

import pytest

from convbert_jax import recipes
from convbert_jax.command_line import overrides
from convbert_jax.config import ConfigError, lengths
from convbert_jax.data import corpus
from convbert_jax.sweeps import runs
from convbert_jax.sweeps.table import Sweep, SweepError, Variant
from convbert_jax.training import loop
from convbert_jax.workdir import Workdir
from tests.refusals import refused
from tests.runs import make_config, one_device

RATES = {"tokens": Fraction(256), "words": Fraction(197, 2), "epochs": Fraction(8, 1_000)}


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("12 steps", 12),
        ("1k steps", 1_000),
        ("2.5k tokens", 9),  # 9.77
        ("1M words", 10_152),  # 10,152.3
        ("1word", 1),  # never 0
        ("3 epochs", 375),
    ],
)
def test_a_length_is_rounded_down_to_steps(text, steps):
    config = make_config(train__steps=text, optimizer__warmup_steps="10%")
    found = lengths.to_steps(config, lambda of_phase: RATES)
    assert found.train.steps == steps
    assert found.optimizer.warmup_steps == max(1, steps // 10)
    assert not list(lengths.find_texts(found))


@pytest.mark.parametrize("text", ["", "words", "-1 words", "0 words", "1e3 words", "3 days"])
def test_other_texts_are_refused(text):
    with refused(ConfigError, field="config.checkpoint.every", value=text):
        make_config(checkpoint__every=text)
    with refused(ConfigError, field="--config.checkpoint.every", value=text):
        overrides.take([f"--config.checkpoint.every={text}"])


@pytest.mark.parametrize(
    "fields",
    [
        {"train__steps": "10%"},
        {"train__steps": "1 epochs", "recipe": "translation"},
        {"train__eval_every": "10%", "recipe": "finetune"},
        {"train__eval_every": "1 hour"},
        {"train__steps": "1 hour", "recipe": "translation"},
        {"train__steps": "1 hour", "phases": ({"name": "only"},)},
        {"train__steps": "1 hour", "objective__masked_lm_steps": 2},
    ],
    ids=str,
)
def test_lengths_without_a_meaning_are_refused(fields):
    with refused(ConfigError, field=f"config.{next(iter(fields)).replace('__', '.')}"):
        make_config(**fields)


def test_a_sweep_needs_numbers_of_steps(tmp_path):
    sweep = Sweep("configs/tiny.py", {"a": Variant({"train.steps": "1M words"})})
    with refused(SweepError, field="config.train.steps", value="1M words"):
        runs.expand(sweep, runs.Folder(tmp_path))


def test_a_run_of_words_stores_its_steps_and_resumes(text, tmp_path):
    config = make_config(
        recipe="masked_lm",
        data__source=text,
        data__directory=str(tmp_path / "data"),
        train__batch_size=8,
        train__steps="1000 words",
        train__log_every="25%",
        checkpoint__every="512 tokens",
        train__eval_every="0.5 epochs",
        train__eval_rows=8,
        optimizer__warmup_steps="50%",
    )
    with refused(ConfigError, field="config.train.steps"):
        recipes.plan(config, tmp_path / "run", topology="cpu")
    assert "1000 words" in recipes.show(config, tmp_path / "run")
    run = recipes.pretrain(config, tmp_path / "run")
    splits = corpus.read_metadata(tmp_path / "data")["splits"]
    written = pathlib.Path(text.removeprefix("text:")).read_text()
    words = sum(shard["words"] for shards in splits.values() for shard in shards)
    assert words == len(written.split())
    train = {key: sum(shard[key] for shard in splits["train"]) for key in ("rows", "words")}
    steps = int(1_000 * train["rows"] / (8 * train["words"]))
    kept = Workdir(run.folder).read_config()
    assert kept.train.steps == run.step == steps > 4
    assert kept.train.eval_every == train["rows"] // 16
    assert (kept.checkpoint.every, kept.optimizer.warmup_steps) == (2, steps // 2)
    again = recipes.pretrain(config, run.folder)
    assert Workdir(again.folder).read_config() == kept
    longer = dataclasses.replace(config.train, steps="1100 words")
    with refused(ConfigError, field="config.optimizer.warmup_steps"):
        section = dataclasses.replace(config.optimizer, warmup_steps=1_000)
        recipes.plan(
            dataclasses.replace(config, train=longer, optimizer=section), run.folder, topology="cpu"
        )


def _in_time(config, steps="60 minutes"):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))


def test_a_budget_in_minutes_is_measured_once(
    pretraining_config, pretrained, tmp_path, monkeypatch
):
    measured, time_steps = [], loop.time_steps

    def measure(*given):
        first, seconds = time_steps(*given, 2)
        assert first > seconds > 0
        measured.append(given)
        return 360.0, 600.0

    monkeypatch.setattr(loop, "time_steps", measure)
    config = _in_time(pretraining_config)
    assert "60 minutes" in recipes.show(config, tmp_path / "run")
    with refused(ConfigError, field="config.train.steps", value="60 minutes"):
        recipes.plan(config, tmp_path / "run", topology="cpu")
    with one_device():
        run = recipes.pretrain(config, tmp_path / "run")
        # 95% of an hour less twice 360 s for compilation; without it, 5 steps
        assert Workdir(run.folder).read_config().train.steps == run.step == 4
        again = recipes.pretrain(_in_time(config, "2 hours"), run.folder)
    assert (again.step, len(measured)) == (4, 1)
    assert run.evaluation == pretrained.evaluation  # the measurement does not change the run


def test_a_budget_without_time_for_a_step_is_refused(pretraining_config, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "time_steps", lambda *given: (1775.0, 60.0))
    with refused(ConfigError, field="config.train.steps", value="60 minutes"):
        recipes.pretrain(_in_time(pretraining_config), tmp_path / "run")
