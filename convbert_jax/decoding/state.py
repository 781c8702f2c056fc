"""The state of a step: moved among the rows of a beam, and given room as texts become longer."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
from jaxtyping import Array, Int

# Positions that there is room for at first, and how many times as many then, each time that they
# are full. A step reads all of them, and most texts end long before their limit; but each size is
# compiled for itself.
FIRST, TIMES = 64, 4

Carry = TypeVar("Carry", bound=NamedTuple)


def move(state: Any, rows: Int[Array, " R"]) -> Any:
    """The state of which row r is row `rows[r]` of `state`: arrays with rows first, or what has
    their `take`.
    """
    return jax.tree.map(
        lambda part: part.take(rows, axis=0), state, is_leaf=lambda part: hasattr(part, "take")
    )


def loop(
    unfinished: Callable[[Carry], Array],
    go_on: Callable[[Carry], Carry],
    start: Carry,
    length: int,
) -> Carry:
    """`jax.lax.while_loop`, in parts where the state can be given room.

    Args:
      start: has a `place`, by which `go_on` goes up by one, and a `state` with room for `length`
        positions. Parts of it that have `resize(positions)` get fewer at first.
    """
    carry = start
    for room in _rooms(start.state, length):
        state = jax.tree.map(
            lambda part, room=room: part.resize(room) if _has_room(part) else part,
            carry.state,
            is_leaf=_has_room,
        )
        carry = jax.lax.while_loop(
            lambda carry, room=room: unfinished(carry) & (carry.place < room),
            go_on,
            carry._replace(state=state),
        )
    return carry


def _rooms(state: Any, length: int) -> list[int]:
    rooms, room = [], FIRST
    if any(map(_has_room, jax.tree.leaves(state, is_leaf=_has_room))):
        while room < length:
            rooms.append(room)
            room *= TIMES
    return [*rooms, length]


def _has_room(part: Any) -> bool:
    return hasattr(part, "resize")
