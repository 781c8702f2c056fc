"""Interface between the training loop and a recipe.

The loop treats a batch as a dict of arrays with rows along axis 0 and reads no field of it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from convbert_jax.interfaces.batch import Batch
from convbert_jax.interfaces.evaluator import Evaluator, Outputs
from convbert_jax.interfaces.placement import Rules

Params = dict[str, Any]  # nested dict of float32 arrays
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
