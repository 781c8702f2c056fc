"""Units done on this machine: in this process, or by several that die with it."""

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

_STARTING = threading.Lock()  # held while this process has no main script, see `_without_script`


@dataclasses.dataclass(frozen=True)
class Processes:
    """A runner of several processes of this machine.

    Attributes:
      workers: 0 is one per core; a single one is the calling process.
      activity: what the progress line says.
    """

    workers: int
    activity: str = "Tokenizing"

    def run(self, work: Work, assignments: Sequence[Assignment]) -> None:
        """As `Runner` has it. Raises DataError too where a process was killed."""
        workers = min(self.workers or _cores(), len(assignments))
        total = sum(each.size for each in assignments)
        with show_progress(total, self.activity) as advance:
            if workers <= 1:
                for each in assignments:
                    work.do(each)
                    advance(each.size)
                return
            with _pool(workers, work) as pool:
                with _without_script():  # a submission may start a worker
                    waiting = {pool.submit(_do, each): each for each in assignments}
                for task in futures.as_completed(waiting):
                    task.result()
                    advance(waiting[task].size)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@contextlib.contextmanager
def _pool(workers: int, work: Work) -> Iterator[futures.Executor]:
    others = multiprocessing.active_children()
    # Fresh interpreters: the parent may have started jax, whose threads do not survive a fork.
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
            "A process that tokenizes was killed, most likely for memory; run again with fewer "
            "--config.data.workers: what was finished is kept.",
            field="config.data.workers",
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


# --- In a worker process ---

_work: Work | None = None


def _start_worker(work: Work) -> None:
    """Initializer: keeps what is done, leaves Ctrl-C to the parent, dies with it."""
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core already
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _do(assignment: Assignment) -> None:
    _work.do(assignment)
