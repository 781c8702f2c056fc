"""A whole run: tasks, settings and seeds, each pair of them once, over as many starts as it takes.

WORKDIR/results.jsonl                  one line for each finished run
WORKDIR/TASK/seed-N/                   its model, a run's folder of its own, and predictions/
WORKDIR/TASK/rate-R-epochs-E/seed-N/   the same where several settings are searched
WORKDIR/unfinished/                    the run that is under way, see unfinished.py
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from absl import logging

from convbert_jax import files
from convbert_jax.config import Config, to_dict
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.finetuning import fitting, origin
from convbert_jax.finetuning.fitting import Setting
from convbert_jax.finetuning.programs import Programs
from convbert_jax.finetuning.results import (
    RunResult,
    TaskResult,
    append_result,
    check_scores,
    median_of,
    read_results,
    runs_of,
)
from convbert_jax.finetuning.tasks.task import FinetuneTask, FinetuningError, Scores
from convbert_jax.finetuning.unfinished import Unfinished
from convbert_jax.training import consistency, distributed, memory
from convbert_jax.training.checkpoints.saving import Checkpoints
from convbert_jax.training.environment.compilation import describe_compile_cache
from convbert_jax.training.state import TrainState
from convbert_jax.training.task import Params
from convbert_jax.workdir import Workdir

_LESS_TO_TRAIN = (
    "set config.finetune.vectorize_seeds=false, so that seeds train in turn, or "
    "config.model.remat=full, or lower config.finetune.batch_size or config.finetune.length"
)
_LESS_TO_PREDICT = (
    "lower config.finetune.eval_batch_size, or set config.finetune.vectorize_seeds=false"
)
# Channels from which a rate is usual: ELECTRA (Clark et al., 2020, appendix B), as the release of
# ConvBERT. Below them by benchmarks/RESULTS.md, section 13.
_RATES = ((1024, 5e-5), (768, 1e-4), (256, 3e-4))
_RATE_BELOW = 1e-3
_SMALL = 384  # channels of an encoder that leaves an accelerator idle with one batch of 32 rows


def finetune(
    config: Config,
    workdir: Workdir,
    tasks: Iterable[Callable[[], FinetuneTask]],
    programs: Programs,
    tokenizer: Tokenizer,
    weights: Params | None,
) -> list[TaskResult]:
    """Trains what `workdir` does not have yet, and returns the results of everything.

    All processes call it and train; the first one alone writes results, models and predictions.

    Args:
      config: `model` and `tokenizer` are those of the weights.
      workdir: locked by the caller.
      tasks: read and encoded one after another, each when its turn comes.
      weights: `embeddings` and `encoder`; None: every run starts from random ones.

    Raises:
      FinetuningError: every run of a task diverged, the processes share no `workdir`, or what is
        there began with other weights or rows.
      DamagedFileError: the record of finished runs, or of the one under way.
    """
    if jax.process_index() == 0:
        read_results(workdir)  # takes a half written line away
    distributed.barrier("results mended")
    done = read_results(workdir)
    if not distributed.is_same_on_all(repr(done)):  # it says which runs are left, to each process
        raise FinetuningError(
            f"the processes find different results in {workdir.results}; give all of them the same "
            "--workdir, on storage that they share.",
            field="--workdir",
            path=workdir.results,
        )
    began_with = origin.Origin(workdir, config, done)
    began_with.bind_weights(weights)
    results = []
    for make in tasks:
        task = make()
        _check_task(task)
        began_with.bind_task(task)
        if jax.process_count() > 1:
            consistency.check_data(config, fingerprint(task))
        results.append(_finetune_task(config, workdir, task, programs, tokenizer, weights, done))
    logging.info("%d programs; %s.", programs.count_compiled(), describe_compile_cache())
    return results


def fingerprint(task: FinetuneTask) -> str:
    """Of all rows of a task, as they are encoded."""
    return hashlib.sha256(repr(sorted(origin.of_task(task).items())).encode()).hexdigest()


def settings_of(config: Config, task: FinetuneTask) -> list[Setting]:
    """All that a search tries; usually one."""
    rates = config.finetune.learning_rates or (usual_rate(config.model.hidden_size),)
    epochs = config.finetune.epochs or (task.epochs,)
    return [Setting(rate, e) for rate in rates for e in epochs]


def usual_rate(width: int) -> float:
    """The peak learning rate for encoders of so many channels, where none is asked for."""
    return next((rate for least, rate in _RATES if width >= least), _RATE_BELOW)


def model_of(
    config: Config, workdir: Workdir, task: FinetuneTask, setting: Setting, seed: int
) -> Workdir:
    """Where the run of a setting and a seed is."""
    name = ""
    if len(settings_of(config, task)) > 1:
        name = f"rate-{setting.learning_rate:g}-epochs-{setting.epochs:g}"
    return workdir.model(task.name, name, seed)


def _check_task(task: FinetuneTask) -> None:
    for name, rows in (("train", task.train), *task.evaluation.items()):
        if not len(rows):
            raise FinetuningError(f"{task.name} has no rows in its {name} split; check its files.")
    if not task.scored:
        raise FinetuningError(
            f"{task.name} has no labelled rows to select by; name a validation file."
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
    """What `config.finetune.vectorize_seeds` comes to; `auto` is logged with its reason.

    On a CPU five runs of a `tiny` together are as fast as one after another in training and a
    third slower in prediction (benchmarks/speed/finetuning_speed.py). That one run of a small model
    leaves an accelerator idle is a guess: nobody has measured it.
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
    """Trains, predicts, scores and keeps the runs of some seeds."""
    described = {"task": task.name, **dataclasses.asdict(setting), "seeds": list(seeds)}
    unfinished = Unfinished(workdir, described, config.finetune.checkpoint_minutes)
    f, runs = config.finetune, len(seeds)
    state = programs.of(task, runs if vectorized else None).abstract
    title = f"training {task.name}, {runs} x {f.batch_size} rows of up to {f.length} tokens"
    with memory.explain_out_of_memory(
        title, _LESS_TO_TRAIN, lambda: memory.find_state(state.params, state.opt_state)
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
        title, _LESS_TO_PREDICT, lambda: memory.find_state(fitted.params)
    ):
        states = {
            split: fitting.predict(
                programs, task, config, fitted.params, split, vectorized=vectorized
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
        )
        place = model_of(config, workdir, task, setting, seed)
        if config.finetune.save_models and not result.diverged:
            params = fitting.take_run(fitted, task, number, vectorized=vectorized)
            save_model(place, config, task, tokenizer, params, fitted.steps, seed)
        writes = jax.process_index() == 0
        for split in task.evaluation if writes and not result.diverged else ():
            # Pictures of one seed: all look alike, and they take longer than a small run's files.
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
    """Makes `workdir` a run whose one checkpoint is the fine-tuned model, with its vocabulary.

    All processes call it, with the whole of `params` on the host.
    """
    if jax.process_index() == 0:
        files.remove_tree(workdir.path)
        workdir.keep_vocabularies({"": tokenizer.path}, {"": tokenizer.fingerprint})
    distributed.barrier("model's folder emptied")  # not its path, which hosts may spell differently
    inside = str((workdir.vocabulary / tokenizer.path.name).relative_to(workdir.path))
    section = dataclasses.replace(config.tokenizer, path=inside)
    own = dataclasses.replace(
        config, name=task.name, seed=seed, tokenizer=section, outputs=task.outputs
    )
    count = np.asarray(steps, np.int32)
    checkpoints = Checkpoints(workdir.checkpoints, config.checkpoint)
    try:
        # Nothing goes on from here, so of the optimizer there is but its count of steps.
        checkpoints.save(TrainState(count, params, {"count": count}), {}, last=True)
    finally:
        checkpoints.close()
    if jax.process_index() == 0:
        files.write_json(workdir.config, files.seal(to_dict(own)))


def _score(task: FinetuneTask, split: str, state, finite: bool) -> Scores:
    if not finite:
        return dict.fromkeys(task.metrics, math.nan)
    return task.evaluators[split].finish(state)


def _choose(task: FinetuneTask, settings: list[Setting], runs: list[RunResult]) -> Setting:
    """The setting with the best median over seeds of the first metric on the first split."""
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
            f"every run of {task.name} diverged (the loss is not finite); lower "
            f"config.finetune.learning_rates={config_rates(settings)}.",
            field="config.finetune.learning_rates",
            value=config_rates(settings),
        )
    return best


def config_rates(settings: Sequence[Setting]) -> str:
    """The learning rates of some settings, as they are written on the command line."""
    return ",".join(f"{rate:g}" for rate in dict.fromkeys(s.learning_rate for s in settings))


def _log(task: FinetuneTask, result: RunResult) -> None:
    if result.diverged:
        logging.warning(
            "%s, seed %d, %s: the loss is not finite, the run counts as the worst.",
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
        "%s, seed %d, %s: %s  (%d steps, %.0f s, %.0f examples/s, compiling counted)",
        task.name,
        result.seed,
        result.setting,
        scores,
        result.steps,
        result.seconds,
        result.examples_per_second,
    )
