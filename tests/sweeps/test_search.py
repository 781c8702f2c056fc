"""Rows that Optuna chooses: within the budget, none twice, from what the others taught it."""

import dataclasses
import threading
import time

import optuna
import pytest

from convbert_jax import config_files
from convbert_jax.config import to_dict
from convbert_jax.sweeps import Row, Search, Sweep, SweepError, Task, describe, runner
from convbert_jax.sweeps.cells import check_unchanged, expand
from convbert_jax.sweeps.folder import FINISHED, Folder, Record
from convbert_jax.sweeps.search import Explorer
from tests.sweeps.machine import Machine

TAPS = tuple(range(3, 18, 2))
# heads of 4: a ratio of 3 cannot be
SPACE = {"model.kernel_size": TAPS, "model.head_ratio": (2, 3), "model.ffn_size": (256, 512, 1024)}
SEARCH = Search(SPACE, rows=6, metric="discriminator_auc", maximize=True)
TABLE = Sweep("tiny", {"given": Row()}, seeds=(0, 1), search=SEARCH)


class Judge(Machine):
    """More taps are better, and seeds differ."""

    def values(self, cell):
        return {"discriminator_auc": cell.config.model.kernel_size + 0.1 * cell.seed}


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(runner, "_POLL", 0.02)


@pytest.fixture
def machine(tmp_path) -> Judge:
    return Judge(Folder(tmp_path / "sweep"))


def search(machine, table=TABLE, **options):
    explorer = Explorer(table, machine.folder, {})
    cells = expand(explorer.sweep, machine.folder)
    return explorer, machine.run(cells, explorer=explorer, **options)


def trials(explorer):
    return explorer._study.get_trials(deepcopy=False)


def test_a_search_finds_rows_within_the_budget(machine):
    budget = dataclasses.replace(SEARCH, most_parameters=1_401_200, most_flops=9.872e12)
    explorer, summary = search(machine, dataclasses.replace(TABLE, search=budget))
    assert summary.failed == {}
    rows = explorer.sweep.rows
    assert len(rows) == 1 + 6
    cells = expand(explorer.sweep, machine.folder)  # refuses two rows of one config
    assert sorted(cell.id for cell in cells) == sorted(machine.started)
    assert all(describe.count_parameters(cell, machine.folder) <= 1_401_200 for cell in cells)
    assert all(describe.count_flops(cell, machine.folder) <= 9.872e12 for cell in cells)
    assert all(cell.config.model.head_ratio == 2 for cell in cells)
    told = {t.user_attrs["row"]: t for t in trials(explorer) if t.value is not None}
    assert told.keys() == rows.keys() - {"given"}
    for name, trial in told.items():
        # the mean over seeds 0 and 1
        assert trial.value == pytest.approx(rows[name].changes["model.kernel_size"] + 0.05)


def test_a_search_goes_on_with_its_rows(machine):
    half = dataclasses.replace(TABLE, search=dataclasses.replace(SEARCH, rows=3))
    first, _ = search(machine, half)
    started = list(machine.started)
    explorer, _ = search(machine)
    assert first.sweep.rows.items() <= explorer.sweep.rows.items()
    assert len(explorer.sweep.rows) == 7
    assert machine.started[: len(started)] == started
    assert len(set(machine.started)) == len(machine.started) == 14
    cells = expand(explorer.sweep, machine.folder)
    assert check_unchanged(cells, machine.folder) == (0, [])


def test_runners_search_together(machine):
    machine.seconds = 0.05
    (first, done), (second, also_done) = search_twice(machine)
    assert first.sweep.rows == second.sweep.rows
    assert len(first.sweep.rows) == 7
    assert done.failed == also_done.failed == {}


def test_runners_that_choose_the_same_row_agree_on_it(machine, monkeypatch):
    """Whoever chose it first may be the later one to say so."""
    fits = Explorer._fits

    def think(explorer, name, row):
        time.sleep(0.5 if name == "search-000" else 0)
        return fits(explorer, name, row)

    monkeypatch.setattr(Explorer, "_fits", think)
    only = dataclasses.replace(SEARCH, space={"model.kernel_size": (3,)})
    (first, _), (second, _) = search_twice(machine, dataclasses.replace(TABLE, search=only))
    assert first.sweep.rows == second.sweep.rows
    assert first.sweep.rows.keys() == {"given", "search-000"}


def search_twice(machine, table=TABLE):
    """By two runners at once, neither of which runs a cell of the other."""
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(search(machine, table))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(set(machine.started)) == len(machine.started)
    return found


def test_without_its_journal_no_row_takes_the_folder_of_another(machine):
    search(machine)
    before = list(machine.started)
    text = machine.folder.journal.read_text()
    machine.folder.journal.write_text("{\n" + text)
    with pytest.raises(SweepError, match="put a copy of it back, as the rows of a search"):
        search(machine)
    machine.folder.journal.unlink()
    machine.started.clear()
    search(machine)
    assert not {cell for cell in machine.started if cell.startswith("search")} & set(before)


def test_a_small_space_comes_to_its_end(machine):
    space = {"model.kernel_size": (3, 5, 9)}  # 9 is what the given row has
    table = dataclasses.replace(TABLE, search=dataclasses.replace(SEARCH, space=space))
    explorer, _ = search(machine, table)
    assert len(explorer.sweep.rows) == 1 + 2
    assert isinstance(explorer._study.sampler, optuna.samplers.TPESampler)  # for the next row


def test_a_row_that_fails_teaches_and_stops_nothing(machine):
    start = machine.start

    def fail(cell, folder, lock):
        if cell.row != "given":
            machine.ends[cell.id] = "error: no room."
        return start(cell, folder, lock)

    machine.start = fail
    explorer, summary = search(machine)
    assert len(explorer.sweep.rows) == 7
    assert set(summary.failed.values()) == {"no room."}
    assert all(trial.value is None for trial in trials(explorer))


def test_a_task_without_the_metric_is_a_sentence(machine):
    task = {"trec": Task("text:trec", {"finetune.seeds": 1})}
    asked = dataclasses.replace(SEARCH, metric="test accuracy", stage="trec")
    table = dataclasses.replace(TABLE, search=asked, tasks=task)
    with pytest.raises(
        SweepError, match=r"goes by test accuracy, which .* does not have; it has: disc"
    ):
        search(machine, table)


def test_a_search_within_a_row_spends_no_more_than_it(machine):
    """Whatever is overridden: of other steps a fixed number of FLOPs would be wrong."""
    budget = dataclasses.replace(SEARCH, within="given")
    changed = {"train.steps": 200}
    table = dataclasses.replace(TABLE, search=budget, changes=changed)
    explorer, _ = search(machine, table)
    cells = {cell.row: cell for cell in expand(explorer.sweep, machine.folder)}
    given = cells.pop("given")
    assert given.config.model.kernel_size == 9
    assert cells
    for cell in cells.values():
        assert describe.count_parameters(cell, machine.folder) <= describe.count_parameters(
            given, machine.folder
        )
        assert describe.count_flops(cell, machine.folder) <= describe.count_flops(
            given, machine.folder
        )
    lost = dataclasses.replace(TABLE, search=dataclasses.replace(SEARCH, within="nobody"))
    with pytest.raises(SweepError, match="within=nobody, which is no row; rows: given"):
        expand(lost, machine.folder)


def test_the_named_search_varies_the_share_of_heads(machine):
    """Whatever is found has convolution and attention, of shares that its heads allow."""
    table = dataclasses.replace(config_files.load_sweep("ablation:search"), seeds=(0,))
    shares = table.search.space["model.mixer_fields"]
    assert len(shares) == 3
    # what more heads of one kind cost is saved elsewhere
    space = {"model.mixer_fields": shares, "model.ffn_size": (256, 512)}
    table = dataclasses.replace(table, search=dataclasses.replace(table.search, space=space))
    explorer, summary = search(machine, table)
    assert summary.failed == {}
    cells = expand(explorer.sweep, machine.folder)
    mixers = [cell.config.encoder.stages[0].layer.mixer for cell in cells]
    assert {(m.attention_heads, m.convolution_heads) for m in mixers} == {(2, 2), (1, 3), (3, 1)}


def test_a_metric_that_is_not_there_is_a_sentence(machine):
    table = dataclasses.replace(TABLE, search=dataclasses.replace(SEARCH, metric="acu"))
    with pytest.raises(SweepError, match="'acu'"):
        search(machine, table)
    assert not machine.folder.path.exists()


def test_a_search_by_a_stage_that_no_cell_has_is_refused(machine):
    """It had nothing to learn from, and searched at random."""
    table = dataclasses.replace(TABLE, search=dataclasses.replace(SEARCH, stage="pretraining"))
    with pytest.raises(SweepError, match="'pretraining'"):
        search(machine, table)
    assert not machine.folder.path.exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"space": {**SPACE, "model.kernel_size": (3, 5)}},
            "whose space of model.kernel_size was 3 | 5 | 7 | 9 | 11 | 13 | 15 | 17, now 3 | 5;",
        ),
        (
            {"space": {"model.kernel_size": TAPS, "model.layers": (1, 2)}},
            "whose space of model.layers was not there, now 1 | 2;",
        ),
        ({"space": {"model.kernel_size": TAPS}}, "model.head_ratio was 2 | 3, now not there;"),
        ({"metric": "mlm_loss"}, "whose metric was discriminator_auc, now mlm_loss;"),
        ({"maximize": False}, "whose maximize was True, now False;"),
    ],
)
def test_a_search_that_has_begun_keeps_what_it_seeks(machine, changes, says):
    few = dataclasses.replace(SEARCH, rows=2)
    search(machine, dataclasses.replace(TABLE, search=few))
    other = dataclasses.replace(TABLE, search=dataclasses.replace(SEARCH, **changes))
    with pytest.raises(SweepError) as caught:
        search(machine, other)
    assert says in str(caught.value)
    explorer, _ = search(machine)  # more rows are the same search
    assert len(explorer.sweep.rows) == 7


def test_a_row_that_another_runner_began_otherwise_is_refused(machine):
    explorer = Explorer(TABLE, machine.folder, {})
    other = Explorer(TABLE, machine.folder, {"train.steps": 50})
    cell = other.grow({}, set(), idle=True)[0]
    config = to_dict(cell.config)
    machine.folder.write(Record(cell.id, FINISHED, config, ("main",)))
    with pytest.raises(
        SweepError,
        match=r"search-\d+/seed-0/pretrain has another config: .*train\.steps was 50, now 800",
    ):
        explorer.grow({}, set(), idle=True)


def test_a_row_that_was_done_after_it_failed_is_learned_from(machine):
    few = dataclasses.replace(TABLE, search=dataclasses.replace(SEARCH, rows=1))
    start = machine.start

    def fail(cell, folder, lock):
        machine.ends[cell.id] = "error: no room." if cell.row != "given" else ""
        return start(cell, folder, lock)

    machine.start = fail
    search(machine, few)
    machine.start = start
    machine.ends.clear()
    for _ in range(2):  # told once
        explorer, summary = search(machine, few)
        assert summary.failed == {}
        row = next(r for name, r in explorer.sweep.rows.items() if name != "given")
        told = [trial.value for trial in trials(explorer) if trial.value is not None]
        assert told == [pytest.approx(row.changes["model.kernel_size"] + 0.05)]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rows": 0}, "the search has no rows"),
        ({"space": {}}, "no fields"),
        ({"space": {"model.kernel_size": ()}}, "a field without values"),
        ({"space": {"model.kernel_siez": (3,)}}, "which is no field; is it model.kernel_size"),
    ],
)
def test_a_search_that_cannot_be(machine, changes, says):
    table = dataclasses.replace(TABLE, search=dataclasses.replace(SEARCH, **changes))
    with pytest.raises(SweepError) as caught:
        expand(table, machine.folder)
    assert says in str(caught.value)


def test_what_is_searched_cannot_be_overridden(machine):
    with pytest.raises(SweepError, match=r"model\.ffn_size is what the cells differ in"):
        expand(TABLE, machine.folder, {"model.ffn_size": 512})
