"""The page of a long run: what its text says, with curves, warnings and parameters."""

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from convbert_jax.analysis import held_out_text, pretraining_report
from convbert_jax.analysis.held_out_text import Cloze, Subword, Suspects
from convbert_jax.analysis.pretraining_report import Curves, Panel
from convbert_jax.html_page import blocks
from convbert_jax.html_page.charts import Line, line_chart
from convbert_jax.html_page.elements import element, foreign
from convbert_jax.recipes.reports import commands, run_page
from convbert_jax.recipes.reports.pretraining_text import PretrainingReport
from convbert_jax.recipes.writing import scoring
from convbert_jax.training.reports.reporting import HealthWatch


def find_warnings(
    watch: HealthWatch, records: Sequence[Mapping[str, Any]]
) -> list[tuple[int, str]]:
    """What a run was warned of and at which step, from the lines of its metrics file."""
    training = [record for record in records if record["split"] == "train"]
    return [(r["step"], text) for r in training for text in watch.look(r["step"], r)]


def make(
    report: PretrainingReport,
    about: run_page.About,
    *,
    parameters: Mapping[str, int],
    warnings: Sequence[tuple[int, str]] | None,
) -> str:
    """The page.

    Args:
      parameters: how many numbers each part of the model learns.
      warnings: None where config.train.warn_health is off.
    """
    config, total = report.config, report.config.train.steps
    sections = [
        _numbers(report),
        _curves(report.curves),
        *([_cloze(report.cloze)] if report.cloze else []),
        *([_suspects(report.suspects)] if report.suspects else []),
        *_written(report),
        _warnings(warnings),
        _parameters(parameters),
    ]
    if report.failed:
        sections.insert(0, element("p", report.failed, class_="warning"))
    if report.interrupted:
        how = "ended by an error" if report.failed else "interrupted"
        state = f"{how} after step {report.step:,} of {total:,}"
        go_on = commands.go_on(report.workdir)
    else:
        state, go_on = f"finished at step {report.step:,}", ""
        following = commands.after_pretraining(config, report.workdir, report.step)
        sections.append(blocks.section("What to do next", blocks.commands(following)))
    return run_page.make(config, state, go_on, sections, about)


def _numbers(report: PretrainingReport) -> Element:
    if not report.numbers:
        told = element("p", "There was no evaluation yet.", class_="note")
        return blocks.section("Held-out text", told)
    head = ("", f"step {report.evaluated:,}", "beside it")
    return blocks.section("Held-out text", blocks.table(head, report.numbers, names=3))


def _curves(curves: Curves) -> Element:
    charts = [_chart(panel, curves) for panel in pretraining_report.choose_panels(curves)]
    if not charts:
        return blocks.section("Curves", element("p", "There are no numbers yet.", class_="note"))
    return blocks.section("Curves", element("div", *charts, class_="charts"))


def _chart(panel: Panel, curves: Curves) -> Element:
    lines = []
    for color, name in enumerate(panel.metrics):
        for split, held_out in (("train", ""), ("validation", ", held out")):
            if points := curves.get(split, {}).get(name):
                label = name.replace("_", " ") + held_out
                lines.append(Line(label, points, color, thin=not held_out))
    return line_chart(panel.title, lines, panel.no_skill)


def _cloze(cloze: Cloze) -> Element:
    legend = element(
        "p",
        element("u", "Underlined", class_="suspect"),
        " subwords were hidden from the model, which filled in the likeliest ones; above a ",
        element("mark", "wrong"),
        " one stands what was there.",
        class_="note",
    )
    return blocks.section(
        "A held-out text, filled in",
        legend,
        _text(cloze.subwords),
        element("p", held_out_text.count_right(cloze)),
    )


def _suspects(suspects: Suspects) -> Element:
    legend = element(
        "p",
        element("span", element("mark", "new"), " was put in by the generator, above it the word "),
        "that stood there; ",
        element("u", "underlined", class_="suspect"),
        " are as many subwords as were replaced, those that the discriminator suspects most.",
        class_="note",
    )
    return blocks.section(
        "A held-out text, with false words",
        legend,
        _text(suspects.subwords),
        element("p", held_out_text.count_found(suspects)),
    )


def _text(subwords: Sequence[Subword]) -> Element:
    parts = []
    for text, original, marked, begins_word in subwords:
        shown = element("span", text)  # in the direction of the text, whose letters it may join
        if original is not None:
            shown = element("ruby", foreign(text, "mark"), foreign(original, "rt"))
        if marked:
            shown = element("u", shown, class_="suspect")
        parts += [" " if begins_word else "", shown]
    return element("p", *parts, class_="example", dir="auto")


def _written(report: PretrainingReport) -> list[Element]:
    parts = [element("p", report.unwritten, class_="warning")] if report.unwritten else []
    for found in report.written:
        title = element("h3", f"{len(found.written):,} pairs of ", foreign(found.name))
        scores = blocks.table(("", "score"), scoring.list_scores(found), names=1)
        parts += [title, scores]
        parts += [element("p", line, class_="note") for line in scoring.list_settings(found)]
        parts += [element("p", line, class_="warning") for line in scoring.list_warnings(found)]
        for example in scoring.choose_examples(found):
            lines = [
                element("p", element("b", name), " ", foreign(text))
                for name, text in example.items()
            ]
            parts.append(element("div", *lines, class_="pair"))
        parts.append(element("p", "All texts: ", foreign(str(found.file.parent)), class_="note"))
    return [blocks.section("What it writes", *parts)] if parts else []


def _warnings(warnings: Sequence[tuple[int, str]] | None) -> Element:
    if warnings:
        rows = [(f"{step:,}", text) for step, text in warnings]
        return blocks.section("Warnings", blocks.table(("from step", ""), rows, names=2))
    told = "None was given. The first steps are not judged."
    if warnings is None:
        told = "Nothing was watched: config.train.warn_health is off."
    return blocks.section("Warnings", element("p", told, class_="note"))


def _parameters(parameters: Mapping[str, int]) -> Element:
    rows = [(name, f"{count:,}") for name, count in parameters.items()]
    total = ("all", f"{sum(parameters.values()):,}")
    shown = blocks.table(("part", "parameters"), [*rows, total], names=1, chosen=(len(rows),))
    return blocks.section("Parameters", shown)
