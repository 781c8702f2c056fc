"""What a command line of launch/sweep.py asks for."""

import argparse
import dataclasses
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from convbert_jax import config_files, links
from convbert_jax.command_line import overrides
from convbert_jax.config import ConfigError
from convbert_jax.config.checks import plugins
from convbert_jax.sweeps.folder import Folder
from convbert_jax.sweeps.slurm import submission
from convbert_jax.sweeps.table import Sweep, SweepError, Task

_MOST_SEEDS, _MOST_RUNNERS = 1000, 1000


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
      name: of the sweep, as --config has it.
      overrides: path of a field -> value, for all cells.
      do: "run"; "submit" to have runners of a cluster run it; "plan" to print the cells; "report"
        to write what there is.
      arguments: of launch/sweep.py, with which a runner elsewhere does the same.
      runners, sbatch: how many are submitted, and what sbatch is told of their machines.
      topology, price: of a plan, see `describe.describe`.
    """

    name: str
    sweep: Sweep
    folder: Folder
    overrides: Mapping[str, Any]
    do: str
    arguments: tuple[str, ...] = ()
    runners: int = 0
    sbatch: Mapping[str, str | bool] = dataclasses.field(default_factory=dict)
    topology: str = "cpu"
    price: float | None = None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            f"{message[:1].lower()}{message[1:].rstrip('.')}; --help lists the flags."
        )


def read(argv: Sequence[str], description: str = "") -> Request:
    """Reads a command line, the program's name first.

    Raises:
      UserError: a flag, a file or a sweep that cannot be used; one sentence.
    """
    changed, rest = overrides.take(argv[1:])
    flags = _parser(description).parse_args(rest)
    sweep = config_files.load_sweep(flags.config)
    if not isinstance(sweep, Sweep):
        raise SweepError(
            f"--config={flags.config}: get_sweep returns a {type(sweep).__name__}; let it return "
            "a Sweep."
        )
    if flags.baseline is not None:
        sweep = _compare_with(sweep, flags.baseline)
    if flags.rows is not None:
        sweep = _choose_rows(sweep, flags.rows)
    if flags.seeds is not None:
        sweep = dataclasses.replace(sweep, seeds=_read_seeds(flags.seeds))
    tasks = dict(sweep.tasks)
    for text in flags.finetune:
        name, task = _read_task(text)
        if name in tasks:
            raise ConfigError(f"--finetune={text}: there is a task {name}; write NAME={text}.")
        tasks[name] = task
    sweep = dataclasses.replace(sweep, tasks=tasks)
    plugins.allow((*flags.plugins, *plugins.named(changed), *plugins.named(sweep)))
    name = flags.config.rpartition(":")[2].removesuffix(".py").rpartition("/")[2]
    if flags.workdir == "":
        raise ConfigError("--workdir= names no folder; leave it out for runs/NAME.")
    folder = Folder(flags.workdir or f"runs/{name.replace(',', '-')}")
    there = next(path for path in (folder.path, *folder.path.parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"--workdir={folder}: {there} is a file; name a folder.")
    links.check(folder.path)
    if flags.report and not folder.path.exists():
        raise ConfigError(
            f"--report: there is no --workdir={folder}; name the folder of a sweep that has begun."
        )
    return Request(
        name=name,
        sweep=sweep,
        folder=folder,
        overrides=changed,
        do=_what_to_do(flags),
        arguments=(*_to_arguments(flags, folder), *overrides.to_flags(changed)),
        runners=flags.slurm or 0,
        sbatch={} if flags.slurm is None else submission.read_options(flags.sbatch),
        topology=flags.topology or "cpu",
        price=flags.price,
    )


def _what_to_do(flags: argparse.Namespace) -> str:
    if not flags.plan and (flags.topology or flags.price is not None):
        raise ConfigError("--topology and --price are of --plan; add --plan, or leave them out.")
    if flags.price is not None and not 0 <= flags.price < math.inf:
        raise ConfigError(f"--price={flags.price} must be a number from 0, as --price=1.2.")
    if flags.slurm is None:
        if flags.sbatch:
            raise ConfigError("--sbatch is of --slurm; add --slurm=N, the number of runners.")
        return "plan" if flags.plan else "report" if flags.report else "run"
    if not 0 < flags.slurm <= _MOST_RUNNERS:
        raise ConfigError(f"--slurm={flags.slurm} must be from 1 to {_MOST_RUNNERS}.")
    return "submit"


def _to_arguments(flags: argparse.Namespace, folder: Folder) -> list[str]:
    """Of a runner on another machine, which shares the disk."""
    chosen = {"rows": flags.rows, "seeds": flags.seeds, "baseline": flags.baseline}
    return [
        f"--config={flags.config}",
        f"--workdir={folder.path.absolute()}",
        *(f"--{name}={value}" for name, value in chosen.items() if value is not None),
        *(f"--finetune={text}" for text in flags.finetune),
        *(f"--plugins={name}" for name in flags.plugins),
    ]


def _parser(description: str) -> _Parser:
    parser = _Parser(
        prog="python launch/sweep.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="Every field of a config, for all cells: --config.section.field=VALUE.",
    )
    add = parser.add_argument
    add("--config", required=True, metavar="FILE:NAME", help="configs/ablation.py:kernel_size")
    add("--workdir", help="folder of the sweep, shared by its runners; default runs/NAME")
    add("--rows", help="which, with commas: attention,mixed; default all of the sweep")
    add("--seeds", help="how many, or which: 5, or 0,3,7, or 2, (one); default those of the sweep")
    add("--baseline", metavar="ROW", help="the row that the report compares the others with")
    add(
        "--finetune",
        action="append",
        default=[],
        metavar="[NAME=]'CONFIG OVERRIDES'",
        help="a task after each pre-training, again for each: "
        "'text:trec --config.task.folder=FOLDER'",
    )
    add(
        "--plugins",
        action="extend",
        type=lambda text: text.split(","),
        default=[],
        metavar="PACKAGE.MODULE:NAME",
        help="Python of your own that the config of a folder may import",
    )
    do = parser.add_mutually_exclusive_group()
    add = do.add_argument
    add("--plan", action="store_true", help="print the cells, time and cost, run nothing")
    add("--report", action="store_true", help="write the report of what there is, run nothing")
    add("--slurm", type=int, metavar="N", help="put N runners into the queue of a Slurm cluster")
    add = parser.add_argument
    add("--topology", metavar="DEVICES", help="of --plan: v5e-16, gpu:h100x8; default cpu (here)")
    add("--price", type=float, help="of --plan: of an hour of one chip, to print the cost")
    parser.add_argument(
        "--sbatch",
        default="",
        metavar="OPTIONS",
        help="machine of each: '--partition=gpu --gpus=1 --time=24:00:00'",
    )
    return parser


def _compare_with(sweep: Sweep, row: str) -> Sweep:
    if row not in sweep.rows:
        raise ConfigError(
            f"--baseline={row}: there is no such row; choose one of: {', '.join(sweep.rows)}."
        )
    return dataclasses.replace(sweep, baseline=row)


def _choose_rows(sweep: Sweep, text: str) -> Sweep:
    names = {name.strip() for name in text.split(",")}
    for name in names - sweep.rows.keys():
        raise ConfigError(
            f"--rows={text}: there is no row {name!r}; choose of: {', '.join(sweep.rows)}."
        )
    rows = {name: row for name, row in sweep.rows.items() if name in names}
    if sweep.compared_with not in rows:
        raise ConfigError(
            f"--rows={text} leaves out {sweep.compared_with}, with which others are compared; add "
            "it, or name another one by --baseline."
        )
    for name, row in rows.items():
        if row.flops_of and row.flops_of not in rows:
            raise ConfigError(
                f"--rows={text} leaves out {row.flops_of}, whose FLOPs {name} is given; add it."
            )
    return dataclasses.replace(sweep, rows=rows)


def _read_seeds(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.removesuffix(",").split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise ConfigError(f"--seeds={text} must be a number of seeds, or seeds with commas.")
    if "," in text:
        return tuple(map(int, parts))
    if not 0 < int(text) <= _MOST_SEEDS:
        raise ConfigError(f"--seeds={text} must be from 1 to {_MOST_SEEDS}.")
    return tuple(range(int(text)))


def _read_task(text: str) -> tuple[str, Task]:
    """(name, task) of '[NAME=]CONFIG OVERRIDES'."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--finetune={text}: {str(error).lower()}.") from None
    if not words or words[0].startswith("-"):
        raise ConfigError(
            f"--finetune={text!r} must begin with a config: 'text:trec --config.task.folder=…'."
        )
    changed, rest = overrides.take(words[1:])
    if rest:
        raise ConfigError(f"--finetune={text}: '{rest[0]}' is no --config.section.field=VALUE.")
    name, named, config = words[0].partition("=")
    if not named:
        config = words[0]
        name = config.rpartition(":")[2].removesuffix(".py").rpartition("/")[2].replace(",", "-")
    return name, Task(config, changed)
