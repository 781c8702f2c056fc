"""Metrics of a run: log lines, WORKDIR/metrics.jsonl, TensorBoard, trackers and a progress bar.

Each line of metrics.jsonl is a JSON object: step, split ("train" or "validation") and the metrics
by name; a value that is not finite is null. Only process 0 writes.
"""

import contextlib
import importlib
import json
import math
import os
import resource
import secrets
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import tqdm
from absl import logging
from etils import epath

from convbert_jax import storage
from convbert_jax.config import Config, ConfigError, UserError, changes, to_dict
from convbert_jax.storage import DamagedFileError, damaged, parse_json, read_json_lines, replacing
from convbert_jax.training import partitioning
from convbert_jax.training.timing import format_seconds
from convbert_jax.training.train_step import Metrics, Task
from convbert_jax.workdir import Workdir

INTERVAL_KEY = "interval"  # stored next to the fields of the data position


def interval_to_json(totals: Metrics | None) -> dict[str, Any]:
    """Converts sums to JSON exactly: JSON round-trips doubles, which represent every float32."""
    if totals is None:
        return {}
    pairs = jax.device_get(totals)
    return {
        INTERVAL_KEY: {name: [np.asarray(a).tolist() for a in pair] for name, pair in pairs.items()}
    }


def interval_from_json(kept: dict[str, Any], like: Metrics) -> Metrics | None:
    """Restores the sums with the shardings of `like`.

    Logs a warning and returns None if the names or shapes of the metrics have changed.
    """
    try:
        pairs = {
            name: tuple(np.asarray(k, a.dtype) for k, a in zip(kept[name], like[name], strict=True))
            for name in like.keys() | kept.keys()
        }
    except (KeyError, TypeError, ValueError):
        pairs = {}
    if jax.tree.map(np.shape, pairs) != jax.tree.map(np.shape, dict(like)):
        logging.warning("The metrics have changed; the log interval restarts at this checkpoint.")
        return None
    return partitioning.put_params(pairs, jax.tree.map(lambda a: a.sharding, dict(like)))


@contextlib.contextmanager
def _as_if_absent(package: str) -> Iterator[None]:
    """Makes imports of `package` fail within the block, unless it is already loaded."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # makes its import raise ImportError
    try:
        yield
    finally:
        del sys.modules[package]


_FLUSH_SECONDS = 60  # between flushes, which wait for the disk


class EventFile:
    """A TensorBoard event file, written synchronously.

    The thread of tensorboardX's `SummaryWriter` dies silently on a full disk or if the clock is set
    back. Its queue then fills up and blocks the caller forever.
    """

    def __init__(self, folder: epath.Path, *, purge_step: int):
        """Creates a file in `folder`; TensorBoard ignores events of older files from `purge_step`.

        Raises:
          OSError: the file cannot be written.
        """
        # Imported late, because inference imports this module. tensorboardX imports PyTorch if
        # installed, only for type annotations, which takes two seconds.
        with _as_if_absent("torch"):
            from tensorboardX import summary
            from tensorboardX.proto import event_pb2
            from tensorboardX.record_writer import RecordWriter
        self._make_event, self._make_scalar = event_pb2.Event, summary.scalar
        # Random: another run may start within the same second, and the name must not be a symlink.
        unique = f"{socket.gethostname()}.{secrets.token_hex(8)}"
        name = f"events.out.tfevents.{time.time():017.6f}.{unique}"
        self._local, self._place = folder / name, folder / name
        if storage.is_remote(folder):  # RecordWriter needs a local file, which is copied
            self._folder = tempfile.TemporaryDirectory()
            self._local = Path(self._folder.name) / name
        self._file = RecordWriter(str(self._local))
        self._flushed = time.monotonic()
        self._write(step=purge_step, file_version="brain.Event:2")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(step=purge_step, session_log=start)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Adds the values of a step by name; raises OSError if they cannot be written."""
        for name, value in values.items():
            self._write(step=step, summary=self._make_scalar(name, value))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Flushes and closes the file; raises OSError if it cannot be written."""
        try:
            self._flush()
        finally:
            self._file.close()

    def _flush(self) -> None:
        self._file.flush()
        if self._local != self._place:
            storage.copy(self._local, self._place)

    def _write(self, **fields: object) -> None:
        event = self._make_event(wall_time=time.time(), **fields)
        self._file.write(event.SerializeToString())


_PROJECT = "convbert_jax"  # default project or experiment
_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}

# Characters of a parameter, and parameters of a request, that every MLflow server accepts.
_LONGEST, _MOST_PARAMS = 500, 100


class Tracker(Protocol):
    """Receiver of a run's metrics."""

    def add(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@contextlib.contextmanager
def tracking(config: Config, workdir: Workdir) -> Iterator[Tracker | None]:
    """Starts the tracker of `config.train.tracker` with the run's config; yields None if empty.

    Raises:
      ConfigError: the tracker's package is not installed, or the tracker cannot start.
    """
    name = config.train.tracker
    if not name:
        yield None
        return
    check_tracker(name)
    run = None
    with contextlib.suppress(FileNotFoundError):
        remedy = "remove it to start a new tracker run"
        fields = {"tracker": str, "run": str}
        known = storage.read_json(workdir.tracker, remedy=remedy, fields=fields)
        run = known["run"] if known["tracker"] == name else None
    begin = {"wandb": _WeightsAndBiases, "mlflow": _MLflow}[name]
    try:
        tracker = begin(config, workdir, run)
    except Exception as error:  # trackers define many classes
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ConfigError(
            f"config.train.tracker='{name}' cannot start: {first}. Set its environment variables "
            "(WANDB_MODE=offline, MLFLOW_TRACKING_URI=…), or leave config.train.tracker empty.",
            field="config.train.tracker",
            value=name,
        ) from error
    storage.write_json(workdir.tracker, {"tracker": name, "run": tracker.run})
    patient = _Patient(name, tracker)
    try:
        yield patient
    finally:
        patient.close()


def check_tracker(name: str) -> None:
    """Raises ConfigError if the package of a tracker is not installed."""
    if name and importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"config.train.tracker='{name}' needs a package. Run pip install {_PACKAGES[name]}, or "
            "install the extra 'trackers'.",
            value=name,
        )


