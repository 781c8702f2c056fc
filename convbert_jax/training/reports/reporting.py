"""Metrics of a run: log lines, WORKDIR/metrics.jsonl, TensorBoard and a progress bar.

Each line of metrics.jsonl is a JSON object: step, split ("train" or "validation") and the metrics
by name; a value that is not finite is null. Only process 0 writes.
"""

import contextlib
import json
import math
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import tqdm
from absl import logging
from etils import epath

from convbert_jax import files
from convbert_jax.config import UserError
from convbert_jax.files import DamagedFileError, damaged, parse_json, read_json_lines, replacing
from convbert_jax.training.reports.tensorboard import EventFile
from convbert_jax.training.reports.timing import format_seconds
from convbert_jax.training.reports.trackers import Tracker
from convbert_jax.training.task import Task
from convbert_jax.workdir import Workdir


class ReportError(UserError):
    """Metrics cannot be written."""


class Reporter:
    """Writer of a run's metrics; a context manager that closes its files."""

    def __init__(
        self,
        workdir: Workdir,
        task: Task,
        *,
        steps: int,
        step: int,
        tracker: Tracker | None = None,
    ):
        """Opens the files and drops entries after `step`.

        Args:
          steps: length of the run.
          step: step that the run resumes from.
          tracker: also gets the metrics.

        Raises:
          ReportError: the files cannot be written; also raised by the methods and on exit.
        """
        self._task = task
        self._steps = steps
        self._tracker = tracker
        self._workdir = workdir
        self._health = HealthWatch(task.health)
        self._writes = jax.process_index() == 0
        if not self._writes:
            return
        self._files = contextlib.ExitStack()
        with self._explain():
            drop_later_lines(workdir.metrics, step)
            self._lines = files.Lines(workdir.metrics)
            self._files.callback(self._lines.close)
            self._board = EventFile(workdir.path, purge_step=step + 1)
            self._files.callback(self._board.close)
        self._bar = tqdm.tqdm(
            total=steps, initial=step, unit="step", disable=not sys.stderr.isatty(), leave=False
        )

    def __enter__(self):
        return self

    def __exit__(self, kind, *exception):
        if not self._writes:
            return
        self._bar.close()
        try:
            with self._explain():
                self._files.close()
        except ReportError:  # the first error is more specific
            if kind is None:
                raise

    def advance(self) -> None:
        """Advances the progress bar by one step."""
        if self._writes:
            self._bar.update()

    def train(self, step: int, values: dict[str, float], seconds_per_step: float | None) -> None:
        """Reports the training metrics of the log interval that ends with `step`.

        Args:
          values: the task's metrics over the interval, loss, grad_norm and learning_rate.
          seconds_per_step: from `Clock.lap`; None if no step was timed.
        """
        if not self._writes:
            return
        rates = self._rates(step, seconds_per_step)
        self._write(step, "train", values | rates)
        shown = ["loss", *(n for n in self._task.show if n != "loss"), "learning_rate", "grad_norm"]
        parts = [f"step {step:,}/{self._steps:,}", *self._format(values, shown)]
        if seconds_per_step:
            parts.append(f"{rates['tokens_per_second']:,.0f} tokens/s")
        parts.append(f"{_format_count(rates['tokens'])} tokens")
        if "mfu" in rates:
            known = math.isfinite(rates["mfu"])
            parts.append(f"MFU {rates['mfu']:.1%}" if known else "MFU unknown")
        parts.append(_format_memory(rates))
        if seconds_per_step:
            left = (self._steps - step) * seconds_per_step
            parts.append(f"{format_seconds(left)} left" if left else "done")
        logging.info("%s", "  ".join(parts))

    def validation(self, step: int, values: dict[str, float]) -> None:
        """Reports the held-out metrics at `step`."""
        if not self._writes:
            return
        self._write(step, "validation", values)
        shown = ["loss", *(name for name in self._task.show if name != "loss")]
        parts = [f"step {step:,} held out", *self._format(values, shown)]
        logging.info("%s", "  ".join(parts))

    def flush(self) -> None:
        """Flushes metrics.jsonl, which must be complete before a checkpoint is saved."""
        if self._writes:
            with self._explain():
                self._lines.flush()

    def warn_health(self, step: int, values: dict[str, float]) -> None:
        """Logs new warnings of `HealthWatch`."""
        if not self._writes:
            return
        for text in self._health.look(step, values):
            logging.warning("step %d: %s", step, text)

    def _rates(self, step: int, seconds_per_step: float | None) -> dict[str, float]:
        task = self._task
        rates = {"tokens": step * task.tokens_per_step}
        if seconds_per_step:
            rates["seconds_per_step"] = seconds_per_step
            rates["tokens_per_second"] = task.tokens_per_step / seconds_per_step
            if task.peak_flops_per_device:
                peak = task.peak_flops_per_device * jax.device_count()
                rates["mfu"] = task.flops_per_step / seconds_per_step / peak
        return rates | measure_memory()

    def _write(self, step: int, split: str, values: Mapping[str, float]) -> None:
        finite = {n: float(v) if math.isfinite(v) else None for n, v in values.items()}
        shown = {f"{split}/{name}": v for name, v in finite.items() if v is not None}
        with self._explain():
            self._lines.append(json.dumps({"step": step, "split": split, **finite}))
            self._board.add(step, shown)
        if self._tracker:
            self._tracker.add(step, shown)

    @contextlib.contextmanager
    def _explain(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ReportError(
                f"Cannot write metrics to {self._workdir}: {error.strerror or error}. Free space "
                "there and restart; the run resumes from the last checkpoint.",
                path=str(self._workdir),
            ) from error

    @staticmethod
    def _format(values: Mapping[str, float], names: list[str]) -> list[str]:
        short = {"learning_rate": "lr", "grad_norm": "grad"}
        return [f"{short.get(n, n)} {values[n]:.4g}" for n in names if n in values]


class HealthWatch:
    """Filter of repeated `Task.health` warnings; one is repeated only after it was absent."""

    def __init__(self, health: Callable[[int, Mapping[str, float]], list[str]]):
        self._health = health
        self._warned: set[str] = set()

    def look(self, step: int, values: Mapping[str, float]) -> list[str]:
        """Returns the new warnings at the end of a log interval, from its metrics."""
        warnings = {text.partition(":")[0]: text for text in self._health(step, values)}
        new = [text for name, text in warnings.items() if name not in self._warned]
        self._warned = set(warnings)
        return new


def drop_later_lines(path: epath.Path, step: int) -> None:
    """Removes the lines after `step` from a metrics file atomically.

    Also removes incomplete and damaged lines.
    """
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    steps = [_step_of(line) for line in lines]
    kept = [line for line, at in zip(lines, steps, strict=True) if at is not None and at <= step]
    if kept == lines:
        return
    broken = steps[:-1].count(None)  # the last line may be incomplete
    if broken:
        logging.warning("Dropped %d damaged lines of %s.", broken, path)
    logging.info(
        "Resuming at step %d: dropped %d later lines of %s.",
        step,
        len(lines) - len(kept) - broken,
        path.name,
    )
    with replacing(path) as file:
        file.writelines(kept)


def read_metrics(path: epath.Path) -> list[dict[str, Any]]:
    """Reads the lines of a metrics file; null becomes NaN, and a missing file has no lines.

    Raises:
      DamagedFileError: a line is damaged.
    """
    remedy = "restore a copy or remove it; training does not need it"
    try:
        lines = read_json_lines(path, remedy=remedy, fields={"step": int, "split": str})
    except FileNotFoundError:
        return []
    for number, line in enumerate(lines, start=1):
        if fault := _fault_in(line):
            raise damaged(path, f"line {number}: {fault}", remedy)
    return [_with_nan(line) for line in lines]


def read_undamaged(path: epath.Path) -> list[dict[str, Any]]:
    """Reads the lines of a metrics file, but skips damaged ones with a warning."""
    try:
        return read_metrics(path)
    except DamagedFileError as error:
        logging.warning("%s Using the other lines.", error)
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError:
        return []
    return [_with_nan(parse_json(line)) for line in lines if _step_of(line) is not None]


def last_of(lines: Sequence[Mapping[str, Any]], split: str) -> dict[str, float]:
    """Returns the last metrics of `split` in the lines of a metrics file, or {}."""
    for line in reversed(lines):
        if line["split"] == split:
            return {name: v for name, v in line.items() if name not in ("step", "split")}
    return {}


def measure_memory() -> dict[str, float]:
    """Returns peak and limit of the first local device in bytes, or peak host memory."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        known = {"device_memory": stats["peak_bytes_in_use"]}
        if stats.get("bytes_limit"):
            known["device_memory_limit"] = stats["bytes_limit"]
        return known
    unit = 1 if sys.platform == "darwin" else 1024
    return {"host_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def _step_of(line: bytes) -> int | None:
    """Returns the step of a line, or None if it is incomplete or damaged."""
    try:
        values = parse_json(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return None if _fault_in(values) else values["step"]


def _fault_in(values: Any) -> str:
    """Returns why `Reporter` cannot have written these values, or ""."""
    if not isinstance(values, dict):
        return f"expected an object, found {type(values).__name__}"
    if type(values.get("step")) is not int:  # not isinstance, which accepts bool
        return "'step' is not an integer"
    if not isinstance(values.get("split"), str):
        return "'split' is not a string"
    for name, value in values.items():
        if name != "split" and type(value) not in (int, float, type(None)):
            return f"'{name}' is not a number"
    return ""


def _with_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: math.nan if v is None else v for name, v in values.items()}


def _format_memory(rates: Mapping[str, float]) -> str:
    if "host_memory" in rates:
        return f"host memory {rates['host_memory'] / 2**30:.1f} GiB"
    used = rates["device_memory"]
    text = f"device memory {used / 2**30:.1f} GiB"
    limit = rates.get("device_memory_limit")
    return f"{text} ({used / limit:.0%})" if limit else text


def _format_count(count: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if float(f"{count:.3g}") >= size:  # 999,999 is 1M
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"
