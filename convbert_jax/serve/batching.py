"""Dynamic batching: one thread computes the values of concurrent requests together."""

import collections
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from absl import logging

MAX_BATCH = 64  # maximum items of a batch
# A list of values -> a list with the result of each
BatchFunction = Callable[[list[Any]], Sequence[Any]]


class QueueFullError(Exception):
    """The queue has no space for the items of a request."""


class _Item(NamedTuple):
    function: BatchFunction
    value: Any
    future: Future
    since: float  # time.monotonic()


class Batcher:
    """A queue of items and the thread that computes them.

    Attributes:
      ready: set when the warm-up is complete.
    """

    def __init__(
        self,
        *,
        max_wait: float,
        capacity: int,
        warm_up: Iterable[Callable[[], Any]] = (),
        observe: Callable[[int], Any] = lambda size: None,
    ):
        """
        Args:
          max_wait: maximum seconds that an item waits for further items of its batch.
          capacity: maximum number of waiting items.
          warm_up: functions to call before the first batch.
          observe: is called with the number of items of each batch.
        """
        self._max_wait, self._capacity = max_wait, capacity
        self._warm_up, self._observe = warm_up, observe
        self._queue: collections.deque[_Item] = collections.deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self.ready = threading.Event()

    def __len__(self) -> int:
        """Returns the number of waiting items."""
        return len(self._queue)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Computes the waiting items and ends the thread; an unfinished warm-up is skipped."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def submit(self, function: BatchFunction, values: Sequence[Any]) -> list[Future]:
        """Adds values to the queue.

        Args:
          function: values with the same function share batches.

        Returns:
          The future result of each value. A value whose future is cancelled is not computed.

        Raises:
          QueueFullError: the queue has no space for all values.
        """
        now = time.monotonic()
        added = [_Item(function, value, Future(), now) for value in values]
        with self._changed:
            if len(self._queue) + len(added) > self._capacity:
                kept = [item for item in self._queue if not item.future.cancelled()]
                self._queue = collections.deque(kept)
            if len(self._queue) + len(added) > self._capacity:
                raise QueueFullError
            self._queue += added
            self._changed.notify()
        return [item.future for item in added]

    def _run(self) -> None:
        try:
            for step in self._warm_up:
                if self._stopping:
                    break
                step()
                while self._queue:
                    self._compute_next()
        except Exception:
            logging.exception("The warm-up failed; the first answers will be slower.")
        self.ready.set()
        while self._compute_next():
            pass

    def _compute_next(self) -> bool:
        """Waits for a batch and computes it; returns False when stopped and nothing waits."""
        batch = self._take()
        if batch:
            self._observe(len(batch))
            _compute(batch)
        return batch is not None

    def _take(self) -> list[_Item] | None:
        """Waits for items and returns the next batch; None when stopped and nothing waits."""
        with self._changed:
            while not self._queue:
                if self._stopping:
                    return None
                self._changed.wait()
            function, _, _, since = self._queue[0]
            # Items that arrived during the last batch have waited long enough.
            while len(self._queue) < MAX_BATCH and not self._stopping:
                left = since + self._max_wait - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            batch: list[_Item] = []
            others: collections.deque[_Item] = collections.deque()
            for item in self._queue:
                fits = item.function is function and len(batch) < MAX_BATCH
                (batch if fits else others).append(item)
            self._queue = others
        return [item for item in batch if item.future.set_running_or_notify_cancel()]


def _compute(batch: Sequence[_Item]) -> None:
    """Computes a batch; if it fails, each half alone, until only faulty items fail."""
    try:
        results = batch[0].function([item.value for item in batch])
        computed = list(zip(batch, results, strict=True))
    except Exception as error:
        if len(batch) == 1:
            batch[0].future.set_exception(error)
            return
        middle = len(batch) // 2
        _compute(batch[:middle])
        _compute(batch[middle:])
    else:
        for item, result in computed:
            item.future.set_result(result)
