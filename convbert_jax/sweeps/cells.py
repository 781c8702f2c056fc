"""The runs that a sweep makes, each with its config; all of them are checked before any begins."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from convbert_jax import config_files
from convbert_jax.analysis import flops
from convbert_jax.command_line.fields import field_types, nearest
from convbert_jax.config import (
    Config,
    UserError,
    changes,
    from_config_dict,
    to_dict,
)
from convbert_jax.config.sequences.sections import OF_PAIRS
from convbert_jax.sweeps.checks import rows as rows_lib
from convbert_jax.sweeps.checks.files import as_it_runs
from convbert_jax.sweeps.folder import FINISHED, Folder, Record
from convbert_jax.sweeps.table import Cell, Row, Sweep, SweepError, Task

PRETRAIN, FINETUNE, SCRATCH = "pretrain", "finetune", "-scratch"
_NAME = re.compile(r"[A-Za-z0-9][\w.,=+-]*", re.ASCII)
# Changeable in a run, and yet what a table of runs is compared under.
_COMPARED = (
    *("train.steps", "train.log_every", "train.eval_every", "train.eval_rows"),
    *("train.gradient_dtype", "compute_dtype", "finetune.tasks", "finetune.seeds"),
    "distillation.teacher",
)
_WRITING, _AT_ONCE = "decoding.", "decoding.batch_tokens"  # how texts are written that are scored
# An override of a sweep with tasks is of pre-training, but for those of fine-tuning and of both.
_OF_TASKS = ("finetune.", "task.", "parallel.", "decoding.")
_OF_BOTH = ("platform", "compute_dtype", "mesh.")
_BOTH_TOO = ("train.compile_cache",)
# Recipes of the tasks after a recipe; after others it is FINETUNE.
_FOLLOW = {"span_corruption": OF_PAIRS, "causal_lm": ()}


def expand(sweep: Sweep, folder: Folder, overrides: Mapping[str, Any] | None = None) -> list[Cell]:
    """All cells, seed by seed, pre-training before the tasks that follow it.

    Args:
      overrides: path -> value, for all cells; of a sweep with tasks those of `finetune` and `task`
        are for the tasks.

    Raises:
      SweepError: a row or a task that cannot be; one sentence that names it.
    """
    overrides = dict(overrides or {})
    _check_table(sweep, overrides)
    of_rows, of_tasks = _deal(sweep, overrides)
    shared = {**sweep.changes, **of_rows}
    cells = []
    try:
        rows = {name: _steps_of_row(sweep, folder, name, shared) for name in sweep.rows}
        for seed in sweep.seeds:
            for name, changed in rows.items():
                cells += _cells_of(sweep, folder, name, seed, changed, of_tasks)
    except rows_lib.RowError as error:
        raise rows_lib.explain(error, sweep, of_rows) from error
    if cells[0].config.recipe != FINETUNE:
        _check_overrides_of_tasks(sweep, overrides)
    rows_lib.check_differ(cells, sweep, of_rows)
    rows_lib.check_shards(cells, folder, of_rows)
    return cells


def check_unchanged(cells: Iterable[Cell], folder: Folder) -> tuple[int, list[str]]:
    """Compares the cells with what has begun in `folder`.

    Returns:
      how many are new; those that have begun and are no longer in the table.

    Raises:
      SweepError: a cell that has begun has another config now.
      DamagedFileError: the record of one is damaged.
    """
    begun = {name: folder.read(name) for name in folder.begun()}
    cells = {cell.id: cell for cell in cells}
    for name, record in begun.items():
        cell = cells.get(name)
        if cell is None or (record.state != FINISHED and not folder.run(name).is_bound()):
            continue
        found = changes.differences(_read_config(record, folder), to_dict(cell.config))
        refused = {path: pair for path, pair in found.items() if _is_fixed(path, cell)}
        if refused:
            raise SweepError(
                f"--workdir={folder} holds a sweep in which {name} has another config: "
                f"{changes.describe(refused)}; choose another --workdir, or set these fields back."
            )
    return len(cells.keys() - begun.keys()), sorted(begun.keys() - cells.keys())


def _read_config(record: Record, folder: Folder) -> dict[str, Any]:
    """The config of a record, where younger fields have their defaults."""
    try:
        return to_dict(from_config_dict(record.config, check=False))
    except UserError as error:
        raise SweepError(
            f"{folder.record(record.cell)}: {error} It is of another version of convbert_jax; use "
            "that one, or another --workdir."
        ) from None


def _is_fixed(path: str, cell: Cell) -> bool:
    if path in _COMPARED or (path.startswith(_WRITING) and path != _AT_ONCE):
        return True
    if cell.after and path == "init_from":  # the folder may have moved
        return False
    return not changes.is_changeable(Config, path, "finetune")  # the stricter one


def _check_table(sweep: Sweep, overrides: Mapping[str, Any]) -> None:
    if not isinstance(sweep, Sweep):
        raise SweepError(f"get_sweep returns a {type(sweep).__name__}; let it return a Sweep.")
    for field in ("rows", "changes", "tasks"):
        found = getattr(sweep, field)
        if not isinstance(found, Mapping):
            raise SweepError(f"{field} is a {type(found).__name__}; make it a dict.")
    for field, kind in (("seeds", int), ("metrics", str)):
        values = getattr(sweep, field)
        if not isinstance(values, tuple | list) or not all(type(v) is kind for v in values):
            raise SweepError(f"{field}={values!r} must be a tuple of {kind.__name__}.")
    if not sweep.rows or not sweep.seeds:
        raise SweepError("the sweep has no rows or no seeds; give it one of each at least.")
    for name in (*sweep.rows, *sweep.tasks):
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise SweepError(f"'{name}' is no name of a folder; use letters, digits and .,=+-_.")
    for name, row in sweep.rows.items():
        if not isinstance(row, Row):
            raise SweepError(f"row {name} is a {type(row).__name__}; make it a Row.")
        if not isinstance(row.changes, Mapping) or not isinstance(row.parts, Mapping):
            raise SweepError(f"row {name} has changes or parts that are no dict; make them one.")
        if not all(isinstance(part, int | float) for part in row.parts.values()):
            raise SweepError(f"row {name} has parts={row.parts}; each is a number, as 0.5.")
        if row.flops_of and (row.flops_of not in sweep.rows or sweep.rows[row.flops_of].flops_of):
            raise SweepError(
                f"row {name} has flops_of={row.flops_of}, which is no row with steps of its own."
            )
    if len(set(sweep.seeds)) < len(sweep.seeds):
        raise SweepError(f"seeds={sweep.seeds} has one twice; leave one out.")
    if sweep.compared_with not in sweep.rows:
        raise SweepError(f"baseline={sweep.baseline} is no row; rows: {', '.join(sweep.rows)}.")
    for name, task in sweep.tasks.items():
        if not isinstance(task, Task):
            raise SweepError(f"task {name} is a {type(task).__name__}; make it a Task.")
        for path in ("seed", "init_from"):
            if path in task.changes:
                raise SweepError(
                    f"task {name} has config.{path}, which follows from the pre-training; leave "
                    "it out."
                )
        if name in (PRETRAIN, FINETUNE) or (sweep.from_scratch and name.endswith(SCRATCH)):
            raise SweepError(f"a task cannot be called {name}; give it another name.")
    if sweep.from_scratch and not sweep.tasks:
        raise SweepError(
            "this sweep compares tasks with and without pre-training and names none; add "
            "--finetune='text:trec --config.task.folder=FOLDER', for one."
        )
    rows = sweep.rows.values()
    varied = {path for row in rows for path in (*row.changes, *row.parts)} | {"seed"}
    if sweep.search:
        varied |= sweep.search.space.keys()
        _check_search(sweep)
    if any("seed" in changes for changes in (sweep.changes, *(row.changes for row in rows))):
        raise SweepError("a row or the sweep changes config.seed; use the seeds of the sweep.")
    for path in overrides:
        if path in varied:
            what = "--seeds=N" if path == "seed" else "another sweep for another table"
            raise SweepError(
                f"--config.{path} is what the cells differ in; leave it out, and take {what}."
            )


def _check_search(sweep: Sweep) -> None:
    search = sweep.search
    if search.within and search.within not in sweep.rows:
        raise SweepError(
            f"the search is within={search.within}, which is no row; rows: {', '.join(sweep.rows)}."
        )
    if search.rows < 1 or not search.space or not all(search.space.values()):
        raise SweepError("the search has no rows, no fields or a field without values.")
    for path in search.space:
        near = nearest(path, field_types())
        if path not in field_types():
            raise SweepError(f"the search varies config.{path}, which is no field; is it {near}?")


def _check_overrides_of_tasks(sweep: Sweep, overrides: Mapping[str, Any]) -> None:
    of_tasks = [path for path in overrides if path.startswith(("finetune.", "task."))]
    if of_tasks and not sweep.tasks:
        raise SweepError(
            f"--config.{of_tasks[0]} is of fine-tuning, and no task follows the pre-training of "
            "this sweep; add --finetune='text:trec --config.task.folder=FOLDER', for one."
        )
    for path in overrides:
        own = [path in task.changes for task in sweep.tasks.values()]
        if path.startswith(_OF_TASKS) and own and all(own):
            raise SweepError(
                f"--config.{path} is for all tasks, and each of them has its own; leave it out."
            )


def _deal(sweep: Sweep, overrides: Mapping[str, Any]) -> tuple[dict, dict]:
    """(overrides of the rows, overrides of the tasks)."""
    if not sweep.tasks:
        return dict(overrides), {}
    of_tasks = {p: v for p, v in overrides.items() if p.startswith(_OF_TASKS)}
    both = {p: v for p, v in overrides.items() if p.startswith(_OF_BOTH) or p in _BOTH_TOO}
    return {p: v for p, v in overrides.items() if p not in of_tasks}, of_tasks | both


def _make(what: str, base: str, changed: Mapping[str, Any]) -> Config:
    try:
        return config_files.make_config(base, dict(changed))
    except UserError as error:
        raise SweepError(f"{what}: {error}") from error


def _steps_of_row(
    sweep: Sweep, folder: Folder, name: str, shared: Mapping[str, Any]
) -> dict[str, Any]:
    """What a row changes, with its steps where they follow from others or from the FLOPs of another
    row.
    """
    row = sweep.rows[name]
    changed = {**shared, **row.changes}
    if row.parts and row.flops_of:
        raise SweepError(f"row {name} has parts and flops_of; leave one out.")
    if row.parts:
        steps = rows_lib.make_row(name, sweep.config, changed).train.steps
        changed |= {path: round(steps * part) for path, part in row.parts.items()}
    if not row.flops_of:
        return changed
    if "train.steps" in row.changes:
        raise SweepError(f"row {name} has train.steps and flops_of; leave one out.")
    config = rows_lib.make_row(name, sweep.config, changed)
    of_like = _steps_of_row(sweep, folder, row.flops_of, shared)
    wanted = rows_lib.make_row(row.flops_of, sweep.config, of_like)
    if config.recipe == FINETUNE or config.reads_pairs:
        raise SweepError(
            f"row {name} has flops_of, which is of pre-training on a corpus, and "
            f"config.recipe={config.recipe} is not; leave one of them out."
        )
    if config.objective.masked_lm_steps:
        raise SweepError(
            f"row {name} has flops_of and config.objective.masked_lm_steps="
            f"{config.objective.masked_lm_steps}, which costs another part of other steps; leave "
            "one of them out."
        )
    if teacher := config.distillation.teacher or wanted.distillation.teacher:
        raise SweepError(
            f"row {name} has flops_of, and config.distillation.teacher={teacher} spends FLOPs that "
            "are not counted; leave one of them out."
        )
    spent = []
    for of_row, like, fields in ((name, config, changed), (row.flops_of, wanted, of_like)):
        run = folder.run(f"{of_row}/seed-{sweep.seeds[0]}/{PRETRAIN}")
        spent.append(flops.training_flops(as_it_runs(like, fields, run)))
    ratio = spent[1] / spent[0]
    if math.isnan(ratio):
        raise SweepError(
            f"row {name} has flops_of, and the FLOPs of config.model.mixer are unknown; give it "
            "train.steps."
        )
    steps = max(1, round(config.train.steps * ratio))
    return changed | {
        "train.steps": steps,
        "optimizer.warmup_steps": min(steps, round(config.optimizer.warmup_steps * ratio)),
    }


def _cells_of(sweep, folder, name, seed, changed, of_tasks) -> list[Cell]:
    """One row with one seed: its run, and the tasks after it."""
    changed = {**changed, "seed": seed}
    config = rows_lib.make_row(name, sweep.config, changed)
    if sweep.tasks and (config.recipe == FINETUNE or config.reads_pairs):
        raise SweepError(f"{sweep.config} is fine-tuning, after which no tasks can come.")
    if config.recipe == FINETUNE:
        if changed.get("finetune.seeds", 1) != 1:
            raise SweepError(
                f"row {name} has config.finetune.seeds={changed['finetune.seeds']}, but each cell "
                "of a sweep of fine-tuning is one seed; use the seeds of the sweep (--seeds=N)."
            )
        changed["finetune.seeds"] = 1
        changed.setdefault("finetune.save_models", False)
        config = rows_lib.make_row(name, sweep.config, changed)
        return [Cell(name, seed, FINETUNE, sweep.config, changed, config)]
    if not config.data.directory:
        changed["data.directory"] = str(folder.data(config))
        config = rows_lib.make_row(name, sweep.config, changed)
    pretrained = Cell(name, seed, PRETRAIN, sweep.config, changed, config)
    cells = [pretrained]
    for task_name, task in sweep.tasks.items():
        ways = {"": False, SCRATCH: True} if sweep.from_scratch else {"": None}
        for suffix, scratch in ways.items():
            cells.append(
                _after(folder, pretrained, f"{task_name}{suffix}", task, of_tasks, scratch)
            )
    return cells


def _after(folder, pretrained: Cell, name: str, task: Task, overrides, scratch) -> Cell:
    what = f"task {name}"
    changed = {**overrides, **task.changes, "init_from": str(folder.run(pretrained.id))}
    config = _make(what, task.config, changed)
    before = pretrained.config.recipe
    follow = _FOLLOW.get(before, (FINETUNE,))
    if config.recipe not in follow:
        raise SweepError(
            f"{what}: {task.config} has config.recipe='{config.recipe}'; after '{before}' comes "
            f"{' or '.join(follow) or 'none'}."
        )
    section, seeds = "parallel", 1
    if config.recipe == FINETUNE:
        section, seeds = "finetune", config.finetune.seeds
        changed.setdefault("finetune.save_models", False)
    if scratch is not None:
        changed[f"{section}.from_scratch"] = scratch
    # no fine-tuning seed comes twice, and all rows have the same
    changed["seed"] = pretrained.seed * seeds
    return Cell(
        pretrained.row,
        pretrained.seed,
        name,
        task.config,
        changed,
        _make(what, task.config, changed),
        after=pretrained.id,
    )
