"""Command line of launch/sweep.py, and workers as jobs of a Slurm cluster (submitit)."""

import argparse
import contextlib
import dataclasses
import importlib.util
import math
import operator
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import convbert_jax
from convbert_jax import config_files, storage
from convbert_jax.command_line import overrides
from convbert_jax.config import ConfigError, plugins
from convbert_jax.sweeps.table import Folder, Sweep, SweepError, Task

_MAX_SEEDS, _MAX_WORKERS = 1000, 1000


@dataclasses.dataclass(frozen=True)
class Request:
    """A parsed command line.

    Attributes:
      name: of the sweep: the variant or file name of --config.
      overrides: field path -> value, for all runs.
      action: "run", "submit" (workers on a cluster), "plan" or "report".
      arguments: command line of a worker, without --slurm and --sbatch.
      workers, sbatch: number of submitted workers, and their options.
      topology, price: of a plan, see `runs.describe`.
    """

    name: str
    sweep: Sweep
    folder: Folder
    overrides: Mapping[str, Any]
    action: str
    arguments: tuple[str, ...]
    workers: int
    sbatch: Mapping[str, str | bool]
    topology: str
    price: float | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See --help.")


def read(argv: Sequence[str], description: str = "") -> Request:
    """Parses a command line, the program's name first.

    Raises:
      UserError: an invalid flag, file or sweep.
    """
    changed, rest = overrides.take(argv[1:])
    flags = make_parser(description).parse_args(rest)
    sweep = config_files.load_sweep(flags.config)
    if not isinstance(sweep, Sweep):
        raise SweepError(
            f"returned a {type(sweep).__name__}; expected a Sweep.",
            field="--config",
            value=flags.config,
        )
    sweep = _add_tasks(_select(sweep, flags), flags.finetune)
    plugins.allow((*flags.plugins, *plugins.named(changed), *plugins.named(sweep)))
    name = flags.config.rpartition(":")[2].removesuffix(".py").rpartition("/")[2]
    if flags.workdir == "":
        raise ConfigError("must not be empty.", field="--workdir", value="")
    return Request(
        name=name,
        sweep=sweep,
        folder=_open_folder(flags.workdir or f"runs/{name.replace(',', '-')}", flags.report),
        overrides=changed,
        action=_action(flags),
        arguments=_worker_arguments(argv[1:]),
        workers=flags.slurm or 0,
        sbatch={} if flags.slurm is None else read_options(flags.sbatch),
        topology=flags.topology or "cpu",
        price=flags.price,
    )


