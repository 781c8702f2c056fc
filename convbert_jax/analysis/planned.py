"""What plans by a compiler and plans by arithmetic have in common: what is made of a step's
figures, which of several plans is recommended, and what helps where memory does not suffice.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from convbert_jax.config import Config

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
    def seconds(self) -> tuple[float, float]: ...
    @property
    def rank(self) -> Any: ...
    @property
    def paid(self) -> int: ...
    @property
    def assumptions(self) -> str: ...


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
    """Mesh and what is computed again, as on a command line."""
    flags = [f"--config.mesh.{name}={size}" for name, size in plan.axes.items()]
    return " ".join([*flags, f"--config.model.remat={plan.config.model.remat}"])


def spell_mesh(axes: Mapping[str, int]) -> str:
    """As "data=4 fsdp=1 tensor=1 sequence=1"."""
    return " ".join(f"{name}={size}" for name, size in axes.items())


def numbers_of_all(
    first: Planned,
    largest: Planned | None,
    compared: Sequence[Planned],
    to_json: Callable[[Any], dict[str, Any]],
) -> dict[str, Any]:
    """All numbers, for JSON: those of `first`, and beside them the others'."""
    best = recommend([first, *compared]) if compared else None
    return to_json(first) | {
        "largest_batch": to_json(largest) if largest else None,
        "compared": [to_json(each) for each in compared],
        "recommended": best
        and {"mesh": dict(best.axes), "remat": best.config.model.remat, "flags": flags_of(best)},
    }
