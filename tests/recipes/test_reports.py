"""The text report and the page at the end of a run."""

import base64
import dataclasses
import datetime
import functools
import math
import re
import shlex
import statistics
import types

import hypothesis
import jax
import numpy as np
import pytest
from absl.testing import flagsaver
from hypothesis import given, strategies

import convbert_jax
from convbert_jax import command_line, drawing, storage
from convbert_jax.analysis import pretraining_report
from convbert_jax.analysis.pretraining_report import Cloze, Number, Subword, Suspects
from convbert_jax.analysis.text_scores import Scores
from convbert_jax.config import Config, GeneratorSection, to_dict
from convbert_jax.data.parallel_text import References
from convbert_jax.finetuning import score_table
from convbert_jax.finetuning.run_files import RunResult, Setting, TaskResult
from convbert_jax.recipes import pretraining, scoring, tasks
from convbert_jax.recipes.reports import finetuning as finetuning_reports
from convbert_jax.recipes.reports import page
from convbert_jax.recipes.reports import pretraining as pretraining_reports
from convbert_jax.recipes.reports.pretraining import PretrainingReport
from convbert_jax.recipes.scoring import Set
from convbert_jax.training import partitioning
from convbert_jax.training.metrics_writer import HealthWatch
from convbert_jax.workdir import Workdir
from tests import html
from tests.html import Page

WRITTEN = datetime.datetime(2026, 1, 31, 23, 59, tzinfo=datetime.UTC)
ONE_LINE = html.TEXTS.map(lambda text: " ".join(text.splitlines()))


CURVES = {"train": {"token_loss": [(10, 3.0), (20, 2.0)], "unknown": [(10, 1.0)]}}


def page_of_pretraining(t, *, interrupted=False, folder="runs/it", curves=CURVES) -> str:
    """Return a page with `t` in place of every text from data, config or names."""
    config = Config(name=t[0], init_from=t[1], recipe="translation")
    subwords = (Subword(t[2], t[3], True, True), Subword(t[4], None, False, True))
    written = Set(
        name=t[5],
        references=References(pairs=((t[6], t[7]),), bad=(1, t[8])),
        written=(t[9],),
        scores=Scores({"bleu": 12.5}, t[10]),
        unread=(0, ""),
        cut=0,
        decoding=scoring.collect_settings(config, (40,), "float32"),
        file=Workdir(folder).path / "validation.txt",
    )
    report = PretrainingReport(
        config=config,
        workdir=Workdir(folder),
        step=40,
        interrupted=interrupted,
        numbers=(Number(t[11], t[12], t[13]),),
        evaluated=40,
        curves=curves,
        commands=tasks.recipe_of(config).commands(config, Workdir(folder), 40),
        cloze=Cloze(subwords[::-1], 32, 0.25),
        suspects=Suspects(subwords, 32, 0.5, 0.125),
        written=(written,),
        unwritten=t[14],
    )
    return pretraining_reports.make_page(
        report,
        page.About(WRITTEN, ("finetune",), {t[17]: t[18]}),
        parameters={t[15]: 1234},
        warnings=[(600, t[16])],
    )


def page_of_tasks(t, pictures=None) -> str:
    runs = tuple(
        RunResult(t[0], Setting(rate, 3.0), seed, 9, loss, {"dev": {t[1]: score}}, 1.0, 1.0)
        for rate, seed, loss, score in (
            (1e-3, 0, 0.1, 0.5),
            (1e-3, 1, 0.1, 0.75),
            (1e-4, 0, 0.1, 0.25),
            (1e-4, 1, math.nan, math.nan),
        )
    )
    folders = (str(pictures or "runs/it"),) * 2
    if pictures:
        predictions = Workdir(pictures).predictions
        predictions.mkdir(parents=True)
        (predictions / "dev-confusion.png").write_bytes(b"\x89PNG")
    result = TaskResult(t[0], (t[1],), ("dev",), Setting(1e-3, 3.0), runs, folders)
    columns = [score_table.Column(t[0], "dev", t[1], (0.5, 0.75))]
    return finetuning_reports.make_page(
        Config(name=t[2], recipe="finetune"),
        Workdir("runs/it"),
        [result],
        columns,
        score_table.make_table(columns),
        page.About(WRITTEN, (), {}),
    )


