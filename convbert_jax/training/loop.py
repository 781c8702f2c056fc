"""Training loop: step, report, evaluate and save, with exact resumption and rollback.

After a bad step a run can return to its last checkpoint and skip the batches since then. PaLM was
trained this way (Chowdhery et al. 2022, §5.1). A file in the workdir lists the skipped batches, so
a restart skips them too: the state at a step depends only on config, data and file.
"""

import collections
import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from etils import epath
from jax.sharding import Mesh

from convbert_jax import interrupts, storage
from convbert_jax.config import Config, UserError
from convbert_jax.interfaces import Batch
from convbert_jax.training import (
    distributed,
    environment,
    memory,
    metrics_writer,
    partitioning,
    signals,
    train_step,
)
from convbert_jax.training.checkpoints import Checkpoints
from convbert_jax.training.partitioning import Params
from convbert_jax.training.signals import Watchdog
from convbert_jax.training.timing import Clock, Profiler, seconds_since_start
from convbert_jax.training.train_step import (
    EvalStep,
    Metrics,
    Program,
    StepMetrics,
    Task,
    TrainState,
    make_program,
)
from convbert_jax.workdir import Workdir

Tree = TypeVar("Tree")

_LESS_MEMORY = (
    "shard rows with config.mesh.data, shard parameters with config.mesh.fsdp, or lower "
    "config.train.batch_size (for text pairs, config.parallel.batch_tokens); "
    "config.train.accumulation does not split evaluation batches"
)


class EvaluationError(UserError):
    """There is no model or no held-out data to evaluate."""


def evaluate(
    task: Task,
    eval_step: EvalStep,
    params: Params,
    heldout: Mapping[str, Iterable[Batch]],
    *,
    seed: int,
    opt_state: Any = None,
) -> dict[str, float]:
    """Evaluates all batches and returns the metrics of `task.evaluator` by name.

    Args:
      eval_step: compiled `task.evaluate`.
      heldout: source -> global arrays, starting with its first batch; masks depend on the batch
        index. Sources with a name also get their own metrics, as "NAME/loss".
      seed: config.seed.
      opt_state: optimizer state on the devices during training, for the out-of-memory error.

    Raises:
      OutOfMemoryError: the device has too little memory.
      EvaluationError: there are no batches.
    """
    key = train_step.fold_in_name(jax.random.key(seed), "evaluation")
    init, update, finish = task.evaluator.init, task.evaluator.update, task.evaluator.finish
    count, whole, values = 0, init(), {}
    with memory.explain_out_of_memory(
        "evaluating", _LESS_MEMORY, lambda: memory.find_state(params, opt_state)
    ):
        for source, batches in heldout.items():
            part = init()
            running = (
                eval_step(params, batch, jax.random.fold_in(key, index))
                for index, batch in enumerate(batches)
            )
            for outputs in fetch_outputs(running, ahead=1):
                count += 1
                whole = update(whole, outputs)
                if source:
                    part = update(part, outputs)
            if source:
                values |= {f"{source}/{name}": value for name, value in finish(part).items()}
    if not count:
        raise EvaluationError(
            "There are no held-out rows. Raise config.data.heldout_fraction.",
            field="config.data.heldout_fraction",
        )
    return finish(whole) | values


def fetch_outputs(running: Iterable[Tree], *, ahead: int) -> Iterator[Tree]:
    """Yields the outputs of `running` as host arrays, in order.

    Waits for an output only after dispatching `ahead` more, so the device stays busy without
    holding all outputs.
    """
    waiting: collections.deque[Tree] = collections.deque()
    for outputs in running:
        waiting.append(outputs)
        if len(waiting) > ahead:
            yield jax.device_get(waiting.popleft())
    while waiting:
        yield jax.device_get(waiting.popleft())


_WINDOW = 100  # steps in the median that a loss is compared with
_LOSSES = "losses"  # stored next to the fields of the data position


class TrainingError(UserError):
    """The run cannot continue."""


