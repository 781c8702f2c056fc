"""Decoding states: reordering among beams, and growth of caches with the length of the texts."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
from jaxtyping import Array, Int

# Initial number of entries, and the growth factor each time a cache is full. A step reads all
# entries, and most texts end long before their limit; but every size is compiled separately.
FIRST, TIMES = 128, 2
# A cache is enlarged if packing frees less than this fraction of it: packing costs as much as
# several steps, so it must free space for several steps.
FREE = 0.25

Carry = TypeVar("Carry", bound=NamedTuple)


def move(state: Any, rows: Int[Array, " R"]) -> Any:
    """Reorder rows, so that row r of the result is row `rows[r]` of `state`.

    The leaves are arrays with rows on axis 0, or objects with the same `take` method.
    """
    return jax.tree.map(
        lambda part: part.take(rows, axis=0), state, is_leaf=lambda part: hasattr(part, "take")
    )


def pack(state: Any) -> Any:
    """Drop entries that no row uses, in the parts that have `pack`."""
    return _each(lambda part: part.pack(), state)


def loop(
    unfinished: Callable[[Carry], Array],
    go_on: Callable[[Carry], Carry],
    start: Carry,
    used: int = 0,
) -> Carry:
    """Run `jax.lax.while_loop`, in several loops if parts of the state can be resized.

    Args:
      start: Carry with a `state`. Resizable parts have `resize(room)`, `room` (their capacity in
        entries), `used` (entries written), `growth` (entries per step) and `pack()`, which drops
        unused entries. They arrive with space for all steps, and are shrunk at first.
      used: Number of entries written at the start.
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
    """Run steps until packing frees too few entries."""
    part = _parts(start.state)[0]
    least = max(part.growth, int(FREE * part.room))

    def has_free(carry, entries):
        part = _parts(carry.state)[0]
        return unfinished(carry) & (part.used + entries <= part.room)

    def steps(carry):
        return jax.lax.while_loop(lambda carry: has_free(carry, part.growth), go_on, carry)

    if part.growth == 1:  # a single row per group: all entries remain in use
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
    """Return the parts that can be resized."""
    return [part for part in jax.tree.leaves(state, is_leaf=_has_room) if _has_room(part)]


def _each(change: Callable[[Any], Any], state: Any) -> Any:
    return jax.tree.map(
        lambda part: change(part) if _has_room(part) else part, state, is_leaf=_has_room
    )


def _has_room(part: Any) -> bool:
    return hasattr(part, "resize")
