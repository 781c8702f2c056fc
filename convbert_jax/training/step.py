"""One training step and one evaluation step, each compiled once."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from convbert_jax.training import sharding as sharding_lib
from convbert_jax.training import state as state_lib
from convbert_jax.training.state import TrainState
from convbert_jax.training.task import Batch, Metrics, Params, Task


class Vitals(NamedTuple):
    """What the host looks at after every step, in one small transfer; float32 scalars."""

    loss: jax.Array
    grad_norm: jax.Array  # global, before clipping
    learning_rate: jax.Array


TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics, Vitals]]
EvalStep = Callable[[Params, Batch, jax.Array], Metrics]


def make_train_step(
    task: Task,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    seed: int,
    accumulation: int,
    mesh: Mesh,
    shardings: TrainState,
) -> TrainStep:
    """Compiled (state, batch) -> (next state, metrics, vitals); the old state is donated.

    With `accumulation` > 1 the batch is cut into as many microbatches, run one after another: the
    gradient is the mean of theirs, metrics add up, and each draws its own randomness.

    Args:
      shardings: of the state, as from `sharding.tree_shardings`.
    """
    replicated = sharding_lib.replicated(mesh)
    gradient = jax.value_and_grad(task.loss, has_aux=True)

    def train_step(state: TrainState, batch: Batch):
        key = state_lib.step_key(seed, state.step, "loss")
        if accumulation == 1:
            (loss, metrics), gradients = gradient(state.params, batch, key)
        else:
            loss, metrics, gradients = _accumulate(
                gradient, state.params, batch, key, accumulation, mesh
            )
        vitals = Vitals(loss, optax.tree.norm(gradients), schedule(state.step))
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state), metrics, vitals

    return jax.jit(
        train_step,
        in_shardings=(shardings, sharding_lib.batch_sharding(mesh)),
        out_shardings=(shardings, replicated, replicated),
        donate_argnums=0,
    )


def make_eval_step(task: Task, *, mesh: Mesh, shardings) -> EvalStep:
    """Compiled (params, batch, key) -> metrics; donates nothing. `shardings` are of the params."""
    replicated = sharding_lib.replicated(mesh)
    return jax.jit(
        task.evaluate,
        in_shardings=(shardings, sharding_lib.batch_sharding(mesh), replicated),
        out_shardings=replicated,
    )


@jax.jit
def add_metrics(first: Metrics, second: Metrics) -> Metrics:
    """Sums of both; stays on the device."""
    return jax.tree.map(jnp.add, first, second)


def _accumulate(gradient, params, batch, key, accumulation: int, mesh: Mesh):
    # Microbatch i takes rows i, i + A, i + 2A, ...: every device cuts its own rows, none moves.
    spec = NamedSharding(mesh, PartitionSpec(None, sharding_lib.BATCH_AXES))

    def cut(rows):
        rows = rows.reshape(rows.shape[0] // accumulation, accumulation, *rows.shape[1:])
        return jax.lax.with_sharding_constraint(rows.swapaxes(0, 1), spec)

    def add(total, microbatch):
        rows, index = microbatch
        (loss, metrics), gradients = gradient(params, rows, jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, total, gradients), (loss, metrics)

    zeros = jax.tree.map(jnp.zeros_like, params)
    microbatches = (jax.tree.map(cut, batch), jnp.arange(accumulation))
    gradients, (losses, metrics) = jax.lax.scan(add, zeros, microbatches)
    gradients = jax.tree.map(lambda g: g / accumulation, gradients)
    return losses.mean(), jax.tree.map(lambda m: m.sum(0), metrics), gradients