class BadStepError(TrainingError):
    """The loss or gradient of step `step` is not finite, or the loss is a spike."""

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class LossGuard:
    """Detector of losses that are not finite or spike; checkpoints contain its history."""

    def __init__(self, spike: float):
        """
        Args:
          spike: `config.train.spike`.
        """
        self._spike = spike
        self._losses: collections.deque[float] = collections.deque(maxlen=_WINDOW)

    def judge(self, loss: float, grad_norm: float) -> str:
        """Records the next step; returns the problem with its numbers, or ""."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return f"loss {loss}, gradient norm {grad_norm}"
        if self._spike and len(self._losses) == _WINDOW:
            usual = statistics.median(self._losses)
            if loss > self._spike * usual:
                return (
                    f"loss {loss:.4g} is above config.train.spike={self._spike:g} times "
                    f"{usual:.4g}, the median of the last {_WINDOW} steps"
                )
        self._losses.append(loss)
        return ""

    def to_json(self) -> dict[str, Any]:
        return {_LOSSES: list(self._losses)} if self._spike else {}

    def restore(self, position: dict[str, Any]) -> None:
        """Restores the output of `to_json` and removes it from `position`."""
        self._losses.extend(position.pop(_LOSSES, ()))


class Rollbacks:
    """Rollbacks of a run and the batches that they skip."""

    def __init__(self, file: epath.Path, most: int):
        """
        Args:
          file: JSON file with the rollbacks.
          most: `config.train.rollbacks`.

        Raises:
          DamagedFileError: the file was not written by this class.
        """
        self._file, self._most = file, most
        self._skipped: list[Mapping[str, int]] = []
        if file.exists():
            remedy = "restore it from a copy, or remove it to train on all batches"
            self._skipped = storage.read_json(file, remedy=remedy, fields={"skipped": list})[
                "skipped"
            ]
            for each in self._skipped:
                found = each if isinstance(each, dict) else {}
                if any(type(found.get(name)) is not int for name in ("after", "batches")):
                    raise storage.damaged(file, f"{each!r} is not a rollback", remedy)

    def batches_after(self, step: int) -> int:
        """Returns the number of batches to skip between `step` and the next step."""
        return sum(each["batches"] for each in self._skipped if each["after"] == step)

    def describe(self) -> list[tuple[int, str]]:
        """Returns (bad step, description) of each rollback."""
        return [
            (
                each["after"] + each["batches"],
                f"bad step: returned to step {each['after']:,} and skipped {each['batches']:,} "
                "batches",
            )
            for each in self._skipped
        ]

    def go_back(self, error: BadStepError, checkpoint: int, *, writes: bool) -> None:
        """Records a rollback that skips the batches after `checkpoint` up to the step of `error`.

        Args:
          error: the bad step.
          checkpoint: step that the run returns to.
          writes: whether this process writes the file.

        Raises:
          BadStepError: `error`, if the run has used all its rollbacks.
        """
        if len(self._skipped) >= self._most:
            if not self._most:
                raise error
            raise BadStepError(
                f"{error} All {len(self._skipped)} rollbacks of config.train.rollbacks are used.",
                error.step,
            )
        logging.warning(
            "%s. Returning to %s and skipping the %d batches since then: rollback %d of %d.",
            str(error).rstrip("."),
            f"the checkpoint of step {checkpoint}" if checkpoint else "the start",
            error.step - checkpoint,
            len(self._skipped) + 1,
            self._most,
        )
        self._skipped.append({"after": checkpoint, "batches": error.step - checkpoint})
        if writes:
            storage.write_json(self._file, {"skipped": self._skipped})


class Batches(Protocol):
    """Iterator over training batches (the rows of this process) with a resumable position."""

    def __next__(self) -> Batch: ...
    def metrics(self) -> dict[str, float]: ...
    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive steps of a run with one task and one stream of batches.

    Attributes:
      end: last step, counted from the start of the run.
      task: segments that share this object also share their compiled steps.
      batches: opens the training input at its first batch. It is closed on every exit. At most
        `task.batch_shapes` shapes, with rows divisible by the mesh and config.train.accumulation.
      evaluation: returns the held-out batches of each source, from the first, at each call; the
        last batch is padded with rows of weight 0. See `evaluate`.
    """

    end: int
    task: Task
    batches: Callable[[], Batches]
    evaluation: Callable[[], Mapping[str, Iterable[Batch]]]


@dataclasses.dataclass(frozen=True)
class Result:
    """Final step, state and metrics of a run."""

    step: int
    state: TrainState
    train: dict[str, float]  # metrics of the last log interval
    evaluation: dict[str, float]  # held-out metrics of the last evaluation
    stopped_by: str | None  # signal that stopped the run after saving, if any

    @property
    def interrupted(self) -> bool:
        """Whether a signal stopped the run."""
        return self.stopped_by is not None


