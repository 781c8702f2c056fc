"""What came out of a cell, read off its folder."""

import statistics

from convbert_jax.finetuning.results import RunResult, read_results, runs_of
from convbert_jax.sweeps.cells import FINETUNE, Cell
from convbert_jax.sweeps.folder import Folder
from convbert_jax.training.reports.reporting import read_metrics
from convbert_jax.workdir import Workdir

_OF_TRAINING = ("tokens_per_second", "host_memory", "device_memory")


def read_values(cell: Cell, folder: Folder) -> dict[str, float] | None:
    """The numbers of a cell that has come to its end, by metric; None of one that has not.

    Of pre-training: the last held-out numbers, the median of tokens_per_second, the peak of memory.
    Of fine-tuning: "SPLIT METRIC" as fractions, the mean over its seeds; of several settings, those
    of the best median of the first metric on the first split, as in the run's own table.

    Raises:
      DamagedFileError: the file that has them.
    """
    run = folder.run(cell.id)
    if cell.config.recipe == FINETUNE:
        return _of_finetuning(cell, run)
    if max(run.steps(), default=-1) < cell.config.train.steps:
        return None
    values: dict[str, float] = {}
    trained: dict[str, list[float]] = {}
    for record in read_metrics(run.metrics):
        split = record.pop("split")
        if split == "validation":
            values = {name: value for name, value in record.items() if name != "step"}
            continue
        for name in _OF_TRAINING:
            if name in record:
                trained.setdefault(name, []).append(record[name])
    return values | {name: statistics.median(found) for name, found in trained.items()}


def _of_finetuning(cell: Cell, run: Workdir) -> dict[str, float] | None:
    config = cell.config
    seeds = range(config.seed, config.seed + config.finetune.seeds)
    runs = [result for result in read_results(run) if result.seed in seeds]
    settings = dict.fromkeys(result.setting for result in runs)
    tries = len(config.finetune.learning_rates) * max(1, len(config.finetune.epochs))
    tasks = dict.fromkeys(result.task for result in runs)
    wanted = len(config.finetune.tasks) * tries * len(seeds)
    if len(runs) < wanted:
        return None
    values = {}
    for task in tasks:
        of_task = [result for result in runs if result.task == task]
        best = max(settings, key=lambda s: _median(runs_of(of_task, s)))
        prefix = f"{task} " if len(tasks) > 1 else ""
        chosen = runs_of(of_task, best)
        for split, scores in chosen[0].scores.items():
            for metric in scores:
                found = [result.scores[split][metric] for result in chosen]
                values[f"{prefix}{split} {metric}"] = statistics.fmean(found)
    return values


def _median(runs: tuple[RunResult, ...]) -> float:
    """Of the first metric on the first split; a run that diverged is worse than any."""
    if not runs:
        return float("-inf")
    first = [next(iter(next(iter(result.scores.values())).values())) for result in runs]
    return statistics.median(float("-inf") if v != v else v for v in first)
