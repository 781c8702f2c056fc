"""Optuna search: respects the budget, proposes no variant twice, and learns from results."""

import dataclasses
import json
import sys
import time

import pytest

from convbert_jax import config_files
from convbert_jax.config import to_dict
from convbert_jax.sweeps import Search, Sweep, SweepError, Task, Variant
from convbert_jax.sweeps.runs import check_unchanged, count_flops, count_parameters, expand
from convbert_jax.sweeps.search import Explorer
from convbert_jax.sweeps.table import FINISHED, Record
from tests.refusals import refused
from tests.sweeps.fake_runs import FakeRuns, in_threads

KERNELS = tuple(range(3, 18, 2))
# 4 heads: a ratio of 3 is invalid
SPACE = {"model.kernel_size": KERNELS, "model.head_ratio": (2, 3), "model.ffn_size": (256, 512)}
SEARCH = Search(SPACE, trials=3, metric="discriminator_auc", maximize=True)
SWEEP = Sweep("tiny", {"given": Variant()}, seeds=(0, 1), search=SEARCH)


def searching(**changes) -> Sweep:
    return dataclasses.replace(SWEEP, search=dataclasses.replace(SEARCH, **changes))


class Larger(FakeRuns):
    """Objective that prefers larger kernels and depends on the seed."""

    def values(self, run):
        return {"discriminator_auc": run.config.model.kernel_size + 0.1 * run.seed}


@pytest.fixture
def fake(folder) -> Larger:
    pytest.importorskip("optuna")
    return Larger(folder)


def search(fake, sweep=SWEEP, **options):
    explorer = Explorer(sweep, fake.folder, {})
    runs = expand(explorer.sweep, fake.folder)
    return explorer, fake.work(runs, explorer=explorer, **options)


def search_twice(fake, sweep=SWEEP):
    """Searches with two concurrent workers."""
    found = in_threads(2, lambda: search(fake, sweep))
    assert len(set(fake.started)) == len(fake.started)
    return found


def values(explorer) -> dict[str, float]:
    """Returns variant -> objective, as stored by Optuna."""
    trials = explorer._study.get_trials(deepcopy=False)
    return {t.user_attrs["variant"]: t.value for t in trials if t.value is not None}


def test_a_search_finds_variants_within_the_budget_and_continues(fake):
    budget = {"max_parameters": 1_401_200, "max_flops": 9.872e12}
    first, summary = search(fake, searching(**budget))
    assert summary.failed == {}
    started = list(fake.started)
    assert len(started) == 2 * (1 + 3)
    explorer, _ = search(fake, searching(**budget, trials=5))  # more trials: the same search
    variants = explorer.sweep.variants
    assert first.sweep.variants.items() <= variants.items()
    assert len(variants) == 1 + 5
    assert fake.started[: len(started)] == started
    runs = expand(explorer.sweep, fake.folder)  # rejects equal variants
    assert sorted(run.id for run in runs) == sorted(fake.started)
    assert check_unchanged(runs, fake.folder) == (0, [])
    for run in runs[: len(variants)]:
        assert count_parameters(run, fake.folder) <= budget["max_parameters"]
        assert count_flops(run, fake.folder) <= budget["max_flops"]
        assert run.config.model.head_ratio == 2
    assert values(explorer) == {
        name: pytest.approx(variant.changes["model.kernel_size"] + 0.05)  # mean over seeds 0, 1
        for name, variant in variants.items()
        if name != "given"
    }


def test_the_budget_of_a_variant_is_that_of_its_run(fake):
    """The FLOP budget follows the steps of each run."""
    sweep = dataclasses.replace(searching(budget_of="given"), changes={"train.steps": 200})
    explorer, _ = search(fake, sweep)
    given, *found = expand(dataclasses.replace(explorer.sweep, seeds=(0,)), fake.folder)
    assert len(found) == 3
    for count in (count_parameters, count_flops):
        assert max(count(run, fake.folder) for run in found) <= count(given, fake.folder)


def test_workers_search_together(fake):
    fake.seconds = 0.05
    (first, done), (second, also_done) = search_twice(fake)
    assert first.sweep.variants == second.sweep.variants
    assert len(first.sweep.variants) == 4
    assert done.failed == also_done.failed == {}


def test_workers_that_choose_the_same_variant_agree_on_it(fake, monkeypatch):
    is_acceptable = Explorer._is_acceptable

    def decide(explorer, name, changes):
        time.sleep(0.5 if name == "search-000" else 0)
        return is_acceptable(explorer, name, changes)

    monkeypatch.setattr(Explorer, "_is_acceptable", decide)
    (first, _), (second, _) = search_twice(fake, searching(space={"model.kernel_size": (3,)}))
    assert first.sweep.variants == second.sweep.variants
    assert first.sweep.variants.keys() == {"given", "search-000"}


def test_a_small_space_ends_the_search(fake):
    space = {"model.kernel_size": (3, 5, 9)}  # 9 is already a variant
    explorer, _ = search(fake, searching(space=space, trials=6))
    assert len(explorer.sweep.variants) == 1 + 2


