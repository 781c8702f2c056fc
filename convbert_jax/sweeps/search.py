"""Variants that Optuna chooses under a budget of parameters and FLOPs.

Each trial of the study in journal.log is a variant, with runs for all seeds as any other variant;
the objective is the mean of a metric over seeds. A worker proposes a variant when it has no other
run to do, so several workers search in parallel. The journal is the only record of the variants.
"""

import contextlib
import dataclasses
import json
import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from convbert_jax.config import UserError, to_text
from convbert_jax.sweeps import results
from convbert_jax.sweeps.runs import (
    check_unchanged,
    count_flops,
    count_parameters,
    expand,
    identity,
)
from convbert_jax.sweeps.table import FINISHED, Folder, Record, Run, Sweep, SweepError, Variant

_VARIANT, _DEFINITION = "variant", "definition"  # attributes of a trial, of the study
_ATTEMPTS = 60  # proposals that are known, invalid or above the budget, until the search ends
# Raised by Optuna for a damaged journal: no JSON, or JSON of something else.
_DAMAGE = (
    *(json.JSONDecodeError, UnicodeDecodeError, KeyError, AssertionError),
    *(TypeError, AttributeError, IsADirectoryError),
)


class Explorer:
    """Variants of a search so far, and the next ones.

    Attributes:
      sweep: the sweep with the variants that were found so far.
    """

    def __init__(self, sweep: Sweep, folder: Folder, overrides: Mapping[str, Any]):
        """Opens the journal.

        Raises:
          SweepError: as `expand`; Optuna is not installed; the journal is damaged or belongs to
            another search.
        """
        self.sweep = sweep
        self._given, self._search = sweep, sweep.search
        self._folder, self._overrides = folder, overrides
        runs = expand(sweep, folder, overrides)
        results.check_metrics(sweep, runs)
        self._study = _open_study(folder, maximize=self._search.maximize)
        self._check_definition()
        self._known = {self._identity(run) for run in runs}
        self._limits = [
            (count_flops, self._search.max_flops),
            (count_parameters, self._search.max_parameters),
        ]
        if self._search.budget_of:
            like = next(run for run in runs if run.variant == self._search.budget_of)
            self._limits += [(count, count(like, folder)) for count, _ in self._limits]
        self._runs: dict[int, list[Run]] = {}  # by number of the trial
        self._refused: set[str] = set()  # proposals not to be checked again
        self._ended = False
        self._adopt()

    def sync(self, records: Mapping[str, Record | None]) -> list[Run]:
        """Reports finished variants to Optuna; returns runs of variants that others proposed.

        Args:
          records: of all runs.

        Raises:
          SweepError: a finished run lacks the objective, or another worker started a run of a new
            variant with another config.
        """
        for trial in self._trials():
            runs = self._runs.get(trial.number, ())
            found = [records.get(run.id) for run in runs if run.stage == self._search.stage]
            if trial.state.is_finished() or not found:
                continue
            if all(record and record.state == FINISHED for record in found):
                value = statistics.fmean(self._objective(record) for record in found)
                self._tell(trial.number, "COMPLETE" if math.isfinite(value) else "FAIL", value)
        return self._adopt()

    def propose(self) -> list[Run]:
        """Adds a variant to the journal; returns its runs, or [] at the end of the search."""
        with self._folder.alone("search"):
            new = self._adopt()  # another worker may have added one meanwhile
            found = len(self.sweep.variants) - len(self._given.variants)
            if new or self._ended or found >= self._search.trials:
                return new
            self._ended = not self._find()
            return self._adopt()

    def _find(self) -> bool:
        """Adds a variant that is new and within the budget; False if none was found."""
        from optuna.samplers import RandomSampler

        sampler = self._study.sampler
        try:
            for attempt in range(_ATTEMPTS):
                if attempt == _ATTEMPTS // 2:  # what TPE learned leads to no new variant
                    self._study.sampler = RandomSampler()
                with _journal_errors(self._folder):
                    trial = self._study.ask()
                    for path, values in self._search.space.items():
                        trial.suggest_categorical(path, tuple(range(len(values))))
                name = f"search-{trial.number:03d}"
                # A folder without a variant belongs to a journal that was lost.
                exists = (self._folder.path / "runs" / name).exists()
                if not exists and self._is_acceptable(name, self._changes(trial.params)):
                    trial.set_user_attr(_VARIANT, name)
                    return True
                self._tell(trial.number, "PRUNED")
        finally:
            self._study.sampler = sampler
        return False

    def _is_acceptable(self, name: str, changes: Mapping[str, Any]) -> bool:
        """Whether a variant is valid, new and within the budget."""
        if repr(changes) in self._refused:
            return False
        with contextlib.suppress(UserError):  # heads that do not divide, for one
            run = self._expand(name, changes, self._given.seeds[:1])[0]
            within = all(
                (count(run, self._folder) or 0) <= limit for count, limit in self._limits if limit
            )
            if within and self._identity(run) not in self._known:
                return True
        self._refused.add(repr(changes))
        return False

    def _adopt(self) -> list[Run]:
        """Returns the runs of variants that are new in the journal."""
        new = []
        for trial in self._trials():
            name = trial.user_attrs.get(_VARIANT)
            if name is None or trial.number in self._runs:
                continue
            changes = self._changes(trial.params)
            runs = self._runs[trial.number] = self._expand(name, changes, self._given.seeds)
            identity = self._identity(runs[0])
            if identity in self._known:  # the sweep contains it by now
                self._runs[trial.number] = []
                self._tell(trial.number, "PRUNED")
                continue
            self._known.add(identity)
            variants = {**self.sweep.variants, name: Variant(changes)}
            self.sweep = dataclasses.replace(self.sweep, variants=variants)
            new += runs
        if new:
            check_unchanged(new, self._folder)
        return new

    def _objective(self, record: Record) -> float:
        metric = self._search.metric
        if metric not in record.values:
            raise SweepError(
                f"is not a metric of {record.run}, which has: {', '.join(record.values)}.",
                field="search.metric",
                value=metric,
            )
        value = record.values[metric]
        return math.nan if value is None else value

    def _changes(self, params: Mapping[str, int]) -> dict[str, Any]:
        return {path: self._search.space[path][index] for path, index in params.items()}

    def _expand(self, name: str, changes: Mapping[str, Any], seeds: tuple[int, ...]) -> list[Run]:
        variants = {name: Variant(changes)}
        alone = dataclasses.replace(
            self._given, variants=variants, seeds=seeds, baseline=name, search=None
        )
        return expand(alone, self._folder, self._overrides)

    def _identity(self, run: Run) -> str:
        return identity(dataclasses.replace(run.config, seed=0))

    def _trials(self) -> list[Any]:
        with _journal_errors(self._folder):
            return self._study.get_trials(deepcopy=False)

    def _tell(self, number: int, state: str, value: float | None = None) -> None:
        """Ends a trial; `state` is a name of `optuna.trial.TrialState`."""
        from optuna.trial import TrialState

        values = value if state == "COMPLETE" else None
        with _journal_errors(self._folder), contextlib.suppress(RuntimeError):  # already ended
            self._study.tell(number, values, state=TrialState[state], skip_if_finished=True)

    def _check_definition(self) -> None:
        """Refuses a journal of another search: trials store indices of the space's values."""
        search = self._search
        definition = {
            f"space of {path}": " | ".join(map(to_text, values))
            for path, values in search.space.items()
        } | {name: str(getattr(search, name)) for name in ("metric", "maximize", "stage")}
        with _journal_errors(self._folder):
            kept = self._study.user_attrs.get(_DEFINITION)
            if kept is None:
                self._study.set_user_attr(_DEFINITION, definition)
                return
        for name in definition | kept:
            old, new = kept.get(name, "absent"), definition.get(name, "absent")
            if old != new:
                raise SweepError(
                    f"Cannot continue the search: {name} was {old}, now {new}. Restore it, or use "
                    "another --workdir.",
                    path=self._folder.path,
                )


