"""The state of a step: moved among the rows of a beam, and given room as texts become longer."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
from jaxtyping import Array, Int

# Entries that there is room for at first, and how many times as many then, each time that they are
# full. A step reads all of them, and most texts end long before their limit; but each size is
# compiled for itself.
FIRST, TIMES = 128, 2
# The share of its room that a state must have free once packed, else it is given more: packing
# costs as much as some steps, so it shall make room for as many.
FREE = 0.25

Carry = TypeVar("Carry", bound=NamedTuple)


def move(state: Any, rows: Int[Array, " R"]) -> Any:
    """The state of which row r is row `rows[r]` of `state`: arrays with rows first, or what has
    their `take`.
    """
    return jax.tree.map(
        lambda part: part.take(rows, axis=0), state, is_leaf=lambda part: hasattr(part, "take")
    )


def pack(state: Any) -> Any:
    """The state without what no row reads any more, where it has a `pack` for it."""
    return _each(lambda part: part.pack(), state)


def loop(
    unfinished: Callable[[Carry], Array],
    go_on: Callable[[Carry], Carry],
    start: Carry,
    used: int = 0,
) -> Carry:
    """`jax.lax.while_loop`, in parts where the state can be given room.

    Args:
      start: has a `state`, whose parts may have `resize(room)`, and with it `room`, the entries
        that they hold, `used`, how many of these are written, `growth`, by how many in each step,
        and `pack()`, which keeps only those that are of use. All have room for all steps, and are
        given less at first.
      used: the entries that are written at the start.
    """
    parts = _parts(start.state)
    if not parts:
        return jax.lax.while_loop(unfinished, go_on, start)
    carry = start
    for room in _rooms(parts[0], used):
        carry = carry._replace(state=_each(lambda part, room=room: part.resize(room), carry.state))
        if room < parts[0].room:
            carry = _while_it_fits(unfinished, go_on, carry)
    return jax.lax.while_loop(unfinished, go_on, carry)


def _while_it_fits(unfinished, go_on, start):
    """Until packing the state frees too little of its room."""
    part = _parts(start.state)[0]
    least = max(part.growth, int(FREE * part.room))

    def has_free(carry, entries):
        part = _parts(carry.state)[0]
        return unfinished(carry) & (part.used + entries <= part.room)

    def steps(carry):
        return jax.lax.while_loop(lambda carry: has_free(carry, part.growth), go_on, carry)

    if part.growth == 1:  # of each position there is one entry, which stays of use
        return steps(start)

    def steps_and_pack(carry):
        carry = steps(carry)
        return carry._replace(state=pack(carry.state))

    return jax.lax.while_loop(lambda carry: has_free(carry, least), steps_and_pack, start)


def _rooms(part: Any, used: int) -> list[int]:
    rooms, room = [], used + max(FIRST, part.growth)
    while room < part.room:
        rooms.append(room)
        room *= TIMES
    return [*rooms, part.room]


def _parts(state: Any) -> list[Any]:
    """Those that can be given room."""
    return [part for part in jax.tree.leaves(state, is_leaf=_has_room) if _has_room(part)]


def _each(change: Callable[[Any], Any], state: Any) -> Any:
    return jax.tree.map(
        lambda part: change(part) if _has_room(part) else part, state, is_leaf=_has_room
    )


def _has_room(part: Any) -> bool:
    return hasattr(part, "resize")
