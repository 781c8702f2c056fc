"""Milliseconds on the device of work that is shorter than its launch.

A kernel of an op at these shapes takes some tens of microseconds, as starting a program does. So a
program holds the work several times, one behind the other, and several programs are queued before
the host waits: the device then starts one while the host prepares the next.
"""

import statistics
from collections.abc import Callable, Sequence

from benchmarks import timing

TIMES = 6  # that a program does it
QUEUED = 8  # programs
ROUNDS = 9


def chain(function: Callable, feeds: str, times: int = TIMES) -> Callable:
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


def prepare(function: Callable, arguments: Sequence, queued: int = QUEUED) -> Callable:
    """Runs `function`, compiled, so many times and waits for the last; it has run when returned."""
    import jax

    compiled = jax.jit(function).lower(*arguments).compile()

    def run():
        for _ in range(queued):
            out = compiled(*arguments)
        jax.block_until_ready(out)

    run()
    return run


def application(rounds: Sequence[float], times: int = TIMES) -> float:
    """Milliseconds of one application of a chain, of those of its queued programs: the median."""
    return statistics.median(rounds) / (times * QUEUED)


def repeated(function: Callable, arguments: Sequence, feeds: str) -> float:
    """Milliseconds of one application of one function."""
    run = prepare(chain(function, feeds), arguments)
    return application(timing.alternate({"": run}, ROUNDS)[""])


def copy_bandwidth(size: int, dtype) -> float:
    """Bytes per second, read and written, of reading `size` bytes and writing as many."""
    import jax
    import jax.numpy as jnp

    source = jax.random.normal(jax.random.key(0), (size // jnp.dtype(dtype).itemsize,), dtype)
    milliseconds = repeated(lambda x: x + jnp.ones((), dtype), (source,), "first")
    return 2 * source.nbytes / (milliseconds / 1e3)
