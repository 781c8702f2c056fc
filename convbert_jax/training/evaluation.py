"""One pass over the held-out rows: the same numbers in the loop and on a checkpoint."""

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
    "a batch to evaluate is whole, config.train.accumulation does not cut it: split rows over more "
    "devices with config.mesh.data, parameters with config.mesh.fsdp, or lower "
    "config.train.batch_size, for pairs of texts config.parallel.batch_tokens"
)


class EvaluationError(UserError):
    """There is nothing to evaluate, or nothing to evaluate on."""


def run(
    task: Task,
    eval_step: EvalStep,
    params: Params,
    batches: Iterable[Batch],
    *,
    seed: int,
    opt_state: Any = None,
) -> dict[str, float]:
    """The numbers of `task.evaluator`.

    Args:
      eval_step: `task.evaluate`, compiled.
      batches: on the devices, from the first; what is masked in each depends on its number.
      seed: config.seed.
      opt_state: of a run under way, which lies on the devices beside the parameters.

    Raises:
      OutOfMemoryError: the device is too small.
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
            "there are no held-out rows; raise config.data.heldout_fraction.",
            field="config.data.heldout_fraction",
        )
    return values


def fetch(running: Iterable[Tree], *, ahead: int) -> Iterator[Tree]:
    """What `running` dispatches, on the host, in its order; each is waited for when `ahead` more
    are on their way, so that the device is never idle and never holds all of them.
    """
    waiting: collections.deque[Tree] = collections.deque()
    for outputs in running:
        waiting.append(outputs)
        if len(waiting) > ahead:
            yield jax.device_get(waiting.popleft())
    while waiting:
        yield jax.device_get(waiting.popleft())
