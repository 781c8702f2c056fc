"""Plans for GPUs and for this machine's CPU, by arithmetic."""

import dataclasses
import functools
import math
import types

import jax

from convbert_jax.analysis import flops, plans
from convbert_jax.config import Config, MeshSection
from convbert_jax.recipes import prepared, teaching
from convbert_jax.recipes.planning import candidates
from convbert_jax.recipes.planning.traced import make_batch, make_task
from convbert_jax.recipes.results import PlanResult
from convbert_jax.training import sharding
from convbert_jax.training.environment.devices import compute_dtype
from convbert_jax.training.memory import count_shards, kept_bytes
from convbert_jax.training.program import make_program


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
        devices = plans.this_cpu(*shape, compute_dtype(config, device))
    else:
        devices = plans.read_gpus(topology)
    plan_one = functools.partial(_plan, devices=devices, teacher=teaching.open_teacher(config))
    first = plan_one(config)
    largest = candidates.find_largest(first, plan_one) if largest_batch else None
    compared = candidates.compare(first, plan_one) if compare else []
    to_json = functools.partial(plans.ArithmeticPlan.to_json, price=price)
    numbers = plans.numbers_of_all(first, largest, compared, to_json)
    report = plans.describe(first, price, largest=largest, compared=compared)
    return PlanResult(first.fits, numbers, report)


def _plan(
    config: Config, devices: plans.Devices, teacher: teaching.Teacher | None
) -> plans.ArithmeticPlan:
    sizes = sharding.mesh_sizes(config.mesh, devices.count)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    prepared.check_batches(config, mesh)
    shards = count_shards(mesh)
    device = types.SimpleNamespace(platform=devices.platform, device_kind=devices.kind)
    task = make_task(config, device, teacher, shards=shards)
    here = sharding.make_mesh(MeshSection(), jax.devices()[:1])
    state = make_program(task, config, here).abstract
    places = sharding.tree_shardings(state, mesh, task.rules)
    size = functools.partial(jax.tree.map, _bytes_of_device)
    parameters, moments = (
        sum(jax.tree.leaves(size(tree, of_tree)))
        for tree, of_tree in ((state.params, places.params), (state.opt_state, places.opt_state))
    )
    taught, taught_bytes = 0.0, 0
    if teacher:
        of_teacher = sharding.tree_shardings(task.frozen, mesh, task.rules)
        taught_bytes = sum(jax.tree.leaves(size(task.frozen, of_teacher)))
        per_token = flops.teacher_flops_per_token(config, teacher.encoder, teacher.embeddings)
        taught = task.tokens_per_step * per_token
    batch = make_batch(config, shards)
    parts = config.train.accumulation
    kept = kept_bytes(task, state.params, batch, parts, mesh, here)
    moved = None
    if devices.bandwidth is not None:
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
        devices,
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