def test_a_variant_that_fails_is_learned_from_when_it_succeeds(fake):
    start = fake.start

    def fail(run, folder, lock):
        fake.errors[run.id] = "error: no memory." if run.variant != "given" else ""
        return start(run, folder, lock)

    explorer, summary = search(fake, start=fail)
    assert len(explorer.sweep.variants) == 4  # the search continues
    assert set(summary.failed.values()) == {"no memory."}
    assert values(explorer) == {}
    fake.errors.clear()
    explorer, summary = search(fake)
    assert summary.failed == {}
    assert len(values(explorer)) == 3


def test_an_objective_that_is_not_measured_is_refused(fake):
    for changes, mention in (({"metric": "acu"}, "acu"), ({"stage": "trek"}, "trek")):
        with refused(SweepError, mention, field="search.metric"):
            search(fake, searching(**changes))
    assert not fake.folder.path.exists()
    # a known metric that a run did not write
    sweep = dataclasses.replace(
        searching(metric="test accuracy", stage="trec"),
        tasks={"trec": Task("text:trec", {"finetune.seeds": 1})},
    )
    with refused(SweepError, "discriminator_auc", value="test accuracy"):
        search(fake, sweep)


def test_a_search_keeps_its_space_and_objective(fake):
    search(fake, searching(trials=1))
    for changes, mentions in (
        ({"space": {**SPACE, "model.kernel_size": (3, 5)}}, ["3 | 5 | 7", "model.kernel_size"]),
        ({"space": {**SPACE, "model.layers": (1, 2)}}, ["model.layers", "1 | 2"]),
        ({"space": {"model.kernel_size": KERNELS}}, ["model.head_ratio", "2 | 3"]),
        ({"metric": "mlm_loss"}, ["discriminator_auc", "mlm_loss"]),
        ({"maximize": False}, ["maximize", "True", "False"]),
    ):
        with refused(SweepError, *mentions, path=fake.folder.path):
            search(fake, searching(**changes))


def test_a_variant_that_another_worker_started_with_another_config_is_refused(fake):
    explorer = Explorer(SWEEP, fake.folder, {})
    (run, _) = Explorer(SWEEP, fake.folder, {"train.steps": 50}).propose()
    fake.folder.write(Record(run.id, FINISHED, to_dict(run.config), ("main",)))
    with refused(SweepError, run.id, "config.train.steps", 50, 800):
        explorer.sync({})


def test_a_partial_last_line_of_the_journal_is_removed(fake):
    search(fake, searching(trials=1))
    with fake.folder.journal.open("a") as file:
        file.write('{"op_code": 4, "work')
    explorer, _ = search(fake)
    assert len(explorer.sweep.variants) == 4
    for line in fake.folder.journal.read_text().splitlines():
        json.loads(line)


def test_a_damaged_journal_is_refused_and_a_new_one_takes_no_folder_of_a_lost_one(fake):
    search(fake)
    before, text = set(fake.started), fake.folder.journal.read_text()
    for line in ("{", "null\n", "7\n", "[]\n", '"x"\n', "{}\n"):
        fake.folder.journal.write_text(line + text)
        with refused(SweepError, path=fake.folder.journal):
            search(fake)
    fake.folder.journal.unlink()
    fake.started.clear()
    search(fake)
    assert fake.started
    assert not before & set(fake.started)
    fake.folder.journal.unlink()
    fake.folder.journal.mkdir()
    with refused(SweepError, path=fake.folder.journal):
        search(fake)


def test_a_journal_that_is_deleted_during_a_search_is_reported(fake):
    def start(run, folder, lock):
        folder.journal.unlink(missing_ok=True)
        return fake.start(run, folder, lock)

    with refused(SweepError, path=fake.folder.journal):
        search(fake, start=start)
    assert fake.folder.read(fake.started[0]).state == FINISHED


def test_the_named_search_varies_the_share_of_heads(fake):
    sweep = dataclasses.replace(config_files.load_sweep("ablation:search"), seeds=(0,))
    shares = sweep.search.space["model.mixer_fields"]
    assert len(shares) == 3
    # smaller feed-forward layers leave parameters for more heads of the other kind
    space = {"model.mixer_fields": shares, "model.ffn_size": (256, 512)}
    sweep = dataclasses.replace(sweep, search=dataclasses.replace(sweep.search, space=space))
    explorer, summary = search(fake, sweep)
    assert summary.failed == {}
    runs = expand(explorer.sweep, fake.folder)
    mixers = [run.config.encoder.stages[0].layer.mixer for run in runs]
    assert {(m.attention_heads, m.convolution_heads) for m in mixers} == {(2, 2), (1, 3), (3, 1)}


def test_a_field_of_the_search_cannot_be_overridden(fake):
    with refused(SweepError, field="--config.model.ffn_size"):
        expand(SWEEP, fake.folder, {"model.ffn_size": 512})


def test_a_search_without_optuna_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with refused(SweepError, "pip install optuna"):
        Explorer(SWEEP, folder, {})
