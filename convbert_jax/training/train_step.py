"""Training step: state, loss, gradients, update, and the compiled functions.

The loop treats a batch as a dict of arrays with rows along axis 0 and reads no field of it.
"""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from convbert_jax.config import Config
from convbert_jax.interfaces import Batch, Evaluator, Outputs, Rules
from convbert_jax.training import environment, optimizer, partitioning
from convbert_jax.training.partitioning import Params

# name -> arrays that are summed over batches, usually (sum, weight)
Metrics = dict[str, tuple[jax.Array, ...]]

HostMetrics = dict[str, tuple[np.ndarray, ...]]


@dataclasses.dataclass(frozen=True)
class Task:
    """A recipe as pure functions, and the constants for its throughput and MFU.

    Attributes:
      init: key -> parameters. Traced by `jax.jit`, so the arrays are created sharded.
      loss: (params, batch, key, *phase, *frozen) -> (scalar, metrics), in training mode.
      summarize: summed metrics (numpy) -> named values.
      evaluate: (params, batch, key) -> outputs, in deterministic mode; the key draws masks.
      evaluator: computes held-out metrics from the outputs of all batches.
      rules: partition rules of the parameters.
      health: (step, named values) -> warnings, each as "problem: details".
      show: names of the values in the log line, in order.
      tokens_per_step: input positions of a global batch; the average if batches differ.
      flops_per_step: model FLOPs of a step over all devices, forward and backward.
      peak_flops_per_device: FLOP/s of one device; None: unknown.
      phase: step count (int32 scalar on the device) -> extra arguments of the loss, so that one
        compiled step can switch objectives during a run.
      batch_shapes: number of shapes of training batches; the step is compiled for each.
      frozen: unsharded host arrays that the loss reads and training does not update, for example
        teacher weights. Sharded by `rules` and not in checkpoints. None: no such arrays.
    """

    init: Callable[[jax.Array], Params]
    loss: Callable[..., tuple[jax.Array, Metrics]]
    summarize: Callable[[HostMetrics], dict[str, float]]
    evaluate: Callable[[Params, Batch, jax.Array], Outputs]
    evaluator: Evaluator
    rules: Rules
    health: Callable[[int, dict[str, float]], list[str]]
    show: tuple[str, ...]
    tokens_per_step: int
    flops_per_step: float
    peak_flops_per_device: float | None
    phase: Callable[[jax.Array], tuple[jax.Array, ...]] = lambda step: ()
    batch_shapes: int = 1
    frozen: Params | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """State that a training step updates. It has no key: keys derive from seed and step."""

    step: jax.Array  # int32 scalar, steps done
    params: Params
    opt_state: optax.OptState


def create_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the state before the first step."""
    return TrainState(jax.numpy.zeros((), jax.numpy.int32), params, optimizer.init(params))


def fold_in_name(key: jax.Array, name: str) -> jax.Array:
    """Folds the CRC-32 of `name` into `key`; the result is the same on every machine."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def step_key(seed: int, step: jax.Array | int, name: str) -> jax.Array:
    """Returns fold_in(fold_in(seed, step), name), the key for one purpose at one step."""
    return fold_in_name(jax.random.fold_in(jax.random.key(seed), step), name)


class StepMetrics(NamedTuple):
    """Float32 scalars that the host reads after every step, in one transfer."""

    loss: jax.Array
    grad_norm: jax.Array  # global norm before clipping; mean over replicas
    learning_rate: jax.Array


class StepInputs(NamedTuple):
    """Inputs of a step in addition to state and batch."""

    key: jax.Array  # for the loss
    learning_rate: jax.Array
    constants: tuple[Any, ...] = ()  # extra arguments of the loss, not split into microbatches


def value_and_grad_with_metrics(loss: Callable) -> Callable:
    """Returns the function that returns ((loss, metrics), gradients)."""
    return jax.value_and_grad(loss, has_aux=True)


