"""For GPUs: arithmetic, as there is no compiler for them without one."""

import functools
import math
import types

import jax

from convbert_jax.analysis import gpu_plan
from convbert_jax.config import Config, ConfigError, MeshSection
from convbert_jax.recipes import prepared, teaching
from convbert_jax.recipes.planning.traced import count_shards, kept_bytes, make_batch, make_task
from convbert_jax.recipes.results import PlanResult
from convbert_jax.training import sharding
from convbert_jax.training.program import make_program


def plan_gpus(
    config: Config,
    gpus: gpu_plan.Gpus,
    *,
    largest_batch: bool,
    compare: bool,
    price: float | None,
) -> PlanResult:
    """As far as arithmetic goes: places of the state on an abstract mesh, activations by tracing on
    this machine's device.
    """
    if largest_batch or compare:
        raise ConfigError(
            f"--largest_batch and --compare compile, and for --topology={gpus.name} there is no "
            "compiler here; leave them out."
        )
    sizes = sharding.mesh_sizes(config.mesh, gpus.count)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    prepared.check_batches(config, mesh)
    shards = count_shards(mesh)
    device = types.SimpleNamespace(platform="gpu", device_kind=gpus.kind)
    task = make_task(config, device, teaching.open_teacher(config), shards=shards)
    here = sharding.make_mesh(MeshSection(), jax.devices()[:1])
    state = make_program(task, config, here).abstract
    places = sharding.tree_shardings(state, mesh, task.rules)
    size = functools.partial(jax.tree.map, _bytes_of_device)
    parameters, moments = (
        sum(jax.tree.leaves(size(tree, of_tree)))
        for tree, of_tree in ((state.params, places.params), (state.opt_state, places.opt_state))
    )
    batch = make_batch(config, shards)
    plan = gpu_plan.GpuPlan(
        config,
        gpus,
        axes=sizes,
        rows=batch["tokens"].shape[0],
        parameters=parameters,
        gradients=parameters,
        moments=moments,
        kept=kept_bytes(task, state.params, batch, config, mesh, here),
        tokens=task.tokens_per_step,
        flops=task.flops_per_step,
    )
    return PlanResult(plan.fits, plan.to_json(), gpu_plan.describe(plan, price))


def _bytes_of_device(leaf: jax.ShapeDtypeStruct, place: jax.NamedSharding) -> int:
    return math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize
