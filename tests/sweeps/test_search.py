"""Rows that Optuna chooses: within the budget, none twice, from what the others taught it."""

import dataclasses
import threading

import pytest

from convbert_jax.sweeps import Row, Search, Sweep, SweepError, describe, runner
from convbert_jax.sweeps.cells import check_unchanged, expand
from convbert_jax.sweeps.folder import Folder
from convbert_jax.sweeps.search import Explorer
from tests.sweeps.machine import Machine

TAPS = tuple(range(3, 18, 2))
# heads of 4: a ratio of 3 cannot be
SPACE = {"model.kernel_size": TAPS, "model.head_ratio": (2, 3), "model.ffn_size": (256, 512, 1024)}
SEARCH = Search(SPACE, rows=6, metric="auc", maximize=True)
TABLE = Sweep("tiny", {"given": Row()}, seeds=(0, 1), search=SEARCH)


class Judge(Machine):
    """More taps are better, and seeds differ."""

    def values(self, cell):
        return {"auc": cell.config.model.kernel_size + 0.1 * cell.seed}


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
    assert all(describe.count_parameters(cell) <= 1_401_200 for cell in cells)
    assert all(describe.count_flops(cell) <= 9.872e12 for cell in cells)
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
    found = []
    threads = [threading.Thread(target=lambda: found.append(search(machine))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(set(machine.started)) == len(machine.started)
    rows = [set(explorer.sweep.rows) for explorer, _ in found]
    assert rows[0] == rows[1]
    assert 7 <= len(rows[0]) <= 8  # both may propose the last one
    assert all(summary.failed == {} for _, summary in found)


def test_a_small_space_comes_to_its_end(machine):
    space = {"model.kernel_size": (3, 5, 9)}  # 9 is what the given row has
    table = dataclasses.replace(TABLE, search=dataclasses.replace(SEARCH, space=space))
    explorer, _ = search(machine, table)
    assert len(explorer.sweep.rows) == 1 + 2


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


def test_a_metric_that_is_not_there_is_a_sentence(machine):
    table = dataclasses.replace(TABLE, search=dataclasses.replace(SEARCH, metric="acu"))
    with pytest.raises(SweepError, match=r"goes by acu, which .* does not have; it has: auc"):
        search(machine, table)


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
