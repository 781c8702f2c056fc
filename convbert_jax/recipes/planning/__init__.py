"""Plans memory and time of a run on devices that are not attached (`--mode=plan`).

traced.py     task and batches as shapes
tpu_slice.py  compiles the step for a TPU slice
counted.py    estimates by arithmetic for GPUs or this CPU
candidates.py plans other batches, meshes, microbatches and `config.model.remat`
"""

import math
from collections.abc import Collection, Mapping

from etils import epath

from convbert_jax import files
from convbert_jax.analysis.plans import is_counted
from convbert_jax.analysis.tpu_devices import open_topology
from convbert_jax.config import Config, ConfigError
from convbert_jax.recipes import evaluation, start
from convbert_jax.recipes.planning.counted import plan_by_arithmetic
from convbert_jax.recipes.planning.tpu_slice import plan_slice
from convbert_jax.recipes.results import PlanResult
from convbert_jax.workdir import Workdir


def plan(
    config: Config,
    folder: epath.PathLike,
    given: Collection[str] = (),
    *,
    topology: str,
    largest_batch: bool = False,
    compare: bool = False,
    price: float | None = None,
    output: str | None = None,
) -> PlanResult:
    """Plans a run: compiles the training step for a TPU slice, or estimates GPUs and CPUs.

    For a TPU slice, jax must not have initialized a TPU backend yet, see
    `analysis.tpu_pricing.use_compile_only_tpu`.

    Args:
      given: see `start.read_start`; files and weights of the config are read.
      topology: as "v5e:4x4" or "gpu:h100x8", or "cpu" for this machine.
      largest_batch: search for the largest batch that fits.
      compare: also plan other meshes, microbatches and `config.model.remat`.
      price: price of one chip hour, in any currency.
      output: JSON file to write.

    Raises:
      EvaluationError: `output` cannot be written or is another file.
      ConfigError: the slice does not exist, the compiler is missing, or the batch of this recipe
        cannot be searched.
      ShardingError: mesh, batch and devices do not match.
    """
    if output:
        evaluation.check_output(files.to_path(output), "plan", ("topology", "mesh"))
    config, _ = start.read_start(config, Workdir(folder), given)
    if largest_batch and config.reads_pairs:
        raise ConfigError(
            "--largest_batch does not support text pairs. Change config.parallel.batch_tokens "
            "and plan again.",
            field="--largest_batch",
        )
    settings = {"largest_batch": largest_batch, "compare": compare, "price": price}
    if is_counted(topology):
        result = plan_by_arithmetic(config, topology, **settings)
    else:
        result = plan_slice(config, open_topology(topology), **settings)
    if output:
        files.write_json(files.to_path(output), _without_unknown(result.numbers))
    return result


def _without_unknown(numbers):
    """Replaces NaN (FLOPs of a mixer that does not define them) by None, for JSON."""
    if isinstance(numbers, Mapping):
        return {name: _without_unknown(value) for name, value in numbers.items()}
    if isinstance(numbers, list | tuple):
        return [_without_unknown(value) for value in numbers]
    return None if isinstance(numbers, float) and math.isnan(numbers) else numbers
