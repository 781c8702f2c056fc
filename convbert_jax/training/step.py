"""One training step as a plain function: gradients, their cuts into microbatches, the update."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from convbert_jax.interfaces.batch import Batch
from convbert_jax.training import sharding as sharding_lib
from convbert_jax.training.state import TrainState
from convbert_jax.training.task import Metrics


class Vitals(NamedTuple):
    """What the host looks at after every step, in one small transfer; float32 scalars."""

    loss: jax.Array
    grad_norm: jax.Array  # global, before clipping; of replicas, the mean of theirs
    learning_rate: jax.Array


class Drawn(NamedTuple):
    """What differs from step to step beside state and batch."""

    key: jax.Array  # of the loss
    learning_rate: jax.Array
    constants: tuple[Any, ...] = ()  # further arguments of the loss, the same for all its rows


@dataclasses.dataclass(frozen=True)
class Learning:
    """How a step learns.

    With `accumulation` > 1 the batch is cut into as many microbatches, run one after another: the
    gradient is the mean of theirs by the weight of their loss (of models that write text their
    tokens, so that it is that of the batch; 1 elsewhere), metrics add up, and each draws its own
    randomness.

    With `replicas` > 1 the batch is cut into as many parts before that, each a batch of its own:
    its loss is divided by its own tokens and its gradient clipped at the norm `clip_norm` (0: not).
    The optimizer, which must not clip again, gets the sum: the release's run on a TPU.

    What is the same for a whole run is compiled into it or, where runs share a program, `given` to
    each step as further arguments.

    Attributes:
      optimizer: the whole update; it is told the `learning_rate`, and may have one of its own.
      draw: (step, *given) -> what this step draws and how fast it learns; `step` is the int32
        scalar of the state.
      given_axes: of each argument that is given, 0 if every run has its own where several are
        trained together, None if they have the same.
    """

    optimizer: optax.GradientTransformation
    draw: Callable[..., Drawn]
    given_axes: tuple[int | None, ...] = ()
    accumulation: int = 1
    replicas: int = 1
    clip_norm: float = 0.0


def make_step(
    loss: Callable[..., tuple[jax.Array, Metrics]], learning: Learning, mesh: Mesh
) -> Callable[..., tuple[TrainState, Metrics, Vitals]]:
    """(state, batch, *given) -> (next state, metrics, vitals), to be traced.

    Args:
      loss: (params, batch, key, *constants) -> (scalar, metrics).
    """
    optimizer = optax.with_extra_args_support(learning.optimizer)

    def step(state: TrainState, batch: Batch, *given):
        drawn = learning.draw(state.step, *given)

        def value_and_grad(params, batch, key):
            both = jax.value_and_grad(loss, has_aux=True)
            return both(params, batch, key, *drawn.constants)

        def gradient(params, batch, key):
            if learning.accumulation > 1:
                return _accumulate(value_and_grad, params, batch, key, learning.accumulation, mesh)
            (value, metrics), gradients = value_and_grad(params, batch, key)
            return value, metrics, gradients

        if learning.replicas > 1:
            value, metrics, gradients, norm = _sum_of_replicas(
                gradient, state.params, batch, drawn.key, learning, mesh
            )
        else:
            value, metrics, gradients = gradient(state.params, batch, drawn.key)
            norm = optax.tree.norm(gradients)
        vitals = Vitals(value, norm, drawn.learning_rate)
        with jax.named_scope("update"):
            updates, opt_state = optimizer.update(
                gradients, state.opt_state, state.params, learning_rate=drawn.learning_rate
            )
            params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state), metrics, vitals

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
    whole = jnp.maximum(weights.sum(), 1e-6)  # of a batch of padding there is none
    gradients = jax.tree.map(lambda g: g / whole, gradients)
    return (losses * weights).sum() / whole, _add_up(metrics), gradients


def _sum_of_replicas(gradient, params, batch, key, learning: Learning, mesh: Mesh):
    clip_norm = learning.clip_norm

    def add(total, replica):
        rows, index = replica
        loss, metrics, gradients = gradient(params, rows, jax.random.fold_in(key, index))
        norm = optax.tree.norm(gradients)
        scale = jnp.minimum(1.0, clip_norm / norm) if clip_norm else 1.0
        total = jax.tree.map(lambda t, g: t + scale * g, total, gradients)
        return total, (loss, metrics, norm)

    zeros = jax.tree.map(jnp.zeros_like, params)
    parts = _cut(batch, learning.replicas, mesh)
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
