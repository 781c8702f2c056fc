"""Evaluates a checkpoint, or the mean of several, on held-out text.

Pair recipes also generate texts for the held-out sources and score them.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath
from jax.experimental import multihost_utils

from convbert_jax import storage
from convbert_jax.analysis import pretraining_report
from convbert_jax.config import Config
from convbert_jax.interop import sources
from convbert_jax.interop.sources import check_learned
from convbert_jax.recipes import prepared, scoring, start, tasks
from convbert_jax.recipes.results import EvaluationResult
from convbert_jax.training import environment, loop, memory, partitioning
from convbert_jax.training.train_step import make_program
from convbert_jax.workdir import Workdir


def evaluate(
    config: Config,
    folder: epath.PathLike,
    given: Collection[str] = (),
    *,
    step: int | None = None,
    average: int | None = None,
    output: str | None = None,
) -> EvaluationResult:
    """Computes the held-out metrics of a checkpoint and writes them to a JSON file.

    Pair recipes also generate texts for the held-out pairs and config.decoding.test_sources, and
    score them. config.decoding.average > 1 evaluates the mean of that many checkpoints, while
    training logs the metrics of a single one; file and report list the checkpoints. The run is not
    changed and may still be training.

    Args:
      folder: workdir of the run.
      given: see `start.read_start`.
      step: step of the checkpoint, default the newest.
      average: evaluate the mean of this many checkpoints up to `step`; default
        config.decoding.average for pair recipes, else 1.
      output: JSON file to write, default WORKDIR/evaluation/step-N.json. Scores of other sets that
        it already contains are kept.

    Raises:
      EvaluationError: there is no held-out text, or `output` cannot be written or is another file.
      WorkdirError: the checkpoint does not exist.
      ScoreError: the library for scoring is not installed.
      UserError: the corpus or the checkpoint cannot be read.
    """
    workdir = Workdir(folder)
    step = workdir.choose_step(step)
    if output:
        check_output(storage.to_path(output), "eval", ("workdir", "step"))
    else:
        storage.check_links(workdir.path)
    if step is None and jax.process_count() > 1:  # a running job may save in between
        step = int(multihost_utils.broadcast_one_to_all(np.int32(workdir.steps()[-1])))
    found = environment.find_devices(config)
    logging.info("Evaluating on %s.", environment.describe_devices(found))
    mesh = partitioning.make_mesh(config.mesh, found)
    recipe = tasks.recipe_of(config)
    recipe.check_batches(config, mesh, training=False)
    config, _ = start.read_start(config, workdir, given)
    tests = recipe.check_scores(config)
    if config.phases:
        step = step or workdir.steps()[-1]
        phases = prepared.open_phases(config, workdir, recipe.effort)
        data, config = phases[config.phase_number(step)], config.at(step)
    else:
        data = recipe.open_data(config, workdir)
    check_learned(workdir, config, data.tokenizers)
    task = tasks.build_task(config, data.tokenizer.special, found[0], tokenizer=data.tokenizer)
    with environment.random_numbers(found), jax.set_mesh(mesh):
        program = make_program(task, config, mesh)
        if average:
            steps, params = sources.read_mean(workdir, config, average, step)
        else:
            steps, params = recipe.read_params(workdir, config, program.abstract.params, step)
        with memory.explain_out_of_memory(
            "loading a checkpoint",
            "split parameters over more devices with config.mesh.fsdp",
            lambda: memory.find_state(program.abstract.params),
        ):
            placed = program.put_params(params)
        heldout = data.heldout(mesh)()
        with environment.compiling("Evaluating"):
            values = loop.evaluate(
                task,
                program.eval_step,
                placed,
                {name: map(program.put_batch, batches) for name, batches in heldout.items()},
                seed=config.seed,
            )
    step = steps[-1]
    file = storage.to_path(output) if output else workdir.evaluation(step)
    sets, unwritten = recipe.write_and_score(
        config, data, texts_folder(file), lambda: (steps, params), tests
    )
    report = ""
    if jax.process_index() == 0:
        write_numbers(workdir, steps, values, file, sets)
        report = _describe(config, steps, values, file, sets, unwritten)
    return EvaluationResult(workdir.path, step, values, file, report, scoring.values_of(sets))


def texts_folder(file: epath.Path) -> epath.Path:
    """Returns the folder of generated texts that belongs to a file of metrics."""
    return file.parent / file.stem


def write_numbers(
    workdir: Workdir,
    steps: Sequence[int],
    values: Mapping[str, float],
    file: epath.Path,
    sets: Sequence[scoring.Set] = (),
) -> None:
    """Writes metrics (NaN as null) and scores of generated texts to a JSON file.

    Scores of other sets that the file already contains are kept.

    Args:
      steps: steps of the averaged checkpoints, or the one step.
    """
    finite = {
        name: float(value) if math.isfinite(value) else None for name, value in values.items()
    }
    scores = _read_scores(workdir, steps[-1], file) | scoring.to_json(sets)
    of_file = {"workdir": str(workdir), "step": steps[-1], "checkpoints": list(steps), **finite}
    file.parent.mkdir(parents=True, exist_ok=True)
    storage.write_json(file, of_file | ({"scores": scores} if scores else {}))


def _read_scores(workdir: Workdir, step: int, file: epath.Path) -> dict[str, Any]:
    """Returns the scores in `file` by set name; {} if it is from another run or step."""
    try:
        found = storage.read_json(file, remedy="it is replaced", fields={})
    except FileNotFoundError:
        return {}
    except storage.DamagedFileError as error:
        logging.warning("%s", error)
        return {}
    own = file == workdir.evaluation(step)  # also if the run has been moved
    same = own or (found.get("workdir"), found.get("step")) == (str(workdir), step)
    scores = found.get("scores")
    return scores if same and isinstance(scores, dict) else {}


def check_output(file: epath.Path, mode: str, names: Collection[str]) -> None:
    """Creates the folder of a JSON file that `mode` will write.

    Args:
      names: keys of such a file; an existing file without them is not replaced.

    Raises:
      EvaluationError: the folder cannot be created, or another file would be overwritten.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise loop.EvaluationError(
            f"--output={file} cannot be written: {error.strerror}. Use another file.",
            field="--output",
            path=file,
        ) from None
    if file.is_dir():
        raise loop.EvaluationError(
            f"--output={file} is a folder. Use a file name.", field="--output", path=file
        )
    if file.exists() and not _is_made_of(file, names):
        raise loop.EvaluationError(
            f"--output={file} exists and was not written by --mode={mode}. Remove it or use "
            "another file.",
            field="--output",
            path=file,
        )


def _is_made_of(file: epath.Path, names: Collection[str]) -> bool:
    """Whether a file is empty, or a JSON object with these keys."""
    try:
        if file.is_file() and file.read_bytes():
            storage.read_json(file, remedy="", fields=dict.fromkeys(names, object))
        return file.is_file()  # False for /dev/null
    except (OSError, storage.DamagedFileError):
        return False


def _describe(
    config: Config, steps: Sequence[int], values, file: epath.Path, sets, unwritten: str
) -> str:
    numbers = pretraining_report.list_numbers(values, config.vocabularies[1])
    shown = pretraining_report.describe_numbers(numbers)
    which = f"step {steps[-1]:,}"
    if len(steps) > 1:
        which = f"the mean of checkpoints {steps[0]:,} to {steps[-1]:,}"
    lines = [f"{config.name}, {which}, on held-out text:", *(f"  {n}" for n in shown)]
    if sets:
        lines += ["", *scoring.describe(sets)]
    if unwritten:
        lines += ["", unwritten]
    return "\n".join([*lines, f"All numbers: {file}"])