@hypothesis.settings(max_examples=15)
@given(strategies.lists(ONE_LINE.filter(bool), min_size=19, max_size=19))
def test_no_text_changes_the_structure_of_a_page(texts):
    html.check(functools.partial(page_of_pretraining, curves={}), texts)
    html.check(page_of_tasks, texts[:3])


def test_a_page_needs_no_other_file(tmp_path):
    source = page_of_tasks(["topics", "accuracy", "it"], pictures=tmp_path)
    page_ = Page(source)
    assert page_.tags.isdisjoint({"script", "link", "iframe", "object", "base", "a"})
    assert any("default-src 'none'" in policy for policy in page_.values("content"))
    (picture,) = page_.values("src")
    assert base64.b64decode(picture.removeprefix("data:image/png;base64,")) == b"\x89PNG"
    assert not re.search(r'(?:href|src)="(?!#|data:)|url\((?!#)', source)


def test_characters_that_html_forbids_are_replaced():
    assert page.clean("a\r\nb\rc\nd\te\x00\ud800") == "a\nb\nc\nd\te\ufffd\ufffd"


def test_tokens_are_marked_with_their_originals():
    found = page_of_pretraining([f"text{n}" for n in range(19)])
    wrong = '<ruby><mark dir="auto">text2</mark><rt dir="auto">text3</rt></ruby>'
    assert f'<span>text4</span> <u class="suspect">{wrong}</u>' in found  # masked
    assert f'<u class="suspect">{wrong}</u> <span>text4</span>' in found  # replaced
    assert '<p class="example" dir="auto">' in found  # each text sets its own direction
    for number in ("25%", "50%", "12%"):
        assert number in Page(found).text


# --- figures ---

POINTS = strategies.lists(
    strategies.tuples(
        strategies.integers(0, 10**9),
        strategies.floats(-1e38, 1e38) | strategies.sampled_from([0.0, 5e-324, 1e-323, -5e-324]),
    ),
    min_size=1,
    max_size=50,
    unique_by=lambda point: point[0],
).map(sorted)


def charts_of(curves):
    """Return the <path> tags and the rows of the page's tables."""
    found = Page(page_of_pretraining(["it"] * 19, curves=curves))
    return [path for path in found.values("d") if "C" not in path], found.texts("tr")


@hypothesis.settings(max_examples=8)
@given(POINTS)
@hypothesis.example([(0, -1e38), (1, 1e38), (2, 5e-324)])
@hypothesis.example([(7, 5e-324)])
def test_any_finite_curve_is_drawn(points):
    _, rows = charts_of({"validation": {"mlm_loss": points}})
    step, value = points[-1]
    assert f"{step:,}{value:.4g}" in rows


def test_a_long_curve_is_thinned_out_but_keeps_its_spikes():
    points = [(step, 0.01 * (step % 2)) for step in range(20_000)]
    points[4321] = (4321, 9.0)
    points[8765] = (8765, -9.0)
    paths, _ = charts_of({"train": {"learning_rate": points}})
    ys = [[float(y) for y in re.findall(r"[ML] \S+ (\S+)", path)] for path in paths]
    curve = max(ys, key=len)
    assert 4 < len(curve) < 5_000
    middle = statistics.median(curve)
    assert max(curve) - middle == pytest.approx(middle - min(curve), rel=0.01)
    assert max(curve) - middle > 50


def test_every_metric_of_a_panel_is_drawn():
    from matplotlib.figure import Figure

    for panel in pretraining_report._PANELS:
        curves = {"train": {name: [(10, 3.0), (20, 2.0)] for name in panel.metrics}}
        axis = Figure().subplots()
        pretraining_report.draw_panel(axis, panel, curves)
        labels = [text.get_text() for text in axis.get_legend().get_texts()]
        names = [name.replace("_", " ") for name in panel.metrics]
        assert [label for label in labels if label != "no skill"] == names
        colors = {line.get_color() for line in axis.lines if line.get_label() in names}
        assert len(colors) == len(names)


def test_colors_of_figures_follow_the_page():
    found = page_of_pretraining(["it"] * 19)
    svg = found[found.index("<svg") : found.index("</svg>")]
    assert "var(--first)" in svg
    assert not [color for color in drawing.COLORS.values() if color in svg]
    assert "discriminator" not in Page(found).values("aria-label")[0]


