"""Rows that Optuna chooses, instead of a grid, under a budget of parameters and FLOPs.

A trial of the study "search" is a row: every seed of it is a cell as of any other row, and the mean
of its metric over seeds is what Optuna learns from. A runner proposes a row when it has nothing
else to do, so that several search side by side. Unlike the queue, this study is the only record of
which rows there are: with a search the journal must be kept.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from convbert_jax.config import UserError, to_text
from convbert_jax.sweeps import describe, journal, results
from convbert_jax.sweeps.cells import Cell, check_unchanged, expand
from convbert_jax.sweeps.checks.rows import what_is_read
from convbert_jax.sweeps.folder import FINISHED, Folder, Record
from convbert_jax.sweeps.table import Row, Search, Sweep, SweepError

_STUDY, _ROW, _AGAIN, _SOUGHT = "search", "row", "again", "sought"
_TRIES = 60  # choices in vain, over the budget or known, until the search is at its end


class Explorer:
    """The rows of a search so far, and the next ones."""

    def __init__(self, sweep: Sweep, folder: Folder, overrides: Mapping[str, Any]):
        """Opens the journal; raises as `expand` and `journal.open_study`."""
        self._sweep, self._folder, self._overrides = sweep, folder, overrides
        self._search = sweep.search
        given = expand(sweep, folder, overrides)
        results.check_metrics(sweep, given)
        self._study = journal.open_study(folder, _STUDY, maximize=self._search.maximize)
        _check_unchanged(self._search, self._study, folder)
        self._known = {_essence(cell) for cell in given}
        self._most = _find_limits(self._search, given, folder)
        self._trials: dict[int, str] = {}  # number -> row, of those that are adopted
        self._rows: dict[str, Row] = {}
        self._cells: dict[str, list[Cell]] = {}
        self._refused: set[str] = set()  # changes that cannot be, are known or over the budget
        self._ended = False
        self._adopt()

    @property
    def sweep(self) -> Sweep:
        """With the rows that were found so far, after those that were given."""
        return dataclasses.replace(self._sweep, rows={**self._sweep.rows, **self._rows})

    def grow(
        self, records: Mapping[str, Record | None], failed: set[str], *, idle: bool
    ) -> list[Cell]:
        """Learns from what is finished; new cells, those of other runners too.

        Args:
          records: of all cells, as they are now; `failed`: those that are not tried again.
          idle: whether this runner has nothing to do; then a row is proposed if one is left.

        Raises:
          SweepError: what is finished does not have the metric that decides, or another runner
            began a new cell with another config.
        """
        self._learn(records, failed)
        new = self._adopt()
        if not new and idle and not self._ended and len(self._rows) < self._search.rows:
            with self._folder.alone("search"):
                new = self._adopt()  # what another proposed in between, and would be proposed again
                if not new:
                    sampler = self._study.sampler
                    self._ended = not self._propose()
                    self._study.sampler = sampler
                    new = self._adopt()
        if new:
            check_unchanged(new, self._folder)
        return new

    def _adopt(self) -> list[Cell]:
        """Cells of rows that are in the journal and not yet here; every runner names them alike."""
        new = []
        with journal.explain(self._folder):
            trials = self._study.get_trials(deepcopy=False)
        for trial in trials:
            if _ROW not in trial.user_attrs or trial.number in self._trials:
                continue
            row = Row(self._changes(trial.params))
            cells = self._expand(trial.user_attrs[_ROW], row)
            self._trials[trial.number] = trial.user_attrs[_ROW]
            if _essence(cells[0]) in self._known:  # the table has it too by now
                journal.end(self._study, trial.number, "PRUNED")
                continue
            self._known.add(_essence(cells[0]))
            self._rows[trial.user_attrs[_ROW]] = row
            self._cells[trial.user_attrs[_ROW]] = cells
            new += cells
        return new

    def _propose(self) -> bool:
        """Puts a row into the journal that is new and within the budget; False if none is found."""
        from optuna.samplers import RandomSampler

        for attempt in range(_TRIES):
            with journal.explain(self._folder):
                trial = self._study.ask()
                for path, values in self._search.space.items():
                    trial.suggest_categorical(path, tuple(range(len(values))))
            name = f"search-{trial.number:03d}"
            # A folder without its row is of a journal that is lost: its numbers are another row's.
            lost = (self._folder.path / "cells" / name).exists()
            if not lost and self._fits(name, Row(self._changes(trial.params))):
                trial.set_user_attr(_ROW, name)
                return True
            journal.end(self._study, trial, "PRUNED")
            if attempt == _TRIES // 2:  # what it learned leads to nothing new
                self._study.sampler = RandomSampler()
        return False

    def _fits(self, name: str, row: Row) -> bool:
        """Whether a row can be, is new, and is within the budget."""
        if repr(row) in self._refused:
            return False
        if self._is_new(name, row):
            return True
        self._refused.add(repr(row))
        return False

    def _is_new(self, name: str, row: Row) -> bool:
        one_seed = dataclasses.replace(self._sweep, seeds=self._sweep.seeds[:1])
        try:
            first = self._expand(name, row, one_seed)[0]
        except UserError:  # heads that do not divide, for one
            return False
        if _essence(first) in self._known:
            return False
        return all((count(first, self._folder) or 0) <= most for count, most in self._most)

    def _learn(self, records: Mapping[str, Record | None], failed: set[str]) -> None:
        """Tells Optuna of rows whose cells have all come to an end."""
        from optuna.trial import TrialState

        with journal.explain(self._folder):
            trials = self._study.get_trials(deepcopy=False)
        again = {trial.user_attrs.get(_AGAIN) for trial in trials}
        for trial in trials:
            cells = self._cells.get(self._trials.get(trial.number, ""), ())
            cells = [cell for cell in cells if cell.stage == self._search.stage]
            found = [records.get(cell.id) for cell in cells]
            value = None
            if cells and all(record and record.state == FINISHED for record in found):
                value = statistics.fmean(self._value(record) for record in found)
            done = value is not None and math.isfinite(value)
            lost = value is not None or any({cell.id, cell.after} & failed for cell in cells)
            if trial.state == TrialState.RUNNING and done:
                journal.end(self._study, trial.number, "COMPLETE", value)
            elif trial.state == TrialState.RUNNING and lost:
                journal.end(self._study, trial.number, "FAIL")
            elif trial.state == TrialState.FAIL and done and trial.number not in again:
                self._tell_again(trial, value)

    def _tell_again(self, trial: Any, value: float) -> None:
        """Of a row that failed, and was done when it was tried again: what Optuna has of a trial
        that has ended stays, so it gets another one.
        """
        import optuna

        told = optuna.trial.create_trial(
            params=trial.params,
            distributions=trial.distributions,
            value=value,
            user_attrs={_AGAIN: trial.number},
        )
        with self._folder.alone("search"), journal.explain(self._folder):
            trials = self._study.get_trials(deepcopy=False)
            if trial.number not in {known.user_attrs.get(_AGAIN) for known in trials}:
                self._study.add_trial(told)

    def _value(self, record: Record) -> float:
        metric = self._search.metric
        if metric not in record.values:
            raise SweepError(
                f"the search goes by {metric}, which {record.cell} does not have; it has: "
                f"{', '.join(record.values)}."
            )
        value = record.values[metric]
        return math.nan if value is None else value

    def _changes(self, params: Mapping[str, int]) -> dict[str, Any]:
        return {path: self._search.space[path][index] for path, index in params.items()}

    def _expand(self, name: str, row: Row, sweep: Sweep | None = None) -> list[Cell]:
        alone = dataclasses.replace(
            sweep or self._sweep, rows={name: row}, baseline=name, search=None
        )
        return expand(alone, self._folder, self._overrides)


def _check_unchanged(search: Search, study: Any, folder: Folder) -> None:
    """What is in the journal are places in the space, and numbers of one metric."""
    sought = {
        f"space of {path}": " | ".join(map(to_text, values))
        for path, values in search.space.items()
    } | {name: str(getattr(search, name)) for name in ("metric", "maximize", "stage")}
    with journal.explain(folder):
        kept = study.user_attrs.get(_SOUGHT)
        if kept is None:
            study.set_user_attr(_SOUGHT, sought)
            return
    for name in sought | kept:
        if sought.get(name) != kept.get(name):
            raise SweepError(
                f"--workdir={folder} holds a search whose {name} was {kept.get(name, 'not there')},"
                f" now {sought.get(name, 'not there')}; choose another --workdir, or set it back."
            )


def _find_limits(search: Search, given: list[Cell], folder: Folder) -> list[tuple[Callable, float]]:
    """What a row is counted by, and the most that there may be of it."""
    limits = [
        (describe.count_flops, search.most_flops),
        (describe.count_parameters, search.most_parameters),
    ]
    if search.within:
        like = next(cell for cell in given if cell.row == search.within)
        limits += [(count, count(like, folder)) for count, _ in limits]
    return [(count, most) for count, most in limits if most]


def _essence(cell: Cell) -> str:
    """What makes two rows the same; of any of their cells but for the seed."""
    return what_is_read(dataclasses.replace(cell.config, seed=0))
