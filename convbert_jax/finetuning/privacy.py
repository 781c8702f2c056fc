"""Differentially private fine-tuning by DP-SGD (Abadi et al. 2016, arXiv 1607.00133).

A step draws each training row with probability config.finetune.batch_size / rows (Poisson
sampling), clips the gradient of each row to `privacy_clip`, adds Gaussian noise to their sum and
divides by the batch size. jax_privacy clips, samples, and calibrates the noise to (epsilon, delta)
with Rényi accounting. Neighboring data sets differ in one row, which is added or removed.

Sampling and noise depend on 128 secret bits of the operating system, not on config.seed, which
config.json contains. They are part of the optimizer state, so a stopped run resumes exactly, and
are deleted with the checkpoints of the unfinished run.
"""

import dataclasses
import importlib
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging

from convbert_jax.config import Config, ConfigError
from convbert_jax.finetuning.task import FinetuneTask
from convbert_jax.training.train_step import TrainState

_MICROBATCH = 8  # rows whose gradients are in memory at the same time
_ORDERS = (*range(2, 33), 40, 48, 64, 96, 128, 192, 256, 512)  # of the Rényi divergences


def check(config: Config, devices: int) -> None:
    """Checks that the package is installed and that the run uses one device.

    Raises:
      ConfigError: one of the two does not hold.
    """
    if not config.finetune.privacy_epsilon:
        return
    _module("clipping")
    if devices > 1:
        raise ConfigError(
            f"supports one device, not {devices}. Set --config.mesh.data=1 and "
            "--config.mesh.fsdp=1.",
            field="config.finetune.privacy_epsilon",
            value=config.finetune.privacy_epsilon,
        )


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"jax_privacy.{name}")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"needs the package {error.name}. Run pip install '.[privacy]'.",
            field="config.finetune.privacy_epsilon",
        ) from None


@dataclasses.dataclass(frozen=True)
class PrivacyPlan:
    """Guarantee of a run and the noise that it needs.

    Attributes:
      epsilon: spent after all steps, at most config.finetune.privacy_epsilon.
      noise_multiplier: standard deviation of the noise of a sum, divided by `clip`.
      rows: number of training rows, which counts as public.
      batch_size: expected number of rows in a batch.
    """

    epsilon: float
    delta: float
    clip: float
    noise_multiplier: float
    rows: int
    batch_size: int
    steps: int

    def to_json(self) -> dict[str, float]:
        """Returns what results.jsonl stores."""
        names = ("epsilon", "delta", "clip", "noise_multiplier")
        return {name: getattr(self, name) for name in names}


def make_plan(task: FinetuneTask, config: Config, steps: int) -> PrivacyPlan | None:
    """Calibrates the noise of a run; returns None without privacy.

    Raises:
      ConfigError: the task has several rows for one example or fewer rows than a batch, or delta is
        not below 1 / rows.
    """
    f, rows = config.finetune, len(task.train)
    if not f.privacy_epsilon:
        return None
    if task.outputs.kind == "span":
        raise ConfigError(
            f"does not support {task.name}, where one question has several rows. Set it to 0.",
            field="config.finetune.privacy_epsilon",
            value=f.privacy_epsilon,
        )
    if f.batch_size > rows:
        raise ConfigError(
            f"exceeds the {rows} training rows of {task.name}. Lower it.",
            field="config.finetune.batch_size",
            value=f.batch_size,
        )
    if f.privacy_delta >= 1 / rows:
        raise ConfigError(
            f"must be below 1 / {rows}, one divided by the training rows of {task.name}.",
            field="config.finetune.privacy_delta",
            value=f.privacy_delta,
        )
    accounting = _module("accounting")
    accountant = accounting.DpsgdTrainingAccountant(accounting.RdpAccountantConfig(orders=_ORDERS))
    given = {"num_samples": rows, "batch_size": f.batch_size, "delta": f.privacy_delta}
    noise = accounting.calibrate_noise_multiplier(
        target_epsilon=f.privacy_epsilon,
        accountant=accountant,
        batch_sizes=f.batch_size,
        num_updates=steps,
        num_samples=rows,
        target_delta=f.privacy_delta,
        tol=1e-3,
    )
    params = accounting.DpParams(noise_multipliers=noise, **given)
    epsilon = float(accountant.compute_epsilon(steps, params))
    plan = PrivacyPlan(epsilon, f.privacy_delta, f.privacy_clip, noise, rows, f.batch_size, steps)
    logging.info(
        "%s: (%.3g, %.2g)-differentially private after %d steps with noise multiplier %.4g and "
        "clipping norm %g.",
        task.name,
        epsilon,
        plan.delta,
        steps,
        noise,
        plan.clip,
    )
    return plan


