"""Plans memory and time of a run on devices that are not attached (`--mode=plan`).

For a TPU slice, the training step is compiled: the program that `training/train_step.py` builds
for training. Memory and network traffic are exact results of the compiler; times come from its cost
model. For GPUs and for this machine's CPU, the plan is an estimate by arithmetic.
"""

import dataclasses
import functools
import math
import time
import types
from collections.abc import Callable, Collection, Mapping

import jax
import numpy as np
from absl import logging
from etils import epath

from convbert_jax import storage
from convbert_jax.analysis import flops, overview, plans, tpu_plan
from convbert_jax.analysis.hlo import compile_as_text
from convbert_jax.analysis.tpu_devices import Topology, open_topology
from convbert_jax.analysis.tpu_plan import Plan, Shortage, Step, bytes_needed, describe_step
from convbert_jax.config import Config, ConfigError, MeshSection
from convbert_jax.interfaces import SpecialIds, sentinel_names
from convbert_jax.recipes import evaluation, plan_search, start, tasks, teaching
from convbert_jax.recipes.results import PlanResult
from convbert_jax.training import environment, partitioning
from convbert_jax.training.memory import bytes_of_device, count_shards, kept_bytes
from convbert_jax.training.train_step import Program, Task, make_program
from convbert_jax.workdir import Workdir


def make_batch(config: Config, shards: int = 1) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the batch of one step, see `Recipe.batch_shapes`."""
    return tasks.recipe_of(config).batch_shapes(config, shards)


def make_task(
    config: Config,
    device: jax.Device,
    teacher: teaching.Teacher | None = None,
    *,
    shards: int = 1,
) -> Task:
    """Builds the task of a config without a vocabulary.

    Uses default ids of special tokens and assumes that every token begins a word.

    Args:
      shards: see `Recipe.batch_shapes`.
    """
    size, recipe = config.tokenizer.vocab_size, tasks.recipe_of(config)
    names = sentinel_names(recipe.count_sentinels(config))
    extra = {name: size - 1 - number for number, name in enumerate(names)}
    return tasks.build_task(
        config,
        SpecialIds(pad=0, unknown=1, cls=2, sep=3, mask=4, extra=extra),
        device,
        teacher,
        tokenizer=types.SimpleNamespace(begins_word=np.ones(size, bool)),
        effort=recipe.effort(config, shards),
    )


def plan_slice(
    config: Config, topology: Topology, *, largest_batch: bool, compare: bool, price: float | None
) -> PlanResult:
    """Plans a run by compiling its training step for a TPU slice."""
    teacher = teaching.open_teacher(config)
    plan_one = functools.partial(_plan_slice, topology=topology, teacher=teacher)
    with environment.random_numbers(topology.devices):
        first, largest, compared = _plan_all(config, plan_one, largest_batch, compare)
    to_json = functools.partial(tpu_plan.to_json, price=price)
    numbers = plans.numbers_of_all(first, largest, compared, to_json)
    report = tpu_plan.describe(first, largest, compared, price)
    return PlanResult(first.fits, numbers, report)


def _plan_all(
    config: Config, plan_one: plan_search.PlanOne, largest_batch: bool, compare: bool
) -> tuple[plans.Planned, plans.Largest | None, list[plans.Planned]]:
    """Returns the plan of the config, of the largest batch and of the alternatives, if asked."""
    first = plan_one(config)
    largest = plan_search.find_largest(first, plan_one) if largest_batch else None
    return first, largest, plan_search.compare(first, plan_one) if compare else []


def _plan_slice(config: Config, topology: Topology, teacher: teaching.Teacher | None) -> Plan:
    mesh = partitioning.make_mesh(config.mesh, topology.devices)
    tasks.recipe_of(config).check_batches(config, mesh)
    task = make_task(config, topology.devices[0], teacher, shards=count_shards(mesh))
    program = make_program(task, config, mesh)
    batch = make_batch(config, count_shards(mesh))
    logging.info(
        "Compiling a step of %d rows for %s, mesh %s, config.model.remat=%s; takes minutes for a "
        "large model.",
        batch["tokens"].shape[0],
        topology.name,
        plans.spell_mesh(mesh.shape),
        config.model.remat,
    )
    started = time.monotonic()
    step = _compile(program, task, batch, topology)
    seconds = time.monotonic() - started
    one = partitioning.make_mesh(MeshSection(), topology.devices[:1])
    accumulation = config.train.accumulation
    kept = kept_bytes(task, program.abstract.params, batch, accumulation, mesh, one)
    plan = Plan(
        config,
        topology,
        axes=dict(mesh.shape),
        rows=batch["tokens"].shape[0],
        step=step,
        kept=kept,
        tokens=task.tokens_per_step,
        flops=task.flops_per_step,
    )
    # A search compiles for up to an hour before its report is printed.
    logging.info("Compiled in %.0f s: %s.", seconds, tpu_plan.outcome(plan))
    return plan


def _compile(program: Program, task: Task, batch, topology: Topology) -> Step | Shortage:
    batch = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=program.rows)
        for name, x in batch.items()
    }
    given = []
    if task.frozen is not None:
        given = [
            jax.tree.map(
                lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
                task.frozen,
                program.extra_shardings[0],
            )
        ]
    with jax.set_mesh(program.mesh):
        lowered = program.train_step.lower(program.abstract, batch, *given)
        try:
            compiled, text = compile_as_text(lowered)
        except jax.errors.JaxRuntimeError as error:
            short = bytes_needed(error)
            if short:
                state = program.abstract
                lying = (bytes_of_device(tree) for tree in (state.params, state.opt_state))
                return Shortage(*short, *lying)
            reason = str(error).splitlines()[0].rstrip(".")
            raise ConfigError(
                f"The TPU compiler cannot compile this step for {topology.name}: {reason}. Try "
                "another config.mesh, config.model.scan_unroll or version of libtpu.",
                value=topology.name,
            ) from error
    axes = dict(program.mesh.shape)
    state, teacher = program.abstract, bytes_of_device(given)
    return describe_step(
        compiled, text, state, topology.chip, axes, topology.slices, teacher=teacher
    )


def plan_by_arithmetic(
    config: Config,
    topology: str,
    *,
    largest_batch: bool,
    compare: bool,
    price: float | None,
) -> PlanResult:
    """Plans a run by arithmetic.

    Shards the state over an abstract mesh, and traces the step on this machine to count the bytes
    of activations.
    """
    if topology == "cpu":
        rows, length = make_batch(config)["tokens"].shape
        layer = rows * length // config.train.accumulation
        shape = (layer, config.model.hidden_size, config.model.ffn_size)
        device = types.SimpleNamespace(platform="cpu")
        hardware = plans.this_cpu(*shape, environment.compute_dtype(config, device))
    else:
        hardware = plans.read_gpus(topology)
    plan_one = functools.partial(
        _plan_by_arithmetic, hardware=hardware, teacher=teaching.open_teacher(config)
    )
    first, largest, compared = _plan_all(config, plan_one, largest_batch, compare)
    to_json = functools.partial(plans.ArithmeticPlan.to_json, price=price)
    numbers = plans.numbers_of_all(first, largest, compared, to_json)
    report = plans.describe(first, price, largest=largest, compared=compared)
    return PlanResult(first.fits, numbers, report)


def _plan_by_arithmetic(
    config: Config, hardware: plans.Devices, teacher: teaching.Teacher | None
) -> plans.ArithmeticPlan:
    sizes = partitioning.mesh_sizes(config.mesh, hardware.count)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    tasks.recipe_of(config).check_batches(config, mesh)
    shards = count_shards(mesh)
    device = types.SimpleNamespace(platform=hardware.platform, device_kind=hardware.kind)
    task = make_task(config, device, teacher, shards=shards)
    here = partitioning.make_mesh(MeshSection(), jax.devices()[:1])
    state = make_program(task, config, here).abstract
    places = partitioning.tree_shardings(state, mesh, task.rules)
    size = functools.partial(jax.tree.map, _bytes_of_device)
    parameters, moments = (
        sum(jax.tree.leaves(size(tree, of_tree)))
        for tree, of_tree in ((state.params, places.params), (state.opt_state, places.opt_state))
    )
    taught, taught_bytes = 0.0, 0
    if teacher:
        of_teacher = partitioning.tree_shardings(task.frozen, mesh, task.rules)
        taught_bytes = sum(jax.tree.leaves(size(task.frozen, of_teacher)))
        per_token = flops.teacher_flops_per_token(
            config, teacher.encoder, teacher.embeddings, teacher.head
        )
        taught = task.tokens_per_step * per_token
    batch = make_batch(config, shards)
    parts = config.train.accumulation
    kept = kept_bytes(task, state.params, batch, parts, mesh, here)
    moved = None
    if hardware.bandwidth is not None:
        model = dataclasses.replace(config.model, remat="none")  # remat moves at most as much
        whole = dataclasses.replace(config, model=model)
        whole_task = make_task(whole, device, teacher, shards=shards)
        looped = config.model.scan_unroll < config.model.layers
        moved = (plans.MOVED_IN_LOOPS if looped else plans.MOVED) * parts
        moved *= kept_bytes(whole_task, state.params, batch, parts, mesh, here)
        if taught:
            moved *= 1 + taught / task.flops_per_step  # assumes the student's bytes per FLOP
    return plans.ArithmeticPlan(
        config,
        hardware,
        axes=sizes,
        rows=batch["tokens"].shape[0],
        parameters=parameters,
        gradients=parameters,
        moments=moments,
        kept=kept,
        moved=moved,
        tokens=task.tokens_per_step,
        flops=task.flops_per_step,
        teacher=taught_bytes,
        teacher_flops=taught,
    )


def _bytes_of_device(leaf: jax.ShapeDtypeStruct, place: jax.NamedSharding) -> int:
    return math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize


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
        evaluation.check_output(storage.to_path(output), "plan", ("topology", "mesh"))
    workdir = Workdir(folder)
    config, _ = start.read_start(config, workdir, given)
    config = start.count_steps(config, workdir, required=True)
    if largest_batch and config.spec.tokens_per_step(config) is None:
        raise ConfigError(
            "--largest_batch does not support text pairs. Change config.parallel.batch_tokens "
            "and plan again.",
            field="--largest_batch",
        )
    settings = {"largest_batch": largest_batch, "compare": compare, "price": price}
    if plans.is_counted(topology):
        plan_one = functools.partial(plan_by_arithmetic, topology=topology, **settings)
    else:
        plan_one = functools.partial(plan_slice, topology=open_topology(topology), **settings)
    result = _plan_phases(config, plan_one) if config.phases else plan_one(config)
    if output:
        storage.write_json(storage.to_path(output), _without_unknown(result.numbers))
    return result


def _plan_phases(config: Config, plan_one: Callable[[Config], PlanResult]) -> PlanResult:
    """Plans each phase as a run of its length, and adds up their times."""
    results = {}
    for phase, of_phase in zip(config.phases, config.phase_configs, strict=True):
        train = dataclasses.replace(of_phase.train, steps=phase.length)
        results[phase.name] = plan_one(dataclasses.replace(of_phase, train=train, phases=()))
    parts = [f"phase {name}\n\n{result.report}\n" for name, result in results.items()]
    numbers = {"phases": {name: result.numbers for name, result in results.items()}}
    fits = all(result.fits for result in results.values())
    if fits:
        hours = [sum(plan["hours"][i] for plan in numbers["phases"].values()) for i in (0, 1)]
        numbers["hours"] = hours
        whole = overview.spell_range(*(3600 * each for each in hours))
        parts.append(f"all phases              {config.train.steps:,} steps: {whole}")
    return PlanResult(fits, numbers, "\n".join(parts))


def _without_unknown(numbers):
    """Replaces NaN (FLOPs of a mixer that does not define them) by None, for JSON."""
    if isinstance(numbers, Mapping):
        return {name: _without_unknown(value) for name, value in numbers.items()}
    if isinstance(numbers, list | tuple):
        return [_without_unknown(value) for value in numbers]
    return None if isinstance(numbers, float) and math.isnan(numbers) else numbers
