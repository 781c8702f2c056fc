"""Searches for the largest batch; compares meshes, microbatches and `config.model.remat`."""

import dataclasses
import math
from collections.abc import Callable, Iterator

from convbert_jax.analysis.plans import REMAT, Largest, Planned, Trial, price_of_row, recommend
from convbert_jax.config import Config, MeshSection
from convbert_jax.interop.matching import replace
from convbert_jax.training.partitioning import ShardingError

_SEARCHES = 4  # maximum number of plans after the first in the batch search
_FULL = 0.97  # share of memory above which the search ends: a plan takes minutes
_MAX_ROW_COST = 1.1  # a higher `row_cost`: smaller batches with accumulation are faster
_ROWS = 8  # sublanes: minimum rows of a TPU computation
_LANES = 128  # lanes of a TPU register
_HALVES = 3  # maximum number of times a comparison doubles the microbatches

PlanOne = Callable[[Config], Planned]  # raises ShardingError if the mesh is not possible


def find_largest(first: Planned, plan_one: PlanOne) -> Largest:
    """Searches for the largest batch that fits.

    Stops at 97% of the memory, or when rows become slower: close to the memory limit the compiler
    recomputes parts of the step. The next batch size is predicted from previous plans; the result
    is always a planned batch.
    """
    unit = _unit(first)
    trials = [Trial(first, None)]
    for _ in range(_SEARCHES):
        plans = [trial.plan for trial in trials]
        best = _best(plans)
        if best and (best.used >= _FULL * best.capacity or _row_cost(best, plans) > _MAX_ROW_COST):
            break
        batch = _next_batch(plans, unit)
        if batch is None:
            break
        found = plan_one(replace(first.config, {"train.batch_size": batch}))
        trials.append(Trial(found, _Line(plans).bytes_of(batch)))
    plans = [trial.plan for trial in trials]
    best = _best(plans)
    row_cost = _row_cost(best, plans) if best else 1.0
    return Largest(
        best,
        tuple(trials),
        *_find_next(plans, best, unit),
        row_cost,
        gave_up=row_cost > _MAX_ROW_COST,
    )


def _unit(plan: Planned) -> int:
    """Returns the step of the search in rows.

    With thousands of short rows the compiler maps rows to lanes; batches that are not a multiple of
    the lanes then take a fifth more memory than predicted.
    """
    parts = _parts(plan)
    rows = plan.config.train.batch_size // parts
    coarsest = _LANES if rows >= 32 * _LANES else _ROWS  # rounding costs at most 3%
    return parts * next(unit for unit in (coarsest, _ROWS, 1) if rows % unit == 0)


def _parts(plan: Planned) -> int:
    """Returns the number of parts of a batch: batch devices x accumulation x replicas."""
    shards = plan.axes["data"] * plan.axes["fsdp"]
    return shards * plan.config.train.accumulation * plan.config.optimizer.release_replicas


def _best(plans: list[Planned]) -> Planned | None:
    return max((plan for plan in plans if plan.fits), key=lambda plan: plan.rows, default=None)


def _row_cost(best: Planned, plans: list[Planned]) -> float:
    return price_of_row(best) / min(price_of_row(plan) for plan in plans if plan.fits)


class _Line:
    """Linear model of the bytes of a device as a function of rows.

    The line goes through the two largest plans that fit. With one plan that fits, its slope is the
    plan's growing bytes per row; if none fits, the smallest plan is used the same way.
    """

    def __init__(self, plans: list[Planned]):
        fit = sorted((plan for plan in plans if plan.fits), key=lambda plan: -plan.used)[:2]
        nearest = fit[0] if fit else min(plans, key=lambda plan: plan.rows)
        self._rows, self._used = nearest.rows, nearest.fixed + nearest.growing
        self._slope = nearest.growing / self._rows
        if len(fit) == 2:
            # Close to the limit the compiler trades time for memory, which flattens the line.
            line = (fit[0].used - fit[1].used) / (fit[0].rows - fit[1].rows)
            self._slope = max(line, self._slope / 2)

    def bytes_of(self, rows: int) -> float:
        return self._used + self._slope * (rows - self._rows)

    def rows_of(self, size: float) -> float:
        return self._rows + (size - self._used) / self._slope


def _next_batch(plans: list[Planned], unit: int) -> int | None:
    """Returns the next batch to plan, a multiple of `unit`; None if the search is complete.

    It lies between the largest batch that fits and the smallest that does not.
    """
    lower = max((plan.rows for plan in plans if plan.fits), default=0)
    upper = min((plan.rows for plan in plans if not plan.fits), default=math.inf)
    guess = _Line(plans).rows_of(plans[0].capacity)
    if guess >= upper:
        guess = (lower + upper) / 2
    batch = int(max(guess, lower + unit)) // unit * unit
    return batch if lower < batch < upper else None


def _find_next(plans: list[Planned], best: Planned | None, unit: int) -> tuple[int, float, bool]:
    """Returns (rows, bytes, whether it was planned) of the smallest batch that does not fit."""
    short = min((plan for plan in plans if not plan.fits), key=lambda p: p.rows, default=None)
    if short:
        return short.rows, short.used, True
    line = _Line(plans)
    rows = (int(line.rows_of(best.capacity)) // unit + 1) * unit
    rows = max(rows, best.rows + unit)
    return rows, line.bytes_of(rows), False


def compare(first: Planned, plan_one: PlanOne) -> list[Planned]:
    """Plans alternatives in order: meshes, microbatches, `config.model.remat`.

    Each stage starts from the best plan so far; microbatches are doubled as long as that helps.
    Smaller microbatches take less memory, and more activations may stay in the chip's fast memory.
    """
    compared = []
    for mesh in other_meshes(first.axes):
        try:
            compared.append(plan_one(dataclasses.replace(first.config, mesh=mesh)))
        except ShardingError:
            continue
    best = _better(first, *compared)
    for _ in range(_HALVES):
        if best.rows % (2 * _ROWS * _parts(best)):
            break
        accumulation = 2 * best.config.train.accumulation
        compared.append(plan_one(replace(best.config, {"train.accumulation": accumulation})))
        if _better(best, compared[-1]) is best:
            break
        best = compared[-1]
    for remat in REMAT:
        if remat != best.config.model.remat:
            compared.append(plan_one(replace(best.config, {"model.remat": remat})))
    return compared


def _better(*plans: Planned) -> Planned:
    """Returns the best plan that fits, or the one with the least memory."""
    return recommend(plans) or min(plans, key=lambda plan: plan.used)


def other_meshes(axes: dict[str, int]) -> Iterator[MeshSection]:
    """Yields other meshes of the same number of devices.

    First other sizes of `fsdp`, then half and double `tensor`, then half and double `sequence`.
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