def _open_study(folder: Folder, *, maximize: bool) -> Any:
    """Returns the study (`optuna.Study`) of the journal, created if it does not exist."""
    try:
        import optuna
    except ImportError:
        raise SweepError("A search needs Optuna: pip install optuna.") from None
    from optuna.storages import journal

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    folder.path.mkdir(parents=True, exist_ok=True)
    path = folder.journal.absolute()  # its lock is a link with this name
    if path.is_symlink():
        raise SweepError("is a symbolic link. Replace it by the file itself.", path=path)
    lock = journal.JournalFileSymlinkLock(str(path))
    with _journal_errors(folder):
        lock.acquire()
        try:
            _remove_partial_line(folder)
        finally:
            lock.release()
        backend = journal.JournalFileBackend(str(path), lock_obj=lock)
        return optuna.create_study(
            storage=optuna.storages.JournalStorage(backend),
            study_name="search",
            direction="maximize" if maximize else "minimize",
            load_if_exists=True,
        )


def _remove_partial_line(folder: Folder) -> None:
    """Removes a last line that a full disk truncated; the next one would be appended to it."""
    if folder.journal.exists():
        content = folder.journal.read_bytes()
        if not content.endswith(b"\n"):
            with folder.journal.open("r+b") as file:
                file.truncate(content.rfind(b"\n") + 1)


@contextlib.contextmanager
def _journal_errors(folder: Folder) -> Iterator[None]:
    """Turns errors of Optuna about a damaged or deleted journal into SweepError."""
    try:
        yield
    except (FileNotFoundError, *_DAMAGE) as error:
        deleted = isinstance(error, FileNotFoundError)
        reason = "deleted by another process" if deleted else f"damaged ({type(error).__name__})"
        raise SweepError(
            f"{reason}. Restore a copy, the only record of the search's variants, or use another "
            "--workdir.",
            path=folder.journal,
        ) from error
