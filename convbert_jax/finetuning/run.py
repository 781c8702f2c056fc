"""A complete fine-tuning run over tasks, settings and seeds; it can be stopped and resumed.

WORKDIR/results.jsonl                  one line per finished run
WORKDIR/TASK/seed-N/                   its model, as a run folder, and predictions/
WORKDIR/TASK/rate-R-epochs-E/seed-N/   the same, if several settings are searched
WORKDIR/unfinished/                    the run in progress, see run_files.py
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from absl import logging

from convbert_jax import storage
from convbert_jax.config import Config, to_dict
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.finetuning import fitting, run_files
from convbert_jax.finetuning.fitting import Programs
from convbert_jax.finetuning.run_files import (
    RunResult,
    Setting,
    TaskResult,
    Unfinished,
    append_result,
    check_scores,
    median_of,
    read_results,
    runs_of,
)
from convbert_jax.finetuning.task import FinetuneTask, FinetuningError, Scores
from convbert_jax.training import consistency, distributed, memory
from convbert_jax.training.checkpoints import Checkpoints
from convbert_jax.training.environment import describe_compile_cache
from convbert_jax.training.partitioning import Params
from convbert_jax.training.train_step import TrainState
from convbert_jax.workdir import Workdir

_LESS_TO_TRAIN = (
    "set config.finetune.vectorize_seeds=false to train one seed at a time, or "
    "config.model.remat=full, or lower config.finetune.batch_size or config.finetune.length"
)
_LESS_TO_PREDICT = (
    "lower config.finetune.eval_batch_size, or set config.finetune.vectorize_seeds=false"
)
# (minimum width, learning rate): ELECTRA (Clark et al., 2020, appendix B), as the official ConvBERT
# code. Smaller widths learn little at 3e-4.
_RATES = ((1024, 5e-5), (768, 1e-4), (256, 3e-4))
_RATE_BELOW = 1e-3
_SMALL = 384  # maximum width of encoders for which a batch of 32 rows leaves an accelerator idle


def finetune(
    config: Config,
    workdir: Workdir,
    tasks: Iterable[Callable[[], FinetuneTask]],
    programs: Programs,
    tokenizer: Tokenizer,
    weights: Params | None,
) -> list[TaskResult]:
    """Train all runs that `workdir` does not have yet, and return the results of all.

    All processes must call it; only process 0 writes results, models and predictions.

    Args:
      config: `model` and `tokenizer` match the weights.
      workdir: Locked by the caller.
      tasks: Functions that read and encode a task, called one after another.
      weights: `embeddings` and `encoder`; None initializes every run randomly.

    Raises:
      FinetuningError: All runs of a task diverged, the processes do not share `workdir`, or earlier
        runs in it started from different weights or rows.
      DamagedFileError: A file of finished runs or of the unfinished run is damaged.
    """
    if jax.process_index() == 0:
        read_results(workdir)  # removes a partial line
    distributed.barrier("results mended")
    done = read_results(workdir)
    if not distributed.is_same_on_all(repr(done)):  # it determines the remaining runs
        raise FinetuningError(
            f"Processes read different results from {workdir.results}. Give all processes the same "
            "--workdir on shared storage.",
            field="--workdir",
            path=workdir.results,
        )
    provenance = run_files.Provenance(workdir, config, done)
    provenance.bind_weights(weights)
    results = []
    for make in tasks:
        task = make()
        _check_task(task)
        provenance.bind_task(task)
        if jax.process_count() > 1:
            consistency.check_data(config, fingerprint(task))
        results.append(_finetune_task(config, workdir, task, programs, tokenizer, weights, done))
    logging.info("Compiled %d programs; %s.", programs.count_compiled(), describe_compile_cache())
    return results


def fingerprint(task: FinetuneTask) -> str:
    """Return a checksum of all encoded rows of a task."""
    return hashlib.sha256(repr(sorted(run_files.checksum_task(task).items())).encode()).hexdigest()


def settings_of(config: Config, task: FinetuneTask) -> list[Setting]:
    """Return all settings to try, usually one."""
    rates = config.finetune.learning_rates or (usual_rate(config.model.hidden_size),)
    epochs = config.finetune.epochs or (task.epochs,)
    return [Setting(rate, e) for rate in rates for e in epochs]


def usual_rate(width: int) -> float:
    """Return the default peak learning rate for an encoder with `width` channels."""
    return next((rate for least, rate in _RATES if width >= least), _RATE_BELOW)


def model_of(
    config: Config, workdir: Workdir, task: FinetuneTask, setting: Setting, seed: int
) -> Workdir:
    """Return the folder of one run."""
    name = ""
    if len(settings_of(config, task)) > 1:
        name = f"rate-{setting.learning_rate:g}-epochs-{setting.epochs:g}"
    return workdir.model(task.name, name, seed)


def _check_task(task: FinetuneTask) -> None:
    for name, rows in (("train", task.train), *task.evaluation.items()):
        if not len(rows):
            raise FinetuningError(f"{task.name} has no rows in its {name} split. Check its files.")
    if not task.scored:
        raise FinetuningError(
            f"{task.name} has no labeled rows for model selection. Set a validation file."
        )


def _finetune_task(config, workdir, task, programs, tokenizer, weights, done) -> TaskResult:
    seeds = range(config.seed, config.seed + config.finetune.seeds)
    vectorized = choose_vectorized(config, len(seeds), jax.default_backend())
    runs = [r for r in done if r.task == task.name]
    check_scores(workdir, runs, task.scored, task.metrics)
    for setting in settings_of(config, task):
        finished = {r.seed for r in runs_of(runs, setting)}
        left = [seed for seed in seeds if seed not in finished]
        if finished:
            logging.info(
                "%s, %s: %d of %d seeds are finished.",
                task.name,
                setting,
                len(seeds) - len(left),
                len(seeds),
            )
        for group in [left] if vectorized and left else [[seed] for seed in left]:
            new = _run_group(
                config, workdir, task, programs, tokenizer, weights, setting, group, vectorized
            )
            runs += new
    wanted = [r for r in runs if r.seed in seeds]
    chosen = _choose(task, settings_of(config, task), wanted)
    folders = tuple(model_of(config, workdir, task, chosen, seed).path for seed in seeds)
    return TaskResult(task.name, task.metrics, task.scored, chosen, tuple(wanted), folders)


def choose_vectorized(config: Config, seeds: int, platform: str) -> bool:
    """Resolve `config.finetune.vectorize_seeds`; for `auto`, log the choice and its reason.

    On a CPU, training several small models together is not faster than in sequence, and prediction
    is slower (benchmarks/speed/finetuning_speed.py). The choice for accelerators assumes that one
    run of a small model leaves them idle; this has not been measured.
    """
    asked = config.finetune.vectorize_seeds
    if seeds == 1 or asked != "auto":
        return seeds > 1 and asked == "true"
    small = config.model.hidden_size <= _SMALL
    chosen = platform != "cpu" and small
    reason = f"on {platform}, {config.model.hidden_size} channels"
    logging.info("%d seeds %s (%s).", seeds, "together" if chosen else "in turn", reason)
    return chosen


def _run_group(
    config, workdir, task, programs, tokenizer, weights, setting, seeds, vectorized
) -> list[RunResult]:
    """Train, predict, score and save the runs of some seeds."""
    described = {"task": task.name, **dataclasses.asdict(setting), "seeds": list(seeds)}
    unfinished = Unfinished(workdir, described, config.finetune.checkpoint_minutes)
    f, runs = config.finetune, len(seeds)
    state = programs.of(task, runs if vectorized else None).abstract
    title = f"training {task.name}, {runs} x {f.batch_size} rows of up to {f.length} tokens"
    with memory.explain_out_of_memory(
        title,
        _LESS_TO_TRAIN,
        lambda: memory.find_state((state.params, programs.frozen), state.opt_state),
    ):
        fitted = fitting.fit(
            programs,
            task,
            config,
            setting,
            seeds,
            weights,
            vectorized=vectorized,
            unfinished=unfinished,
        )
    title = f"evaluating {task.name}, {runs} x {f.eval_batch_size} rows of up to {f.length} tokens"
    with memory.explain_out_of_memory(
        title, _LESS_TO_PREDICT, lambda: memory.find_state((fitted.params, fitted.frozen))
    ):
        states = {
            split: fitting.predict(
                programs,
                task,
                config,
                fitted.params,
                split,
                vectorized=vectorized,
                frozen=fitted.frozen,
            )
            for split in task.evaluation
        }
    workdir.check_owner()
    results = []
    for number, seed in enumerate(seeds):
        loss = float(fitted.losses[number])
        scores = {
            split: _score(task, split, states[split][number], math.isfinite(loss))
            for split in task.scored
        }
        result = RunResult(
            task=task.name,
            setting=setting,
            seed=seed,
            steps=fitted.steps,
            loss=loss,
            scores=scores,
            seconds=fitted.seconds,
            examples_per_second=fitted.examples_per_second,
            privacy=fitted.plan and fitted.plan.to_json(),
        )
        place = model_of(config, workdir, task, setting, seed)
        if config.finetune.save_models and not result.diverged:
            params = fitting.take_run(fitted, task, number, vectorized=vectorized)
            save_model(place, config, task, tokenizer, params, fitted.steps, seed)
        writes = jax.process_index() == 0
        for split in task.evaluation if writes and not result.diverged else ():
            # Only for one seed: the others look alike, and drawing takes longer than a small run.
            task.write(
                place.predictions, split, states[split][number], pictures=seed == config.seed
            )
        if writes:
            append_result(workdir, result)
            _log(task, result)
        results.append(result)
    unfinished.remove()
    return results


def save_model(workdir: Workdir, config, task, tokenizer, params, steps: int, seed: int) -> None:
    """Save the fine-tuned model and vocabulary to `workdir` as a run with a single checkpoint.

    All processes must call it, with complete `params` on the host.
    """
    if jax.process_index() == 0:
        storage.remove_tree(workdir.path)
        workdir.keep_vocabularies({"": tokenizer.path}, {"": tokenizer.fingerprint})
    distributed.barrier("model's folder emptied")  # no path: hosts may spell it differently
    inside = str((workdir.vocabulary / tokenizer.path.name).relative_to(workdir.path))
    section = dataclasses.replace(config.tokenizer, path=inside)
    own = dataclasses.replace(
        config, name=task.name, seed=seed, tokenizer=section, outputs=task.outputs
    )
    count = np.asarray(steps, np.int32)
    checkpoints = Checkpoints(workdir.checkpoints, config.checkpoint)
    try:
        # Training does not resume from here, so only the optimizer's step count is saved.
        checkpoints.save(TrainState(count, params, {"count": count}), {}, last=True)
    finally:
        checkpoints.close()
    if jax.process_index() == 0:
        storage.write_json(workdir.config, storage.seal(to_dict(own)))


def _score(task: FinetuneTask, split: str, state, finite: bool) -> Scores:
    if not finite:
        return dict.fromkeys(task.metrics, math.nan)
    return task.evaluators[split].finish(state)


def _choose(task: FinetuneTask, settings: list[Setting], runs: list[RunResult]) -> Setting:
    """Choose the setting with the best median over seeds of the first metric and split."""
    medians = {}
    for setting in settings:
        medians[setting] = median_of(runs_of(runs, setting), task.scored[0], task.metrics[0])
        if len(settings) > 1:
            logging.info(
                "%s, %s: median %s %.4f.", task.name, setting, task.metrics[0], medians[setting]
            )
    best = max(settings, key=lambda setting: medians[setting])
    if medians[best] == -math.inf and all(r.diverged for r in runs):
        raise FinetuningError(
            f"All runs of {task.name} diverged (the loss is not finite). Lower "
            f"config.finetune.learning_rates={config_rates(settings)}.",
            field="config.finetune.learning_rates",
            value=config_rates(settings),
        )
    return best


def config_rates(settings: Sequence[Setting]) -> str:
    """Format the learning rates of some settings as on the command line."""
    return ",".join(f"{rate:g}" for rate in dict.fromkeys(s.learning_rate for s in settings))


def _log(task: FinetuneTask, result: RunResult) -> None:
    if result.diverged:
        logging.warning(
            "%s, seed %d, %s: diverged (the loss is not finite); the run ranks last.",
            task.name,
            result.seed,
            result.setting,
        )
        return
    scores = "  ".join(
        f"{split} {name} {value:.4f}"
        for split, values in result.scores.items()
        for name, value in values.items()
    )
    logging.info(
        "%s, seed %d, %s: %s  (%d steps, %.0f s, %.0f examples/s with compilation)",
        task.name,
        result.seed,
        result.setting,
        scores,
        result.steps,
        result.seconds,
        result.examples_per_second,
    )
