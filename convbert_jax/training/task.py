"""All that the training loop knows of a recipe."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

Params = dict[str, Any]  # nested dict of float32 arrays
Batch = Mapping[str, Any]  # arrays whose first axis is the rows; opaque to this package
# name -> a tuple of arrays: of training (sum, weight), additive over batches; of an evaluation
# whatever `Task.summarize` makes numbers of, once, on the host.
Metrics = dict[str, tuple[jax.Array, ...]]
HostMetrics = dict[str, tuple[np.ndarray, ...]]


@dataclasses.dataclass(frozen=True)
class Task:
    """A recipe as functions of parameters, plus what its speed is measured by.

    Attributes:
      init: key -> parameters. Traced by `jax.jit`, so every array is born sharded.
      loss: (params, batch, key) -> (scalar, metrics), the network in training mode.
      evaluate: (params, batch, key) -> metrics, the network deterministic; the key draws masks.
        Rows that only fill up a batch must have weight zero.
      summarize: metrics, as numpy -> named numbers. Of an interval of training it gets one item,
        the sums over its batches; of an evaluation one for each batch.
      health: (step, named numbers) -> warnings in words, each beginning `what is wrong:`.
      show: names, in order, for the one log line.
      tokens_per_step: input positions of one global batch.
      flops_per_step: model FLOPs of one step over all devices (forward and backward).
      peak_flops_per_device: FLOP/s of one device, or None where unknown.
    """

    init: Callable[[jax.Array], Params]
    loss: Callable[[Params, Batch, jax.Array], tuple[jax.Array, Metrics]]
    evaluate: Callable[[Params, Batch, jax.Array], Metrics]
    summarize: Callable[[Sequence[HostMetrics]], dict[str, float]]
    health: Callable[[int, dict[str, float]], list[str]]
    show: tuple[str, ...]
    tokens_per_step: int
    flops_per_step: float
    peak_flops_per_device: float | None
