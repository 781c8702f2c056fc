"""Runners of one sweep into the queue of Slurm, as an array of jobs."""

import importlib
import pathlib
import re
import shlex
import shutil
from collections.abc import Mapping
from typing import Any

import convbert_jax
from convbert_jax.config import ConfigError
from convbert_jax.sweeps.folder import Folder
from convbert_jax.sweeps.slurm.job import Job
from convbert_jax.sweeps.table import SweepError

_NOTICE = 120  # seconds before the end of --time, for the cell to save
_RESTARTS = 1_000  # by the time limit; each goes on from what was saved
_PACKAGES = {
    "submitit": "puts runners into the queue",
    "optuna": "deals the cells to their runners",
}
# What submitit, or one runner a job, decides.
_TAKEN = (
    *("array", "error", "input", "nodes", "ntasks", "ntasks_per_node", "open_mode", "output"),
    *("parsable", "requeue", "no_requeue", "signal", "wait", "wrap"),
)
# minutes | minutes:seconds | hours:minutes:seconds | days-hours[:minutes[:seconds]]
_TIME = re.compile(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?|(\d+)(?::(\d+))?(?::(\d+))?)", re.ASCII)


def read_options(text: str) -> dict[str, str | bool]:
    """What --sbatch says, "--partition=gpu --gpus=1 --time=24:00:00": name -> value, as sbatch has
    them; True of one without a value.

    Raises:
      ConfigError: no such option, no time, or one that is not free.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--sbatch={text}: {str(error).lower()}.") from None
    options: dict[str, str | bool] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not re.fullmatch(r"--[a-z][a-z-]+", name) or (equals and not value):
            raise ConfigError(
                f"--sbatch={text!r}: {word!r} is no option; write them as "
                "'--partition=gpu --gpus=1 --time=24:00:00'."
            )
        name = name[2:].replace("-", "_")
        if name in _TAKEN:
            raise ConfigError(f"--sbatch={text!r}: --slurm sets {word} itself; leave it out.")
        options[name] = value if equals else True
    if "time" not in options:
        raise ConfigError(
            f"--sbatch={text!r} has no --time, before whose end a runner is put back into the "
            "queue; add --time=24:00:00, or what the partition allows."
        )
    if 60 * _minutes(options["time"]) <= 2 * _NOTICE:
        raise ConfigError(
            f"--sbatch: --time={options['time']} leaves next to nothing beside the "
            f"{_NOTICE // 60} minutes before its end in which a cell saves; ask for more."
        )
    return options


def _minutes(time: str | bool) -> int:
    """Of a time as sbatch takes it, whole ones."""
    found = _TIME.fullmatch(str(time))
    parts = [int(part) if part else 0 for part in found.groups()] if found else [0] * 7
    days, *of_days = parts[:4]
    if found and not found[1]:
        of_days = parts[4:] if found[7] else [0, *parts[4:6]]
    hours, minutes, seconds = of_days
    total = (days * 24 + hours) * 60 + minutes + seconds // 60
    if not total:
        raise ConfigError(
            f"--sbatch: --time={time} is no time of a minute or more; write HH:MM:SS or D-HH."
        )
    return total


def check_installed() -> None:
    """Raises SweepError where a package or Slurm is missing."""
    for package, what in _PACKAGES.items():
        try:
            importlib.import_module(package)
        except ImportError:
            raise SweepError(
                f"--slurm needs {package}, which {what}: pip install {package}."
            ) from None
    for tool in ("sbatch", "srun"):
        if shutil.which(tool) is None:
            raise SweepError(
                f"--slurm needs {tool}, which is not on PATH; start this on a login node of the "
                "cluster."
            )


def submit(
    name: str, folder: Folder, job: Job, runners: int, options: Mapping[str, str | bool]
) -> list[str]:
    """Puts runners of a sweep into the queue; they print to WORKDIR/slurm.

    Args:
      name: of the jobs.
      options: as `read_options` gives them.

    Returns:
      ids of the jobs.

    Raises:
      SweepError: sbatch does not take them; the sentence is its own.
    """
    import submitit
    from submitit.core.utils import FailedJobError

    executor = submitit.SlurmExecutor(folder.path / "slurm", max_num_timeout=_RESTARTS)
    options = dict(options)
    more: dict[str, Any] = {}
    if "cpus_per_task" in options:  # which srun does not take over from sbatch
        more["srun_args"] = [f"--cpus-per-task={options['cpus_per_task']}"]
    executor.update_parameters(
        job_name=str(options.pop("job_name", name)),
        time=_minutes(options.pop("time")),
        signal_delay_s=_NOTICE,
        array_parallelism=runners,
        stderr_to_stdout=True,
        setup=[set_path()],
        additional_parameters={"requeue": True, **options},
        **more,
    )
    try:
        jobs = executor.submit_array([job] * runners)
    except FailedJobError as error:
        said = " ".join(str(error).split()).rstrip(".")
        raise SweepError(f"{said}; nothing was submitted.") from error
    return [submitted.job_id for submitted in jobs]


def set_path() -> str:
    """A line of a shell with which Python finds this package, installed or not."""
    above = pathlib.Path(convbert_jax.__file__).resolve().parent.parent
    return f"export PYTHONPATH={shlex.quote(str(above))}${{PYTHONPATH:+:$PYTHONPATH}}"
