"""How units of work are done: by one process that holds the folder, on several, with progress."""

import collections
import contextlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import tqdm
from absl import logging

from convbert_jax import files
from convbert_jax.data.errors import DataError

LOCK_PATIENCE = 12 * 3600  # seconds
LOG_EVERY = 10  # seconds
_STARTING = threading.Lock()  # held while this process has no main script, see `_without_script`


@contextlib.contextmanager
def lock(directory: Path) -> Iterator[None]:
    """Holds `directory` alone, made with a folder for units if it is not there; waits while another
    process has it, and says so.

    The operating system releases the lock of a process that dies. Raises DataError where it cannot
    be made, and after `LOCK_PATIENCE` seconds.
    """
    try:
        (directory / "units").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{directory} could not be made ({error.strerror}); set config.data.directory."
        ) from None
    with open(directory / "lock", "w") as file:
        started = logged = time.monotonic()
        while not files.try_lock(
            file, f"{directory} cannot be locked; let one process prepare it."
        ):
            now = time.monotonic()
            if now - started > LOCK_PATIENCE:
                raise DataError(
                    f"{directory} has been in use by another process for {LOCK_PATIENCE // 3600} "
                    "hours; end that one or name another config.data.directory."
                )
            if logged == started or now - logged > 60:
                logging.info("Waiting: another process prepares %s.", directory)
                logged = now
            time.sleep(0.2)
        yield


def do_units(
    sizes: Mapping[int, int],
    here: Callable[[int], dict[str, Any]],
    in_worker: Callable[..., dict[str, Any]],
    arguments: Mapping[int, tuple],
    *,
    workers: int,
    start: Callable,
    start_with: tuple,
) -> dict[int, dict[str, Any]]:
    """Records of units, by their numbers.

    Args:
      sizes: bytes of each unit, by its number.
      here: does a unit in this process, where one is enough.
      in_worker: does one in another, given its `arguments`; a function of a module.
      workers: processes; 0 is one per core.
      start, start_with: what a process calls first, and its arguments.

    Raises:
      DataError: the first that a unit raised; finished units are kept. Or a process was killed.
    """
    workers = min(workers or _cores(), len(sizes))
    records = {}
    with _progress(sum(sizes.values())) as advance:
        if workers <= 1:
            for i, size in sizes.items():
                records[i] = here(i)
                advance(size)
            return records
        with _pool(workers, start, start_with) as pool:
            with _without_script():  # a submission may start a worker
                waiting = {pool.submit(in_worker, *arguments[i]): i for i in sizes}
            for task in futures.as_completed(waiting):
                i = waiting[task]
                records[i] = task.result()
                advance(sizes[i])
    return records


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@contextlib.contextmanager
def _pool(workers: int, start: Callable, start_with: tuple):
    others = multiprocessing.active_children()
    # Fresh interpreters: the parent may have started jax, whose threads do not survive a fork.
    pool = futures.ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=start,
        initargs=start_with,
    )
    try:
        yield pool
    except BrokenProcessPool:
        raise DataError(
            "A process that tokenizes was killed, most likely for memory; run again with fewer "
            "--config.data.workers: what was finished is kept."
        ) from None
    except KeyboardInterrupt:  # a unit can take long; after a DataError it is worth the wait
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _without_script() -> Iterator[None]:
    """Context in which processes start without running the user's script again.

    A process that is spawned imports the main module first, in case what it is sent is defined
    there. Ours is sent nothing of it, and a script without `if __name__ == "__main__":` would begin
    all over in each.
    """
    main = sys.modules["__main__"]
    with _STARTING:  # two threads that hide the same would put back what is hidden
        hidden = {
            name: vars(main).pop(name) for name in ("__spec__", "__file__") if name in vars(main)
        }
        main.__spec__ = None
        try:
            yield
        finally:
            del main.__spec__
            vars(main).update(hidden)


@contextlib.contextmanager
def _progress(total: int):
    """Gives a function to call with the bytes done: a bar on a terminal, otherwise log lines."""
    if sys.stderr.isatty():
        with tqdm.tqdm(total=total, unit="B", unit_scale=True, desc="Tokenizing") as bar:
            yield bar.update
        return
    state = collections.Counter()
    started = time.monotonic()

    def advance(size: int) -> None:
        state["done"] += size
        elapsed = time.monotonic() - started
        if elapsed - state["logged"] > LOG_EVERY:
            state["logged"] = elapsed
            rate = state["done"] / elapsed
            logging.info(
                "Tokenizing: %.0f of %.0f MB, %.1f MB/s, %.0f s left.",
                state["done"] / 1e6,
                total / 1e6,
                rate / 1e6,
                (total - state["done"]) / rate,
            )

    yield advance
