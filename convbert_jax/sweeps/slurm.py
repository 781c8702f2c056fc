"""Workers of a sweep as jobs of a Slurm cluster, submitted and requeued by submitit."""

import contextlib
import dataclasses
import importlib.util
import operator
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import convbert_jax
from convbert_jax.config import ConfigError
from convbert_jax.sweeps.folder import Folder
from convbert_jax.sweeps.table import SweepError

_NOTICE = 120  # seconds before the end of --time, to save a checkpoint
_RESTARTS = 1_000  # at the time limit
# Options that submitit sets, or that would start several processes in a job.
_RESERVED = (
    *("array", "error", "input", "nodes", "ntasks", "ntasks_per_node", "open_mode", "output"),
    *("parsable", "requeue", "no_requeue", "signal", "wait", "wrap"),
)
# Times of sbatch: minutes[:seconds], hours:minutes:seconds, days-hours[:minutes[:seconds]].
_TIME = re.compile(r"(\d+-\d+(:\d+){0,2})|(\d+(:\d+){0,2})", re.ASCII)


@dataclasses.dataclass
class Worker:
    """A job of submitit, which calls it on the node, again after each requeue.

    Attributes:
      command: arguments of Python that start a worker.
      folder: its working directory.
    """

    command: tuple[str, ...]
    folder: str
    _process = None  # not started yet

    def __call__(self) -> None:
        """Runs a worker; raises SystemExit with its exit code if some runs failed."""
        self._process = subprocess.Popen(
            [sys.executable, *self.command],
            cwd=self.folder,
            # Slurm signals all processes of a job; only submitit's handles this one.
            preexec_fn=lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
        )
        self._wait()
        if code := self._process.wait():
            sys.exit(code)

    def checkpoint(self) -> Any:
        """Stops the worker after its run has saved; returns the job that submitit requeues."""
        from submitit.helpers import DelayedSubmission

        if self._process:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)
            self._wait()
        return DelayedSubmission(Worker(self.command, self.folder))

    def _wait(self) -> None:
        """Waits without the lock of `Popen.wait`: submitit's signal handler, which interrupts
        `__call__`, calls `checkpoint`.
        """
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)


def read_options(text: str) -> dict[str, str | bool]:
    """Parses --sbatch, "--partition=gpu --gpus=1 --time=24:00:00".

    Returns:
      Name -> value, True for an option without a value; "time" in minutes.

    Raises:
      ConfigError: an invalid or reserved option; no time, or less than the notice for saving.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"is invalid: {error}.", field="--sbatch", value=text) from None
    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not re.fullmatch(r"--[a-z][a-z-]+", name) or (equals and not value):
            raise ConfigError(
                f"{word!r} is not an option such as --gpus=1.", field="--sbatch", value=text
            )
        name = name[2:].replace("-", "_")
        if name in _RESERVED:
            raise ConfigError(f"{word} is set by --slurm.", field="--sbatch", value=text)
        options[name] = value if equals else True
    time = options.get("time")
    if not _TIME.fullmatch(str(time)):
        raise ConfigError(
            "needs --time=HH:MM:SS or --time=D-HH, before whose end a job is requeued.",
            field="--sbatch",
            value=text,
        )
    options["time"] = _to_minutes(time)
    if 60 * options["time"] <= 2 * _NOTICE:
        raise ConfigError(
            f"is too short: {_NOTICE // 60} minutes are reserved for saving a checkpoint. Request "
            "at least 10.",
            field="--time",
            value=time,
        )
    return options


def _to_minutes(time: str) -> int:
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return (86_400 * int(days or 0) + sum(map(operator.mul, parts, units))) // 60


def check_installed() -> None:
    """Raises SweepError if submitit or Slurm is missing."""
    if importlib.util.find_spec("submitit") is None:
        raise SweepError("needs submitit: pip install submitit.", field="--slurm")
    for tool in ("sbatch", "srun"):
        if shutil.which(tool) is None:
            raise SweepError(f"needs {tool} on PATH. Use a login node.", field="--slurm")


def submit(
    name: str, folder: Folder, worker: Worker, count: int, options: Mapping[str, Any]
) -> list[str]:
    """Submits an array of workers, whose output goes to WORKDIR/slurm.

    Args:
      name: of the jobs.
      options: as `read_options` returns them.

    Returns:
      Ids of the jobs.

    Raises:
      SweepError: sbatch refuses them; contains its message.
    """
    import submitit
    from submitit.core.utils import FailedJobError

    executor = submitit.SlurmExecutor(folder.path / "slurm", max_num_timeout=_RESTARTS)
    options = dict(options)
    if cpus := options.get("cpus_per_task"):  # srun does not inherit it from sbatch
        executor.update_parameters(srun_args=[f"--cpus-per-task={cpus}"])
    executor.update_parameters(
        job_name=str(options.pop("job_name", name)),
        time=options.pop("time"),
        signal_delay_s=_NOTICE,
        array_parallelism=count,
        stderr_to_stdout=True,
        setup=[set_path()],
        additional_parameters={"requeue": True, **options},
    )
    try:
        jobs = executor.submit_array([worker] * count)
    except FailedJobError as error:
        raise SweepError(f"sbatch failed: {' '.join(str(error).split())}") from error
    return [job.job_id for job in jobs]


def set_path() -> str:
    """Shell command that lets Python find this package, installed or not."""
    package = pathlib.Path(convbert_jax.__file__).resolve().parent.parent
    return f"export PYTHONPATH={shlex.quote(str(package))}${{PYTHONPATH:+:$PYTHONPATH}}"