class _Dispatched(NamedTuple):
    """A dispatched step whose metrics are still on the device."""

    step: int
    metrics: StepMetrics
    totals: Metrics | None  # of the log interval, if it ends here
    batch: Batch
    of_batches: dict[str, float]  # metrics of the batches so far


def train(
    segments: Sequence[Segment],
    config: Config,
    *,
    workdir: Workdir,
    mesh: Mesh,
    initial_params: Callable[[], Params] | None = None,
    initial_opt_state: Callable[[optax.OptState], optax.OptState] | None = None,
    publish: Callable[[int, Params], None] | None = None,
) -> Result:
    """Trains to `config.train.steps`, resuming from the newest checkpoint in `workdir` if any.

    On SIGTERM or SIGINT the run finishes its step, saves and returns. Before the end of the first
    step nothing can be saved, and within `interrupts.handled` a signal ends the process. A finished
    run returns its last state and metrics. The state at any step depends only on config, data and
    the rollbacks in `workdir.skipped`, not on interruptions.

    Args:
      segments: all steps of the run, in order; the last segment ends at `config.train.steps`. They
        have the same parameters, optimizer state and metrics. Each one ends with an evaluation and
        a checkpoint, which is kept.
      initial_params: returns unsharded host arrays, the same on each process; called only without
        checkpoints. None: `task.init` with a key from `config.seed`.
      initial_opt_state: abstract optimizer state -> state on the devices, with `initial_params`.
        None: the state before the first step.
      publish: called as publish(step, params) on all processes before the first step and every
        `config.checkpoint.huggingface_every` steps.

    Raises:
      ShardingError: mesh and parameters do not fit together.
      CheckpointError: no checkpoint can be read, or several in a row cannot be written.
      OwnershipError: another run has taken over `workdir`.
      TrainingError: the loss or gradient of a step is bad and no rollbacks are left; the batch is
        saved in `workdir`. Or the training data ended, or config.checkpoint.best_metric is unknown.
      EvaluationError: there are no held-out rows.
      ReportError: metrics cannot be written.
      ConfigError: the configured tracker cannot start.
      OutOfMemoryError: the device has too little memory.
    """
    t = config.train
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        stop = stack.enter_context(signals.StopSignals())
        checkpoints = stack.enter_context(
            contextlib.closing(
                Checkpoints(
                    workdir.checkpoints,
                    config.checkpoint,
                    always=[segment.end for segment in segments[:-1]],
                )
            )
        )
        tracker = None
        if jax.process_index() == 0:
            tracker = stack.enter_context(metrics_writer.tracking(config, workdir))
        watchdog = Watchdog(t.hang_seconds)
        stack.enter_context(watchdog.watching())
        rollbacks = Rollbacks(workdir.skipped, t.rollbacks)
        programs: dict[int, Program] = {}
        for segment in segments:
            if id(segment.task) not in programs:
                programs[id(segment.task)] = make_program(segment.task, config, mesh)
        while True:
            run = _Run(
                segments=segments,
                programs=programs,
                config=config,
                workdir=workdir,
                checkpoints=checkpoints,
                initial_params=initial_params,
                initial_opt_state=initial_opt_state,
                publish=publish,
                rollbacks=rollbacks,
                watchdog=watchdog,
            )
            try:
                # Not entered into `stack`, which would keep `run` and its state alive.
                with (
                    contextlib.closing(run),
                    memory.explain_out_of_memory("training", memory.LESS_TO_TRAIN, run.find_memory),
                ):
                    run.restore_or_start()
                    if run.step >= t.steps:
                        return run.finished()
                    with metrics_writer.Reporter(
                        workdir, run.task, steps=t.steps, step=run.step, tracker=tracker
                    ) as reporter:
                        run.reporter = reporter
                        run.tell_reporter()
                        return run.to_the_end(stop)
            except BadStepError as error:
                rollbacks.go_back(error, checkpoints.newest or 0, writes=jax.process_index() == 0)
                distributed.barrier("rollback")


TIMED_STEPS = 30


