"""Training step: loss, gradients, gradient accumulation and optimizer update."""

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
    """Float32 scalars that the host reads after every step, in one transfer."""

    loss: jax.Array
    grad_norm: jax.Array  # global norm before clipping; mean over replicas
    learning_rate: jax.Array


class Drawn(NamedTuple):
    """Inputs of a step in addition to state and batch."""

    key: jax.Array  # for the loss
    learning_rate: jax.Array
    constants: tuple[Any, ...] = ()  # extra arguments of the loss, not split into microbatches


@dataclasses.dataclass(frozen=True)
class Learning:
    """Optimizer, schedule and gradient accumulation of a train step.

    With `accumulation` > 1 the batch is split into microbatches that run sequentially. The gradient
    is the mean over microbatches, weighted by the second array of the metric "loss" (target tokens
    of generative models, so it equals the gradient of the batch) or by 1 without that metric.
    Metrics are summed. Each microbatch has its own key.

    With `replicas` > 1 the batch is first split into replicas, as in the official code on a TPU:
    each loss is divided by its own token count, each gradient is clipped to `clip_norm` (0: no
    clipping), and the gradients are summed. The optimizer must not clip again.

    Constants of a run are compiled into the step, or passed to each step as the arguments `given`
    if several runs share a program.

    Attributes:
      optimizer: the complete update. It gets `learning_rate` as an extra argument and may ignore
        it in favor of its own schedule.
      draw: (step, *given) -> key, learning rate and constants of the step; `step` is an int32
        scalar.
      given_axes: axis of each argument `given` when several runs are trained together: 0 if each
        run has its own value, None if they share it.
      accumulation: number of microbatches.
      replicas: number of replicas.
      clip_norm: maximum gradient norm of a replica; unused if `replicas` is 1.
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
    """Makes the function (state, batch, *given) -> (next state, metrics, vitals), not compiled.

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
    whole = jnp.maximum(weights.sum(), 1e-6)  # 0 if the batch is all padding
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
    """Splits a batch for `jax.lax.scan` into (rows with a leading axis `parts`, part index)."""
    # Part i has rows i, i + parts, i + 2 parts, ..., so every row stays on its device.
    spec = NamedSharding(mesh, PartitionSpec(None, sharding_lib.BATCH_AXES))

    def cut(rows):
        rows = rows.reshape(rows.shape[0] // parts, parts, *rows.shape[1:])
        return jax.lax.with_sharding_constraint(rows.swapaxes(0, 1), spec)

    return jax.tree.map(cut, batch), jnp.arange(parts)


def _add_up(metrics):
    return jax.tree.map(lambda m: m.sum(0), metrics)