@dataclasses.dataclass(frozen=True)
class TrainStepConfig:
    """Optimizer, schedule and gradient accumulation of a train step.

    With `accumulation` > 1 the batch is split into microbatches that run sequentially. The gradient
    is the mean over microbatches, weighted by the second array of the metric "loss" (target tokens
    of generative models, so it equals the gradient of the batch) or by 1 without that metric.
    Metrics are summed. Each microbatch has its own key.

    With `replicas` > 1 the batch is first split into replicas, as in the official code on a TPU:
    each loss is divided by its own token count, each gradient is clipped to `clip_norm` (0: no
    clipping), and the gradients are summed. The optimizer must not clip again.

    Constants of a run are compiled into the step, or passed to each step as `extra_args` if several
    runs share a program.

    Attributes:
      optimizer: the complete update. It gets `learning_rate` as an extra argument and may ignore
        it in favor of its own schedule.
      draw: (step, *extra_args) -> key, learning rate and constants of the step; `step` is an int32
        scalar.
      extra_axes: axis of each of `extra_args` when several runs are trained together: 0 if each run
        has its own value, None if they share it.
      accumulation: number of microbatches.
      replicas: number of replicas.
      clip_norm: maximum gradient norm of a replica; unused if `replicas` is 1.
      value_and_grad: loss -> the function that returns ((value, metrics), gradients).
    """

    optimizer: optax.GradientTransformation
    draw: Callable[..., StepInputs]
    extra_axes: tuple[int | None, ...] = ()
    accumulation: int = 1
    replicas: int = 1
    clip_norm: float = 0.0
    value_and_grad: Callable = value_and_grad_with_metrics


def make_step(
    loss: Callable[..., tuple[jax.Array, Metrics]], step_config: TrainStepConfig, mesh: Mesh
) -> Callable[..., tuple[TrainState, Metrics, StepMetrics]]:
    """Makes (state, batch, *extra_args) -> (next state, metrics, step_metrics), not compiled.

    Args:
      loss: (params, batch, key, *constants) -> (scalar, metrics).
    """
    optimizer = optax.with_extra_args_support(step_config.optimizer)

    def step(state: TrainState, batch: Batch, *extra_args):
        inputs = step_config.draw(state.step, *extra_args)

        def value_and_grad(params, batch, key):
            both = step_config.value_and_grad(loss)
            return both(params, batch, key, *inputs.constants)

        def gradient(params, batch, key):
            if step_config.accumulation > 1:
                return _accumulate(
                    value_and_grad, params, batch, key, step_config.accumulation, mesh
                )
            (value, metrics), gradients = value_and_grad(params, batch, key)
            return value, metrics, gradients

        if step_config.replicas > 1:
            value, metrics, gradients, norm = _sum_of_replicas(
                gradient, state.params, batch, inputs.key, step_config, mesh
            )
        else:
            value, metrics, gradients = gradient(state.params, batch, inputs.key)
            norm = optax.tree.norm(gradients)
        step_metrics = StepMetrics(value, norm, inputs.learning_rate)
        with jax.named_scope("update"):
            updates, opt_state = optimizer.update(
                gradients, state.opt_state, state.params, learning_rate=inputs.learning_rate
            )
            params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state), metrics, step_metrics

    return step


def _accumulate(value_and_grad, params, batch, key, accumulation: int, mesh: Mesh):
    def add(total, microbatch):
        rows, index = microbatch
        (loss, metrics), gradients = value_and_grad(params, rows, jax.random.fold_in(key, index))
        weight = metrics["loss"][1] if "loss" in metrics else jnp.ones(())
        total = jax.tree.map(lambda t, g: t + weight * g, total, gradients)
        return total, (loss, weight, metrics)

    zeros = jax.tree.map(jnp.zeros_like, params)
    parts = _cut(batch, accumulation, mesh)
    gradients, (losses, weights, metrics) = jax.lax.scan(add, zeros, parts)
    whole = jnp.maximum(weights.sum(), 1e-6)  # 0 if the batch is all padding
    gradients = jax.tree.map(lambda g: g / whole, gradients)
    return (losses * weights).sum() / whole, _add_up(metrics), gradients


def _sum_of_replicas(gradient, params, batch, key, step_config: TrainStepConfig, mesh: Mesh):
    clip_norm = step_config.clip_norm

    def add(total, replica):
        rows, index = replica
        loss, metrics, gradients = gradient(params, rows, jax.random.fold_in(key, index))
        norm = optax.tree.norm(gradients)
        scale = jnp.minimum(1.0, clip_norm / norm) if clip_norm else 1.0
        total = jax.tree.map(lambda t, g: t + scale * g, total, gradients)
        return total, (loss, metrics, norm)

    zeros = jax.tree.map(jnp.zeros_like, params)
    parts = _cut(batch, step_config.replicas, mesh)
    gradients, (losses, metrics, norms) = jax.lax.scan(add, zeros, parts)
    return losses.mean(), _add_up(metrics), gradients, norms.mean()


