"""Pre-training on a mixture: shares in the log, held-out numbers of each source, exact resume."""

import dataclasses
import shutil

import pytest

from convbert_jax import recipes
from convbert_jax.analysis.verify_resume import compare
from convbert_jax.config import ConfigError, SourceSection
from convbert_jax.data.errors import DataError
from convbert_jax.training.checkpoints import load_arrays
from convbert_jax.workdir import Workdir
from tests.refusals import refused
from tests.runs import make_config


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """The config and the run of a mixture of two sources."""
    folder = tmp_path_factory.mktemp("mixture")
    (folder / "numbers.txt").write_text(
        "\n\n".join(f"Number {n} and {n + 1} are neighbors of {n + 2}." for n in range(200))
    )
    mixture = (
        SourceSection("domain", text, weight=0.75),
        SourceSection("numbers", f"text:{folder}/numbers.txt", weight=0.25, epochs=4),
    )
    config = make_config(
        recipe="masked_lm",
        data__mixture=mixture,
        train__steps=4,
        train__batch_size=8,
        train__log_every=2,
        train__eval_every=2,
        train__eval_rows=16,
        checkpoint__every=2,
        optimizer__warmup_steps=1,
    )
    return config, recipes.pretrain(config, folder / "run")


def test_the_log_has_shares_and_numbers_of_each_source(finished):
    config, run = finished
    train = [line for line in run.metrics if line["split"] == "train"]
    assert [line["domain/share"] * 16 % 1 for line in train] == [0, 0]  # whole rows of 16 and 32
    assert train[-1]["domain/share"] + train[-1]["numbers/share"] == 1
    heldout = run.evaluation
    low, high = sorted(heldout[f"{name}/mlm_loss"] for name in ("domain", "numbers"))
    assert low < heldout["mlm_loss"] < high
    evaluated = recipes.evaluate(config, run.folder)
    assert evaluated.values == pytest.approx(heldout, rel=1e-6)
    assert "numbers" in evaluated.report


def test_resuming_is_exact(finished, tmp_path):
    config, run = finished
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder)
    shutil.rmtree(folder / "checkpoints" / "4")
    again = recipes.pretrain(config, folder)
    wanted, found = (load_arrays(Workdir(r.folder).checkpoints, 4)[1] for r in (run, again))
    assert compare(wanted, found) == []


def test_a_mixture_with_too_few_epochs_is_refused(finished):
    config, run = finished
    sources = tuple(dataclasses.replace(s, epochs=0.001) for s in config.data.mixture)
    data = dataclasses.replace(
        config.data, mixture=sources, directory=str(Workdir(run.folder).data(config))
    )
    with refused(DataError, 4, field="config.data.mixture"):
        recipes.pretrain(dataclasses.replace(config, data=data), run.folder.parent / "other")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ([{"weight": 0.5}, {"weight": 0.4}], ""),
        ([{"weight": 1.5}, {"weight": -0.5}], "[0].weight"),
        ([{"weight": 1.0}, {"weight": 0.0, "source": ""}], "[1].source"),
        ([{"weight": 0.5}, {"weight": 0.5, "name": "a"}], "[0].name"),
        ([{"weight": 0.5}, {"weight": 0.5, "name": "../b"}], "[1].name"),
        ([{"weight": 0.9999}, {"weight": 0.0001}], "[1].weight"),
    ],
    ids=str,
)
def test_wrong_mixtures_are_refused(fields, field):
    given = zip("ab", fields, strict=True)
    sources = [{"name": name, "source": "text:x.txt", **changed} for name, changed in given]
    sections = tuple(SourceSection(**source) for source in sources)
    with refused(ConfigError, field=f"config.data.mixture{field}"):
        make_config(data__mixture=sections)
