"""For a TPU slice: the step that would train, compiled.

The program is the one that `training/program.py` gives the loop, so memory and network are what the
compiler has settled; times are its model.
"""

import dataclasses
import math
import time
from collections.abc import Iterator

import jax
from absl import logging
from jax.sharding import Mesh

from convbert_jax.analysis.tpu import plan_text
from convbert_jax.analysis.tpu.compiling import compile_as_text
from convbert_jax.analysis.tpu.plan import Plan, Shortage, Step, bytes_needed, describe_step
from convbert_jax.analysis.tpu.topology import Topology
from convbert_jax.config import Config, ConfigError, MeshSection
from convbert_jax.interop.matching import replace
from convbert_jax.recipes import prepared, teaching
from convbert_jax.recipes.planning.traced import count_shards, kept_bytes, make_batch, make_task
from convbert_jax.recipes.results import PlanResult
from convbert_jax.training import sharding
from convbert_jax.training.environment import devices
from convbert_jax.training.program import Program, make_program
from convbert_jax.training.task import Task

_SEARCHES = 4  # most compilations after the first, in search of the largest batch
_ROWS = 8  # a TPU computes with so many rows at least


def plan_slice(
    config: Config, topology: Topology, *, largest_batch: bool, compare: bool, price: float | None
) -> PlanResult:
    prepared.check_batches(config, sharding.make_mesh(config.mesh, topology.devices))
    if largest_batch and config.reads_pairs:
        raise ConfigError(
            "--largest_batch is for rows of one length; of pairs of texts choose "
            "config.parallel.batch_tokens and plan again."
        )
    teacher = teaching.open_teacher(config)
    with devices.random_numbers(topology.devices):
        first = _plan(config, topology, teacher)
        largest = _find_largest(first, teacher) if largest_batch else None
        others = _others(config, topology) if compare else ()
        compared = tuple(_plan(other, topology, teacher) for other in others)
    numbers = plan_text.to_json(first) | {
        "largest_batch": plan_text.to_json(largest) if largest else None,
        "compared": [plan_text.to_json(each) for each in compared],
    }
    report = plan_text.describe(first, largest, compared, price, searched=largest_batch)
    return PlanResult(first.fits, numbers, report)


def _plan(config: Config, topology: Topology, teacher: teaching.Teacher | None) -> Plan:
    mesh = sharding.make_mesh(config.mesh, topology.devices)
    task = make_task(config, topology.devices[0], teacher, shards=count_shards(mesh))
    program = make_program(task, config, mesh)
    batch = make_batch(config, count_shards(mesh))
    logging.info(
        "Compiling the step of %d rows for %s, mesh %s, config.model.remat=%s; a large model takes "
        "minutes.",
        batch["tokens"].shape[0],
        topology.name,
        _spell(mesh),
        config.model.remat,
    )
    started = time.monotonic()
    step = _compile(program, task, batch, topology)
    logging.info("Compiled in %.0f s.", time.monotonic() - started)
    one = sharding.make_mesh(MeshSection(), topology.devices[:1])
    kept = kept_bytes(task, program.abstract.params, batch, config, mesh, one)
    return Plan(
        config,
        topology,
        axes=dict(mesh.shape),
        rows=batch["tokens"].shape[0],
        step=step,
        kept=kept,
        tokens=task.tokens_per_step,
        flops=task.flops_per_step,
    )


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
                program.given_places[0],
            )
        ]
    with jax.set_mesh(program.mesh):
        lowered = program.train_step.lower(program.abstract, batch, *given)
        try:
            compiled, text = compile_as_text(lowered)
        except jax.errors.JaxRuntimeError as error:
            short = bytes_needed(error)
            if short:
                return Shortage(*short)
            reason = str(error).splitlines()[0].rstrip(".")
            raise ConfigError(
                f"The TPU compiler cannot compile this step for {topology.name}: {reason}; another "
                "config.mesh, config.model.scan_unroll or libtpu may do."
            ) from error
    axes = dict(program.mesh.shape)
    return describe_step(compiled, text, program.abstract, topology.chip, axes, topology.slices)


def _find_largest(first: Plan, teacher: teaching.Teacher | None) -> Plan | None:
    """The largest batch that fits, by lines through what was compiled so far."""
    config, topology = first.config, first.topology
    mesh = sharding.make_mesh(config.mesh, topology.devices)
    unit = count_shards(mesh) * config.train.accumulation * config.optimizer.release_replicas
    if config.train.batch_size % (_ROWS * unit) == 0:
        unit *= _ROWS
    best = first if first.fits else None
    points = [_point(first)]
    for _ in range(_SEARCHES):
        batch = _next_batch(points, unit, first)
        if batch is None:
            break
        found = _plan(replace(config, {"train.batch_size": batch}), topology, teacher)
        points.append(_point(found))
        if found.fits and (not best or found.rows > best.rows):
            best = found
    return best


def _point(plan: Plan) -> tuple[int, float, bool]:
    """(rows of a batch, bytes of a device, whether it fits)."""
    used = plan.step.memory.used if plan.fits else plan.step.needed
    return plan.rows, used, plan.fits


def _next_batch(points: list[tuple[int, float, bool]], unit: int, plan: Plan) -> int | None:
    """A multiple of `unit` between the largest that fits and the smallest that does not; None where
    there is none left.
    """
    capacity = plan.step.memory.capacity if plan.fits else plan.step.capacity
    lower = max((rows for rows, _, fits in points if fits), default=0)
    upper = min((rows for rows, _, fits in points if not fits), default=math.inf)
    near = sorted(points, key=lambda point: abs(point[1] - capacity))[:2]
    if len(near) == 1:  # what does not grow with the batch is a small part
        slope, rows, used = near[0][1] / near[0][0], near[0][0], near[0][1]
    else:
        (rows, used, _), (other, of_other, _) = near
        slope = (used - of_other) / (rows - other)
    guess = rows + (capacity - used) / slope if slope > 0 else 2 * rows
    batch = int(min(max(guess, lower + unit), upper - unit)) // unit * unit
    return batch if lower < batch < upper else None


def _others(config: Config, topology: Topology) -> Iterator[Config]:
    """Other meshes with the same `remat`, and the same mesh with other `remat`, that can be."""
    count = len(topology.devices)
    own = sharding.make_mesh(config.mesh, topology.devices)
    for fsdp in dict.fromkeys((1, 4, 8, count)):
        if count % fsdp or (count // fsdp, fsdp, 1, 1) == tuple(own.shape.values()):
            continue
        other = dataclasses.replace(config, mesh=MeshSection(count // fsdp, fsdp, 1))
        try:
            make_program(
                make_task(other, topology.devices[0]),
                other,
                sharding.make_mesh(other.mesh, topology.devices),
            )
        except sharding.ShardingError:
            continue
        yield other
    for remat in ("none", "dots", "full"):
        if remat != config.model.remat:
            yield replace(config, {"model.remat": remat})


def _spell(mesh: Mesh) -> str:
    return " ".join(f"{name}={size}" for name, size in mesh.shape.items())