def _cut(batch: Batch, parts: int, mesh: Mesh):
    """Splits a batch for `jax.lax.scan` into (rows with a leading axis `parts`, part index)."""
    # Part i has rows i, i + parts, i + 2 parts, ..., so every row stays on its device.
    spec = NamedSharding(mesh, PartitionSpec(None, partitioning.BATCH_AXES))

    def cut(rows):
        rows = rows.reshape(rows.shape[0] // parts, parts, *rows.shape[1:])
        return jax.lax.with_sharding_constraint(rows.swapaxes(0, 1), spec)

    return jax.tree.map(cut, batch), jnp.arange(parts)


def _add_up(metrics):
    return jax.tree.map(lambda m: m.sum(0), metrics)


TrainStep = Callable[..., tuple[TrainState, Metrics, StepMetrics]]

EvalStep = Callable[[Params, Batch, Any], Outputs]

# vmap axes of runs that are trained together; they share the step count.
_RUN_AXES = TrainState(step=None, params=0, opt_state=0)


@dataclasses.dataclass(frozen=True)
class Trainable:
    """The fields of `Task` that a program needs.

    `loss` takes the constants of `TrainStepConfig.draw` after its key. The third argument of
    `evaluate` is the third argument of `eval_step`.
    """

    init: Callable[[jax.Array], Params]
    loss: Callable[..., tuple[jax.Array, Metrics]]
    evaluate: Callable[..., Outputs]
    rules: Rules


class Program:
    """Abstract state, shardings and jitted functions of a task.

    Constructing a program runs nothing on devices, so the mesh may be a topology for ahead-of-time
    compilation. Call or lower the functions under `jax.set_mesh(program.mesh)`.

    Several runs can be trained together. State, batch, metrics and step metrics then have a
    leading, unsharded axis of runs; an evaluation uses the same rows for all runs.

    Attributes:
      abstract: `TrainState` of `jax.ShapeDtypeStruct`s with shardings, for restoring a checkpoint
        or lowering a step.
      shardings: `TrainState` of shardings.
      rows: sharding of a training batch.
      eval_rows: sharding of an evaluation batch, without the axis of runs.
      extra_shardings: sharding of each of the `extra_args` of a step.
      init: key -> state before the first step, created sharded.
      train_step: (state, batch, *extra_args) -> (next state, metrics, step_metrics), see
        `TrainStepConfig`; donates the old state.
      eval_step: (params, batch, key) -> replicated outputs; donates nothing.
    """

    abstract: TrainState
    shardings: TrainState
    init: Callable[[jax.Array], TrainState]
    train_step: TrainStep
    eval_step: EvalStep

    def __init__(
        self,
        task: Task | Trainable,
        step_config: TrainStepConfig,
        mesh: Mesh,
        *,
        runs: int | None = None,
        extra_shardings: Sequence[Any] | None = None,
        eval_sharding: Any = None,
    ):
        """Traces `task.init`; compiles nothing.

        Args:
          runs: number of runs to train together: `init` takes a key and `start` parameters of each.
            None: one run, without the axis of runs.
          extra_shardings: sharding of each of the `extra_args` of a step. None: replicated.
          eval_sharding: sharding of the third argument of `eval_step`. None: replicated.

        Raises:
          ShardingError: mesh and parameters do not fit together.
        """
        self.mesh = mesh

        def create(params):
            return create_state(params, step_config.optimizer)

        def init(key):
            return create(task.init(key))

        shapes = jax.eval_shape(lambda: init(jax.random.key(0)))
        self.shardings = partitioning.tree_shardings(shapes, mesh, task.rules)
        self.rows = self.eval_rows = partitioning.batch_sharding(mesh)
        starts = [init, create]
        step, evaluate = make_step(task.loss, step_config, mesh), task.evaluate
        if runs is not None:
            shapes, self.shardings = _add_runs(shapes, self.shardings, runs)
            self.rows = partitioning.with_leading_axis(self.rows)
            step = jax.vmap(
                step, in_axes=(_RUN_AXES, 0, *step_config.extra_axes), out_axes=(_RUN_AXES, 0, 0)
            )
            evaluate = jax.vmap(evaluate, in_axes=(0, None, None))
            starts = [jax.vmap(start, out_axes=_RUN_AXES) for start in starts]
        self.abstract = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            shapes,
            self.shardings,
        )
        whole = partitioning.replicated(mesh)
        options = _start_options(mesh)
        self.init, self._create = (
            jax.jit(start, out_shardings=self.shardings, compiler_options=options)
            for start in starts
        )
        self.extra_shardings = extra_shardings or [whole] * len(step_config.extra_axes)
        self.train_step = jax.jit(
            step,
            in_shardings=(self.shardings, self.rows, *self.extra_shardings),
            out_shardings=(self.shardings, whole, whole),
            donate_argnums=0,
            compiler_options=_compiler_options(mesh),
        )
        self.eval_step = jax.jit(
            evaluate,
            in_shardings=(self.shardings.params, self.eval_rows, eval_sharding or whole),
            out_shardings=whole,
        )

    def put_batch(self, batch) -> Batch:
        """Makes global arrays from the rows of this process; the copy is asynchronous."""
        return partitioning.put_batch(batch, sharding=self.rows)

    def put_params(self, params: Params) -> Params:
        """Shards host arrays that are the same on every process."""
        return partitioning.put_params(params, self.shardings.params)

    def start(self, params: Params) -> TrainState:
        """Returns the state before the first step, from parameters as in `put_params`."""
        return self._create(self.put_params(params))

    def count_compiled(self) -> int:
        """Counts the executables of all functions, compiled or read from the cache."""
        functions = (self.init, self._create, self.train_step, self.eval_step)
        return sum(map(environment.count_compiled, functions))