def time_steps(
    task: Task, config: Config, mesh: Mesh, batches: Batches, count: int = TIMED_STEPS
) -> tuple[float, float]:
    """Times training steps with random parameters, which are discarded.

    Returns:
      (seconds of the first step, including compilation and initialization; median seconds of the
      next `count` steps).

    Raises:
      OutOfMemoryError: the device has too little memory.
    """
    program = make_program(task, config, mesh)
    accumulation = config.spec.accumulation(config)
    with jax.set_mesh(mesh), contextlib.closing(batches), interrupts.nothing_to_save():
        times = [time.perf_counter()]
        batch = program.put_batch(next(batches))
        shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in batch.items()}
        with memory.explain_out_of_memory(
            "training",
            memory.LESS_TO_TRAIN,
            lambda: memory.find_causes(task, program, shapes, accumulation),
        ):
            state = program.init(jax.random.key(config.seed))
            frozen = _put_frozen(task, program)
            for _ in range(count + 1):
                state, _, metrics = program.train_step(state, batch, *frozen)
                jax.block_until_ready(metrics)
                times.append(time.perf_counter())
                batch = program.put_batch(next(batches))
    first, *seconds = np.diff(times)
    return float(first), statistics.median(map(float, seconds))


def _put_frozen(task: Task, program: Program) -> list[Params]:
    """Returns the `extra_args` of the steps of a program by `make_program`."""
    if task.frozen is None:
        return []
    (places,) = program.extra_shardings
    return [partitioning.put_params(task.frozen, places)]


