"""What the runs of a folder began with, weights, rows and teachers, known again by checksums.

WORKDIR/began_with.json   {"weights": checksum, "tasks": {TASK: {SPLIT or "teacher": checksum}}}

The names of files are in the config; their content may change between two starts, as the newest
checkpoint of a run that still trains. Folders without the record, of older versions, go on, and get
it.
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
    """A checksum of rows as they are encoded; not of what a teacher says of them, which is made on
    each process' device and may differ in the last bit.
    """
    digest = hashlib.sha256()
    arrays = {"lengths": rows.lengths, **rows.by_token, **rows.by_row}
    arrays.pop("teacher", None)
    for name, array in sorted(arrays.items()):
        _add(digest, name, array)
    return digest.hexdigest()


def of_task(task: FinetuneTask) -> dict[str, str]:
    """Split -> checksum of its rows; "teacher" -> that of its weights, where there is one."""
    splits = {**task.evaluation, "train": task.train}
    found = {name: of_rows(rows) for name, rows in splits.items()}
    return found | ({_TEACHER: task.teacher} if task.teacher else {})


def of_weights(weights: Params) -> str:
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        _add(digest, jax.tree_util.keystr(path), leaf)
    return digest.hexdigest()


class Origin:
    """The record of one folder; all processes read it, the first one writes."""

    def __init__(self, workdir: Workdir, config: Config, done: Sequence[RunResult]):
        """
        Args:
          done: what is finished in `workdir`, which its owner has opened.

        Raises:
          DamagedFileError: the record, or that of the run under way.
        """
        self._workdir, self._config = workdir, config
        self._place = workdir.path / "began_with.json"
        self._begun = {run.task for run in done} | _under_way(workdir)
        self._kept = {"weights": None, "tasks": {}}
        if self._begun and self._place.exists():
            remedy = "take it away to go on with the weights and rows that are named now"
            self._kept = files.read_json(self._place, remedy=remedy, fields=_FIELDS)
            if not all(isinstance(splits, dict) for splits in self._kept["tasks"].values()):
                raise files.damaged(self._place, "it lists a task without splits", remedy)

    def bind_weights(self, weights: Params | None) -> None:
        """
        Raises:
          FinetuningError: a run here began with others.
        """
        found = None if weights is None else of_weights(weights)
        if found and (self._kept["weights"] or found) != found:
            raise FinetuningError(
                f"--workdir={self._workdir} holds runs that began with other weights than "
                f"config.init_from={self._config.init_from} has now; put those back, or name "
                "another --workdir.",
                field="config.init_from",
                value=self._config.init_from,
                path=self._workdir.path,
            )
        self._keep({"weights": found})

    def bind_task(self, task: FinetuneTask) -> None:
        """
        Raises:
          FinetuningError: a run of this task here had other rows, or another teacher.
        """
        found, kept = of_task(task), self._kept["tasks"].get(task.name, {})
        if task.name in self._begun:
            changed = [name for name in found if kept.get(name, found[name]) != found[name]]
            if changed:
                now = f"other rows than its {changed[0]} split has now"
                if changed[0] == _TEACHER:
                    path = self._config.finetune.distill_from
                    now = f"another teacher than config.finetune.distill_from={path} is now"
                raise FinetuningError(
                    f"--workdir={self._workdir} holds runs of {task.name} with {now}; put it back "
                    "as it was, or name another --workdir.",
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
    """The task of the run that was stopped, if one was and some of it is kept."""
    place = workdir.unfinished.unfinished_run
    if not place.exists() or not workdir.unfinished.steps():
        return set()
    remedy = f"delete {workdir.unfinished} to train that run from its beginning"
    return {files.read_json(place, remedy=remedy, fields={"task": str})["task"]}


def _add(digest, name: str, array: np.ndarray) -> None:
    array = np.ascontiguousarray(array)
    digest.update(f"{name} {array.dtype} {array.shape}".encode())
    digest.update(array.reshape(-1).view(np.uint8))