def make_parser(description: str = "") -> argparse.ArgumentParser:
    """Returns the parser of all flags but overrides of config fields."""
    parser = _Parser(
        prog="python launch/sweep.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="Each field of a config can be set for all runs: --config.section.field=VALUE.",
    )
    add = parser.add_argument
    add("--config", required=True, metavar="FILE:NAME", help="configs/ablation.py:kernel_size")
    add("--workdir", help="folder that all workers share (default: runs/NAME)")
    add("--variants", help="comma-separated subset: attention,mixed (default: all)")
    add("--seeds", help="number of seeds, or seeds: 5, or 0,3,7, or 2, (a single one)")
    add("--baseline", metavar="VARIANT", help="variant that the report compares the others with")
    add(
        "--finetune",
        action="append",
        default=[],
        metavar="[NAME=]'CONFIG OVERRIDES'",
        help="task after each pre-training run, may be repeated: "
        "'text:trec --config.task.folder=FOLDER'",
    )
    add(
        "--plugins",
        action="extend",
        type=lambda text: text.split(","),
        default=[],
        metavar="PACKAGE.MODULE:NAME",
        help="your own Python that the config of a run folder may import",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--plan", action="store_true", help="print runs, time and cost, then exit")
    action.add_argument("--report", action="store_true", help="write the report, then exit")
    _add_slurm_flags(action, parser)
    add("--topology", metavar="DEVICES", help="with --plan: v5e-16, gpu:h100x8 (default: cpu)")
    add("--price", type=float, help="with --plan: price of one chip for one hour")
    return parser


def _add_slurm_flags(action, parser) -> None:
    action.add_argument("--slurm", type=int, metavar="N", help="submit N workers to a cluster")
    parser.add_argument(
        "--sbatch",
        default="",
        metavar="OPTIONS",
        help="options of each worker: '--partition=gpu --gpus=1 --time=24:00:00'",
    )


def _worker_arguments(arguments: Sequence[str]) -> tuple[str, ...]:
    """The command line without --slurm and --sbatch."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    _add_slurm_flags(parser, parser)
    return tuple(parser.parse_known_args(arguments)[1])


def _action(flags: argparse.Namespace) -> str:
    if not flags.plan and (flags.topology or flags.price is not None):
        raise ConfigError("is required by --topology and --price.", field="--plan")
    if flags.price is not None and not 0 <= flags.price < math.inf:
        raise ConfigError("must be at least 0.", field="--price", value=flags.price)
    if flags.slurm is None:
        if flags.sbatch:
            raise ConfigError("is required by --sbatch.", field="--slurm")
        return "plan" if flags.plan else "report" if flags.report else "run"
    if not 0 < flags.slurm <= _MAX_WORKERS:
        raise ConfigError(f"must be from 1 to {_MAX_WORKERS}.", field="--slurm", value=flags.slurm)
    return "submit"


def _open_folder(path: str, must_exist: bool) -> Folder:
    folder = Folder(path)
    if not next(path for path in (folder.path, *folder.path.parents) if path.exists()).is_dir():
        raise ConfigError("is a file, or inside of one.", field="--workdir", value=path)
    storage.check_links(folder.path)
    if must_exist and not folder.path.exists():
        raise ConfigError("does not exist.", field="--workdir", value=path)
    return folder


def _select(sweep: Sweep, flags: argparse.Namespace) -> Sweep:
    """Applies --baseline, --variants and --seeds."""
    if flags.baseline is not None:
        sweep = dataclasses.replace(sweep, baseline=flags.baseline)
    if flags.variants is not None:
        names = {name.strip() for name in flags.variants.split(",")}
        for name in names - sweep.variants.keys():
            known = ", ".join(sweep.variants)
            raise ConfigError(f"must be some of: {known}.", field="--variants", value=name)
        variants = {name: value for name, value in sweep.variants.items() if name in names}
        sweep = dataclasses.replace(sweep, variants=variants, baseline=sweep.reference)
    if flags.seeds is not None:
        sweep = dataclasses.replace(sweep, seeds=_read_seeds(flags.seeds))
    return sweep


def _read_seeds(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.removesuffix(",").split(",")]
    valid = all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts)
    if valid and "," in text:
        return tuple(map(int, parts))
    if not valid or not 0 < int(text) <= _MAX_SEEDS:
        raise ConfigError(
            f"must be from 1 to {_MAX_SEEDS}, or seeds with commas.", field="--seeds", value=text
        )
    return tuple(range(int(text)))


def _add_tasks(sweep: Sweep, texts: Sequence[str]) -> Sweep:
    tasks = dict(sweep.tasks)
    for text in texts:
        name, task = _read_task(text)
        if name in tasks:
            raise ConfigError(f"needs another name than {name}.", field="--finetune", value=text)
        tasks[name] = task
    return dataclasses.replace(sweep, tasks=tasks)


def _read_task(text: str) -> tuple[str, Task]:
    """Parses '[NAME=]CONFIG OVERRIDES' into (name, task)."""
    parts = {"field": "--finetune", "value": text}
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"is invalid: {error}.", **parts) from None
    if not words or words[0].startswith("-"):
        raise ConfigError("must begin with a config, as text:trec.", **parts)
    changed, rest = overrides.take(words[1:])
    if rest:
        raise ConfigError(f"{rest[0]!r} is not --config.section.field=VALUE.", **parts)
    name, equals, config = words[0].partition("=")
    if not equals:
        config = words[0]
        name = config.rpartition(":")[2].removesuffix(".py").rpartition("/")[2].replace(",", "-")
    return name, Task(config, changed)


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
