"""Signals and temporary faults during a checkpoint read."""

import shutil
import signal
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from convbert_jax import interrupts
from convbert_jax.config import CheckpointSection
from convbert_jax.training import checkpoints as checkpoints_lib
from convbert_jax.training.checkpoints import Checkpoints
from convbert_jax.workdir import list_steps
from tests.training.test_checkpoints import (
    delete,
    folder,
    make_state,
    mesh,
    restore,
    saved,
    values,
)

__all__ = ["folder", "mesh", "saved"]  # the fixtures
MOMENTS = 20
ANSWERS = ((signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "Stopped"))


def load_params(folder, mesh):
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, values(3)))
    return checkpoints_lib.load_params(folder, shapes)


def save(folder, mesh):
    checkpoints = Checkpoints(folder, CheckpointSection(keep=9))
    try:
        checkpoints.save(make_state(4, mesh), {}, last=True)
    finally:
        checkpoints.close()


USES = {
    "load_params": load_params,
    "load_arrays": lambda folder, mesh: checkpoints_lib.load_arrays(folder),
    "of_one_step": lambda folder, mesh: checkpoints_lib.load_arrays(folder, 3),
    "restore": restore,
    "save": save,
}


def count_calls(function: Callable[[], object]) -> int:
    """Counts calls and returns of the main thread in `function`."""
    count = 0

    def hook(*_):
        nonlocal count
        count += 1

    sys.setprofile(hook)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def interrupt(function: Callable[[], object], moment: int, number: int) -> str:
    """Returns the error that `function` raises for a signal at call or return `moment`, or ""."""
    left = moment

    def hook(*_):
        nonlocal left
        left -= 1
        if left == 0:
            sys.setprofile(None)
            signal.raise_signal(number)

    # Long delays, so that `handled` does not end the test process.
    with interrupts.handled(report_after=1_000, exit_after=1_000):
        sys.setprofile(hook)
        try:
            function()
        except BaseException as error:  # pytest itself would exit on KeyboardInterrupt
            return type(error).__name__
        finally:
            sys.setprofile(None)
    return ""


@pytest.mark.parametrize("use", USES)
def test_no_signal_is_lost(saved, mesh, tmp_path, caplog, use):
    def make(name: str) -> Callable[[], object]:
        copy = shutil.copytree(saved, tmp_path / name)
        return lambda: USES[use](copy, mesh)

    make("first")()  # compiles
    calls = count_calls(make("counted"))
    for index in range(MOMENTS):
        number, expected = ANSWERS[index % 2]
        raised = interrupt(make(f"{index}"), 1 + calls * index // MOMENTS, number)
        assert raised == expected, f"moment {index}"
        assert list_steps(tmp_path / f"{index}")[:3] == [1, 2, 3], "an intact one is never renamed"
    assert "damaged" not in caplog.text


def test_a_fault_that_passes_is_no_damage(folder, mesh, monkeypatch):
    read, failures = checkpoints_lib._read, [ValueError("too many open files")]

    def fail_once(*arguments):
        if failures:
            raise failures.pop()
        return read(*arguments)

    monkeypatch.setattr(checkpoints_lib, "_read", fail_once)
    assert int(restore(folder, mesh)[0].step) == 3
    assert not failures
    assert list_steps(folder) == [1, 2, 3]


def test_a_signal_while_reading_damage_renames_nothing(folder, mesh, monkeypatch):
    delete(folder / "3" / "params" / "_METADATA")
    read = checkpoints_lib._read

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGTERM)
        return read(*arguments)

    monkeypatch.setattr(checkpoints_lib, "_read", interrupted)
    with interrupts.handled(), pytest.raises(interrupts.Stopped):
        restore(folder, mesh)
    assert list_steps(folder) == [1, 2, 3]
