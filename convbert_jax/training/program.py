"""A task on a mesh: what its state is, where it lies, and the compiled functions that turn it.

The loop, fine-tuning, evaluations of checkpoints and whoever compiles without running anything all
take these from here.
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
# The axis of runs that are trained together, before all others; they count their steps as one.
_RUNS = TrainState(step=None, params=0, opt_state=0)


@dataclasses.dataclass(frozen=True)
class Trainable:
    """What a program is made of; a `Task` has the same, see there.

    `loss` takes the constants of `Learning.draw`, if it has any, behind its key; `evaluate` takes
    whatever `eval_step` is called with in the key's place.
    """

    init: Callable[[jax.Array], Params]
    loss: Callable[..., tuple[jax.Array, Metrics]]
    evaluate: Callable[..., Outputs]
    rules: Rules


class Program:
    """Shapes, places and compiled functions, made of shapes alone: nothing has run, and the devices
    may be those of a topology, to compile for. Call or lower the functions under
    `jax.set_mesh(program.mesh)`.

    Several runs can be trained together: state, batch and vitals then have a leading axis of runs,
    which is not divided. An evaluation gives all runs the same rows.

    Attributes:
      abstract: `TrainState` of `jax.ShapeDtypeStruct`s that know their places: what a checkpoint is
        restored onto, or a step lowered for.
      shardings: `TrainState` of the places alone.
      rows: the place of a batch; `eval_rows` of one to evaluate, without an axis of runs.
      given_places: where what is `given` to each step lies, one for each of it.
      init: key -> state before the first step, every array born where it belongs.
      train_step: (state, batch, *given) -> (next state, metrics, vitals), see `Learning`; the old
        state is donated.
      eval_step: (params, batch, key) -> outputs, whole on every device; donates nothing.
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
          given_places: None: whole on every device.
          runs: how many are trained together; None: one, without an axis for it. `init` then takes
            a key of each, `start` parameters of each.

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
        """Rows of this process -> global arrays; returns before the copy is done."""
        return sharding_lib.put_batch(batch, sharding=self.rows)

    def put_params(self, params: Params) -> Params:
        """Whole arrays, the same on the host of each process -> global arrays, each divided."""
        return sharding_lib.put_params(params, self.shardings.params)

    def start(self, params: Params) -> TrainState:
        """State before the first step, from parameters as `put_params` takes them."""
        return self._create(self.put_params(params))

    def count_compiled(self) -> int:
        """Versions compiled or read from the cache so far, of all its functions."""
        functions = (self.init, self._create, self.train_step, self.eval_step)
        return sum(map(private_jax.count_compiled, functions))


def make_program(task: Task, config: Config, mesh: Mesh, *, runs: int | None = None) -> Program:
    """The program of a run as long as `config.train.steps`: its seed and its schedule are compiled
    in. What is `frozen` of the task is given to each step.

    Args:
      runs: as `Program` takes it; all draw from the one seed, so what differs is their start.

    Raises:
      ShardingError: mesh and parameters do not fit together.
    """
    places = None
    if task.frozen is not None:
        places = [sharding_lib.tree_shardings(task.frozen, mesh, task.rules)]
    return Program(task, _learning(task, config), mesh, runs=runs, given_places=places)


# KiB. Gradients above it are added up within a slice so that each device has a part, and only the
# part goes to the other slices; XLA (libtpu 0.0.52) fails at that for the narrow ones of tiny and
# small, "AllReduceScatterFusion not implemented for 2nd-minor compaction", at 128 x 64 first.
_WHOLE_BETWEEN_SLICES = 256


def _compiler_options(mesh: Mesh) -> dict[str, int]:
    devices = mesh.devices.ravel()
    if devices[0].platform != "tpu" or sharding_lib.count_slices(devices) == 1:
        return {}
    return {"xla_tpu_split_local_ar_for_dcn_ar_threshold": _WHOLE_BETWEEN_SLICES}


def _add_runs(shapes: TrainState, shardings: TrainState, runs: int):
    """Shapes and places of the state of several runs."""

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
