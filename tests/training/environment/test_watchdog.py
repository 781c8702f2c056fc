import threading
import time

import jax.numpy as jnp

from convbert_jax.training.environment import watchdog


def test_the_first_batch_of_its_shapes_may_take_as_long_as_the_first_step(monkeypatch):
    """It compiles: a new length of pairs, another bucket of a task."""
    ended, seen = threading.Event(), []
    monkeypatch.setattr(watchdog.distributed, "exit_after_hang", ended.set)
    watched = watchdog.Watchdog(0.2)

    def program(factor, batch):
        if batch["token_ids"].shape not in seen:
            seen.append(batch["token_ids"].shape)
            time.sleep(1)
        return factor * batch["token_ids"].sum()

    def call(length):
        batch = {"token_ids": jnp.ones((2, length))}
        return watched.call(program, 3.0, batch, batch=batch)

    with watched.watching():
        for length in (8, 16, 8, 32):
            assert call(length) == 6 * length
        assert not ended.is_set()
        seen.clear()
        call(8)  # what was compiled before does not hang for a good reason
        assert ended.is_set()
