"""What the first and the second signal do."""

import signal

import pytest

from convbert_jax.training.environment.signals import StopSignals


@pytest.fixture
def before():
    """Python's own handler, also where the tests were started with Ctrl-C ignored, as by `&`."""
    kept = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, kept)


def test_a_second_interrupt_is_what_it_was_before(before):
    """KeyboardInterrupt here and in a notebook, not the end of the process."""
    with StopSignals() as stop:
        assert stop.requested() is None
        signal.raise_signal(signal.SIGINT)
        assert stop.requested() == "SIGINT"
        assert signal.getsignal(signal.SIGINT) is before
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
