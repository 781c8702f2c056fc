"""The queue: batches, faulty values, capacity and stop."""

import contextlib
import threading
from collections.abc import Iterator

import pytest

from convbert_jax.serve.batching import MAX_BATCH, Batcher, QueueFullError


@contextlib.contextmanager
def started(**options) -> Iterator[tuple[Batcher, list[int], threading.Event]]:
    """Yields a queue, the sizes of its batches, and the event that its first batch waits for."""
    sizes, event = [], threading.Event()
    options = {"max_wait": 0.0, "capacity": 1_000, "observe": sizes.append, **options}
    batcher = Batcher(warm_up=[lambda: event.wait(60)], **options)
    batcher.start()
    try:
        yield batcher, sizes, event
    finally:
        event.set()
        batcher.stop()


def double(values):
    return [2 * value for value in values]


def invert(values):
    return [1 / value for value in values]


def test_waiting_values_are_one_batch():
    with started() as (batcher, sizes, event):
        futures = [batcher.submit(double, [n])[0] for n in range(9)]
        event.set()
        assert [future.result(60) for future in futures] == double(range(9))
    assert sizes == [9]


def test_a_value_waits_for_others():
    with started(max_wait=60.0) as (batcher, sizes, event):
        event.set()
        futures = [batcher.submit(double, [n])[0] for n in range(MAX_BATCH)]
        assert [future.result(30) for future in futures] == double(range(MAX_BATCH))
    assert sizes == [MAX_BATCH]


def test_many_values_are_several_batches():
    with started() as (batcher, sizes, event):
        futures = batcher.submit(double, range(2 * MAX_BATCH + 1))
        event.set()
        assert [future.result(60) for future in futures] == double(range(2 * MAX_BATCH + 1))
    assert sizes == [MAX_BATCH, MAX_BATCH, 1]


def test_functions_do_not_share_batches():
    with started() as (batcher, sizes, event):
        futures = [batcher.submit(f, [n])[0] for n, f in enumerate([double, invert] * 2, 1)]
        event.set()
        assert [future.result(60) for future in futures] == [2, 1 / 2, 6, 1 / 4]
    assert sizes == [2, 2]


@pytest.mark.parametrize("faulty", [{0}, {3}, {8}, {0, 1, 7}, set(range(9))])
def test_only_faulty_values_fail(faulty):
    with started() as (batcher, _, event):
        futures = batcher.submit(invert, [0 if n in faulty else 2 for n in range(9)])
        event.set()
        failed = {n for n, future in enumerate(futures) if future.exception(60)}
    assert failed == faulty


def test_a_cancelled_value_is_not_computed_and_takes_no_space():
    with started(capacity=2) as (batcher, sizes, event):
        for future in batcher.submit(double, [1, 2]):
            future.cancel()
        (future,) = batcher.submit(double, [3])
        event.set()
        assert future.result(60) == 6
    assert sizes == [1]


def test_a_full_queue_takes_no_part_of_a_request():
    with started(capacity=3) as (batcher, _, _):
        batcher.submit(double, [1, 2])
        with pytest.raises(QueueFullError):
            batcher.submit(double, [3, 4])
        assert len(batcher) == 2


def test_a_stop_computes_the_waiting_values():
    with started() as (batcher, _, event):
        (future,) = batcher.submit(double, [1])
        event.set()
    assert future.result(0) == 2


def test_a_failed_warm_up_does_not_end_the_queue():
    def fail():
        raise RuntimeError

    batcher = Batcher(max_wait=0.0, capacity=1, warm_up=[fail])
    batcher.start()
    assert batcher.submit(double, [1])[0].result(60) == 2
    assert batcher.ready.is_set()
    batcher.stop()
