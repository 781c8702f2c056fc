"""Other batches, meshes, `config.model.remat` and microbatches, planned one after the other."""

import dataclasses
import math
from collections.abc import Callable, Iterator

from convbert_jax.analysis.planned import (
    REMAT,
    Largest,
    Planned,
    Trial,
    price_of_row,
    recommend,
)
from convbert_jax.config import Config, MeshSection
from convbert_jax.interop.matching import replace
from convbert_jax.training.sharding import ShardingError

_SEARCHES = 4  # most plans after the first, in search of the largest batch
_FULL = 0.97  # of the memory is taken: what is left is not worth a plan, which takes minutes
_DEAR = 1.1  # times the seconds of a row of a smaller batch: accumulation makes cheaper ones of it
_ROWS = 8  # a TPU computes with so many rows at least
_LANES = 128  # numbers side by side in a TPU's registers
_HALVES = 3  # most times that a comparison doubles the microbatches

PlanOne = Callable[[Config], Planned]  # raises ShardingError where a mesh cannot be


def find_largest(first: Planned, plan_one: PlanOne) -> Largest:
    """The largest batch that fits, or one that takes 97% of the memory, or whose rows are dear:
    where memory ends the compiler computes some of the step again.

    Where the next plan is made is predicted from those before; every answer is a plan.
    """
    unit = _unit(first)
    trials = [Trial(first, None)]
    for _ in range(_SEARCHES):
        plans = [trial.plan for trial in trials]
        best = _best(plans)
        if best and (best.used >= _FULL * best.capacity or _dearer(best, plans) > _DEAR):
            break
        batch = _next_batch(plans, unit)
        if batch is None:
            break
        found = plan_one(replace(first.config, {"train.batch_size": batch}))
        trials.append(Trial(found, _Line(plans).bytes_of(batch)))
    plans = [trial.plan for trial in trials]
    best = _best(plans)
    dearer = _dearer(best, plans) if best else 1.0
    return Largest(
        best, tuple(trials), *_find_next(plans, best, unit), dearer, gave_up=dearer > _DEAR
    )


def _unit(plan: Planned) -> int:
    """What a batch is a multiple of. Thousands of short rows come to lie along the lanes, and a
    program of other numbers of them takes a fifth more memory than the line says.
    """
    parts = _parts(plan)
    rows = plan.config.train.batch_size // parts
    coarsest = _LANES if rows >= 32 * _LANES else _ROWS  # what is left over is 3% at most
    return parts * next(unit for unit in (coarsest, _ROWS, 1) if rows % unit == 0)


def _parts(plan: Planned) -> int:
    """Into how many a batch is cut, by devices and in time."""
    shards = plan.axes["data"] * plan.axes["fsdp"]
    return shards * plan.config.train.accumulation * plan.config.optimizer.release_replicas


def _best(plans: list[Planned]) -> Planned | None:
    return max((plan for plan in plans if plan.fits), key=lambda plan: plan.rows, default=None)


def _dearer(best: Planned, plans: list[Planned]) -> float:
    return price_of_row(best) / min(price_of_row(plan) for plan in plans if plan.fits)


class _Line:
    """Bytes of a device as a function of rows: through the two plans next to the capacity that fit,
    or of one by what of it grows; where none fits, by what the smallest of them takes at most.
    """

    def __init__(self, plans: list[Planned]):
        fit = sorted((plan for plan in plans if plan.fits), key=lambda plan: -plan.used)[:2]
        nearest = fit[0] if fit else min(plans, key=lambda plan: plan.rows)
        self._rows, self._used = nearest.rows, nearest.fixed + nearest.growing
        self._slope = nearest.growing / self._rows
        if len(fit) == 2:
            # Where memory is short a compiler saves some of it, and the line through two is flat.
            line = (fit[0].used - fit[1].used) / (fit[0].rows - fit[1].rows)
            self._slope = max(line, self._slope / 2)

    def bytes_of(self, rows: int) -> float:
        return self._used + self._slope * (rows - self._rows)

    def rows_of(self, size: float) -> float:
        return self._rows + (size - self._used) / self._slope


def _next_batch(plans: list[Planned], unit: int) -> int | None:
    """A multiple of `unit` between the largest that fits and the smallest that does not; None where
    there is none left.
    """
    lower = max((plan.rows for plan in plans if plan.fits), default=0)
    upper = min((plan.rows for plan in plans if not plan.fits), default=math.inf)
    guess = _Line(plans).rows_of(plans[0].capacity)
    if guess >= upper:
        guess = (lower + upper) / 2
    batch = int(max(guess, lower + unit)) // unit * unit
    return batch if lower < batch < upper else None


def _find_next(plans: list[Planned], best: Planned | None, unit: int) -> tuple[int, float, bool]:
    """(rows, bytes, whether it was planned) of the smallest batch that does not fit."""
    short = min((plan for plan in plans if not plan.fits), key=lambda p: p.rows, default=None)
    if short:
        return short.rows, short.used, True
    line = _Line(plans)
    rows = (int(line.rows_of(best.capacity)) // unit + 1) * unit
    rows = max(rows, best.rows + unit)
    return rows, line.bytes_of(rows), False


def compare(first: Planned, plan_one: PlanOne) -> list[Planned]:
    """Plans of other meshes, then of the best mesh with twice as many microbatches, again as long
    as that is better, then of the best of these with other `config.model.remat`.

    Fewer rows at once take less memory, and more of what a layer makes of them may stay in the fast
    memory of a chip.
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
    """The best that fits, or the one that is nearest to it."""
    return recommend(plans) or min(plans, key=lambda plan: plan.used)


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
