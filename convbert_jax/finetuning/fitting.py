"""Training and prediction of one fine-tuning setting, for one seed or several at once.

There is one compiled program per shape, shared by tasks, seeds and learning rates. Everything that
differs between runs of one shape is an argument of the steps: the seed, the learning rate and the
task's constants. Several seeds can run in one program over arrays with a leading axis of runs.
"""

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from flax import nnx
from jax.sharding import Mesh
from tqdm import tqdm

from convbert_jax.config import Config, OutputsSection
from convbert_jax.data.samplers import (
    choose_buckets,
    epoch_batches,
    evaluation_batches,
    release_batches,
)
from convbert_jax.data.tasks.labelled_text import Rows
from convbert_jax.finetuning import lora, privacy
from convbert_jax.finetuning.run_files import Setting, Unfinished
from convbert_jax.finetuning.task import (
    ROW,
    FinetuneTask,
    FinetuningError,
    Predicted,
    rows_evaluator,
)
from convbert_jax.interfaces import Evaluator, FinetuneBatch
from convbert_jax.interrupts import Stopped
from convbert_jax.models import build
from convbert_jax.models.networks import FinetunedModel, sharding_rules
from convbert_jax.training import environment, partitioning
from convbert_jax.training.loop import fetch_outputs
from convbert_jax.training.optimizer import make_injected_lr_optimizer, make_schedule
from convbert_jax.training.partitioning import Params
from convbert_jax.training.signals import StopSignals, Watchdog
from convbert_jax.training.timing import format_seconds
from convbert_jax.training.train_step import (
    Program,
    StepInputs,
    Trainable,
    TrainStepConfig,
    fold_in_name,
)


def run_key(seed: jax.Array | int, name: str) -> jax.Array:
    """Return the key for one purpose in a seed's run.

    Always Threefry: with RBG, the preferred generator of TPUs, vectorized runs draw different
    numbers.
    """
    return fold_in_name(jax.random.key(seed, impl="threefry2x32"), name)


