"""Runner that processes units on this machine: in this process, or in several child processes."""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool

from convbert_jax.data.errors import DataError
from convbert_jax.data.units.work import Assignment, Work
from convbert_jax.progress import show_progress

_STARTING = threading.Lock()  # held while the main script is hidden, see `_without_script`


@dataclasses.dataclass(frozen=True)
class Processes:
    """A `Runner` that uses processes of this machine.

    Attributes:
      workers: number of processes; 0: one per core. A single one is the calling process.
      activity: title of the progress line.
    """

    workers: int
    activity: str = "Tokenizing"

    def run(self, work: Work, assignments: Sequence[Assignment]) -> None:
        """Processes units as `Runner.run`. Raises DataError also if a process was killed."""
        workers = min(self.workers or _cores(), len(assignments))
        total = sum(each.size for each in assignments)
        with show_progress(total, self.activity) as advance:
            if workers <= 1:
                for each in assignments:
                    work.do(each)
                    advance(each.size)
                return
            with _pool(workers, work) as pool:
                with _without_script():  # submitting may start a worker
                    waiting = {pool.submit(_do, each): each for each in assignments}
                for task in futures.as_completed(waiting):
                    task.result()
                    advance(waiting[task].size)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@contextlib.contextmanager
def _pool(workers: int, work: Work) -> Iterator[futures.Executor]:
    others = multiprocessing.active_children()
    # Spawn: the parent may have started jax, whose threads do not survive a fork.
    pool = futures.ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(work,),
    )
    try:
        yield pool
    except BrokenProcessPool:
        raise DataError(
            "A tokenizing process was killed, probably out of memory. Start again with fewer "
            "--config.data.workers; finished units are kept.",
            field="config.data.workers",
        ) from None
    except KeyboardInterrupt:  # do not wait for unfinished units, unlike after a DataError
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _without_script() -> Iterator[None]:
    """Prevents processes that are spawned in the block from running the user's script again.

    A spawned process first imports the main module, in case its data is defined there. This package
    sends no such data, and a script without `if __name__ == "__main__":` would start over in each
    process.
    """
    main = sys.modules["__main__"]
    with _STARTING:  # a second thread would save and restore the hidden state
        hidden = {
            name: vars(main).pop(name) for name in ("__spec__", "__file__") if name in vars(main)
        }
        main.__spec__ = None
        try:
            yield
        finally:
            del main.__spec__
            vars(main).update(hidden)


# --- In a worker process ---

_work: Work | None = None


def _start_worker(work: Work) -> None:
    """Initializes a worker: stores `work`, ignores Ctrl-C, and exits with the parent."""
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is already one process per core
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _do(assignment: Assignment) -> None:
    _work.do(assignment)
