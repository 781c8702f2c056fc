"""Plans for TPU slices: compiles the training step.

The program is the one that `training/program.py` builds for training. Memory and network traffic
are exact results of the compiler; times come from its cost model.
"""

import functools
import time

import jax
from absl import logging

from convbert_jax.analysis import plans, tpu_plan
from convbert_jax.analysis.hlo import compile_as_text
from convbert_jax.analysis.tpu_devices import Topology
from convbert_jax.analysis.tpu_plan import Plan, Shortage, Step, bytes_needed, describe_step
from convbert_jax.config import Config, ConfigError, MeshSection
from convbert_jax.recipes import prepared, teaching
from convbert_jax.recipes.planning import candidates
from convbert_jax.recipes.planning.traced import make_batch, make_task
from convbert_jax.recipes.results import PlanResult
from convbert_jax.training import sharding
from convbert_jax.training.environment import devices
from convbert_jax.training.memory import bytes_of_device, count_shards, kept_bytes
from convbert_jax.training.program import Program, make_program
from convbert_jax.training.task import Task


def plan_slice(
    config: Config, topology: Topology, *, largest_batch: bool, compare: bool, price: float | None
) -> PlanResult:
    teacher = teaching.open_teacher(config)
    plan_one = functools.partial(_plan, topology=topology, teacher=teacher)
    with devices.random_numbers(topology.devices):
        first = plan_one(config)
        largest = candidates.find_largest(first, plan_one) if largest_batch else None
        compared = candidates.compare(first, plan_one) if compare else []
    to_json = functools.partial(tpu_plan.to_json, price=price)
    numbers = plans.numbers_of_all(first, largest, compared, to_json)
    report = tpu_plan.describe(first, largest, compared, price)
    return PlanResult(first.fits, numbers, report)


def _plan(config: Config, topology: Topology, teacher: teaching.Teacher | None) -> Plan:
    mesh = sharding.make_mesh(config.mesh, topology.devices)
    prepared.check_batches(config, mesh)
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
    one = sharding.make_mesh(MeshSection(), topology.devices[:1])
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
