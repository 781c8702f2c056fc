"""Files that fine-tuning keeps in its folder, so that it can be stopped and resumed.

WORKDIR/results.jsonl     one line per finished run
WORKDIR/unfinished/       checkpoints of the run in progress, or of several seeds that train
                          together, and run.json, which describes it; removed when the run is done
WORKDIR/began_with.json   {"weights": checksum, "tasks": {TASK: {SPLIT or "teacher": checksum}}}:
                          the weights, rows and teachers that the runs started from

The config only has file names. Their content may change between two starts, such as the newest
checkpoint of a run that is still training. Folders without began_with.json are accepted and get
one.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath

from convbert_jax import storage
from convbert_jax.config import CheckpointSection, Config
from convbert_jax.data.tasks.labelled_text import Rows
from convbert_jax.finetuning.task import FinetuneTask, FinetuningError, Scores
from convbert_jax.training import distributed
from convbert_jax.training.checkpoints import Checkpoints
from convbert_jax.training.partitioning import Params
from convbert_jax.training.train_step import TrainState
from convbert_jax.workdir import Workdir

_NUMBER = (int, float)
_RESULT_FIELDS = {
    "task": str,
    "setting": dict,
    "seed": int,
    "steps": int,
    "loss": (*_NUMBER, type(None)),
    "scores": dict,
    "seconds": _NUMBER,
    "examples_per_second": _NUMBER,
}
_REMEDY = "delete that line to train its run again; other runs are not affected"


@dataclasses.dataclass(frozen=True)
class Setting:
    """Hyperparameters that a search varies."""

    learning_rate: float
    epochs: float

    def __str__(self) -> str:
        return f"learning rate {self.learning_rate:g}, {self.epochs:g} epochs"


@dataclasses.dataclass(frozen=True)
class RunResult:
    """One finished run.

    `scores` maps split and metric to a fraction, NaN if the run diverged.
    """

    task: str
    setting: Setting
    seed: int
    steps: int
    loss: float  # of the last step
    scores: dict[str, Scores]
    seconds: float  # training time, for all runs that were trained together
    examples_per_second: float
    privacy: dict[str, float] | None = None  # see `PrivacyPlan`

    @property
    def diverged(self) -> bool:
        return not math.isfinite(self.loss)


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """All runs of a task.

    Attributes:
      metrics: Names; the median over seeds of the first one, on the first split, selects `chosen`.
      runs: Runs of all settings.
      folders: Folders of the chosen runs, by seed.
    """

    task: str
    metrics: tuple[str, ...]
    splits: tuple[str, ...]  # splits with scores
    chosen: Setting
    runs: tuple[RunResult, ...]
    folders: tuple[epath.Path, ...]

    @property
    def chosen_runs(self) -> tuple[RunResult, ...]:
        """Return the runs of the chosen setting, by seed."""
        return runs_of(self.runs, self.chosen)

    @property
    def medians(self) -> dict[Setting, float]:
        """Return the median that selected `chosen`, for each setting."""
        settings = dict.fromkeys(run.setting for run in self.runs)
        return {
            setting: median_of(runs_of(self.runs, setting), self.splits[0], self.metrics[0])
            for setting in settings
        }


def read_results(workdir: Workdir) -> list[RunResult]:
    """Read the finished runs, and remove a partly written last line.

    Raises:
      DamagedFileError: Another line is not a result; the message names the line.
    """
    path = workdir.results
    try:
        lines = storage.read_json_lines(path, remedy=_REMEDY, fields=_RESULT_FIELDS)
    except FileNotFoundError:
        return []
    content = path.read_bytes()
    if not content.endswith(b"\n") and content:
        with storage.replacing(path) as file:
            file.write(content[: content.rfind(b"\n") + 1])
    results = []
    for number, values in enumerate(lines, start=1):
        try:
            results.append(_to_result(values))
        except (TypeError, ValueError, AttributeError) as error:
            raise storage.damaged(path, f"line {number}: {error}", _REMEDY) from None
    return results


def check_scores(
    workdir: Workdir, runs: Sequence[RunResult], splits: Sequence[str], metrics: Sequence[str]
) -> None:
    """Check that results have all scores of the task.

    Raises:
      DamagedFileError: A score is missing; the message names the run.
    """
    for run in runs:
        lacks = [f"{s} {m}" for s in splits for m in metrics if m not in run.scores.get(s, {})]
        if lacks:
            what = f"the result of {run.task}, seed {run.seed}, {run.setting} has no {lacks[0]}"
            raise storage.damaged(workdir.results, what, _REMEDY)


def _to_result(values: dict[str, Any]) -> RunResult:
    """Parse a result; raises TypeError, ValueError or AttributeError for an invalid value."""
    setting = Setting(**values["setting"])
    for value in dataclasses.astuple(setting):
        if not isinstance(value, _NUMBER):
            raise TypeError(f"{value!r} is not a number")
    scores = {
        split: {name: _number(value) for name, value in found.items()}
        for split, found in values["scores"].items()
    }
    return RunResult(
        **values | {"setting": setting, "loss": _number(values["loss"]), "scores": scores}
    )


def _number(value: Any) -> float:
    """Return the number; None stands for NaN, which JSON does not have."""
    if value is not None and not isinstance(value, _NUMBER):
        raise TypeError(f"{value!r} is not a number")
    return math.nan if value is None else value


def runs_of(runs: Sequence[RunResult], setting: Setting) -> tuple[RunResult, ...]:
    """Return the runs of one setting, by seed."""
    return tuple(sorted((r for r in runs if r.setting == setting), key=lambda r: r.seed))


def median_of(runs: Sequence[RunResult], split: str, metric: str) -> float:
    """Return the median over seeds; diverged runs count as -inf, the worst score."""
    values = [run.scores[split][metric] for run in runs]
    return statistics.median(-math.inf if math.isnan(value) else value for value in values)


def append_result(workdir: Workdir, result: RunResult) -> None:
    """Append the result as one line."""
    values = dataclasses.asdict(result)
    if result.privacy is None:
        del values["privacy"]
    values["loss"] = _finite(result.loss)
    values["scores"] = {
        split: {name: _finite(v) for name, v in scores.items()}
        for split, scores in result.scores.items()
    }
    with contextlib.closing(storage.Lines(workdir.results)) as lines:
        lines.append(json.dumps(storage.seal(values)))


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


AGREE_EVERY = 10  # steps between synchronizations of several processes, which make all wait
# Content of a folder. Another run's state is not resumed: its seeds are now grouped differently.
_NOTHING, _OURS, _ANOTHERS = range(3)


class Unfinished:
    """Saves the state of one run at a time in one folder; all processes must call all methods."""

    def __init__(self, workdir: Workdir, run: Mapping[str, Any], minutes: float):
        """Create the object without reading or writing anything.

        Args:
          run: JSON that identifies this run among all runs of `workdir`.
          minutes: Minutes between checkpoints; 0 saves only when a signal requests a stop.
        """
        self._workdir, self._folder = workdir, workdir.unfinished
        self._run = dict(run)
        self._minutes = minutes
        self._last = time.perf_counter()
        self._checkpoints: Checkpoints | None = None

    def resume(self, abstract: TrainState) -> TrainState | None:
        """Restore the state of this run; return None without a checkpoint.

        Args:
          abstract: `jax.ShapeDtypeStruct`s with shardings.

        Raises:
          CheckpointError: There are checkpoints, but none can be read.
          DamagedFileError: The description of the run is damaged.
        """
        self._last = time.perf_counter()
        found = distributed.broadcast_int(self._look())
        if found == _NOTHING:
            return None
        if found == _OURS:
            found = self._open().restore(abstract)
            if found:
                state, _ = found
                logging.info("Resuming from step %d of the stopped run.", int(state.step))
                return state
        self.remove()
        return None

    def keep_if_due(self, state: TrainState, done: int) -> None:
        """Start to write a checkpoint if the last one is older than `minutes`.

        Args:
          done: Number of steps in `state`, known without waiting for the device.

        Raises:
          CheckpointError: The checkpoint cannot be written.
          OwnershipError: Another run has taken over the folder.
        """
        due = bool(self._minutes) and time.perf_counter() - self._last > 60 * self._minutes
        if jax.process_count() > 1:
            if not self._minutes or done % AGREE_EVERY:
                return
            due = bool(distributed.broadcast_int(due))
        if due:
            self.keep(state)
            self._last = time.perf_counter()

    def keep(self, state: TrainState) -> None:
        """Start to write a checkpoint; raises as `keep_if_due`."""
        self._workdir.check_owner()
        if self._checkpoints is None:
            if jax.process_index() == 0:
                self._folder.path.mkdir(parents=True, exist_ok=True)
                storage.write_json(self._folder.unfinished_run, self._run)
            distributed.barrier("unfinished run named")
        self._open().save(state, self._run)

    def close(self) -> None:
        """Wait until all checkpoints are on disk; raises as `keep_if_due`."""
        if self._checkpoints is not None:
            checkpoints, self._checkpoints = self._checkpoints, None
            checkpoints.close()

    def remove(self) -> None:
        """Delete the checkpoints of the finished run."""
        self.close()
        distributed.barrier("unfinished run closed")
        if jax.process_index() == 0:
            storage.remove_tree(self._folder.path)
        distributed.barrier("unfinished run removed")

    def _open(self) -> Checkpoints:
        if self._checkpoints is None:
            section = CheckpointSection(keep=2)  # a kill may damage the newest one
            self._checkpoints = Checkpoints(self._folder.checkpoints, section)
        return self._checkpoints

    def _look(self) -> int:
        """Return the content of the folder as seen by process 0.

        On shared storage, other processes may see changes later.
        """
        if jax.process_index() != 0 or not self._folder.path.is_dir():
            return _NOTHING
        remedy = f"delete {self._folder} to restart that run from the beginning"
        try:
            found = storage.read_json(self._folder.unfinished_run, remedy=remedy)
        except FileNotFoundError:  # killed before the first checkpoint
            return _ANOTHERS
        return _OURS if found == self._run else _ANOTHERS


_TEACHER = "teacher"
_PROVENANCE_FIELDS = {"weights": (str, type(None)), "tasks": dict}


def checksum_rows(rows: Rows) -> str:
    """Return a checksum of encoded rows, without the teacher's outputs.

    Each process computes those on its own device, so they may differ in the last bit.
    """
    digest = hashlib.sha256()
    arrays = {"lengths": rows.lengths, **rows.by_token, **rows.by_row}
    arrays.pop("teacher", None)
    for name, array in sorted(arrays.items()):
        _add(digest, name, array)
    return digest.hexdigest()


def checksum_task(task: FinetuneTask) -> dict[str, str]:
    """Return checksums of the rows by split, and of the teacher's weights, if any, as "teacher"."""
    splits = {**task.evaluation, "train": task.train}
    found = {name: checksum_rows(rows) for name, rows in splits.items()}
    return found | ({_TEACHER: task.teacher} if task.teacher else {})


