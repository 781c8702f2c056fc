"""A checkpoint of a pre-training run on its held-out text, without training."""

import math
import pathlib
from collections.abc import Collection

import jax
import numpy as np
from jax.experimental import multihost_utils

from convbert_jax import files
from convbert_jax.analysis import pretraining_report
from convbert_jax.config import Config
from convbert_jax.recipes import devices, pretraining
from convbert_jax.training import checkpoint_reading, compilation, evaluation, sharding
from convbert_jax.training import step as step_lib

_LESS_MEMORY = "lower config.train.batch_size or split parameters with config.mesh.fsdp"


def evaluate(
    config: Config,
    folder: pathlib.Path,
    given: Collection[str] = (),
    *,
    step: int | None = None,
    output: str | None = None,
) -> dict[str, float]:
    """The numbers that training would log for this checkpoint; prints them, and keeps them.

    The run itself is left as it is, and may be under way.

    Args:
      folder: workdir of the run.
      given: as `pretraining.read_start` takes it.
      step: of the checkpoint, default the newest.
      output: JSON file to write, default WORKDIR/evaluation/step-N.json.

    Raises:
      EvaluationError: no such checkpoint, no held-out text, or `output` cannot be written.
      UserError: the corpus or the checkpoint cannot be read.
    """
    checkpoints = folder / "checkpoints"
    steps = checkpoint_reading.list_steps(checkpoints)
    if not steps or step not in (None, *steps):
        there = f"; steps there: {', '.join(map(str, steps))}" if steps else "; train it first"
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise evaluation.EvaluationError(f"--workdir={folder} has {what}{there}.")
    if output:
        _check_output(pathlib.Path(output))
    if step is None and jax.process_count() > 1:  # a run under way may save in between
        step = int(multihost_utils.broadcast_one_to_all(np.int32(steps[-1])))
    found = devices.find_devices(config)
    mesh = sharding.make_mesh(config.mesh, found)
    sharding.check_batch_size(config.train.batch_size, 1, mesh)
    compilation.enable_compile_cache(config.train.compile_cache)
    config, _ = pretraining.read_start(config, folder, given)
    prepared = pretraining.prepare_once(config, folder)
    task = pretraining.build_task(config, prepared.tokenizer.special, found[0])
    with jax.set_mesh(mesh), compilation.explain_out_of_memory(_LESS_MEMORY):
        abstract = jax.eval_shape(task.init, jax.random.key(0))
        shardings = sharding.tree_shardings(abstract, mesh)
        step, params = checkpoint_reading.load_params(checkpoints, abstract, step)
        place = sharding.batch_sharding(mesh)
        batches = pretraining.heldout_batches(config, prepared)()
        parts = evaluation.run(
            step_lib.make_eval_step(task, mesh=mesh, shardings=shardings),
            sharding.put_params(params, shardings),
            (sharding.put_batch(batch, sharding=place) for batch in batches),
            seed=config.seed,
        )
    values = task.summarize(parts)
    if jax.process_index() == 0:
        file = pathlib.Path(output) if output else folder / "evaluation" / f"step-{step}.json"
        _report(config, folder, step, values, file)
    return values


def _check_output(file: pathlib.Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise evaluation.EvaluationError(
            f"--output={file} cannot be written ({error.strerror}); name another file."
        ) from None
    if file.is_dir():
        raise evaluation.EvaluationError(f"--output={file} is a folder; name a file in it.")


def _report(config: Config, folder: pathlib.Path, step: int, values, file: pathlib.Path) -> None:
    numbers = pretraining_report.describe_numbers(values, config.tokenizer.vocab_size)
    lines = [f"{config.name}, step {step:,}, on held-out text:", *(f"  {n}" for n in numbers)]
    print("\n".join(lines), flush=True)
    finite = {
        name: float(value) if math.isfinite(value) else None for name, value in values.items()
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(file, {"workdir": str(folder), "step": step, **finite})
    print(f"All numbers: {file}", flush=True)
