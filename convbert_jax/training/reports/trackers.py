"""The numbers of a run for a tracker of experiments besides: Weights & Biases, MLflow.

Where they go is said by the trackers' own variables, WANDB_MODE, WANDB_PROJECT, MLFLOW_TRACKING_URI
and the like. WORKDIR/tracker.json has the tracker's name for the run, which a resumed run goes on
under; of numbers that it told already the trackers keep the first (wandb) or both (MLflow).
"""

import contextlib
import importlib
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from absl import logging

from convbert_jax import files
from convbert_jax.config import Config, ConfigError, to_dict
from convbert_jax.workdir import Workdir

_PROJECT = "convbert_jax"  # where the user names none
_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}
# Characters of a setting, and settings of one message, that every MLflow server takes.
_LONGEST, _MOST_PARAMS = 500, 100


class Tracker(Protocol):
    """Takes the numbers of one run."""

    def add(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@contextlib.contextmanager
def tracking(config: Config, workdir: Workdir) -> Iterator[Tracker | None]:
    """The tracker of `config.train.tracker`, told of the run's settings; None if it names none.

    Raises:
      ConfigError: its package is not installed, or it cannot begin.
    """
    name = config.train.tracker
    if not name:
        yield None
        return
    check_tracker(name)
    run = None
    with contextlib.suppress(FileNotFoundError):
        remedy = "remove it, and the tracker begins a new run"
        fields = {"tracker": str, "run": str}
        known = files.read_json(workdir.tracker, remedy=remedy, fields=fields)
        run = known["run"] if known["tracker"] == name else None
    begin = {"wandb": _WeightsAndBiases, "mlflow": _MLflow}[name]
    try:
        tracker = begin(config, workdir, run)
    except Exception as error:  # of kinds of their own, for want of a key, a server, a disk
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ConfigError(
            f"config.train.tracker='{name}' cannot begin: {first}; set its variables "
            "(WANDB_MODE=offline, MLFLOW_TRACKING_URI=…), or leave config.train.tracker empty.",
            field="config.train.tracker",
            value=name,
        ) from error
    files.write_json(workdir.tracker, {"tracker": name, "run": tracker.run})
    patient = _Patient(name, tracker)
    try:
        yield patient
    finally:
        patient.close()


def check_tracker(name: str) -> None:
    """Raises ConfigError if the package of a tracker is not installed."""
    if name and importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"config.train.tracker='{name}' needs its package: pip install {_PACKAGES[name]}, or "
            "the extra trackers.",
            value=name,
        )


class _Patient:
    """A tracker whose faults do not end a run: after the first one it is left alone."""

    def __init__(self, name: str, tracker: Tracker):
        self._name, self._tracker = name, tracker

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._do(f"numbers of step {step}", lambda tracker: tracker.add(step, values))

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
                "%s did not take %s (%s) and hears no more of this run, until it is started again; "
                "metrics.jsonl has all.",
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
            dir=None if files.is_remote(workdir.path) else str(workdir.path),
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
        # Settings that a resumed run has changed are kept as they were: MLflow allows no others.
        known = self._client.get_run(run).data.params
        params = [
            entities.Param(name, str(value)[:_LONGEST])
            for name, value in _flatten(to_dict(config)).items()
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


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
