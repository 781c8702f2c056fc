"""Common parts of compiled and arithmetic plans: cost of a run, recommendation, batch search."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from convbert_jax.config import Config
from convbert_jax.training.memory import spell_bytes

REMAT = ("none", "dots", "full")  # by increasing recomputation
WHAT_HELPS = (
    "To reduce memory, cheapest first: lower --config.train.batch_size or raise --config.train."
    "accumulation; raise --config.mesh.fsdp if parameters dominate;",
    "set --config.model.remat=dots, then full; use more devices.",
)


class Planned(Protocol):
    """A plan of one config.

    Attributes:
      axes: mesh axis -> size.
      rows: rows of a step over all devices.
      tokens: tokens of a step over all devices.
      fits: whether the step fits into the memory of a device.
      used: bytes per device that the step needs.
      capacity: bytes per device that are available.
      fixed: bytes per device that do not depend on the number of rows.
      growing: bytes per device that grow with it. If the step fits, fixed + growing = used;
        otherwise it is an upper bound.
      seconds: best and worst case of a step that fits.
      rank: sort key of plans that fit; the smallest is the best.
      paid: number of chips or GPUs that are billed.
      assumptions: basis of the seconds, as text.
    """

    config: Config
    axes: Mapping[str, int]
    rows: int
    tokens: int

    @property
    def fits(self) -> bool: ...
    @property
    def used(self) -> float: ...
    @property
    def capacity(self) -> float: ...
    @property
    def fixed(self) -> float: ...
    @property
    def growing(self) -> float: ...
    @property
    def seconds(self) -> tuple[float, float]: ...
    @property
    def rank(self) -> Any: ...
    @property
    def paid(self) -> int: ...
    @property
    def assumptions(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Trial:
    """A trial of a batch search.

    Attributes:
      plan: plan of the batch.
      predicted: bytes per device extrapolated from earlier trials; None for the first one.
    """

    plan: Planned
    predicted: float | None


@dataclasses.dataclass(frozen=True)
class Largest:
    """Result of a search for the largest batch.

    Attributes:
      plan: largest planned batch that fits, or None.
      trials: all planned batches, in order.
      next_rows: smallest planned batch that does not fit; if all fit, the smallest predicted not to
        fit. The prediction may be too high, because compilers save memory when it is short.
      next_bytes: bytes per device of that batch.
      next_planned: whether that batch was planned, not predicted.
      dearer: seconds per row of `plan`, divided by the lowest seconds per row of all batches.
      gave_up: whether the search ended because rows became too expensive.
    """

    plan: Planned | None
    trials: tuple[Trial, ...]
    next_rows: int
    next_bytes: float
    next_planned: bool
    dearer: float
    gave_up: bool

    @property
    def numbers(self) -> dict[str, Any]:
        """The result for JSON; memory in bytes per device."""
        return {
            "trials": [
                {
                    "rows": trial.plan.rows,
                    "predicted": trial.predicted,
                    "used": trial.plan.used,
                    "fits": trial.plan.fits,
                }
                for trial in self.trials
            ],
            "does_not_fit": {
                "rows": self.next_rows,
                "used": self.next_bytes,
                "by": "plan" if self.next_planned else "prediction",
            },
            "seconds_of_a_row_to_the_cheapest": self.dearer,
            "ended_as_rows_were_dear": self.gave_up,
        }


def price_of_row(plan: Planned) -> float:
    """Returns the sum of best and worst seconds per row of a plan that fits."""
    return sum(plan.seconds) / plan.rows


def describe_search(largest: Largest, did: str) -> list[str]:
    """Formats the trials and the prediction of a batch search.

    Args:
      did: how plans were made, for example "compiled".
    """
    lines = []
    for trial in largest.trials:
        size = spell_bytes(trial.plan.used)
        line = f"  {did}: {trial.plan.rows:,} rows, {size}"
        if trial.predicted is not None:
            line += f"; predicted from earlier trials: {spell_bytes(trial.predicted)}"
        lines.append(line if trial.plan.fits else f"{line}; does not fit")
    if largest.next_planned:
        lines.append(f"  next: {largest.next_rows:,} rows do not fit, {did}")
    else:
        size = spell_bytes(largest.next_bytes)
        lines.append(f"  next: {largest.next_rows:,} rows would need {size}, PREDICTED, not {did}")
    if largest.plan and largest.dearer >= 1.005:  # two decimals are shown
        cheapest = f"a row costs {largest.dearer:.2f} times a row of the cheapest batch above"
        lines.append(
            f"  search ended: {cheapest}; use config.train.accumulation instead"
            if largest.gave_up
            else f"  {cheapest}"
        )
    return lines


def outlook(plan: Planned, price: float | None) -> dict[str, Any]:
    """Returns time and price of the run for JSON; pairs are best and worst case.

    Args:
      price: price of a chip-hour, in any currency.
    """
    best, worst = plan.seconds
    hours = [seconds * plan.config.train.steps / 3600 for seconds in (best, worst)]
    paid = [each * plan.paid for each in hours]
    return {
        "seconds_of_a_step": [best, worst],
        "tokens_per_second": [plan.tokens / best, plan.tokens / worst],
        "steps": plan.config.train.steps,
        "hours": hours,
        "chip_hours": paid,
        "price_of_a_chip_hour": price,
        "price": None if price is None else [each * price for each in paid],
        "assumptions": plan.assumptions,
    }


def recommend(plans: Sequence[Planned]) -> Planned | None:
    """Returns the best plan that fits, or None; the first of equal ones."""
    return min((plan for plan in plans if plan.fits), key=lambda plan: plan.rank, default=None)


def flags_of(plan: Planned) -> str:
    """Returns the flags of mesh, rematerialization and accumulation."""
    flags = [f"--config.mesh.{name}={size}" for name, size in plan.axes.items()]
    flags.append(f"--config.model.remat={plan.config.model.remat}")
    if plan.config.train.accumulation > 1:
        flags.append(f"--config.train.accumulation={plan.config.train.accumulation}")
    return " ".join(flags)


def spell_choice(plan: Planned) -> str:
    """Formats a plan as "data=4 fsdp=1 tensor=1 sequence=1 remat=none accumulation=2"."""
    choice = f"{spell_mesh(plan.axes)} remat={plan.config.model.remat}"
    accumulation = plan.config.train.accumulation
    return f"{choice} accumulation={accumulation}" if accumulation > 1 else choice


def spell_mesh(axes: Mapping[str, int]) -> str:
    """Formats a mesh as "data=4 fsdp=1 tensor=1 sequence=1"."""
    return " ".join(f"{name}={size}" for name, size in axes.items())


def numbers_of_all(
    first: Planned,
    largest: Largest | None,
    compared: Sequence[Planned],
    to_json: Callable[[Any], dict[str, Any]],
) -> dict[str, Any]:
    """Returns all results for JSON: the fields of `first`, extended by the other plans.

    Args:
      first: plan of the config itself.
      largest: result of the batch search, if any.
      compared: plans of other meshes and settings.
      to_json: converts a plan to JSON.
    """
    best = recommend([first, *compared]) if compared else None
    return to_json(first) | {
        "largest_batch": to_json(largest.plan) if largest and largest.plan else None,
        "search": largest and largest.numbers,
        "compared": [to_json(each) for each in compared],
        "recommended": best
        and {
            "mesh": dict(best.axes),
            "remat": best.config.model.remat,
            "accumulation": best.config.train.accumulation,
            "flags": flags_of(best),
        },
    }
