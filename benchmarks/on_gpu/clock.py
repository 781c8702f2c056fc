"""Milliseconds on the device of work that is shorter than its launch.

A kernel of an op at these shapes takes some tens of microseconds, as starting a program does. So a
program holds the work several times, one behind the other, and what counts is by how much a longer
one takes longer than a shorter one.
"""

import statistics
from collections.abc import Callable, Sequence

from benchmarks import timing

SHORT, LONG = 2, 10  # times in a program
ROUNDS = 9


def chain(function: Callable, times: int, feeds: str) -> Callable:
    """`function` so many times, each on what the one before gave out, so none can be left out.

    Barriers keep the compiler from fusing one with the next. Numbers may overflow on the way, which
    costs no time on a GPU.

    Args:
      feeds: "first": the result becomes the first argument; "all": its leaves become all of them.
    """
    import jax

    def run(*arguments):
        for _ in range(times):
            given = jax.tree.leaves(function(*arguments))
            following = given if feeds == "all" else [*given, *arguments[1:]]
            arguments = jax.lax.optimization_barrier(tuple(following))
        return arguments

    return run


def prepare(function: Callable, arguments: Sequence, feeds: str) -> dict[str, Callable]:
    """Runs of the shorter and the longer program, compiled and run once."""
    import jax

    runs = {}
    for name, times in (("short", SHORT), ("long", LONG)):
        compiled = jax.jit(chain(function, times, feeds)).lower(*arguments).compile()
        runs[name] = lambda run=compiled: jax.block_until_ready(run(*arguments))
        runs[name]()
    return runs


def difference(times: dict[str, list[float]]) -> float:
    """Milliseconds of one application: the median over the rounds."""
    pairs = zip(times["long"], times["short"], strict=True)
    return statistics.median((long - short) / (LONG - SHORT) for long, short in pairs)


def repeated(function: Callable, arguments: Sequence, feeds: str) -> float:
    """Milliseconds of one application of one function."""
    return difference(timing.alternate(prepare(function, arguments, feeds), ROUNDS))


def copy_bandwidth(size: int, dtype) -> float:
    """Bytes per second, read and written, of reading `size` bytes and writing as many."""
    import jax
    import jax.numpy as jnp

    source = jax.random.normal(jax.random.key(0), (size // jnp.dtype(dtype).itemsize,), dtype)
    milliseconds = repeated(lambda x: x + jnp.ones((), dtype), (source,), "first")
    return 2 * source.nbytes / (milliseconds / 1e3)
