"""The page that a run leaves behind: what is on it, whatever the texts; when and how it is made."""

import dataclasses
import datetime
import math
import shlex
import types

import hypothesis
import jax
import numpy as np
import pytest
from absl.testing import flagsaver
from hypothesis import given, strategies

import convbert_jax
from convbert_jax import command_line, files
from convbert_jax.analysis import pretraining_report
from convbert_jax.analysis.held_out_text import Cloze, Subword, Suspects
from convbert_jax.analysis.pretraining_report import Number
from convbert_jax.analysis.text_scores import Scores
from convbert_jax.config import Config, GeneratorSection, to_dict
from convbert_jax.data.parallel.references import References
from convbert_jax.finetuning.fitting import Setting
from convbert_jax.finetuning.results import RunResult, TaskResult
from convbert_jax.finetuning.scores import score_table
from convbert_jax.html_page.elements import element
from convbert_jax.html_page.style import STYLE
from convbert_jax.recipes import pretraining
from convbert_jax.recipes.reports import (
    commands,
    finetuning_page,
    held_out_text,
    pretraining_page,
    pretraining_text,
    run_page,
)
from convbert_jax.recipes.reports.pretraining_text import PretrainingReport
from convbert_jax.recipes.writing import settings
from convbert_jax.recipes.writing.scoring import Set
from convbert_jax.training import sharding
from convbert_jax.training.reports.reporting import HealthWatch
from convbert_jax.workdir import Workdir
from tests.html_page import hostile
from tests.html_page.parsed import Page

WRITTEN = datetime.datetime(2026, 1, 31, 23, 59, tzinfo=datetime.UTC)
ONE_LINE = hostile.TEXTS.map(lambda text: " ".join(text.splitlines()))


def page_of_pretraining(t, *, interrupted=False, folder="runs/it") -> str:
    """With `t` wherever a text comes from data, a config or a name."""
    config = Config(name=t[0], init_from=t[1], recipe="translation")
    subwords = (Subword(t[2], t[3], True, True), Subword(t[4], None, False, True))
    written = Set(
        name=t[5],
        references=References(pairs=((t[6], t[7]),), bad=(1, t[8])),
        written=(t[9],),
        scores=Scores({"bleu": 12.5}, t[10]),
        unread=(0, ""),
        cut=0,
        decoding=settings.collect(config, (40,), "float32"),
        file=Workdir(folder).path / "validation.txt",
    )
    report = PretrainingReport(
        config=config,
        workdir=Workdir(folder),
        step=40,
        interrupted=interrupted,
        numbers=(Number(t[11], t[12], t[13]),),
        evaluated=40,
        curves={"train": {"token_loss": [(10, 3.0), (20, 2.0)], t[14]: [(10, 1.0)]}},
        cloze=Cloze(subwords[::-1], 32, 0.25),
        suspects=Suspects(subwords, 32, 0.5, 0.125),
        written=(written,),
        unwritten=t[14],
    )
    return pretraining_page.make(
        report,
        run_page.About(WRITTEN, ("finetune",), {t[17]: t[18]}),
        parameters={t[15]: 1234},
        warnings=[(600, t[16])],
    )


def page_of_tasks(t) -> str:
    runs = tuple(
        RunResult(t[0], Setting(rate, 3.0), seed, 9, loss, {"dev": {t[1]: score}}, 1.0, 1.0)
        for rate, seed, loss, score in (
            (1e-3, 0, 0.1, 0.5),
            (1e-3, 1, 0.1, 0.75),
            (1e-4, 0, 0.1, 0.25),
            (1e-4, 1, math.nan, math.nan),
        )
    )
    result = TaskResult(t[0], (t[1],), ("dev",), Setting(1e-3, 3.0), runs, ("runs/it",) * 2)
    columns = [score_table.Column(t[0], "dev", t[1], (0.5, 0.75))]
    return finetuning_page.make(
        Config(name=t[2], recipe="finetune"),
        Workdir("runs/it"),
        [result],
        columns,
        score_table.make_table(columns),
        run_page.About(WRITTEN, (), {}),
    )


@hypothesis.settings(max_examples=25, deadline=None)
@given(strategies.lists(ONE_LINE.filter(bool), min_size=19, max_size=19))
def test_no_text_of_pretraining_breaks_its_page(texts):
    hostile.check(page_of_pretraining, texts)