def make_program(task: Task, config: Config, mesh: Mesh, *, runs: int | None = None) -> Program:
    """Makes the program of a run of `config.train.steps` steps.

    Seed and schedule are compiled in; `task.frozen` is passed to each step.

    Args:
      runs: as in `Program`; all runs use the same seed, so they differ only in initial parameters.

    Raises:
      ShardingError: mesh and parameters do not fit together.
    """
    places = None
    if task.frozen is not None:
        places = [partitioning.tree_shardings(task.frozen, mesh, task.rules)]
    return Program(task, _make_step_config(task, config), mesh, runs=runs, extra_shardings=places)


# KiB. XLA reduce-scatters larger gradients within a slice before the all-reduce across slices. That
# fails in libtpu 0.0.52 for narrow gradients, for example 128 x 64: "AllReduceScatterFusion not
# implemented for 2nd-minor compaction".
_WHOLE_BETWEEN_SLICES = 256


def _compiler_options(mesh: Mesh) -> dict[str, int]:
    devices = mesh.devices.ravel()
    if devices[0].platform != "tpu" or partitioning.count_slices(devices) == 1:
        return {}
    return {"xla_tpu_split_local_ar_for_dcn_ar_threshold": _WHOLE_BETWEEN_SLICES}


def _start_options(mesh: Mesh) -> dict[str, int]:
    """Returns compiler options for the initialization, which runs once.

    Without optimization XLA for CPUs compiles its random draws four times as fast.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return {}
    return {"xla_backend_optimization_level": 0}


def _add_runs(shapes: TrainState, shardings: TrainState, runs: int):
    """Adds the axis of runs to the shapes and shardings of a state."""

    def stack(leaf):
        return jax.ShapeDtypeStruct((runs, *leaf.shape), leaf.dtype)

    def map_runs(function, state):
        trees = (jax.tree.map(function, tree) for tree in (state.params, state.opt_state))
        return TrainState(state.step, *trees)

    return map_runs(stack, shapes), map_runs(partitioning.with_leading_axis, shardings)


def _make_step_config(task: Task, config: Config) -> TrainStepConfig:
    section, steps = config.optimizer, config.train.steps
    schedule = optimizer.make_schedule(section, steps, config.phases)

    def draw(step, *frozen):
        key = step_key(config.seed, step, "loss")
        return StepInputs(key, schedule(step), (*task.phase(step), *frozen))

    return TrainStepConfig(
        optimizer=optimizer.make_optimizer(section, steps, config.phases),
        draw=draw,
        extra_axes=() if task.frozen is None else (None,),
        accumulation=config.spec.accumulation(config),
        replicas=section.release_replicas,
        clip_norm=section.clip_norm,
    )
