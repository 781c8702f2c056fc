"""Text and page at the end of a pre-training run, with predictions for held-out rows.

The report shows the first row in full.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from convbert_jax import drawing
from convbert_jax.analysis import overview, pretraining_report
from convbert_jax.analysis.pretraining_report import (
    Cloze,
    Curves,
    Number,
    Panel,
    Suspects,
    find_suspects,
    pair_subwords,
)
from convbert_jax.config import Config
from convbert_jax.data import batching
from convbert_jax.data.corpus import Corpus
from convbert_jax.models import build
from convbert_jax.models.networks import MODELS
from convbert_jax.objectives import masked_lm, replaced_token
from convbert_jax.recipes import scoring
from convbert_jax.recipes.reports import page
from convbert_jax.training.metrics_writer import HealthWatch
from convbert_jax.workdir import Workdir

_ROWS = 32  # at most


def fill_in(config: Config, corpus: Corpus, params) -> Cloze:
    """Predicts masked tokens of held-out rows; for replaced-token detection with the generator."""

    def run(model, batch, key, settings):
        masked, logits = masked_lm.hide_and_predict(model, batch, key, None, **settings)
        return masked.positions, masked.weights, logits.argmax(axis=-1)

    batch, (positions, weights, guesses) = _run(config, corpus, params, run)
    subwords, right, hidden = (), 0, 0
    for row, ids in enumerate(batch["segment_ids"]):
        old, used = batch["tokens"][row], weights[row] > 0
        new, is_hidden = old.copy(), np.zeros(len(old), bool)
        new[positions[row][used]], is_hidden[positions[row][used]] = guesses[row][used], True
        right, hidden = right + (new == old)[is_hidden].sum(), hidden + is_hidden.sum()
        if not subwords:
            subwords = _pair(corpus, new, old, is_hidden, ids)
    return Cloze(subwords, _count_rows(batch), float(right / max(1, hidden)))


def detect(config: Config, corpus: Corpus, params) -> Suspects:
    """Replaces tokens of held-out rows by the generator, and finds them by the discriminator."""

    def run(model, batch, key, settings):
        corrupted = replaced_token.corrupt(model, batch, key, train=False, **settings)[-1]
        ids, types = batch["segment_ids"], batch["type_ids"]
        return corrupted, model.discriminate(corrupted, ids, types, dtype=jnp.float32, key=None)

    batch, (corrupted, scores) = _run(config, corpus, params, run)
    subwords, replaced, found, tokens = (), 0, 0, 0
    for new, old, score, ids in zip(
        corrupted, batch["tokens"], scores, batch["segment_ids"], strict=True
    ):
        fake, real = new != old, ids != 0
        suspects = np.zeros(len(new), bool)
        suspects[real] = find_suspects(fake[real], score[real])
        replaced, found = replaced + fake[real].sum(), found + (suspects & fake).sum()
        tokens += real.sum()
        if not subwords:
            subwords = _pair(corpus, new, old, suspects, ids)
    found, chance = float(found / max(1, replaced)), float(replaced / max(1, tokens))
    return Suspects(subwords, _count_rows(batch), found, chance)


def _run(config, corpus, params, run):
    """Returns (batch, result of `run` on it), both on the host."""
    graphdef, _ = build(MODELS[config.recipe], config)
    settings = {"dtype": jnp.float32, "config": config, "special": corpus.tokenizer.special}

    @jax.jit
    def compute(params, batch):
        return run(nnx.merge(graphdef, params), batch, jax.random.key(config.seed), settings)

    batch = next(batching.evaluation_batches(corpus, batch_size=_ROWS, rows=_ROWS))
    return batch, jax.device_get(compute(params, batch))


def _count_rows(batch) -> int:
    """Counts rows with text; a batch of less held-out text is filled up by rows of padding."""
    return int((batch["segment_ids"] != 0).any(axis=1).sum())


def _pair(corpus, new, old, marked, segment_ids):
    tokenizer, real = corpus.tokenizer, np.flatnonzero(segment_ids)
    new, old = ([tokenizer.split_piece(i) for i in ids[real]] for ids in (new, old))
    return pair_subwords(new, old, marked[real])


_MOST_VALUES = 60  # rows of the table below a figure


@dataclasses.dataclass(frozen=True)
class PretrainingReport:
    """Results of a pre-training run.

    Attributes:
      step: last completed step.
      interrupted: whether the run ended before its last step; then cloze, suspects and written are
        missing.
      numbers: metrics of the last evaluation, at step `evaluated`; empty if there was none.
      curves: metrics of all logged steps and evaluations.
      commands: what to do after the run, as (purpose, command).
      failed: the error that ended the run; "" for a signal or no interruption.
      picture: whether the curves were also written to curves.png.
      cloze: predictions for masked tokens, by the generator for config.recipe=replaced_token.
      suspects: predicted replacements, for config.recipe=replaced_token.
      written: sets of pairs with the texts that the model generated for them.
      unwritten: reason why a recipe that generates texts has no `written` sets, or "".
    """

    config: Config
    workdir: Workdir
    step: int
    interrupted: bool
    numbers: Sequence[Number]
    evaluated: int
    curves: Curves
    commands: Sequence[page.Command]
    failed: str = ""
    picture: bool = False
    cloze: Cloze | None = None
    suspects: Suspects | None = None
    written: Sequence[scoring.Set] = ()
    unwritten: str = ""

    @property
    def title(self) -> str:
        return f"{self.config.name}, step {self.step:,}"


def describe(report: PretrainingReport, *, has_page: bool) -> str:
    """Returns the text for the terminal.

    Args:
      has_page: whether report.html was written.
    """
    numbers = pretraining_report.describe_numbers(report.numbers)
    lines = [f"{report.title}, {_describe_evaluation(report)}", *(f"  {line}" for line in numbers)]
    if report.cloze:
        lines += ["", *pretraining_report.describe_cloze(report.cloze)]
    if report.suspects:
        lines += ["", *pretraining_report.describe_suspects(report.suspects)]
    if report.written:
        lines += ["", *scoring.describe(report.written)]
    if report.unwritten:
        lines += ["", report.unwritten]
    if phases := overview.describe_phases(report.config):
        lines += ["", *phases]
    lines.append("")
    if report.picture:
        lines.append(f"Curves: {report.workdir.curves}")
    if page.longer(report.config, report.workdir, report.step):
        lines.append(f"To train longer, repeat the command with {page.more_steps(report.step)}")
    if page.has_own_text(report.config):
        purpose, command = report.commands[0]
        lines.append(f"{purpose}: {command}")
    else:
        material = report.config.spec.material
        lines.append(f"To train on your own {material}, add {page.own_text(report.config)}")
    if has_page:
        lines.append(f"Full report for a browser: {report.workdir.report}")
    return "\n".join(lines)


def _describe_evaluation(report: PretrainingReport) -> str:
    """Names the step of the numbers; a run may be ended at a step without an evaluation."""
    if report.evaluated == report.step:
        return "on held-out text:"
    found = f"on held-out text at step {report.evaluated:,}" if report.numbers else "not evaluated"
    return f"{found}; to evaluate now: {page.resume_command(report.workdir, '--mode=eval')}"


def make_page(
    report: PretrainingReport,
    about: page.About,
    *,
    parameters: Mapping[str, int],
    warnings: Sequence[tuple[int, str]] | None,
) -> str:
    """Returns report.html.

    Args:
      parameters: part of the model -> number of parameters.
      warnings: (step, text); None if config.train.warn_health is False.
    """
    config, following = report.config, []
    state, resume = f"finished at step {report.step:,}", ""
    if report.interrupted:
        how = "ended by an error" if report.failed else "interrupted"
        state = f"{how} after step {report.step:,} of {config.train.steps:,}"
        resume = page.resume_command(report.workdir)
    else:
        following = report.commands
    counts = [*parameters.items(), ("all", sum(parameters.values()))]
    return page.render(
        "pretraining.html",
        config,
        about,
        state=state,
        resume=resume,
        report=report,
        charts=[_chart(p, report.curves) for p in pretraining_report.choose_panels(report.curves)],
        cloze_summary=report.cloze and pretraining_report.count_right(report.cloze),
        suspects_summary=report.suspects and pretraining_report.count_found(report.suspects),
        written=list(map(_describe_set, report.written)),
        phases=overview.describe_phases(config),
        warnings=warnings and [(f"{step:,}", text) for step, text in warnings],
        parameters=[(name.replace("_", " "), f"{count:,}") for name, count in counts],
        following=following,
    )


def find_warnings(
    watch: HealthWatch, records: Sequence[Mapping[str, Any]]
) -> list[tuple[int, str]]:
    """Returns (step, text) of the warnings that a run logged, from its metrics records."""
    training = [record for record in records if record["split"] == "train"]
    return [(r["step"], text) for r in training for text in watch.look(r["step"], r)]


def _chart(panel: Panel, curves: Curves) -> dict[str, Any]:
    """Returns the figure of a panel and its held-out values, (step, a value for each name)."""
    draw = functools.partial(pretraining_report.draw_panel, panel=panel, curves=curves)
    found = {
        name: dict(points)
        for name, points in curves.get("validation", {}).items()
        if name in panel.metrics
    }
    steps = sorted(set().union(*found.values()))
    points = [
        (f"{step:,}", *(f"{c[step]:.4g}" if step in c else "" for c in found.values()))
        for step in steps[-_MOST_VALUES:]
    ]
    return {
        "svg": drawing.to_svg(draw, (3.7, 2.6), f"{panel.title}, over steps"),
        "header": ["step", *(name.replace("_", " ") for name in found)],
        "points": points,
    }


def _describe_set(found: scoring.Set) -> dict[str, Any]:
    return {
        "name": found.name,
        "pairs": len(found.written),
        "scores": scoring.list_scores(found),
        "settings": scoring.list_settings(found),
        "warnings": scoring.list_warnings(found),
        "examples": scoring.choose_examples(found),
        "folder": str(found.file.parent),
    }
