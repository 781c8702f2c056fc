"""Other batches, meshes and `config.model.remat`, planned one after the other."""

import dataclasses
import math
from collections.abc import Callable, Iterator

from convbert_jax.analysis.planned import REMAT, Planned, recommend
from convbert_jax.config import Config, MeshSection
from convbert_jax.interop.matching import replace
from convbert_jax.training.sharding import ShardingError

_SEARCHES = 4  # most plans after the first, in search of the largest batch
_FULL = 0.97  # of the memory is taken: what is left is not worth a plan, which takes minutes
_ROWS = 8  # a TPU computes with so many rows at least

PlanOne = Callable[[Config], Planned]  # raises ShardingError where a mesh cannot be


def find_largest(first: Planned, plan_one: PlanOne) -> Planned | None:
    """The largest batch that fits, or one that takes 97% of the memory, by lines through what was
    planned so far.
    """
    config = first.config
    shards = first.axes["data"] * first.axes["fsdp"]
    unit = shards * config.train.accumulation * config.optimizer.release_replicas
    if config.train.batch_size % (_ROWS * unit) == 0:
        unit *= _ROWS
    best = first if first.fits else None
    plans = [first]
    for _ in range(_SEARCHES):
        if best and best.used >= _FULL * best.capacity:
            break
        batch = _next_batch(plans, unit)
        if batch is None:
            break
        found = plan_one(replace(config, {"train.batch_size": batch}))
        plans.append(found)
        if found.fits and (not best or found.rows > best.rows):
            best = found
    return best


def _next_batch(plans: list[Planned], unit: int) -> int | None:
    """A multiple of `unit` between the largest that fits and the smallest that does not; None where
    there is none left.
    """
    capacity = plans[0].capacity
    lower = max((plan.rows for plan in plans if plan.fits), default=0)
    upper = min((plan.rows for plan in plans if not plan.fits), default=math.inf)
    near = sorted(plans, key=lambda plan: abs(plan.used - capacity))[:2]
    rows, used = near[0].rows, near[0].used
    slope = used / rows  # what does not grow with the batch is a small part
    if len(near) == 2:
        # Where memory is short a compiler saves some of it, and the line through two plans is flat.
        slope = max((used - near[1].used) / (rows - near[1].rows), slope / 2)
    guess = rows + (capacity - used) / slope
    batch = int(min(max(guess, lower + unit), upper - unit)) // unit * unit
    return batch if lower < batch < upper else None


def compare(first: Planned, plan_one: PlanOne) -> list[Planned]:
    """Plans of other meshes, then of the best mesh with other `config.model.remat`."""
    compared = []
    for mesh in other_meshes(first.axes):
        try:
            compared.append(plan_one(dataclasses.replace(first.config, mesh=mesh)))
        except ShardingError:
            continue
    plans = [first, *compared]
    best = recommend(plans) or min(plans, key=lambda plan: plan.used)
    for remat in REMAT:
        if remat != best.config.model.remat:
            compared.append(plan_one(replace(best.config, {"model.remat": remat})))
    return compared


def other_meshes(axes: dict[str, int]) -> Iterator[MeshSection]:
    """Meshes of as many devices: of `tensor` and `sequence` those of the mesh itself with other
    `fsdp`, then half and twice as much of one of them.
    """
    count = math.prod(axes.values())
    tensor, sequence = axes["tensor"], axes["sequence"]
    left = count // (tensor * sequence)
    wanted = [(fsdp, tensor, sequence) for fsdp in (1, 4, 8, left)]
    for fewer_or_more in (tensor // 2, 2 * tensor):
        wanted.append((axes["fsdp"], fewer_or_more, sequence))
    for fewer_or_more in (sequence // 2, 2 * sequence):
        wanted.append((axes["fsdp"], tensor, fewer_or_more))
    own = (axes["fsdp"], tensor, sequence)
    for sizes in dict.fromkeys(wanted):
        product = math.prod(sizes)
        if product and sizes != own and count % product == 0:
            yield MeshSection(count // product, *sizes)