def test_seeds_settings_and_the_chosen_one():
    found = Page(page_of_tasks(["topics", "accuracy", "it"]))
    # mean of 50 and 75: 62.5; t with one degree of freedom: 12.706; standard error: 12.5
    assert "-96.3 to 221.3" in found.text
    assert "50.0, 75.0" in found.values("aria-label")
    rows = found.texts("tr")
    assert "learning rate 0.001, 3 epochs62.52" in rows
    assert "learning rate 0.0001, 3 epochsdiverged21" in rows


# --- numbers ---

NO_GENERATOR = Config(recipe="masked_lm", generator=GeneratorSection(kind="uniform"))


@pytest.mark.parametrize(
    ("predict", "config"),
    [
        (pretraining_reports.fill_in, Config()),
        (pretraining_reports.fill_in, NO_GENERATOR),  # masked_lm has no generator
        (pretraining_reports.detect, Config()),
    ],
)
def test_rows_of_padding_are_not_counted(predict, config, monkeypatch):
    """Five rows are held out; the batch has 32."""
    tokens = np.arange(32 * 4).reshape(32, 4)
    batch = {"tokens": tokens, "segment_ids": np.repeat(np.arange(32) < 5, 4).reshape(32, 4) * 1}
    positions = np.zeros((32, 1), int), np.ones((32, 1)), tokens[:, :1]
    found = positions if predict is pretraining_reports.fill_in else (tokens + 1, tokens)
    monkeypatch.setattr(pretraining_reports, "_run", lambda *given: (batch, found))
    pieces = types.SimpleNamespace(split_piece=lambda index: (True, str(index)))
    assert predict(config, types.SimpleNamespace(tokenizer=pieces), None).rows == 5


@pytest.mark.parametrize("evaluated", [4, 2, 0])
def test_numbers_are_of_the_last_evaluation(evaluated, tmp_path, monkeypatch):
    """A run may end at a step between two evaluations."""
    config = Config(name="it", recipe="translation")
    values = {"token_loss": 1.0, "token_accuracy": 0.5, "perplexity": math.e}
    metrics = [{"step": evaluated, "split": "validation", **values}] if evaluated else []
    state = types.SimpleNamespace(params={})
    result = pretraining.loop.Result(4, state, {}, values if evaluated else {}, None)
    kept = []
    monkeypatch.setattr(pretraining.scoring, "score_sets", lambda *_, **options: ((1,), ""))
    monkeypatch.setattr(pretraining.evaluation, "write_numbers", lambda *given: kept.append(given))
    data = types.SimpleNamespace(corpus=None, tokenizers=None, pairs=None)
    mesh = partitioning.make_mesh(config.mesh, jax.devices()[:1])
    report = pretraining._report(config, Workdir(tmp_path), data, result, metrics, mesh)
    assert [written[2] for written in kept] == [values if evaluated == 4 else {}]
    text = pretraining_reports.describe(dataclasses.replace(report, written=()), has_page=False)
    first, *_ = text.splitlines()
    assert first.startswith("it, step 4, ")
    assert ("step 2" in first) == (evaluated == 2)
    assert ("--mode=eval" in first) == (evaluated != 4)


def test_warnings_are_those_of_the_log():
    def health(step, values):
        return [f"bad: {values['loss']}"] if values["loss"] > 2 else []

    losses = [(10, "train", 3.0), (10, "validation", 9.0), (20, "train", 4.0), (30, "train", 1.0)]
    records = [{"step": s, "split": split, "loss": loss} for s, split, loss in losses]
    records.append({"step": 40, "split": "train", "loss": 5.0})
    found = pretraining_reports.find_warnings(HealthWatch(health), records)
    assert found == [(10, "bad: 3.0"), (40, "bad: 5.0")]


# --- commands ---


def read(command: str):
    """Parse a command of a page."""
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "convbert_jax.main"]
    with flagsaver.flagsaver():
        return command_line.read(words[2:])


@given(html.TEXTS)
@hypothesis.settings(max_examples=50)
def test_a_folder_of_any_name_is_quoted(name):
    name = name.replace("\x00", "").replace("://", "")
    hypothesis.assume(name.encode("utf-8", "ignore").decode() == name)  # other names are refused
    workdir = Workdir("runs/" + name)
    assert shlex.split(page.resume_command(workdir))[-1] == f"--workdir={workdir}"


