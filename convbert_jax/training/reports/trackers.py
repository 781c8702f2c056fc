"""Experiment trackers: Weights & Biases, MLflow.

The trackers' environment variables (WANDB_MODE, WANDB_PROJECT, MLFLOW_TRACKING_URI, ...) configure
them. WORKDIR/tracker.json stores the tracker's run ID, under which a resumed run continues. For
steps that are logged again, wandb keeps the first values and MLflow keeps both.
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
        known = files.read_json(workdir.tracker, remedy=remedy, fields=fields)
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
        # MLflow parameters are immutable, so settings that a resumed run changes keep old values.
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