@hypothesis.settings(max_examples=25, deadline=None)
@given(strategies.lists(hostile.TEXTS, min_size=3, max_size=3))
def test_no_text_of_a_task_breaks_its_page(texts):
    hostile.check(page_of_tasks, texts)


def test_replaced_words_are_marked_with_what_stood_there():
    texts = [f"text{n}" for n in range(19)]
    page = page_of_pretraining(texts)
    marked = '<ruby><mark dir="auto">text2</mark><rt dir="auto">text3</rt></ruby>'
    assert f'<u class="suspect">{marked}</u> <span>text4</span>' in page
    assert "Over 32 such rows 50% of its suspects are new; by chance 12%." in Page(page).text


UNREAD = Config(recipe="masked_lm", generator=GeneratorSection(kind="uniform"))


@pytest.mark.parametrize(
    ("tell", "config"),
    [
        (held_out_text.fill_in, Config()),
        (held_out_text.fill_in, UNREAD),  # masked words have no generator
        (held_out_text.detect, Config()),
    ],
)
def test_rows_of_padding_are_no_rows_of_text(tell, config, monkeypatch):
    """Five rows are held out; the batch that is taken apart has 32."""
    tokens = np.arange(32 * 4).reshape(32, 4)
    batch = {"tokens": tokens, "segment_ids": np.repeat(np.arange(32) < 5, 4).reshape(32, 4) * 1}
    places = np.zeros((32, 1), int), np.ones((32, 1)), tokens[:, :1]
    found = places if tell is held_out_text.fill_in else (tokens + 1, tokens)
    monkeypatch.setattr(held_out_text, "_run", lambda *given: (batch, found))
    pieces = types.SimpleNamespace(pieces=lambda ids: list(map(str, ids)))
    told = tell(config, types.SimpleNamespace(tokenizer=pieces), None)
    assert told.rows == 5


@pytest.mark.parametrize(
    ("evaluated", "says"),
    [
        (4, "it, step 4, on held-out text:"),
        (2, "it, step 4, on held-out text at step 2; "),
        (0, "it, step 4, not evaluated; "),
    ],
)
def test_numbers_are_told_of_the_step_that_they_are_of(evaluated, says, tmp_path, monkeypatch):
    """A run may be made to end where it was stopped, between two evaluations."""
    config = Config(name="it", recipe="translation")
    values = {"token_loss": 1.0, "token_accuracy": 0.5, "perplexity": math.e}
    metrics = [{"step": evaluated, "split": "validation", **values}] if evaluated else []
    state = types.SimpleNamespace(params={})
    result = pretraining.loop.Result(4, state, {}, values if evaluated else {}, None)
    kept = []
    monkeypatch.setattr(pretraining.scoring, "score_sets", lambda *_, **options: ((1,), ""))
    monkeypatch.setattr(pretraining.evaluation, "write_numbers", lambda *given: kept.append(given))
    data = types.SimpleNamespace(corpus=None, tokenizers=None, pairs=None)
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    report = pretraining._report(config, Workdir(tmp_path), data, result, metrics, mesh)
    assert [of_file[2] for of_file in kept] == [values if evaluated == 4 else {}]
    text = pretraining_text.describe(dataclasses.replace(report, written=()), page=False)
    assert text.startswith(says)


def test_every_curve_of_a_run_has_a_color():
    names = [name for panel in pretraining_report._PANELS for name in panel.metrics]
    curves = {"train": {name: [(10, 3.0), (20, 2.0)] for name in names}}
    drawn = element("div", pretraining_page._curves(curves))
    assert len(list(drawn.iter("polyline"))) == len(names)
    assert all(f"svg .{line.get('class').split()[-1]} " in STYLE for line in drawn.iter("polyline"))


def test_words_that_were_filled_in_are_underlined():
    page = page_of_pretraining([f"text{n}" for n in range(19)])
    wrong = '<ruby><mark dir="auto">text2</mark><rt dir="auto">text3</rt></ruby>'
    assert f'<span>text4</span> <u class="suspect">{wrong}</u>' in page
    assert "Over 32 such rows 25% are what stood there." in Page(page).text


def test_seeds_settings_and_the_chosen_one():
    page = Page(page_of_tasks(["topics", "accuracy", "it"]))
    assert "finished: 4 runs of topics" in page.text
    # the mean of 50 and 75 is 62.5; t of one degree of freedom is 12.706, the error 12.5
    assert "-96.3 to 221.3" in page.text
    rows = page.texts("tr")
    assert "learning rate 0.001, 3 epochs62.52" in rows
    assert "learning rate 0.0001, 3 epochsdiverged21" in rows