@pytest.mark.parametrize(
    "name", ["base", "small", "language_model:tiny", "span_corruption:tiny", "translation:tiny"]
)
def test_next_commands_are_valid(name, tmp_path):
    config = convbert_jax.load_config(name)
    workdir = Workdir(tmp_path / "a run")
    workdir.path.mkdir()
    storage.write_json(workdir.config, to_dict(config))
    typed = [c for _, c in tasks.recipe_of(config).commands(config, workdir, config.train.steps)]
    for command in typed:
        read(command)
    assert any("--output=written.txt" in command for command in typed) == config.spec.generates
    assert any("--mode=export" in command for command in typed) != config.spec.generates
    task = any("configs/text_to_text.py" in command for command in typed)
    assert task == (config.recipe == "span_corruption")


@pytest.mark.parametrize("name", ["tiny", "translation:tiny"])
def test_a_run_on_other_text_has_its_own_data(name, tmp_path):
    """Shards of another corpus in the folder are refused; its held-out text is not used."""
    section = "parallel" if "translation" in name else "data"
    old = {f"{section}.source": "text:a", f"{section}.validation_source": "text:b"}
    config = convbert_jax.load_config(name, **old, **{"data.directory": "shards"})
    workdir = Workdir(tmp_path)
    storage.write_json(workdir.config, to_dict(config))
    typed = [command for _, command in tasks.recipe_of(config).commands(config, workdir, 40)]
    other = read(next(command for command in typed if "runs/mine" in command)).config
    assert other.data.directory == getattr(other, section).validation_source == ""
    assert "FILE" in getattr(other, section).source or "FOLDER" in getattr(other, section).source


@pytest.mark.parametrize(
    ("name", "source", "next_step"),
    [
        ("tiny", "docstrings", "--config.data.source='text:FOLDER/*.txt'"),
        ("tiny", "text:corpus.txt", "--config=configs/text.py:own"),
        ("translation:tiny", "parallel:a,b", "--mode=predict"),
    ],
)
def test_the_terminal_names_the_next_step(name, source, next_step):
    """A run on the user's text is not asked to train on the user's text."""
    section = "parallel" if "translation" in name else "data"
    config = convbert_jax.load_config(name, **{f"{section}.source": source})
    following = tasks.recipe_of(config).commands(config, Workdir("runs/it"), 40)
    report = PretrainingReport(config, Workdir("runs/it"), 40, False, (), 40, CURVES, following)
    text = pretraining_reports.describe(report, has_page=False)
    assert next_step in text
    assert ("on your own" in text.replace("on your own labeled", "")) == (source == "docstrings")


def test_export_is_named_only_for_models_that_have_it():
    own = dataclasses.replace(Config().model, mixer="dynamic")
    config = dataclasses.replace(Config(), model=own)
    typed = tasks.recipe_of(config).commands(config, Workdir("runs/it"), 40)
    assert not [command for _, command in typed if "--mode=export" in command]


def test_only_an_interrupted_run_shows_how_to_resume():
    texts = ["it"] * 19
    command = "python -m convbert_jax.main --workdir='runs/a  <b>'"
    stopped = Page(page_of_pretraining(texts, interrupted=True, folder="runs/a  <b>"))
    assert stopped.texts("pre") == [command]
    assert "2026-01-31 23:59 UTC" in stopped.text
    finished = Page(page_of_pretraining(texts, folder="runs/a  <b>"))
    assert command not in finished.texts("pre")
    assert len(finished.texts("pre")) > 2


def test_a_page_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    def fail():
        raise KeyError("a number\nthat is not there")

    assert not page.write(Workdir(tmp_path), fail)
    Workdir(tmp_path).report.mkdir()  # a folder in its place: it cannot be written
    assert not page.write(Workdir(tmp_path), lambda: "<p>")
    for record, kind in zip(caplog.records, ("KeyError", "IsADirectoryError"), strict=True):
        assert record.levelname == "WARNING"
        assert record.args[:2] == (tmp_path / "report.html", kind)
        assert "\n" not in record.getMessage()