class Programs:
    """Makes each program once; tasks of equal shape share it.

    Train steps receive (seed, learning rate, constants of the task, *frozen). Evaluation receives
    (constants, *frozen) instead of a key. Runs that are trained together have one seed each.

    Attributes:
      frozen: With LoRA, a tuple of one tree: `jax.ShapeDtypeStruct`s of the base weights, which all
        runs share. Otherwise ().
    """

    def __init__(self, config: Config, dtype: jnp.dtype, mesh: Mesh):
        """Create the cache; `config.model`, `.optimizer` and `.finetune` apply to all tasks."""
        self._config = config
        self._dtype = dtype
        self._mesh = mesh
        self._rules = (*lora.RULES, *sharding_rules(config.encoder), *partitioning.RULES)
        self.frozen = (self._abstract_weights(),) if config.finetune.lora_rank else ()
        self._learning = TrainStepConfig(
            optimizer=make_injected_lr_optimizer(
                config.optimizer,
                config.finetune.layer_decay,
                [stage.depth for stage in config.encoder.stages],
            ),
            draw=_draw,
            extra_axes=(0, None, None, *[None] * len(self.frozen)),
        )
        f = config.finetune
        if f.privacy_epsilon:
            self._learning = dataclasses.replace(
                self._learning,
                optimizer=optax.chain(privacy.add_noise(), self._learning.optimizer),
                value_and_grad=privacy.row_gradients(f.privacy_clip, f.batch_size),
            )
        self._programs: dict[tuple, Program] = {}
        self._starts: dict[tuple, Callable] = {}

    def of(self, task: FinetuneTask, runs: int | None) -> Program:
        """Return the program of a task, for one run or for several with a leading axis.

        Raises:
          ShardingError: The parameters do not fit the mesh.
        """
        key = (task.losses, task.predict, task.outputs.head, task.width, runs)
        if key not in self._programs:
            whole = partitioning.replicated(self._mesh)
            shardings = jax.tree.map(lambda leaf: leaf.sharding, self.frozen)
            self._programs[key] = Program(
                self._trainable(task),
                self._learning,
                self._mesh,
                runs=runs,
                extra_shardings=(whole, whole, whole, *shardings),
                eval_sharding=(whole, *shardings),
            )
        return self._programs[key]

    def new_params(self, task: FinetuneTask, seed: int) -> Params:
        """Initialize the whole model on the host, with a head as wide as its labels."""
        return self._draw_start(task, seed, "model", lambda params, key: params)

    def new_head(self, task: FinetuneTask, seed: int) -> Params:
        """Initialize only the head; it equals the head of `new_params`."""
        return self._draw_start(task, seed, "head", lambda params, key: params["head"])

    def new_factors(self, task: FinetuneTask, seed: int) -> Params:
        """Initialize the head, as `new_head`, and the factors of LoRA."""
        return self._draw_start(task, seed, "factors", self._start_lora)

    def put_constants(self, task: FinetuneTask):
        """Copy `task.constants` to all devices."""
        whole = partitioning.replicated(self._mesh)
        return partitioning.put_params(dict(task.constants), dict.fromkeys(task.constants, whole))

    def put_frozen(self, weights: Params | None) -> tuple[Params, ...]:
        """Shard the base weights of LoRA; return () without LoRA."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.frozen)
        return tuple(partitioning.put_params(weights, places) for places in shardings)

    def count_compiled(self) -> int:
        """Count functions compiled or loaded from the cache so far."""
        return sum(program.count_compiled() for program in self._programs.values()) + sum(
            map(environment.count_compiled, self._starts.values())
        )

    def _trainable(self, task: FinetuneTask) -> Trainable:
        labels = dataclasses.replace(task.outputs, labels=("",) * task.width)
        graphdef, init = build(FinetunedModel, self._with_outputs(labels))
        sum_loss, dtype = self._config.finetune.sum_loss, self._dtype
        scale = lora.scale_of(self._config)

        def loss(params, batch, key, constants, *frozen):
            model = nnx.merge(graphdef, lora.merge(params, frozen, scale))
            losses, weights = task.losses(model, {**batch, **constants}, key, dtype=dtype)
            total = jnp.sum(losses * batch["weight"])
            if not sum_loss:
                total = total / jnp.maximum(jnp.sum(weights * batch["weight"]), 1e-6)
            return total, {}

        def evaluate(params, batch, given):
            constants, *frozen = given
            model = nnx.merge(graphdef, lora.merge(params, frozen, scale))
            return task.predict(model, {**batch, **constants}, dtype=dtype)

        start = (lambda key: self._start_lora(init(key), key)) if self.frozen else init
        return Trainable(start, loss, evaluate, self._rules)

    def _start_lora(self, params: Params, key: jax.Array) -> Params:
        f = self._config.finetune
        return lora.start(params, fold_in_name(key, "lora"), f.lora_rank, f.lora_targets)

    def _abstract_weights(self) -> Params:
        _, init = build(FinetunedModel, self._config)
        shapes = jax.eval_shape(init, jax.random.key(0))
        del shapes["head"]
        return jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            shapes,
            partitioning.tree_shardings(shapes, self._mesh, self._rules),
        )

    def _draw_start(self, task: FinetuneTask, seed: int, what: str, choose: Callable) -> Params:
        _, init = build(FinetunedModel, self._with_outputs(task.outputs))
        key = (what, task.outputs.head, len(task.outputs.labels))
        if key not in self._starts:
            self._starts[key] = jax.jit(
                lambda key: choose(init(key), key),
                out_shardings=partitioning.replicated(self._mesh),
            )
        return jax.device_get(self._starts[key](run_key(seed, "init")))

    def _with_outputs(self, outputs: OutputsSection) -> Config:
        return dataclasses.replace(self._config, outputs=outputs)


def _draw(step, seed, learning_rate, *constants) -> StepInputs:
    key = jax.random.fold_in(run_key(seed, "loss"), step)
    return StepInputs(key, learning_rate, constants)


def widen_head(params: Params, labels: int, width: int) -> Params:
    """Pad the head's last layer on the host to `width` outputs, with zeros beyond `labels`.

    They stay zero: masked logits pass no gradient, and weight decay preserves zeros.
    """
    return _with_output(params, lambda leaf: _pad_last(leaf, width - labels))


def narrow_head(params: Params, labels: int) -> Params:
    """Undo `widen_head`."""
    return _with_output(params, lambda leaf: leaf[..., :labels])


def _with_output(params: Params, change: Callable) -> Params:
    head = params["head"]
    if "output" not in head:
        return params
    return {**params, "head": {**head, "output": jax.tree.map(change, head["output"])}}


def _pad_last(leaf, more: int):
    return np.pad(leaf, [(0, 0)] * (leaf.ndim - 1) + [(0, more)])


_IN_FLIGHT = 4  # dispatched steps before the host waits
_LOG_EVERY = 30.0  # seconds between progress lines without a terminal
_TIMED_SECONDS = 5.0  # measured step time before a remaining time is shown


@dataclasses.dataclass(frozen=True)
class Fitted:
    """Trained runs of one setting.

    Attributes:
      params: Trained parameters on the device, with a leading axis of runs if vectorized.
      losses: Loss of the last step of each run; not finite if it diverged.
      seconds: Training time since the last start.
      examples_per_second: All runs together since the last start, with compilation and without
        filler rows.
      frozen: Base weights on the device, see `Programs`.
      scale: See `lora.scale_of`.
      plan: Guarantee of a private run.
    """

    params: Params
    losses: np.ndarray
    steps: int
    seconds: float
    examples_per_second: float
    frozen: tuple[Params, ...]
    scale: float
    plan: privacy.PrivacyPlan | None = None


def count_steps(task: FinetuneTask, config: Config, epochs: float) -> int:
    """Count steps of whole epochs; the official code uses int(n // batch * epochs) with fillers."""
    per_epoch = -(-len(task.train) // config.finetune.batch_size)
    return max(1, int(per_epoch * epochs))


def learning_rates(config: Config, setting: Setting, steps: int) -> np.ndarray:
    """Return the learning rate of each step."""
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
    """Train one run per seed, in one program if `vectorized`, which several seeds require.

    A run depends only on its seed, which determines its head, dropout and order of rows.

    Args:
      weights: Initial `embeddings` and `encoder`, required with LoRA; None initializes them
        randomly.
      unfinished: Saves checkpoints of these runs, and restores earlier ones.

    Raises:
      Stopped: A signal requested a stop; the progress is saved.
      FinetuningError: The checkpoint is at or beyond the last step.
    """
    start = time.perf_counter()
    program = programs.of(task, len(seeds) if vectorized else None)
    steps = count_steps(task, config, setting.epochs)
    plan = privacy.make_plan(task, config, steps)
    rates = learning_rates(config, setting, steps)
    seed = np.asarray(seeds, np.uint32) if vectorized else np.uint32(seeds[0])
    title = f"{task.name}, seed{'s' if len(seeds) > 1 else ''} {_spell(seeds)}"
    constants, frozen = programs.put_constants(task), programs.put_frozen(weights)
    losses, examples = deque(), 0
    state = unfinished.resume(program.abstract) if unfinished else None
    if state is None:
        state = program.start(_start_params(programs, task, seeds, weights, vectorized))
        state = privacy.start(state, plan) if plan else state
    done = int(state.step)
    if done >= steps:  # the loss comes from the last step, so checkpoints leave one to do
        raise FinetuningError(
            f"Cannot resume {title}: the checkpoint is at step {done}, but the training data now "
            f"gives only {steps} steps. Restore the original data or use a new --workdir.",
            field="--workdir",
        )
    drawn = _batches(task, config, seeds, steps)
    if plan:
        drawn = privacy.batches(plan, state, config.finetune.length)
    batches = itertools.islice(drawn, done, None)
    per_step, stopped = config.finetune.batch_size * len(seeds), None
    watchdog = Watchdog(config.train.hang_seconds)
    with StopSignals() as stop, watchdog.watching():
        mean_length = _mean_length(task, config)
        for length, index in _report(batches, steps, title, per_step, mean_length, done):
            index = index if vectorized else index[0]
            batch = partitioning.put_whole_batch(task.train.batch(index, length), program.rows)
            state, _, vitals = watchdog.call(
                program.train_step,
                state,
                batch,
                seed,
                rates[done],
                constants,
                *frozen,
                batch=batch,
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
            logging.info("Stopped by %s; saved step %d of %d.", stopped, done, steps)
        raise Stopped(stopped)
    last = losses[-1]
    if plan:  # its loss is always 0, and would hide parameters that diverged
        last = 0 * optax.tree.norm(state.params)
    values = np.atleast_1d(np.asarray(jax.device_get(last)))
    seconds = time.perf_counter() - start
    scale = lora.scale_of(config)
    return Fitted(state.params, values, steps, seconds, examples / seconds, frozen, scale, plan)


def predict(
    programs: Programs,
    task: FinetuneTask,
    config: Config,
    params: Params,
    split: str,
    *,
    vectorized: bool,
    frozen: tuple[Params, ...] = (),
) -> list[Any]:
    """Return the state of the split's evaluator after all rows, for each run in `params`.

    Without `vectorized`, there is one run. `params` and `frozen` are as in `Fitted`.
    """
    program = programs.of(task, len(jax.tree.leaves(params)[0]) if vectorized else None)
    constants = programs.put_constants(task)
    watchdog = Watchdog(config.train.hang_seconds)

    def run(batch):
        batch = partitioning.put_whole_batch(batch, program.eval_rows)
        outputs = watchdog.call(
            program.eval_step,
            params,
            batch,
            (constants, *frozen),
            batch=batch,
            what="the evaluation",
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
    batch_size: int | Sequence[int] | Sequence[Sequence[int]],
    title: str | None = None,
) -> list[Any]:
    """Return the evaluator's state after all rows, for each run.

    Args:
      run: batch -> {name: [runs, B, ...]} on the device. The evaluator receives the outputs of its
        run and the row numbers.
      batch_size: see `evaluation_batches`.
      title: Title of the progress bar; None shows no progress.
    """
    batches = evaluation_batches(rows.lengths, buckets, batch_size)
    shown = batches
    if title:
        mean_length = float(np.mean([length for length, _ in batches]))
        shown = _report(batches, len(batches), title, batch_size, mean_length)
    running = ((index, run(rows.batch(index, length))) for length, index in shown)
    states: list[Any] = []
    for index, found in fetch_outputs(running, ahead=2):
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
    batch_size: int | Sequence[int] | Sequence[Sequence[int]],
) -> Predicted:
    """Return the outputs of all rows in order, for one run; arguments are as in `evaluate`."""
    (collected,) = evaluate(
        run, rows, rows_evaluator(len(rows)), buckets=buckets, batch_size=batch_size
    )
    return collected.predicted()


def buckets_of(config: Config) -> tuple[int, ...]:
    """Return the lengths that rows are padded to."""
    return choose_buckets(config.finetune.buckets, config.finetune.length)


def take_run(fitted: Fitted, task: FinetuneTask, run: int, *, vectorized: bool) -> Params:
    """Gather one run's complete parameters on the host, without head padding.

    All processes must call it.
    """
    params = jax.tree.map(lambda leaf: leaf[run], fitted.params) if vectorized else fitted.params
    params, frozen = partitioning.gather((params, fitted.frozen))
    return narrow_head(lora.merge(params, frozen, fitted.scale), len(task.outputs.labels))


def _start_params(programs, task, seeds, weights, vectorized) -> Params:
    """Make initial trained parameters on the host, stacked over runs if `vectorized`."""
    runs = []
    for seed in seeds:
        if weights is None:
            params = programs.new_params(task, seed)
        elif programs.frozen:
            params = programs.new_factors(task, seed)
        else:
            params = {**weights, "head": programs.new_head(task, seed)}
        runs.append(widen_head(params, len(task.outputs.labels), task.width))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *runs) if vectorized else runs[0]


def _batches(
    task: FinetuneTask, config: Config, seeds: Sequence[int], steps: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (length, index [runs, B]) of each step."""
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
    """Return the mean padded length of training rows, in tokens."""
    f = config.finetune
    if f.release_batches or f.privacy_epsilon:
        return f.length
    batches = epoch_batches(task.train.lengths, buckets_of(config), f.batch_size, seed=0, epoch=0)
    return float(np.mean([length for length, _ in batches]))  # equal in all epochs


def _report(
    batches: Iterable[tuple[int, np.ndarray]],
    steps: int,
    title: str,
    examples: int,
    mean_length: float,
    done: int = 0,
):
    """Yield the batches with a progress bar, or with log lines where stderr is not a terminal.

    The remaining time assumes that a step's cost is proportional to its row length, and excludes
    compilation.

    Args:
      examples: Rows per batch, of all runs.
      mean_length: Mean row length over all `steps` batches.
      done: Steps of earlier starts, which are not in `batches`.
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
        if length not in compiled:  # compilation blocked the host, so the queue is empty
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