class _Patient:
    """Wrapper that disables a tracker after its first error, so that training continues."""

    def __init__(self, name: str, tracker: Tracker):
        self._name, self._tracker = name, tracker

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._do(f"step {step}", lambda tracker: tracker.add(step, values))

    def close(self) -> None:
        self._do("the end of the run", lambda tracker: tracker.close())
        self._tracker = None

    def _do(self, what: str, action) -> None:
        if self._tracker is None:
            return
        try:
            action(self._tracker)
        except Exception as error:
            self._tracker = None
            logging.warning(
                "Logging to %s failed at %s (%s); disabled for the rest of this run. metrics.jsonl "
                "is complete.",
                self._name,
                what,
                (str(error).strip().splitlines() or [type(error).__name__])[0],
            )


class _WeightsAndBiases:
    def __init__(self, config: Config, workdir: Workdir, run: str | None):
        wandb = importlib.import_module("wandb")
        self.run = run or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or _PROJECT,
            name=os.environ.get("WANDB_NAME") or config.name,
            id=self.run,
            resume="allow",
            dir=None if storage.is_remote(workdir.path) else str(workdir.path),
            config=to_dict(config),
            settings=wandb.Settings(silent=True, disable_code=True, disable_git=True),
        )

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, config: Config, workdir: Workdir, run: str | None):
        del workdir
        mlflow = importlib.import_module("mlflow")
        entities = importlib.import_module("mlflow.entities")
        self._metric = entities.Metric
        self._client = mlflow.MlflowClient()
        if run is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _PROJECT
            there = self._client.get_experiment_by_name(name)
            place = there.experiment_id if there else self._client.create_experiment(name)
            run = self._client.create_run(place, run_name=config.name).info.run_id
        self.run = run
        self._client.update_run(run, status="RUNNING")
        # MLflow parameters are immutable, so settings that a resumed run changes keep old values.
        known = self._client.get_run(run).data.params
        params = [
            entities.Param(name, str(value)[:_LONGEST])
            for name, value in changes.flatten(to_dict(config)).items()
            if name not in known
        ]
        for begin in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(run, params=params[begin : begin + _MOST_PARAMS])

    def add(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1e3)
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self.run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self.run)


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
        self.begin(task, 0, 0)
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
            self._lines = storage.Lines(workdir.metrics)
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

    def begin(self, task: Task, step: int, tokens: int) -> None:
        """Reports the steps after `step`, with `tokens` before them, as steps of `task`."""
        self._task, self._begin, self._tokens = task, step, tokens

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
        shown += [name for name in values if name.endswith("/share")]
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
        shown += [name for name in values if name.endswith("/loss")]
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
        rates = {"tokens": self._tokens + (step - self._begin) * task.tokens_per_step}
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
