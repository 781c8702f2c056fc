"""Checksums of the weights, rows and teachers that the runs of a folder started from.

WORKDIR/began_with.json   {"weights": checksum, "tasks": {TASK: {SPLIT or "teacher": checksum}}}

The config only has file names. Their content may change between two starts, such as the newest
checkpoint of a run that is still training. Folders without this file are accepted and get one.
"""

import hashlib
from collections.abc import Sequence

import jax
import numpy as np

from convbert_jax import files
from convbert_jax.config import Config
from convbert_jax.data.tasks.encoding import Rows
from convbert_jax.finetuning.results import RunResult
from convbert_jax.finetuning.tasks.task import FinetuneTask, FinetuningError
from convbert_jax.training.task import Params
from convbert_jax.workdir import Workdir

_TEACHER = "teacher"
_FIELDS = {"weights": (str, type(None)), "tasks": dict}


def of_rows(rows: Rows) -> str:
    """Return a checksum of encoded rows, without the teacher's outputs.

    Each process computes those on its own device, so they may differ in the last bit.
    """
    digest = hashlib.sha256()
    arrays = {"lengths": rows.lengths, **rows.by_token, **rows.by_row}
    arrays.pop("teacher", None)
    for name, array in sorted(arrays.items()):
        _add(digest, name, array)
    return digest.hexdigest()


def of_task(task: FinetuneTask) -> dict[str, str]:
    """Return checksums of the rows by split, and of the teacher's weights, if any, as "teacher"."""
    splits = {**task.evaluation, "train": task.train}
    found = {name: of_rows(rows) for name, rows in splits.items()}
    return found | ({_TEACHER: task.teacher} if task.teacher else {})


def of_weights(weights: Params) -> str:
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        _add(digest, jax.tree_util.keystr(path), leaf)
    return digest.hexdigest()


class Origin:
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
            self._kept = files.read_json(self._place, remedy=remedy, fields=_FIELDS)
            if not all(isinstance(splits, dict) for splits in self._kept["tasks"].values()):
                raise files.damaged(self._place, "a task has no splits", remedy)

    def bind_weights(self, weights: Params | None) -> None:
        """Check and record the weights.

        Raises:
          FinetuningError: A run in this folder started from different weights.
        """
        found = None if weights is None else of_weights(weights)
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
        found, kept = of_task(task), self._kept["tasks"].get(task.name, {})
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
                files.write_json(self._place, self._kept)


def _under_way(workdir: Workdir) -> set[str]:
    """Return the task of the unfinished run, if the folder has a checkpoint of one."""
    place = workdir.unfinished.unfinished_run
    if not place.exists() or not workdir.unfinished.steps():
        return set()
    remedy = f"delete {workdir.unfinished} to restart that run from the beginning"
    return {files.read_json(place, remedy=remedy, fields={"task": str})["task"]}


def _add(digest, name: str, array: np.ndarray) -> None:
    array = np.ascontiguousarray(array)
    digest.update(f"{name} {array.dtype} {array.shape}".encode())
    digest.update(array.reshape(-1).view(np.uint8))
