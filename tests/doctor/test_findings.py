"""What goes wrong in a check is a finding, and a line whatever the text."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convbert_jax.config import ConfigError
from convbert_jax.doctor import finding


def test_a_check_that_raises_is_a_finding():
    def check():
        raise ZeroDivisionError("by zero\nsecond line")

    (found,) = finding.run("sums", check, limit=5)
    assert found.state == "wrong"
    assert str(found).startswith("wrong   sums: this could not be checked (ZeroDivisionError: by ")
    assert "second line" not in str(found)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), MemoryError(), OSError()])
def test_so_is_one_that_would_end_the_program(error):
    def check():
        raise error

    (found,) = finding.run("x", check, limit=5)
    assert type(error).__name__ in found.text


def test_what_a_user_can_mend_is_said_as_it_is():
    def check():
        raise ConfigError("config.seed=x must be a number.")

    (found,) = finding.run("start", check, limit=5)
    assert str(found) == "wrong   start: config.seed=x must be a number."


@pytest.mark.parametrize("late", ["wrong", "warning"])
def test_a_check_that_hangs_is_a_finding(late):
    gate = threading.Event()
    (found,) = finding.run("devices", gate.wait, limit=0.05, late=late)
    assert found.state == late
    assert "no answer within 0 s" in found.text
    assert finding.is_stuck()
    gate.set()
    for thread in finding._threads:
        thread.join(5)
    assert not finding.is_stuck()


@given(*[st.text(max_size=20)] * 3, st.sampled_from(finding.STATES))
def test_a_finding_is_one_line(name, text, fix, state):
    said = str(finding.Finding(name, state, text, fix))
    assert len(said.splitlines()) == 1
    assert said.split()[0] == state


def test_an_unknown_state_is_refused():
    with pytest.raises(ValueError, match="'bad' must be one of good, warning, wrong"):
        finding.Finding("x", "bad", "text")
