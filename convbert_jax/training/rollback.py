"""Going back after a step whose numbers are no good: to the last checkpoint, and past the batches
since (as PaLM was trained, Chowdhery et al. 2022, §5.1).

What is passed over stands in the workdir, so a start after a kill passes over the same: the state
at any step is a function of config, data and that file.
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

_WINDOW = 100  # steps whose median a loss is compared with
_KEY = "losses"  # beside the fields of the data position


class TrainingError(UserError):
    """The run cannot go on."""


class BadStepError(TrainingError):
    """A step's loss or gradient is no good; `step` is its number."""

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class LossGuard:
    """Judges the losses of a run in order; what it remembers is kept with each checkpoint."""

    def __init__(self, spike: float):
        """
        Args:
          spike: `config.train.spike`.
        """
        self._spike = spike
        self._losses: collections.deque[float] = collections.deque(maxlen=_WINDOW)

    def judge(self, loss: float, grad_norm: float) -> str:
        """What is wrong with the numbers of the next step, "" if nothing is."""
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
        """Takes what `to_json` gave out of `position`."""
        self._losses.extend(position.pop(_KEY, ()))


class Rollbacks:
    """The batches that a run passes over."""

    def __init__(self, file: epath.Path, most: int):
        """
        Args:
          file: where they are kept.
          most: `config.train.rollbacks`.

        Raises:
          DamagedFileError: the file is none of ours.
        """
        self._file, self._most = file, most
        self._skipped: list[Mapping[str, int]] = []
        if file.exists():
            remedy = "restore it from a copy, or take it away to train on all batches"
            self._skipped = files.read_json(file, remedy=remedy, fields={"skipped": list})[
                "skipped"
            ]
            for each in self._skipped:
                found = each if isinstance(each, dict) else {}
                if any(type(found.get(name)) is not int for name in ("after", "batches")):
                    raise files.damaged(file, f"{each!r} is no place to pass over", remedy)

    def batches_after(self, step: int) -> int:
        """How many are passed over between `step` and the next one."""
        return sum(each["batches"] for each in self._skipped if each["after"] == step)

    def describe(self) -> list[tuple[int, str]]:
        """(step, what happened there) of each time that the run went back."""
        return [
            (
                each["after"] + each["batches"],
                f"a bad step: went back to step {each['after']:,} and past {each['batches']:,} "
                "batches",
            )
            for each in self._skipped
        ]

    def go_back(self, error: BadStepError, checkpoint: int, *, writes: bool) -> None:
        """Passes over the batches of the steps after `checkpoint` up to that of `error`.

        Args:
          writes: whether this process keeps the file.

        Raises:
          BadStepError: `error`, if the run has gone back as often as it may.
        """
        if len(self._skipped) >= self._most:
            if not self._most:
                raise error
            raise BadStepError(
                f"{error}; the run has gone back {len(self._skipped)} times, as often as "
                "config.train.rollbacks allows",
                error.step,
            )
        logging.warning(
            "%s. Going back to %s and past the %d batches since: rollback %d of %d.",
            str(error).rstrip("."),
            f"the checkpoint of step {checkpoint}" if checkpoint else "the start",
            error.step - checkpoint,
            len(self._skipped) + 1,
            self._most,
        )
        self._skipped.append({"after": checkpoint, "batches": error.step - checkpoint})
        if writes:
            files.write_json(self._file, {"skipped": self._skipped})
