"""Log lines of slow operations."""

import time

import pytest

from convbert_jax import console


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(console, "LOG_EVERY", 0.02)


def test_seconds_are_logged_until_the_block_ends(caplog):
    with caplog.at_level("INFO", "absl"):
        with console.log_seconds("Waiting"):
            time.sleep(0.2)
        count = len(caplog.messages)
        time.sleep(0.1)
    assert count >= 2
    assert len(caplog.messages) == count
    assert all(m.startswith("Waiting (0 s so far)") for m in caplog.messages)


def test_small_sizes_have_digits(caplog):
    with caplog.at_level("INFO", "absl"), console.show_progress(2_000_000, "Reading") as advance:
        time.sleep(0.05)
        advance(400_000)
    (line,) = caplog.messages
    assert "0.4 of 2.0 MB" in line


def test_work_beyond_an_estimated_total_has_no_time_left(caplog):
    with caplog.at_level("INFO", "absl"), console.show_progress(10, "Reading") as advance:
        time.sleep(0.05)
        advance(30)
    (line,) = caplog.messages
    assert line.endswith(" 0 s left.")
