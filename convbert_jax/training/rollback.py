"""Rollback after a bad step: return to the last checkpoint and skip the batches since then.

PaLM was trained this way (Chowdhery et al. 2022, §5.1). A file in the workdir lists the skipped
batches, so a restart skips them too: the state at a step depends only on config, data and file.
"""

import collections
import math
import statistics
from collections.abc import Mapping
from typing import Any

from absl import logging
from etils import epath

from convbert_jax import files
from convbert_jax.config import UserError

_WINDOW = 100  # steps in the median that a loss is compared with
_KEY = "losses"  # stored next to the fields of the data position


class TrainingError(UserError):
    """The run cannot continue."""


class BadStepError(TrainingError):
    """The loss or gradient of step `step` is not finite, or the loss is a spike."""

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class LossGuard:
    """Detector of losses that are not finite or spike; checkpoints contain its history."""

    def __init__(self, spike: float):
        """
        Args:
          spike: `config.train.spike`.
        """
        self._spike = spike
        self._losses: collections.deque[float] = collections.deque(maxlen=_WINDOW)

    def judge(self, loss: float, grad_norm: float) -> str:
        """Records the next step; returns the problem with its numbers, or ""."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return f"loss {loss}, gradient norm {grad_norm}"
        if self._spike and len(self._losses) == _WINDOW:
            usual = statistics.median(self._losses)
            if loss > self._spike * usual:
                return (
                    f"loss {loss:.4g} is above config.train.spike={self._spike:g} times "
                    f"{usual:.4g}, the median of the last {_WINDOW} steps"
                )
        self._losses.append(loss)
        return ""

    def to_json(self) -> dict[str, Any]:
        return {_KEY: list(self._losses)} if self._spike else {}

    def restore(self, position: dict[str, Any]) -> None:
        """Restores the output of `to_json` and removes it from `position`."""
        self._losses.extend(position.pop(_KEY, ()))


class Rollbacks:
    """Rollbacks of a run and the batches that they skip."""

    def __init__(self, file: epath.Path, most: int):
        """
        Args:
          file: JSON file with the rollbacks.
          most: `config.train.rollbacks`.

        Raises:
          DamagedFileError: the file was not written by this class.
        """
        self._file, self._most = file, most
        self._skipped: list[Mapping[str, int]] = []
        if file.exists():
            remedy = "restore it from a copy, or remove it to train on all batches"
            self._skipped = files.read_json(file, remedy=remedy, fields={"skipped": list})[
                "skipped"
            ]
            for each in self._skipped:
                found = each if isinstance(each, dict) else {}
                if any(type(found.get(name)) is not int for name in ("after", "batches")):
                    raise files.damaged(file, f"{each!r} is not a rollback", remedy)

    def batches_after(self, step: int) -> int:
        """Returns the number of batches to skip between `step` and the next step."""
        return sum(each["batches"] for each in self._skipped if each["after"] == step)

    def describe(self) -> list[tuple[int, str]]:
        """Returns (bad step, description) of each rollback."""
        return [
            (
                each["after"] + each["batches"],
                f"bad step: returned to step {each['after']:,} and skipped {each['batches']:,} "
                "batches",
            )
            for each in self._skipped
        ]

    def go_back(self, error: BadStepError, checkpoint: int, *, writes: bool) -> None:
        """Records a rollback that skips the batches after `checkpoint` up to the step of `error`.

        Args:
          error: the bad step.
          checkpoint: step that the run returns to.
          writes: whether this process writes the file.

        Raises:
          BadStepError: `error`, if the run has used all its rollbacks.
        """
        if len(self._skipped) >= self._most:
            if not self._most:
                raise error
            raise BadStepError(
                f"{error} All {len(self._skipped)} rollbacks of config.train.rollbacks are used.",
                error.step,
            )
        logging.warning(
            "%s. Returning to %s and skipping the %d batches since then: rollback %d of %d.",
            str(error).rstrip("."),
            f"the checkpoint of step {checkpoint}" if checkpoint else "the start",
            error.step - checkpoint,
            len(self._skipped) + 1,
            self._most,
        )
        self._skipped.append({"after": checkpoint, "batches": error.step - checkpoint})
        if writes:
            files.write_json(self._file, {"skipped": self._skipped})
