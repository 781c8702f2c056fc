"""What plans by a compiler and plans by arithmetic have in common: what is made of a step's
figures, which of several plans is recommended, what a search for the largest batch came to, and
what helps where memory does not suffice.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from convbert_jax.config import Config
from convbert_jax.training.memory import spell_bytes

REMAT = ("none", "dots", "full")  # the more is computed again, the less is kept
WHAT_HELPS = (
    "What helps, the cheapest first: --config.train.batch_size smaller, or --config.train."
    "accumulation larger; --config.mesh.fsdp larger, where parameters are much of it;",
    "--config.model.remat=dots, then full; more devices.",
)


class Planned(Protocol):
    """A plan of one config.

    Attributes:
      axes: of the mesh, name -> size.
      rows, tokens: of a step, of all devices.
      fits: whether it fits into the memory of a device.
      used, capacity: bytes of a device that it takes, and that there are.
      fixed, growing: bytes of a device that are the same for any number of rows, and that grow with
        it; together `used`, or of a step that does not fit at most what it would take.
      seconds: of a step that fits, at best and at worst.
      rank: the least is the best of several plans that fit.
      paid: chips, or GPUs, that an hour is paid for.
      assumptions: what the seconds rest on, for a person.
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
    """One batch of a search: a plan, and the bytes of a device that it was predicted to take from
    those before it, which are no compiler's word; None of the first.
    """

    plan: Planned
    predicted: float | None


@dataclasses.dataclass(frozen=True)
class Largest:
    """What a search for the largest batch came to.

    Attributes:
      plan: of the largest batch that was planned and fits, if one does.
      trials: all that were planned, in order.
      next_rows: the smallest batch that was planned and does not fit; where all fit, the smallest
        that is predicted not to, which it may, as a compiler saves memory where it is short.
      next_bytes: of a device, that it takes.
      next_planned: whether it was planned, not predicted.
      dearer: a row of `plan` divided by a row of the batch whose rows are cheapest, in seconds.
      gave_up: whether the search ended since rows were dear.
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
        """For JSON, bytes of a device."""
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
    """Seconds of a row, best and worst added, of a plan that fits."""
    return sum(plan.seconds) / plan.rows


def describe_search(largest: Largest, did: str) -> list[str]:
    """What was planned and what predicted, for a person.

    Args:
      did: what was done for a plan, as "compiled".
    """
    lines = []
    for trial in largest.trials:
        size = spell_bytes(trial.plan.used)
        line = f"  {did}: {trial.plan.rows:,} rows, {size}"
        if trial.predicted is not None:
            line += f"; predicted from those before: {spell_bytes(trial.predicted)}"
        lines.append(line if trial.plan.fits else f"{line}; does not fit")
    if largest.next_planned:
        lines.append(f"  beyond: {largest.next_rows:,} rows do not fit, {did}")
    else:
        size = spell_bytes(largest.next_bytes)
        lines.append(
            f"  beyond: {largest.next_rows:,} rows would take {size}, PREDICTED, not {did}"
        )
    if largest.plan and largest.dearer >= 1.005:  # two decimals are shown
        cheapest = f"a row costs {largest.dearer:.2f} times a row of the cheapest batch above"
        lines.append(
            f"  ended there: {cheapest}; config.train.accumulation has the cheaper rows"
            if largest.gave_up
            else f"  {cheapest}"
        )
    return lines


def outlook(plan: Planned, price: float | None) -> dict[str, Any]:
    """What the run takes, for JSON; pairs are at best and at worst.

    Args:
      price: of an hour of one chip, in any currency.
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
    """The best of those that fit; of equals the first."""
    return min((plan for plan in plans if plan.fits), key=lambda plan: plan.rank, default=None)


def flags_of(plan: Planned) -> str:
    """Mesh, what is computed again and microbatches, as on a command line."""
    flags = [f"--config.mesh.{name}={size}" for name, size in plan.axes.items()]
    flags.append(f"--config.model.remat={plan.config.model.remat}")
    if plan.config.train.accumulation > 1:
        flags.append(f"--config.train.accumulation={plan.config.train.accumulation}")
    return " ".join(flags)


def spell_choice(plan: Planned) -> str:
    """The same as "data=4 fsdp=1 tensor=1 sequence=1 remat=none accumulation=2"."""
    choice = f"{spell_mesh(plan.axes)} remat={plan.config.model.remat}"
    accumulation = plan.config.train.accumulation
    return f"{choice} accumulation={accumulation}" if accumulation > 1 else choice


def spell_mesh(axes: Mapping[str, int]) -> str:
    """As "data=4 fsdp=1 tensor=1 sequence=1"."""
    return " ".join(f"{name}={size}" for name, size in axes.items())


def numbers_of_all(
    first: Planned,
    largest: Largest | None,
    compared: Sequence[Planned],
    to_json: Callable[[Any], dict[str, Any]],
) -> dict[str, Any]:
    """All numbers, for JSON: those of `first`, and beside them the others'.

    Args:
      largest: if it was searched for.
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
