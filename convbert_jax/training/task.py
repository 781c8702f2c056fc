"""All that the training loop knows of a recipe.

Of a batch it knows that it is a dict of arrays whose first axis is the rows, and no field.
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
# name -> a tuple of arrays that add up over batches, most often (sum, weight)
Metrics = dict[str, tuple[jax.Array, ...]]
HostMetrics = dict[str, tuple[np.ndarray, ...]]


@dataclasses.dataclass(frozen=True)
class Task:
    """A recipe as functions of parameters, plus what its speed is measured by.

    Attributes:
      init: key -> parameters. Traced by `jax.jit`, so every array is born sharded.
      loss: (params, batch, key, *phase, *frozen) -> (scalar, metrics), the network in training
        mode.
      summarize: metrics, added up and as numpy -> named numbers.
      evaluate: (params, batch, key) -> outputs, the network deterministic; the key draws masks.
      evaluator: numbers of the held-out rows from the outputs of their batches.
      rules: how the parameters are divided over devices.
      health: (step, named numbers) -> warnings in words, each beginning `what is wrong:`.
      show: names, in order, for the one log line.
      tokens_per_step: input positions of one global batch, on average if they differ.
      flops_per_step: model FLOPs of one step over all devices (forward and backward).
      peak_flops_per_device: FLOP/s of one device, or None where unknown.
      phase: steps done, an int32 scalar on the device -> what the loss is told of the step besides,
        so that one compiled step can learn one thing first and another later.
      batch_shapes: how many shapes the batches to train on have; the step is compiled for each.
      frozen: arrays that the loss reads and no step changes, whole and on the host, as the weights
        of a teacher; in no checkpoint, divided by the same rules. None: there are none.
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