@given(hostile.TEXTS)
@hypothesis.settings(max_examples=100, deadline=None)
def test_a_folder_of_any_name_is_typed_right(name):
    name = name.replace("\x00", "").replace("://", "")
    hypothesis.assume(name.encode("utf-8", "ignore").decode() == name)  # others are refused
    workdir = Workdir("runs/" + name)
    assert shlex.split(commands.go_on(workdir))[-1] == f"--workdir={workdir}"


@pytest.mark.parametrize(
    "name", ["base", "small", "language_model:tiny", "span_corruption:tiny", "translation:tiny"]
)
def test_what_to_do_next_is_understood(name, tmp_path):
    config = convbert_jax.load_config(name)
    workdir = Workdir(tmp_path / "a run")
    workdir.path.mkdir()
    files.write_json(workdir.config, to_dict(config))
    typed = dict(commands.after_pretraining(config, workdir, config.train.steps))
    for command in typed.values():
        words = shlex.split(command)
        assert words[:3] == ["python", "-m", "convbert_jax.main"]
        with flagsaver.flagsaver():
            command_line.read(words[2:])
    writes = any("--output=written.txt" in command for command in typed.values())
    assert writes == config.writes_text
    assert ("Export it for transformers" in typed) != writes
    assert ("Teach it a task, from pairs of texts" in typed) == (config.recipe == "span_corruption")


@pytest.mark.parametrize("name", ["tiny", "translation:tiny"])
def test_a_run_on_text_of_ones_own_has_nothing_of_this_ones(name, tmp_path):
    """Shards of another corpus in the folder are refused, and its held-out text says nothing."""
    section = "parallel" if "translation" in name else "data"
    old = {f"{section}.source": "text:a", f"{section}.validation_source": "text:b"}
    config = convbert_jax.load_config(name, **old, **{"data.directory": "shards"})
    workdir = Workdir(tmp_path)
    files.write_json(workdir.config, to_dict(config))
    command = dict(commands.after_pretraining(config, workdir, 40))
    (typed,) = (line for what, line in command.items() if "on your own" in what)
    with flagsaver.flagsaver():
        other = command_line.read(shlex.split(typed)[2:]).config
    assert other.data.directory == getattr(other, section).validation_source == ""
    assert "FILE" in getattr(other, section).source or "FOLDER" in getattr(other, section).source


def test_only_what_can_be_exported_is_to_be_exported():
    own = dataclasses.replace(Config().model, mixer="dynamic")
    config = dataclasses.replace(Config(), model=own)
    typed = dict(commands.after_pretraining(config, Workdir("runs/it"), 40))
    assert "Export it for transformers" not in typed


def test_only_an_interrupted_run_says_how_to_go_on():
    texts = ["it"] * 19
    command = "python -m convbert_jax.main --workdir='runs/a b'"
    stopped = Page(page_of_pretraining(texts, interrupted=True, folder="runs/a b"))
    assert stopped.texts("pre") == [command]
    assert "interrupted after step 40 of" in stopped.text
    assert "written 2026-01-31 23:59 UTC" in stopped.text
    finished = Page(page_of_pretraining(texts, folder="runs/a b"))
    assert command not in finished.texts("pre")
    assert "finished at step 40" in finished.text


def test_warnings_are_those_of_the_log():
    def health(step, values):
        return [f"bad: {values['loss']}"] if values["loss"] > 2 else []

    losses = [(10, "train", 3.0), (10, "validation", 9.0), (20, "train", 4.0), (30, "train", 1.0)]
    records = [{"step": s, "split": split, "loss": loss} for s, split, loss in losses]
    records.append({"step": 40, "split": "train", "loss": 5.0})
    found = pretraining_page.find_warnings(HealthWatch(health), records)
    assert found == [(10, "bad: 3.0"), (40, "bad: 5.0")]


def test_a_page_that_cannot_be_made_is_one_warning(tmp_path, caplog):
    def fail():
        raise KeyError("a number\nthat is not there")

    assert not run_page.write(Workdir(tmp_path), fail)
    Workdir(tmp_path).report.mkdir()  # nor can it be written
    assert not run_page.write(Workdir(tmp_path), lambda: "<p>")
    first, second = [record.getMessage() for record in caplog.records]
    for message, kind in ((first, "KeyError"), (second, "IsADirectoryError")):
        assert message.startswith(f"{tmp_path}/report.html could not be written ({kind}: ")
        assert "\n" not in message
