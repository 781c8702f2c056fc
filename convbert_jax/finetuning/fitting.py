"""One setting of one task, trained for one seed or for several at once, and its predictions."""

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from tqdm import tqdm

from convbert_jax.config import Config
from convbert_jax.data.tasks.encoding import Rows
from convbert_jax.data.tasks.length_buckets import (
    choose_buckets,
    epoch_batches,
    evaluation_batches,
    release_batches,
)
from convbert_jax.finetuning.predictions.collected import ROW, Predicted, rows_evaluator
from convbert_jax.finetuning.programs import Programs, narrow_head, widen_head
from convbert_jax.finetuning.tasks.task import FinetuneTask, FinetuningError
from convbert_jax.finetuning.unfinished import Unfinished
from convbert_jax.interfaces.batch import FinetuneBatch
from convbert_jax.interfaces.evaluator import Evaluator
from convbert_jax.interrupts import Stopped
from convbert_jax.training import sharding
from convbert_jax.training.environment.signals import StopSignals
from convbert_jax.training.environment.watchdog import Watchdog
from convbert_jax.training.evaluation import fetch
from convbert_jax.training.optimizer import make_schedule
from convbert_jax.training.reports.timing import format_seconds
from convbert_jax.training.task import Params

_IN_FLIGHT = 4  # steps that are given to the device before the host waits
_LOG_EVERY = 30.0  # seconds between lines where there is no terminal
_TIMED_SECONDS = 5.0  # of steps, before a time left is named


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a search varies."""

    learning_rate: float
    epochs: float

    def __str__(self) -> str:
        return f"learning rate {self.learning_rate:g}, {self.epochs:g} epochs"


@dataclasses.dataclass(frozen=True)
class Fitted:
    """Runs of one setting.

    Attributes:
      params: on the device, with a leading axis of runs if there are several.
      losses: of the last step of each run; not finite where it diverged.
      seconds: since the last start.
      examples_per_second: of all runs together since then, fillers not counted; compilation is.
    """

    params: Params
    losses: np.ndarray
    steps: int
    seconds: float
    examples_per_second: float


def count_steps(task: FinetuneTask, config: Config, epochs: float) -> int:
    """Whole epochs have every row once; release: int(n // batch * epochs), n with fillers."""
    per_epoch = -(-len(task.train) // config.finetune.batch_size)
    return max(1, int(per_epoch * epochs))


def learning_rates(config: Config, setting: Setting, steps: int) -> np.ndarray:
    """The rate of each step."""
    warmup = config.finetune.warmup_fraction * steps
    if not config.finetune.release_warmup:
        warmup = int(warmup)
    section = dataclasses.replace(config.optimizer, learning_rate=setting.learning_rate)
    schedule = make_schedule(section, steps, warmup_steps=warmup)
    return np.asarray(schedule(np.arange(steps)))


def fit(
    programs: Programs,
    task: FinetuneTask,
    config: Config,
    setting: Setting,
    seeds: Sequence[int],
    weights: Params | None,
    *,
    vectorized: bool,
    unfinished: Unfinished | None = None,
) -> Fitted:
    """Trains one run for each seed, by one program if `vectorized`, which several need.

    A run depends on its seed alone: its head, its dropout and its order of rows.

    Args:
      weights: `embeddings` and `encoder` to start from; None: random ones.
      unfinished: keeps what is done of it now and then, and has what an earlier start did.

    Raises:
      Stopped: a signal asked for a stop; what is done is kept.
      FinetuningError: what an earlier start did is more than there is to do.
    """
    start = time.perf_counter()
    program = programs.of(task, len(seeds) if vectorized else None)
    steps = count_steps(task, config, setting.epochs)
    rates = learning_rates(config, setting, steps)
    seed = np.asarray(seeds, np.uint32) if vectorized else np.uint32(seeds[0])
    title = f"{task.name}, seed{'s' if len(seeds) > 1 else ''} {_spell(seeds)}"
    constants = programs.put_constants(task)
    losses, examples = deque(), 0
    state = unfinished.resume(program.abstract) if unfinished else None
    if state is None:
        state = program.start(_start_params(programs, task, seeds, weights, vectorized))
    done = int(state.step)
    if done >= steps:  # no step would be left to take a loss of; every kept state has one
        raise FinetuningError(
            f"the run of {title} that was stopped had done {done} steps, and the rows that are "
            f"here now make {steps}; put its rows back, or name another --workdir.",
            field="--workdir",
            value=steps,
        )
    batches = itertools.islice(_batches(task, config, seeds, steps), done, None)
    per_step, stopped = config.finetune.batch_size * len(seeds), None
    watchdog = Watchdog(config.train.hang_seconds)
    with StopSignals() as stop, watchdog.watching():
        mean_length = _mean_length(task, config)
        for length, index in _report(batches, steps, title, per_step, mean_length, done):
            index = index if vectorized else index[0]
            batch = sharding.put_whole_batch(task.train.batch(index, length), program.rows)
            state, _, vitals = watchdog.call(
                program.train_step, state, batch, seed, rates[done], constants, batch=batch
            )
            done += 1
            examples += int((index >= 0).sum())
            losses.append(vitals.loss)
            if len(losses) > _IN_FLIGHT:
                jax.block_until_ready(losses.popleft())
            watchdog.beat()
            if stopped := stop.requested(done):
                break
            if unfinished and done < steps:
                unfinished.keep_if_due(state, done)
        jax.block_until_ready(list(losses))
    if stopped:
        if unfinished and done < steps:
            unfinished.keep(state)
            unfinished.close()
            logging.info("Stopped by %s; step %d of %d is kept.", stopped, done, steps)
        raise Stopped(stopped)
    values = np.atleast_1d(np.asarray(jax.device_get(losses[-1])))
    seconds = time.perf_counter() - start
    return Fitted(state.params, values, steps, seconds, examples / seconds)


def predict(
    programs: Programs,
    task: FinetuneTask,
    config: Config,
    params: Params,
    split: str,
    *,
    vectorized: bool,
) -> list[Any]:
    """The state of the split's evaluator after all rows, for each run in `params` (one if not
    `vectorized`).
    """
    program = programs.of(task, len(jax.tree.leaves(params)[0]) if vectorized else None)
    constants = programs.put_constants(task)
    watchdog = Watchdog(config.train.hang_seconds)

    def run(batch):
        batch = sharding.put_whole_batch(batch, program.eval_rows)
        outputs = watchdog.call(
            program.eval_step, params, batch, constants, batch=batch, what="the evaluation"
        )
        watchdog.beat()
        return outputs if vectorized else jax.tree.map(lambda leaf: leaf[None], outputs)

    with watchdog.watching():
        return evaluate(
            run,
            task.evaluation[split],
            task.evaluators[split],
            buckets=buckets_of(config),
            batch_size=config.finetune.eval_batch_size,
            title=f"{task.name}, predicting",
        )


def evaluate(
    run: Callable[[FinetuneBatch], dict],
    rows: Rows,
    evaluator: Evaluator,
    *,
    buckets: Sequence[int],
    batch_size: int | Sequence[int],
    title: str | None = None,
) -> list[Any]:
    """The state of the evaluator after all rows, for each run.

    Args:
      run: batch -> {name: [runs, B, ...]} on the device; the evaluator gets that of its run, and
        which rows they are.
      batch_size: rows of a batch, or for each bucket its own.
      title: of the progress that is shown; None shows none.
    """
    batches = evaluation_batches(rows.lengths, buckets, batch_size)
    shown = batches
    if title:
        mean_length = float(np.mean([length for length, _ in batches]))
        shown = _report(batches, len(batches), title, batch_size, mean_length)
    running = ((index, run(rows.batch(index, length))) for length, index in shown)
    states: list[Any] = []
    for index, found in fetch(running, ahead=2):
        states = states or [evaluator.init() for _ in next(iter(found.values()))]
        for number, state in enumerate(states):
            outputs = {name: values[number] for name, values in found.items()}
            states[number] = evaluator.update(state, {**outputs, ROW: index})
    return states


def predict_rows(
    run: Callable[[FinetuneBatch], dict],
    rows: Rows,
    *,
    buckets: Sequence[int],
    batch_size: int | Sequence[int],
) -> Predicted:
    """Outputs of all rows, in their order, of one run; arguments as `evaluate`."""
    (collected,) = evaluate(
        run, rows, rows_evaluator(len(rows)), buckets=buckets, batch_size=batch_size
    )
    return collected.predicted()


def buckets_of(config: Config) -> tuple[int, ...]:
    """Lengths that rows are padded to."""
    return choose_buckets(config.finetune.buckets, config.finetune.length)


def take_run(fitted: Fitted, task: FinetuneTask, run: int, *, vectorized: bool) -> Params:
    """Parameters of one run on the host, the head as wide as its labels; all processes call it."""
    params = jax.tree.map(lambda leaf: leaf[run], fitted.params) if vectorized else fitted.params
    return narrow_head(sharding.gather(params), len(task.outputs.labels))


def _start_params(programs, task, seeds, weights, vectorized) -> Params:
    """On the host, with an axis of runs if they are `vectorized`."""
    runs = []
    for seed in seeds:
        if weights is None:
            params = programs.new_params(task, seed)
        else:
            params = {**weights, "head": programs.new_head(task, seed)}
        runs.append(widen_head(params, len(task.outputs.labels), task.width))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *runs) if vectorized else runs[0]


def _batches(
    task: FinetuneTask, config: Config, seeds: Sequence[int], steps: int
) -> Iterator[tuple[int, np.ndarray]]:
    """(length, index [runs, B]) of each step."""
    f, lengths = config.finetune, task.train.lengths
    if f.release_batches:
        streams = [release_batches(len(lengths), f.length, f.batch_size, seed=s) for s in seeds]
        for _ in range(steps):
            parts = [next(stream) for stream in streams]
            yield f.length, np.stack([index for _, index in parts])
        return
    done, epoch = 0, 0
    while done < steps:
        orders = [
            epoch_batches(lengths, buckets_of(config), f.batch_size, seed=seed, epoch=epoch)
            for seed in seeds
        ]
        for parts in zip(*orders, strict=True):
            if done == steps:
                return
            done += 1
            yield parts[0][0], np.stack([index for _, index in parts])
        epoch += 1


def _mean_length(task: FinetuneTask, config: Config) -> float:
    """Padded tokens of a training row."""
    f = config.finetune
    if f.release_batches:
        return f.length
    batches = epoch_batches(task.train.lengths, buckets_of(config), f.batch_size, seed=0, epoch=0)
    return float(np.mean([length for length, _ in batches]))  # the same in each epoch


def _report(
    batches: Iterable[tuple[int, np.ndarray]],
    steps: int,
    title: str,
    examples: int,
    mean_length: float,
    done: int = 0,
):
    """The batches, with a bar on a terminal; elsewhere a line now and then if it takes long.

    The time left takes the cost of a step as proportional to the length of its rows. Compilation
    is left out.

    Args:
      examples: of a batch, of all runs.
      mean_length: of the rows of all `steps` batches.
      done: steps that an earlier start did; `batches` has the others.
    """
    if jax.process_index() != 0:
        yield from batches
        return
    bar = tqdm(
        batches, total=steps, initial=done, desc=title, unit="step", leave=False, disable=None
    )
    logged = before = time.perf_counter()
    seconds, timed, tokens, tokens_left = 0.0, 0, 0, mean_length * (steps - done)
    queue, compiled, length = deque(), {0}, 0  # 0: before the first step
    for number, batch in enumerate(bar):
        now = time.perf_counter()
        tokens_left -= length
        if length not in compiled:  # it was compiled and waited for, so the queue is empty
            compiled.add(length)
            queue.clear()
        else:
            queue.append(length)
            if len(queue) > _IN_FLIGHT:  # the host waited for the first of the queue
                timed, tokens, seconds = timed + 1, tokens + queue.popleft(), seconds + now - before
        length, before = batch[0], now
        if bar.disable and seconds > _TIMED_SECONDS and now - logged > _LOG_EVERY:
            logged = now
            logging.info(
                "%s: step %d/%d, %.0f examples/s, %s left.",
                title,
                done + number,
                steps,
                examples * timed / seconds,
                format_seconds(seconds / tokens * max(tokens_left + sum(queue), 0)),
            )
        yield batch


def _spell(seeds: Sequence[int]) -> str:
    return f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
