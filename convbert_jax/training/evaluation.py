"""Evaluation on the held-out rows, shared by the training loop and `evaluate`."""

import collections
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import jax

from convbert_jax.config import UserError
from convbert_jax.interfaces.batch import Batch
from convbert_jax.training import memory
from convbert_jax.training import state as state_lib
from convbert_jax.training.program import EvalStep
from convbert_jax.training.task import Params, Task

Tree = TypeVar("Tree")

_LESS_MEMORY = (
    "shard rows with config.mesh.data, shard parameters with config.mesh.fsdp, or lower "
    "config.train.batch_size (for text pairs, config.parallel.batch_tokens); "
    "config.train.accumulation does not split evaluation batches"
)


class EvaluationError(UserError):
    """There is no model or no held-out data to evaluate."""


def run(
    task: Task,
    eval_step: EvalStep,
    params: Params,
    batches: Iterable[Batch],
    *,
    seed: int,
    opt_state: Any = None,
) -> dict[str, float]:
    """Evaluates all batches and returns the metrics of `task.evaluator` by name.

    Args:
      eval_step: compiled `task.evaluate`.
      batches: global arrays, starting with the first batch; masks depend on the batch index.
      seed: config.seed.
      opt_state: optimizer state on the devices during training, for the out-of-memory error.

    Raises:
      OutOfMemoryError: the device has too little memory.
      EvaluationError: there are no batches.
    """
    key = state_lib.fold_in_name(jax.random.key(seed), "evaluation")
    count = 0

    def outputs():
        nonlocal count
        for count, batch in enumerate(batches, start=1):
            yield eval_step(params, batch, jax.random.fold_in(key, count - 1))

    with memory.explain_out_of_memory(
        "evaluating", _LESS_MEMORY, lambda: memory.find_state(params, opt_state)
    ):
        values = task.evaluator.over(fetch(outputs(), ahead=1))
    if not count:
        raise EvaluationError(
            "There are no held-out rows. Raise config.data.heldout_fraction.",
            field="config.data.heldout_fraction",
        )
    return values


def fetch(running: Iterable[Tree], *, ahead: int) -> Iterator[Tree]:
    """Yields the outputs of `running` as host arrays, in order.

    Waits for an output only after dispatching `ahead` more, so the device stays busy without
    holding all outputs.
    """
    waiting: collections.deque[Tree] = collections.deque()
    for outputs in running:
        waiting.append(outputs)
        if len(waiting) > ahead:
            yield jax.device_get(waiting.popleft())
    while waiting:
        yield jax.device_get(waiting.popleft())