def row_gradients(clip: float, batch_size: int) -> Callable:
    """Returns `TrainStepConfig.value_and_grad`: the sum of clipped gradients, over `batch_size`.

    The value is 0, because the loss is not private. Padding rows have `weight` 0.
    """
    clipped_grad = _module("clipping").clipped_grad

    def transform(loss):
        def gradient(params, batch, key, *constants):
            function = clipped_grad(
                lambda *given: loss(*given)[0],
                l2_clip_norm=clip,
                normalize_by=batch_size,
                batch_argnums=1,
                prng_argnum=2,
                microbatch_size=_MICROBATCH,
            )
            padding = batch["weight"] == 0
            mean = function(params, batch, key, *constants, is_padding_example=padding)
            return (jnp.zeros(()), {}), mean

        return gradient

    return transform


class NoiseState(NamedTuple):
    """State of `add_noise`; without `start` the deviation is NaN, so no run trains without noise.

    Attributes:
      secret: 128 random bits, uint32 [4]: the first half for the noise, the second for sampling.
    """

    secret: jax.Array
    deviation: jax.Array
    count: jax.Array


def add_noise() -> optax.GradientTransformation:
    """Adds Gaussian noise to mean gradients, with the deviation in its state."""

    def init(params):
        del params
        return NoiseState(jnp.zeros(4, jnp.uint32), jnp.full((), jnp.nan), jnp.zeros((), jnp.int32))

    def update(gradients, state, params=None):
        del params
        key = jax.random.wrap_key_data(state.secret[:2], impl="threefry2x32")
        noise = optax.tree.random_like(jax.random.fold_in(key, state.count), gradients)
        noisy = jax.tree.map(lambda g, n: g + state.deviation * n, gradients, noise)
        return noisy, state._replace(count=state.count + 1)

    return optax.GradientTransformation(init, update)


def start(state: TrainState, plan: PrivacyPlan) -> TrainState:
    """Returns the state before the first step with a new secret and the deviation of the noise."""
    old, *others = state.opt_state
    new = old._replace(
        secret=np.frombuffer(os.urandom(16), np.uint32),
        deviation=np.float32(plan.noise_multiplier * plan.clip / plan.batch_size),
    )
    placed = jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding), new, old)
    return dataclasses.replace(state, opt_state=(placed, *others))


def batches(plan: PrivacyPlan, state: TrainState, length: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (length, row numbers [1, B]) of each step from the first; -1 is padding.

    B is usually the expected batch size and four standard deviations, rounded up. Larger batches
    have a multiple of it, so no row is dropped.
    """
    secret = np.asarray(state.opt_state[0].secret[2:])
    sampling = _module("batch_selection").CyclicPoissonSampling(
        sampling_prob=plan.batch_size / plan.rows, iterations=plan.steps
    )
    size = plan.batch_size + 4 * int(plan.batch_size**0.5)
    size = -(-size // _MICROBATCH) * _MICROBATCH
    for rows in sampling.batch_iterator(plan.rows, rng=np.random.default_rng(secret)):
        padded = np.full(size * max(1, -(-len(rows) // size)), -1)
        padded[: len(rows)] = rows
        yield length, padded[None]
