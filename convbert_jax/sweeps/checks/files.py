"""What the cells of a sweep start from must be there, before hours of the first ones, and decides
how large they are.
"""

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from convbert_jax.config import Config, UserError
from convbert_jax.data.parallel import parallel_text
from convbert_jax.data.sources.source import REMOTE, open_source
from convbert_jax.recipes import finetuning, start
from convbert_jax.sweeps.folder import FINISHED, Folder
from convbert_jax.sweeps.table import Cell, SweepError
from convbert_jax.workdir import Workdir


def check_files(cells: Iterable[Cell], folder: Folder) -> None:
    """Looks for weights, vocabularies, text and tasks of the cells that are still to be done, of
    each row with one seed, as far as that takes seconds.

    Raises:
      SweepError: it names the row or the task.
    """
    seen = set()
    for cell in cells:
        task = cell.stage if cell.after else ""
        which = ("task", task) if task else ("row", cell.row)  # which may have one name
        record = folder.read(cell.id)
        if which in seen or (record and record.state == FINISHED):
            continue
        seen.add(which)
        try:
            if not task:
                _check_start(cell, folder)
            _check_data(cell.config, seen)
        except UserError as error:
            name = f"task {task}" if task else f"row {cell.row}"
            raise SweepError(f"{name}: {error}") from error


def as_it_runs(config: Config, changed: Mapping[str, Any], run: Workdir) -> Config:
    """The config of a pre-training cell with what its vocabulary and its weights tell, as the run
    itself takes it: sizes, so parameters and FLOPs. As it is where they cannot be read, which
    `check_files` refuses.

    Args:
      changed: path -> value, what main.py is told of it.
    """
    if not _starts_from_files(config):
        return config
    try:
        return start.read_start(config, run, tuple(changed))[0]
    except UserError:
        return config


def _starts_from_files(config: Config) -> bool:
    vocabularies = (config.tokenizer.path, config.parallel.target_vocabulary)
    return any((*vocabularies, config.init_from, config.distillation.teacher))


def _check_start(cell: Cell, folder: Folder) -> None:
    config = cell.config
    if config.recipe == "finetune":
        finetuning.read_start(config, tuple(cell.changed))
    elif _starts_from_files(config):
        start.read_start(config, folder.run(cell.id), tuple(cell.changed))


def _check_data(config: Config, seen: set) -> None:
    if config.recipe == "finetune":
        finetuning.check_tasks(config)
    elif config.reads_pairs:
        parallel_text.open_sources(config)
    elif not pathlib.Path(config.data.directory).exists():  # else what is prepared is enough
        for spec in filter(None, (config.data.source, config.data.validation_source)):
            if spec not in seen and not spec.startswith((*REMOTE, "tfds")):
                seen.add(spec)
                open_source(config.data, spec)
