"""One setting of one task, trained for one seed or for several at once, and its predictions."""

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from absl import logging
from tqdm import tqdm

from convbert_jax.config import Config
from convbert_jax.data.encoding import Rows
from convbert_jax.data.length_buckets import (
    choose_buckets,
    epoch_batches,
    evaluation_batches,
    release_batches,
)
from convbert_jax.finetuning.programs import Params, Programs, narrow_head, widen_head
from convbert_jax.finetuning.task import FinetuneTask, Outputs
from convbert_jax.finetuning.unfinished import Unfinished
from convbert_jax.training.optimizer import make_schedule
from convbert_jax.training.signals import StopSignals
from convbert_jax.training.timing import format_seconds

_IN_FLIGHT = 4  # steps that are given to the device before the host waits
_LOG_EVERY = 30.0  # seconds between lines where there is no terminal


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
      KeyboardInterrupt: a signal asked for a stop; what is done is kept.
    """
    start = time.perf_counter()
    state = _start(programs, task, seeds, weights, vectorized)
    step = programs.train_step(task, vectorized)
    steps = count_steps(task, config, setting.epochs)
    rates = learning_rates(config, setting, steps)
    seed = np.asarray(seeds, np.uint32) if vectorized else np.uint32(seeds[0])
    title = f"{task.name}, seed{'s' if len(seeds) > 1 else ''} {_spell(seeds)}"
    constants = programs.replicate(dict(task.constants))
    losses, examples, done = deque(), 0, 0
    if unfinished:
        state, done = unfinished.resume(state)
    batches = itertools.islice(_batches(task, config, seeds, steps), done, None)
    per_step, stopped = config.finetune.batch_size * len(seeds), None
    with StopSignals() as stop:
        for length, index in _report(batches, steps, title, per_step, done):
            index = index if vectorized else index[0]
            batch = programs.put(task.train.batch(index, length), runs=vectorized)
            state, loss = step(state, batch, constants, seed, np.int32(done), rates[done])
            done += 1
            examples += int((index >= 0).sum())
            losses.append(loss)
            if len(losses) > _IN_FLIGHT:
                jax.block_until_ready(losses.popleft())
            if stopped := stop.requested(agree=True):
                break
            if unfinished and done < steps:
                unfinished.keep_if_due(state, done)
    if stopped:
        if unfinished and done < steps:
            unfinished.keep(state, done)
            unfinished.close()
            logging.info("Stopped by %s; step %d of %d is kept.", stopped, done, steps)
        raise KeyboardInterrupt
    values = np.atleast_1d(np.asarray(jax.device_get(losses[-1])))
    seconds = time.perf_counter() - start
    return Fitted(state[0], values, steps, seconds, examples / seconds)


def predict(
    programs: Programs,
    task: FinetuneTask,
    config: Config,
    params: Params,
    rows: Rows,
    *,
    vectorized: bool,
) -> list[Outputs]:
    """Outputs of all rows, in their order, for each run in `params` (one if not `vectorized`)."""
    step = programs.predict_step(task, vectorized)
    constants = programs.replicate(dict(task.constants))

    def run(batch):
        outputs = step(params, programs.put(batch), constants)
        return outputs if vectorized else jax.tree.map(lambda leaf: leaf[None], outputs)

    title = f"{task.name}, predicting"
    return predict_rows(run, rows, buckets_of(config), config.finetune.eval_batch_size, title)


def predict_rows(
    run, rows: Rows, buckets: Sequence[int], batch_size: int, title: str | None = None
) -> list[Outputs]:
    """Outputs of all rows, in their order.

    Args:
      run: batch -> {name: [runs, B, ...]} on the device.
      title: of the progress that is shown; None shows none.

    Returns:
      for each run, name -> [N, ...], or a list of N arrays where their shapes differ.
    """
    found: list[dict[str, list]] = []
    waiting = deque()

    def collect(index, outputs):
        places = index[index >= 0]
        for name, runs in jax.device_get(outputs).items():
            while len(found) < len(runs):
                found.append({})
            for kept, values in zip(found, runs, strict=True):
                target = kept.setdefault(name, [None] * len(rows))
                for place, value in zip(places, values, strict=False):
                    target[place] = value

    batches = evaluation_batches(rows.lengths, buckets, batch_size)
    shown = _report(batches, len(batches), title, batch_size) if title else batches
    for length, index in shown:
        waiting.append((index, run(rows.batch(index, length))))
        if len(waiting) > 2:  # collects the first of these while the device has two to do
            collect(*waiting.popleft())
    while waiting:
        collect(*waiting.popleft())
    return [{name: _stack(values) for name, values in kept.items()} for kept in found]


def buckets_of(config: Config) -> tuple[int, ...]:
    """Lengths that rows are padded to."""
    return choose_buckets(config.finetune.buckets, config.finetune.length)


def take_run(fitted: Fitted, task: FinetuneTask, run: int, *, vectorized: bool) -> Params:
    """Parameters of one run on the host, the head as wide as its labels."""
    params = jax.tree.map(lambda leaf: leaf[run], fitted.params) if vectorized else fitted.params
    return jax.device_get(narrow_head(params, len(task.outputs.labels)))


def _start(programs, task, seeds, weights, vectorized):
    runs = []
    for seed in seeds:
        if weights is None:
            params = programs.new_params(task, seed)
        else:
            params = {**weights, "head": programs.new_head(task, seed)}
        runs.append(widen_head(params, len(task.outputs.labels), task.width))
    params = jax.tree.map(lambda *leaves: np.stack(leaves), *runs) if vectorized else runs[0]
    return programs.start(task, vectorized)(programs.replicate(params))


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


def _report(batches, steps: int, title: str, examples: int, done: int = 0):
    """The batches, with a bar on a terminal; elsewhere a line now and then if it takes long.

    Args:
      examples: of a batch, of all runs.
      done: steps that an earlier start did; `batches` has the others.
    """
    bar = tqdm(
        batches, total=steps, initial=done, desc=title, unit="step", leave=False, disable=None
    )
    logged = before = time.perf_counter()
    # The first step of each length is left out, it is compiled; and the first few after it, which
    # only join the queue of the device.
    timed, seconds = -_IN_FLIGHT, 0.0
    lengths, length = set(), None
    for number, batch in enumerate(bar):
        now = time.perf_counter()
        if length in lengths:
            timed += 1
            seconds += now - before if timed > 0 else 0.0
        lengths.add(length)
        length, before = batch[0], now
        if bar.disable and timed > _IN_FLIGHT and now - logged > _LOG_EVERY:
            logged = now
            logging.info(
                "%s: step %d/%d, %.0f examples/s, %s left.",
                title,
                done + number,
                steps,
                examples * timed / seconds,
                format_seconds(seconds / timed * (steps - done - number)),
            )
        yield batch


def _spell(seeds: Sequence[int]) -> str:
    return f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"


def _stack(values: list[np.ndarray]):
    same = all(value.shape == values[0].shape for value in values)
    return np.stack(values) if same and values else values