def checksum_weights(weights: Params) -> str:
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        _add(digest, jax.tree_util.keystr(path), leaf)
    return digest.hexdigest()


class Provenance:
    """The checksum file of one folder; all processes read it, process 0 writes it."""

    def __init__(self, workdir: Workdir, config: Config, done: Sequence[RunResult]):
        """
        Args:
          done: Finished runs in `workdir`, which the caller has locked.

        Raises:
          DamagedFileError: The checksum file or the description of the unfinished run is damaged.
        """
        self._workdir, self._config = workdir, config
        self._place = workdir.path / "began_with.json"
        self._begun = {run.task for run in done} | _under_way(workdir)
        self._kept = {"weights": None, "tasks": {}}
        if self._begun and self._place.exists():
            remedy = "delete it to continue with the current weights and rows"
            self._kept = storage.read_json(self._place, remedy=remedy, fields=_PROVENANCE_FIELDS)
            if not all(isinstance(splits, dict) for splits in self._kept["tasks"].values()):
                raise storage.damaged(self._place, "a task has no splits", remedy)

    def bind_weights(self, weights: Params | None) -> None:
        """Check and record the weights.

        Raises:
          FinetuningError: A run in this folder started from different weights.
        """
        found = None if weights is None else checksum_weights(weights)
        if found and (self._kept["weights"] or found) != found:
            raise FinetuningError(
                f"Cannot resume --workdir={self._workdir}: its runs started from different weights "
                f"than config.init_from={self._config.init_from} contains now. Restore those "
                "weights or use a new --workdir.",
                field="config.init_from",
                value=self._config.init_from,
                path=self._workdir.path,
            )
        self._keep({"weights": found})

    def bind_task(self, task: FinetuneTask) -> None:
        """Check and record the rows and the teacher of a task.

        Raises:
          FinetuningError: A run of this task had different rows or a different teacher.
        """
        found, kept = checksum_task(task), self._kept["tasks"].get(task.name, {})
        if task.name in self._begun:
            changed = [name for name in found if kept.get(name, found[name]) != found[name]]
            if changed:
                now = f"the rows of its {changed[0]} split have changed"
                if changed[0] == _TEACHER:
                    path = self._config.finetune.distill_from
                    now = f"the teacher config.finetune.distill_from={path} has changed"
                raise FinetuningError(
                    f"Cannot resume {task.name} in --workdir={self._workdir}: {now}. "
                    "Restore the original or use a new --workdir.",
                    field="--workdir",
                    path=self._workdir.path,
                )
            found = kept | found
        self._keep({"tasks": {**self._kept["tasks"], task.name: found}})

    def _keep(self, values: dict) -> None:
        if self._kept != self._kept | values:
            self._kept |= values
            if jax.process_index() == 0:
                self._workdir.path.mkdir(parents=True, exist_ok=True)
                storage.write_json(self._place, self._kept)


def _under_way(workdir: Workdir) -> set[str]:
    """Return the task of the unfinished run, if the folder has a checkpoint of one."""
    place = workdir.unfinished.unfinished_run
    if not place.exists() or not workdir.unfinished.steps():
        return set()
    remedy = f"delete {workdir.unfinished} to restart that run from the beginning"
    return {storage.read_json(place, remedy=remedy, fields={"task": str})["task"]}


def _add(digest, name: str, array: np.ndarray) -> None:
    array = np.ascontiguousarray(array)
    digest.update(f"{name} {array.dtype} {array.shape}".encode())
    digest.update(array.reshape(-1).view(np.uint8))
