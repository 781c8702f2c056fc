"""Words between processes, through the coordination service that jax starts: no device is touched,
nothing is compiled.

It is there once all processes have connected, which meeting.py brings about: jax's service refuses
a process that writes or reads earlier, and ends it with a trace of C++. Of those that fall silent
afterwards, everything here gives the number.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import jax
from jax._src import distributed  # its client keeps words for all processes; not public

from convbert_jax.config import UserError

_T = TypeVar("_T")
_KEY = "convbert_jax/exchange"
_MARGIN = 30.0  # seconds more than the first process takes at most, for its answer to come
_LINGER = 10.0  # seconds that the first process waits for its answer to be read
_calls = itertools.count()  # the same on all: they make the same calls in the same order


class SilentProcessError(UserError):
    """The first process has connected, and then did not answer."""


def place() -> tuple[int, int]:
    """(number of this process, how many there are), as jax brought them together."""
    state = distributed.global_state
    return (0, 1) if state.client is None else (state.process_id, state.num_processes)


def post(key: str, text: str) -> None:
    """Leaves a text for all processes, under a key that nobody has used."""
    distributed.global_state.client.key_value_set(key, text)


def posted(folder: str) -> dict[str, str]:
    """What was left by now under keys FOLDER/NAME, name -> text."""
    found = distributed.global_state.client.key_value_dir_get(folder)
    return {key.rpartition("/")[2]: text for key, text in found}


def judge(value: object, function: Callable[[list], _T], limit: float) -> _T:
    """What `function` says of the values of all processes, on all of them; they all call it.

    Args:
      value: of this process, as JSON has it.
      function: list of values by number of the process, None of one that gave none in time -> what
        to answer, as JSON has it. Called on the first process.
      limit: seconds to wait for all.

    Raises:
      SilentProcessError: the first process does not answer.
    """
    index, count = place()
    key = f"{_KEY}/{next(_calls)}"
    if count == 1:
        return _through_json(function([_through_json(value)]))
    put = distributed.global_state.client.key_value_set
    if index:
        put(f"{key}/value/{index}", json.dumps(value))
        answer = _get(f"{key}/answer", limit + _MARGIN)
        if answer is None:
            raise SilentProcessError(
                f"process 0 of {count} has said nothing for {limit + _MARGIN:.0f} s after all had "
                "connected; look at its log and its host, end all processes and start them again."
            )
        put(f"{key}/read/{index}", "")
        return json.loads(answer)
    others = _get_all(f"{key}/value", range(1, count), limit)
    values = [None if text is None else json.loads(text) for text in others]
    answer = function([_through_json(value), *values])
    put(f"{key}/answer", json.dumps(answer))
    # Where this process ends, so does the service: not before those who are here have read.
    here = [i for i, text in enumerate(others, start=1) if text is not None]
    _get_all(f"{key}/read", here, _LINGER)
    return _through_json(answer)


def word_of_first(value: object, limit: float) -> object:
    """What the first process gave, on all; they all call it. Raises as `judge`."""
    return judge(value, lambda values: values[0], limit)


def clock_offsets(limit: float) -> list[tuple[float, float] | None]:
    """How far the clock of each process is ahead of the first one's, on all; they all call it.

    One after another asks the first process for its time, as NTP does.

    Args:
      limit: seconds to wait for each.

    Returns:
      By number of the process (seconds ahead, seconds that this may be wrong by), None where there
      was no answer in time.
    """
    index, count = place()
    key = f"{_KEY}/{next(_calls)}"
    measured = (0.0, 0.0)
    if count > 1 and index == 0:
        put = distributed.global_state.client.key_value_set
        for i in range(1, count):
            if _get(f"{key}/asked/{i}", limit) is not None:
                put(f"{key}/time/{i}", repr(time.time()))
            put(f"{key}/turn/{i + 1}", "")
    elif count > 1:
        measured = _ask_time(key, index, limit * index)
    return judge(measured, lambda values: values, limit)


def _ask_time(key: str, index: int, limit: float) -> tuple[float, float] | None:
    if index > 1 and _get(f"{key}/turn/{index}", limit) is None:
        return None
    began = time.time()
    distributed.global_state.client.key_value_set(f"{key}/asked/{index}", "")
    text = _get(f"{key}/time/{index}", limit)
    ended = time.time()
    if text is None:
        return None
    return (began + ended) / 2 - float(text), (ended - began) / 2


def _get_all(key: str, numbers: Iterable[int], limit: float) -> list[str | None]:
    """The texts of KEY/NUMBER, None of those that are not there within `limit` seconds."""
    ends, found = time.monotonic() + limit, {}
    for number in numbers:
        found[number] = _get(f"{key}/{number}", ends - time.monotonic())
        if found[number] is None:  # the time is up: who is there by now
            there = dict(distributed.global_state.client.key_value_dir_get(key))
            return [there.get(f"{key}/{number}") for number in numbers]
    return list(found.values())


def _get(key: str, limit: float) -> str | None:
    """The text of a key, None where there is none within `limit` seconds."""
    milliseconds = max(1, int(1000 * limit))
    try:
        return distributed.global_state.client.blocking_key_value_get(key, milliseconds)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


def _through_json(value):
    """As the other processes see it: tuples are lists."""
    return json.loads(json.dumps(value))


def by_number(processes: Sequence[int]) -> str:
    """As "process 3" or "processes 1, 2 and 5"; of many the first ones."""
    numbers = [str(number) for number in processes]
    if len(numbers) == 1:
        return f"process {numbers[0]}"
    if len(numbers) > 6:
        return f"processes {', '.join(numbers[:5])} and {len(numbers) - 5} more"
    return f"processes {', '.join(numbers[:-1])} and {numbers[-1]}"
