"""Sharded train state and compiled steps of a task on a mesh.

Used by the training loop, fine-tuning, evaluation of checkpoints and ahead-of-time compilation.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from convbert_jax.config import Config
from convbert_jax.interfaces.batch import Batch
from convbert_jax.interfaces.evaluator import Outputs
from convbert_jax.interfaces.placement import Rules
from convbert_jax.training import optimizer as optimizer_lib
from convbert_jax.training import sharding as sharding_lib
from convbert_jax.training import state as state_lib
from convbert_jax.training.environment import private_jax
from convbert_jax.training.state import TrainState
from convbert_jax.training.step import Drawn, Learning, Vitals, make_step
from convbert_jax.training.task import Metrics, Params, Task

TrainStep = Callable[..., tuple[TrainState, Metrics, Vitals]]
EvalStep = Callable[[Params, Batch, Any], Outputs]
# vmap axes of runs that are trained together; they share the step count.
_RUNS = TrainState(step=None, params=0, opt_state=0)


@dataclasses.dataclass(frozen=True)
class Trainable:
    """The fields of `Task` that a program needs.

    `loss` takes the constants of `Learning.draw` after its key. The third argument of `evaluate` is
    the third argument of `eval_step`.
    """

    init: Callable[[jax.Array], Params]
    loss: Callable[..., tuple[jax.Array, Metrics]]
    evaluate: Callable[..., Outputs]
    rules: Rules


class Program:
    """Abstract state, shardings and jitted functions of a task.

    Constructing a program runs nothing on devices, so the mesh may be a topology for ahead-of-time
    compilation. Call or lower the functions under `jax.set_mesh(program.mesh)`.

    Several runs can be trained together. State, batch, metrics and vitals then have a leading,
    unsharded axis of runs; an evaluation uses the same rows for all runs.

    Attributes:
      abstract: `TrainState` of `jax.ShapeDtypeStruct`s with shardings, for restoring a checkpoint
        or lowering a step.
      shardings: `TrainState` of shardings.
      rows: sharding of a training batch.
      eval_rows: sharding of an evaluation batch, without the axis of runs.
      given_places: sharding of each argument `given` of a step.
      init: key -> state before the first step, created sharded.
      train_step: (state, batch, *given) -> (next state, metrics, vitals), see `Learning`; donates
        the old state.
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
        learning: Learning,
        mesh: Mesh,
        *,
        runs: int | None = None,
        given_places: Sequence[Any] | None = None,
    ):
        """Traces `task.init`; compiles nothing.

        Args:
          runs: number of runs to train together: `init` takes a key and `start` parameters of each.
            None: one run, without the axis of runs.
          given_places: sharding of each argument `given` of a step. None: replicated.

        Raises:
          ShardingError: mesh and parameters do not fit together.
        """
        self.mesh = mesh

        def create(params):
            return state_lib.create(params, learning.optimizer)

        def init(key):
            return create(task.init(key))

        shapes = jax.eval_shape(lambda: init(jax.random.key(0)))
        self.shardings = sharding_lib.tree_shardings(shapes, mesh, task.rules)
        self.rows = self.eval_rows = sharding_lib.batch_sharding(mesh)
        starts = [init, create]
        step, evaluate = make_step(task.loss, learning, mesh), task.evaluate
        if runs is not None:
            shapes, self.shardings = _add_runs(shapes, self.shardings, runs)
            self.rows = sharding_lib.behind_runs(self.rows)
            step = jax.vmap(step, in_axes=(_RUNS, 0, *learning.given_axes), out_axes=(_RUNS, 0, 0))
            evaluate = jax.vmap(evaluate, in_axes=(0, None, None))
            starts = [jax.vmap(start, out_axes=_RUNS) for start in starts]
        self.abstract = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            shapes,
            self.shardings,
        )
        whole = sharding_lib.replicated(mesh)
        self.init, self._create = (jax.jit(f, out_shardings=self.shardings) for f in starts)
        self.given_places = given_places or [whole] * len(learning.given_axes)
        self.train_step = jax.jit(
            step,
            in_shardings=(self.shardings, self.rows, *self.given_places),
            out_shardings=(self.shardings, whole, whole),
            donate_argnums=0,
            compiler_options=_compiler_options(mesh),
        )
        self.eval_step = jax.jit(
            evaluate,
            in_shardings=(self.shardings.params, self.eval_rows, whole),
            out_shardings=whole,
        )

    def put_batch(self, batch) -> Batch:
        """Makes global arrays from the rows of this process; the copy is asynchronous."""
        return sharding_lib.put_batch(batch, sharding=self.rows)

    def put_params(self, params: Params) -> Params:
        """Shards host arrays that are the same on every process."""
        return sharding_lib.put_params(params, self.shardings.params)

    def start(self, params: Params) -> TrainState:
        """Returns the state before the first step, from parameters as in `put_params`."""
        return self._create(self.put_params(params))

    def count_compiled(self) -> int:
        """Counts the executables of all functions, compiled or read from the cache."""
        functions = (self.init, self._create, self.train_step, self.eval_step)
        return sum(map(private_jax.count_compiled, functions))


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
        places = [sharding_lib.tree_shardings(task.frozen, mesh, task.rules)]
    return Program(task, _learning(task, config), mesh, runs=runs, given_places=places)


# KiB. XLA reduce-scatters larger gradients within a slice before the all-reduce across slices. That
# fails in libtpu 0.0.52 for narrow gradients, for example 128 x 64: "AllReduceScatterFusion not
# implemented for 2nd-minor compaction".
_WHOLE_BETWEEN_SLICES = 256


def _compiler_options(mesh: Mesh) -> dict[str, int]:
    devices = mesh.devices.ravel()
    if devices[0].platform != "tpu" or sharding_lib.count_slices(devices) == 1:
        return {}
    return {"xla_tpu_split_local_ar_for_dcn_ar_threshold": _WHOLE_BETWEEN_SLICES}


def _add_runs(shapes: TrainState, shardings: TrainState, runs: int):
    """Adds the axis of runs to the shapes and shardings of a state."""

    def stack(leaf):
        return jax.ShapeDtypeStruct((runs, *leaf.shape), leaf.dtype)

    def map_runs(function, state):
        trees = (jax.tree.map(function, tree) for tree in (state.params, state.opt_state))
        return TrainState(state.step, *trees)

    return map_runs(stack, shapes), map_runs(sharding_lib.behind_runs, shardings)


def _learning(task: Task, config: Config) -> Learning:
    section, steps = config.optimizer, config.train.steps
    schedule = optimizer_lib.make_schedule(section, steps)

    def draw(step, *frozen):
        key = state_lib.step_key(config.seed, step, "loss")
        return Drawn(key, schedule(step), (*task.phase(step), *frozen))

    return Learning(
        optimizer=optimizer_lib.make_optimizer(section, steps),
        draw=draw,
        given_axes=() if task.frozen is None else (None,),
        accumulation=config.train.accumulation,
        replicas=section.release_replicas,
        clip_norm=section.clip_norm,
    )
