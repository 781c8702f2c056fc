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
    grad_norm: jax.Array  # global, before clipping; of replicas, the mean of theirs
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
    replicas: int = 1,
    clip_norm: float = 0.0,
    mesh: Mesh,
    shardings: TrainState,
) -> TrainStep:
    """Compiled (state, batch) -> (next state, metrics, vitals); the old state is donated.

    With `accumulation` > 1 the batch is cut into as many microbatches, run one after another: the
    gradient is the mean of theirs, metrics add up, and each draws its own randomness.

    With `replicas` > 1 the batch is cut into as many parts before that, each a batch of its own:
    its loss is divided by its own tokens and its gradient clipped at the norm `clip_norm` (0: not).
    The optimizer, which must not clip again, gets the sum: the release's run on a TPU.

    Args:
      shardings: of the state, as from `sharding.tree_shardings`.
    """
    replicated = sharding_lib.replicated(mesh)
    value_and_grad = jax.value_and_grad(task.loss, has_aux=True)

    def gradient(params, batch, key):
        if accumulation > 1:
            return _accumulate(value_and_grad, params, batch, key, accumulation, mesh)
        (loss, metrics), gradients = value_and_grad(params, batch, key)
        return loss, metrics, gradients

    def train_step(state: TrainState, batch: Batch):
        key = state_lib.step_key(seed, state.step, "loss")
        if replicas > 1:
            loss, metrics, gradients, norm = _sum_of_replicas(
                gradient, state.params, batch, key, replicas, clip_norm, mesh
            )
        else:
            loss, metrics, gradients = gradient(state.params, batch, key)
            norm = optax.tree.norm(gradients)
        vitals = Vitals(loss, norm, schedule(state.step))
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


def _accumulate(value_and_grad, params, batch, key, accumulation: int, mesh: Mesh):
    def add(total, microbatch):
        rows, index = microbatch
        (loss, metrics), gradients = value_and_grad(params, rows, jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, total, gradients), (loss, metrics)

    zeros = jax.tree.map(jnp.zeros_like, params)
    gradients, (losses, metrics) = jax.lax.scan(add, zeros, _cut(batch, accumulation, mesh))
    gradients = jax.tree.map(lambda g: g / accumulation, gradients)
    return losses.mean(), _add_up(metrics), gradients


def _sum_of_replicas(gradient, params, batch, key, replicas: int, clip_norm: float, mesh: Mesh):
    def add(total, replica):
        rows, index = replica
        loss, metrics, gradients = gradient(params, rows, jax.random.fold_in(key, index))
        norm = optax.tree.norm(gradients)
        scale = jnp.minimum(1.0, clip_norm / norm) if clip_norm else 1.0
        total = jax.tree.map(lambda t, g: t + scale * g, total, gradients)
        return total, (loss, metrics, norm)

    zeros = jax.tree.map(jnp.zeros_like, params)
    parts = _cut(batch, replicas, mesh)
    gradients, (losses, metrics, norms) = jax.lax.scan(add, zeros, parts)
    return losses.mean(), _add_up(metrics), gradients, norms.mean()


def _cut(batch: Batch, parts: int, mesh: Mesh):
    """(rows of each part, its number), for a scan."""
    # Part i takes rows i, i + parts, i + 2 parts, ...: every device cuts its own rows, none moves.
    spec = NamedSharding(mesh, PartitionSpec(None, sharding_lib.BATCH_AXES))

    def cut(rows):
        rows = rows.reshape(rows.shape[0] // parts, parts, *rows.shape[1:])
        return jax.lax.with_sharding_constraint(rows.swapaxes(0, 1), spec)

    return jax.tree.map(cut, batch), jnp.arange(parts)


def _add_up(metrics):
    return jax.tree.map(lambda m: m.sum(0), metrics)