@dataclasses.dataclass(kw_only=True)
class _Run:
    """Arguments of `train` and the state of the loop.

    `step` is the number of dispatched steps, and `state` is the state after them. `number` is the
    segment of the next step.
    """

    segments: Sequence[Segment]
    programs: Mapping[int, Program]  # by id of the task
    config: Config
    workdir: Workdir
    checkpoints: Checkpoints
    initial_params: Callable[[], Params] | None
    initial_opt_state: Callable[[optax.OptState], optax.OptState] | None
    publish: Callable[[int, Params], None] | None
    rollbacks: Rollbacks
    watchdog: Watchdog

    step: int = 0
    number: int = 0
    batches: Batches | None = None
    state: TrainState | None = None
    reporter: metrics_writer.Reporter | None = None
    pending: _Dispatched | None = None
    totals: Metrics | None = None  # sums of the log interval so far
    cut_interval: dict[str, Any] | None = None  # its sums up to the checkpoint
    train_values: dict[str, float] = dataclasses.field(default_factory=dict)
    eval_values: dict[str, float] = dataclasses.field(default_factory=dict)
    clock: Clock = dataclasses.field(default_factory=Clock)
    watch: environment.RecompileWatch | None = None
    guard: LossGuard = dataclasses.field(init=False)
    extra_args: list[Params] = dataclasses.field(default_factory=list)  # step arguments, on device
    shapes: dict[str, jax.ShapeDtypeStruct] | None = None  # of the newest batch

    def __post_init__(self):
        self.guard = LossGuard(self.config.train.spike)

    def restore_or_start(self) -> None:
        """Restores state and data position from the newest checkpoint, or starts a new run."""
        self._check_best_metric()
        restored = self.checkpoints.restore(self.program.abstract)
        if restored:
            self.state, position = restored
            self.step = int(self.state.step)
            last = len(self.segments) - 1
            numbers = (i for i, segment in enumerate(self.segments) if self.step < segment.end)
            self._enter(next(numbers, last))
            self.cut_interval = position.pop(metrics_writer.INTERVAL_KEY, None)
            self.guard.restore(position)
            if position:  # absent from imported checkpoints: start at the first row
                self.batches.set_state(position)
            logging.info("Resuming from the checkpoint of step %d.", self.step)
            return
        self._enter(0)
        logging.info(
            "Starting from %s: %s parameters.",
            "given weights" if self.initial_params else "scratch",
            f"{partitioning.count_params(self.program.abstract.params):,}",
        )
        with interrupts.nothing_to_save(), environment.compiling("Initializing the parameters"):
            if self.initial_params:
                self.state = self.program.start(self.initial_params())
                if self.initial_opt_state:
                    moments = self.initial_opt_state(self.program.abstract.opt_state)
                    self.state = dataclasses.replace(self.state, opt_state=moments)
            else:
                key = jax.random.key(self.config.seed)
                self.state = self.program.init(train_step.fold_in_name(key, "init"))

    @property
    def segment(self) -> Segment:
        return self.segments[self.number]

    @property
    def task(self) -> Task:
        return self.segment.task

    @property
    def program(self) -> Program:
        return self.programs[id(self.task)]

    def _enter(self, number: int) -> None:
        """Makes segment `number` the current one, at its first batch."""
        self.close()
        previous, self.number = self.task, number
        self.batches = self.segment.batches()
        if self.watch is None or self.task is not previous:
            self.watchdog.forget()
            self.watch = environment.RecompileWatch(
                self.program.train_step, "training step", self.task.batch_shapes
            )

    def tell_reporter(self) -> None:
        """Tells the reporter the task of the current segment and the tokens before it."""
        begin = tokens = 0
        for segment in self.segments[: self.number]:
            tokens += (segment.end - begin) * segment.task.tokens_per_step
            begin = segment.end
        self.reporter.begin(self.task, begin, tokens)

    def close(self) -> None:
        if self.batches:
            self.batches.close()
            self.batches = None

    def to_the_end(self, stop: signals.StopSignals) -> Result:
        t, c = self.config.train, self.config.checkpoint
        self.extra_args = _put_frozen(self.task, self.program)
        saved, signal_name = self.step, None
        if self.step == 0:
            self._publish_if_due()
        with Profiler(self.workdir.profile, t, self.step) as profiler:
            # This order makes resumption exact: evaluate the state of `step`, check its loss, save,
            # and only then draw the next batch. State, data position and metrics.jsonl then agree.
            while self.step < t.steps and not signal_name:
                profiler.before(self.step + 1)
                if self.clock.running:
                    self._dispatch()
                else:  # compiles, and blocks until the step is done
                    with interrupts.nothing_to_save():
                        self._dispatch()
                profiler.after(self.step, self.state)
                last = self.step == t.steps
                signal_name = stop.requested(self.step)
                values = None
                ends_segment = self.step == self.segment.end and not last
                if last or ends_segment or self.step % t.eval_every == 0:
                    self._look_at_pending()
                    values = self._evaluate()
                self._publish_if_due()  # before saving, so a restart after a kill repeats it
                if ends_segment:  # before saving, so the checkpoint has the next data position
                    self._enter(self.number + 1)
                    self.tell_reporter()
                due = last or ends_segment or signal_name or self.step % c.every == 0
                if due or (values and self.checkpoints.is_best(values)):
                    self._look_at_pending()
                    with self.clock.paused():
                        position = self.batches.get_state() | metrics_writer.interval_to_json(
                            self.totals
                        )
                        position |= self.guard.to_json()
                        self.workdir.check_owner()
                        self.reporter.flush()
                        ends = bool(last or signal_name)
                        self.checkpoints.save(self.state, position, values, last=ends)
                    saved = self.step
        stopped_by = signal_name if self.step < t.steps else None
        if stopped_by:
            message = "Stopped by %s after step %d; the same command resumes from checkpoint %d."
            logging.info(message, stopped_by, self.step, saved)
        return Result(self.step, self.state, self.train_values, self.eval_values, stopped_by)

    def finished(self) -> Result:
        logging.info("Nothing to do: the run finished at step %d.", self.step)
        lines = metrics_writer.read_undamaged(self.workdir.metrics)
        train, validation = (
            metrics_writer.last_of(lines, split) for split in ("train", "validation")
        )
        return Result(self.step, self.state, train, validation, stopped_by=None)

    def _publish_if_due(self) -> None:
        every = self.config.checkpoint.huggingface_every
        if self.publish and every and self.step % every == 0:
            self._look_at_pending()
            with self.clock.paused():
                self.publish(self.step, self.state.params)

    def _dispatch(self) -> None:
        """Dispatches the next step, then processes the metrics of the previous step."""
        try:
            for _ in range(self.rollbacks.batches_after(self.step) + 1):
                batch = next(self.batches)
        except StopIteration:
            raise TrainingError(
                f"The training data ended at step {self.step} of config.train.steps="
                f"{self.config.train.steps}. Provide more data or lower config.train.steps.",
                field="config.train.steps",
                value=self.config.train.steps,
            ) from None
        placed = self.program.put_batch(batch)
        self.shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in placed.items()}
        timed = contextlib.nullcontext()
        if self.watchdog.compiles(placed):
            self._look_at_pending()
            timed = self.clock.left_out()
        with timed, jax.profiler.StepTraceAnnotation("train", step_num=self.step + 1):
            self.state, metrics, step_metrics = self.watchdog.call(
                self.program.train_step, self.state, placed, *self.extra_args, batch=placed
            )
        self.step += 1
        if self.cut_interval:
            self.totals = metrics_writer.interval_from_json(self.cut_interval, metrics)
            self.cut_interval = None
        self.totals = _add_metrics(self.totals, metrics) if self.totals else metrics
        last = self.step == self.config.train.steps
        whole = self.step % self.config.train.log_every == 0
        whole = whole or (self.step == self.segment.end and not last)
        ends = whole or last
        before = self.pending
        totals, of_batches = (self.totals, self.batches.metrics()) if ends else (None, {})
        self.pending = _Dispatched(self.step, step_metrics, totals, batch, of_batches)
        if whole:  # a partial interval continues if the run is extended
            self.totals = None
        if before:
            self._look_at(before)
        elif not self.clock.running:
            self._first_step_done()
        self.watchdog.beat()
        self.reporter.advance()

    def _look_at_pending(self) -> None:
        """Waits for the newest step and processes its metrics."""
        if self.pending:
            self._look_at(self.pending)
            self.pending = None

    def _look_at(self, done: _Dispatched) -> None:
        step_metrics = {n: float(v) for n, v in jax.device_get(done.metrics)._asdict().items()}
        if wrong := self.guard.judge(step_metrics["loss"], step_metrics["grad_norm"]):
            self._fail(done, step_metrics, wrong)
        if done.totals is None:
            return
        self.watch.check(done.step)
        values = self.task.summarize(jax.device_get(done.totals))
        # Step metrics describe the last step; the task's metrics are means over the interval.
        self.train_values = step_metrics | values | done.of_batches
        self.reporter.train(done.step, self.train_values, self.clock.lap(done.step))
        if self.config.train.warn_health:
            self.reporter.warn_health(done.step, self.train_values)

    def _fail(self, done: _Dispatched, step_metrics: dict[str, float], wrong: str):
        place = self.workdir.bad_batch(done.step, jax.process_index())
        kept = f"was saved to {place}"
        try:
            with storage.replacing(place) as file:
                np.savez(file, **done.batch, step=done.step, seed=self.config.seed, **step_metrics)
        except OSError as error:
            kept = f"could not be saved to {place} ({error.strerror})"
        self.checkpoints.settle()
        newest = self.checkpoints.newest
        good = f"The checkpoint of step {newest} is good" if newest else "No checkpoint exists"
        rollbacks = "" if self.config.train.rollbacks else ", or set config.train.rollbacks"
        raise BadStepError(
            f"Bad step {done.step}: {wrong}. The batch {kept}. {good}. Lower "
            "config.optimizer.learning_rate or raise config.optimizer.warmup_steps and restart"
            f"{rollbacks}.",
            done.step,
        )

    def _evaluate(self) -> dict[str, float]:
        patient = contextlib.nullcontext()
        if not self.eval_values:
            patient = self.watchdog.patient("Compiling and running the first evaluation")
        with self.clock.paused(), patient:
            self.eval_values = evaluate(
                self.task,
                self.program.eval_step,
                self.state.params,
                {n: map(self._put_heldout, each) for n, each in self.segment.evaluation().items()},
                seed=self.config.seed,
                opt_state=self.state.opt_state,
            )
            self.reporter.validation(self.step, self.eval_values)
        return self.eval_values

    def _put_heldout(self, batch: Batch) -> Batch:
        self.watchdog.beat()
        return self.program.put_batch(batch)

    def find_memory(self) -> dict[str, int]:
        """Returns cause -> bytes per device of a training step."""
        accumulation = self.config.spec.accumulation(self.config)
        return memory.find_causes(self.task, self.program, self.shapes, accumulation)

    def _check_best_metric(self) -> None:
        """Raises TrainingError if the best metric is unknown, before the first evaluation."""
        name, known = self.config.checkpoint.best_metric, self.task.evaluator.names
        if name and name not in known:
            raise TrainingError(
                f"config.checkpoint.best_metric={name} is not a metric of this task; use one of: "
                f"{', '.join(sorted(known))}.",
                field="config.checkpoint.best_metric",
                value=name,
            )

    def _first_step_done(self) -> None:
        jax.block_until_ready(self.state)
        how = environment.describe_compile_cache()
        logging.info("First step %.1f s after the program started; %s.", seconds_since_start(), how)
        self.clock.start(self.step)


@jax.jit
def _add_metrics(first: Metrics, second: Metrics) -> Metrics:
    """Adds metrics on the device."""
    return jax.tree.map(jnp.add, first, second)
