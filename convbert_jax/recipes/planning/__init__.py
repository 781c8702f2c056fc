"""What a run will take of devices that are not here, `--mode=plan`: nothing runs.

traced.py     the run as shapes
tpu_slice.py  compiled for a slice
counted.py    counted for GPUs, or for this CPU
candidates.py other batches, meshes, microbatches and `config.model.remat`
"""

import math
from collections.abc import Collection, Mapping

from etils import epath

from convbert_jax import files
from convbert_jax.analysis.arithmetic_plan import is_counted
from convbert_jax.analysis.tpu.topology import open_topology
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
    """Compiles the training step of `config` for a slice; jax must not have looked for a TPU yet,
    see `analysis.tpu.pricing.use_compile_only_tpu`. For GPUs and for a CPU it counts.

    Args:
      given: as `start.read_start` takes it; files and weights that the config names are read.
      topology: as "v5e:4x4" or "gpu:h100x8", or "cpu" for this machine.
      largest_batch: whether to look for it, by some more plans.
      compare: whether to plan other meshes, microbatches and `config.model.remat` too.
      price: of an hour of one chip, in any currency.
      output: JSON file to write.

    Raises:
      EvaluationError: `output` cannot be written, or is somebody else's.
      ConfigError: no such slice, no compiler, or nothing that can be searched for.
      ShardingError: mesh, batch and devices do not fit together.
    """
    if output:
        evaluation.check_output(files.to_path(output), "plan", ("topology", "mesh"))
    config, _ = start.read_start(config, Workdir(folder), given)
    if largest_batch and config.reads_pairs:
        raise ConfigError(
            "--largest_batch is for rows of one length; of pairs of texts choose "
            "config.parallel.batch_tokens and plan again.",
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
    """NaN, of a mixer that does not say its FLOPs, as null."""
    if isinstance(numbers, Mapping):
        return {name: _without_unknown(value) for name, value in numbers.items()}
    if isinstance(numbers, list | tuple):
        return [_without_unknown(value) for value in numbers]
    return None if isinstance(numbers, float) and math.isnan(numbers) else numbers
