"""One pass over the held-out rows: the same numbers in the loop and on a checkpoint."""

from collections.abc import Iterable

import jax

from convbert_jax.config import UserError
from convbert_jax.training import state as state_lib
from convbert_jax.training.step import EvalStep
from convbert_jax.training.task import Batch, Metrics, Params


class EvaluationError(UserError):
    """There is nothing to evaluate, or nothing to evaluate on."""


def run(
    eval_step: EvalStep, params: Params, batches: Iterable[Batch], *, seed: int
) -> list[Metrics]:
    """Sums of each batch, on the host, for `Task.summarize`.

    Args:
      batches: on the devices, from the first; what is masked in each depends on its number.
      seed: config.seed.

    Raises:
      EvaluationError: there are no batches.
    """
    key = state_lib.fold_in_name(jax.random.key(seed), "evaluation")
    parts, running = [], None
    for index, batch in enumerate(batches):
        metrics = eval_step(params, batch, jax.random.fold_in(key, index))
        if running:  # two batches on their way, not all of them
            parts.append(jax.device_get(running))
        running = metrics
    if not running:
        raise EvaluationError("there are no held-out rows; raise config.data.heldout_fraction.")
    parts.append(jax.device_get(running))
    return parts
