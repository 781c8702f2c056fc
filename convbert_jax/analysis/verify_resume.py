"""Verifies exact resumption: trains twice, once killed midway, and compares all bits."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
from absl import logging
from etils import epath

from convbert_jax import storage
from convbert_jax.config import UserError
from convbert_jax.training.checkpoints import load_arrays
from convbert_jax.workdir import Workdir

_TO_SAVE = 60.0  # seconds for a stopped run to save its last checkpoint
_PATIENCE = 1_800  # seconds to wait for a checkpoint


class ResumeError(UserError):
    """The two runs differ or could not be completed."""


def run(
    arguments: list[str],
    workdir: epath.PathLike,
    *,
    steps: int,
    number: signal.Signals = signal.SIGKILL,
) -> str:
    """Trains without interruption, and with a signal midway and a resumption; compares both.

    The second run is stopped after its first checkpoint at or after the middle step.

    Args:
      arguments: flags of main.py: --config and overrides.
      workdir: workdir of the run to verify; all files are written below WORKDIR/verify_resume.
      steps: length of both runs.
      number: signal that stops the second run. It saves a checkpoint at SIGTERM, not at SIGKILL.

    Returns:
      A sentence with the result.

    Raises:
      ResumeError: parameters, optimizer state or data position differ in any bit.
    """
    workdir = Workdir(workdir)
    straight, killed = (workdir.trial(name) for name in ("straight", "killed"))
    storage.check_links(workdir.path)
    for trial in (straight, killed):
        storage.remove_tree(trial.path)
    every = max(1, steps // 8)
    shared = [
        *arguments,
        f"--config.train.steps={steps}",
        f"--config.optimizer.warmup_steps={max(1, steps // 10)}",
        f"--config.train.eval_every={every}",
        f"--config.train.log_every={every}",
        f"--config.checkpoint.every={every}",
        f"--config.data.directory={workdir.trial('data')}",
    ]
    logging.info("Preparing the data and training %d steps without interruption.", steps)
    with _started(shared, straight) as process:
        _wait(process, "The uninterrupted run")

    logging.info("Training again; this run will be killed midway.")
    with _started(shared, killed) as process:
        killed_at = _kill_after(process, killed, steps, number)
    logging.info("Killed after the checkpoint of step %d; resuming.", killed_at)
    with _started(shared, killed) as process:
        _wait(process, "The resumed run")

    expected, resumed = (load_arrays(w.checkpoints, steps)[1] for w in (straight, killed))
    differing = compare(expected, resumed)
    if differing:
        raise ResumeError(
            f"Resumption is not exact: {len(differing)} of {len(expected)} arrays differ, first "
            f"{differing[0]}. Both runs are kept in {straight.path.parent}.",
            path=straight.path.parent,
        )
    return (
        f"Resumption is exact: at step {steps}, {len(expected)} arrays (parameters, optimizer "
        f"state, data position) of the run killed after step {killed_at} equal the uninterrupted "
        f"run's bit for bit."
    )


def compare(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> list[str]:
    """Returns the names of arrays that are missing on one side or not bit-identical."""
    names = sorted(first.keys() | second.keys())
    return [
        name
        for name in names
        if name not in first
        or name not in second
        or first[name].dtype != second[name].dtype
        or first[name].shape != second[name].shape
        or first[name].tobytes() != second[name].tobytes()
    ]


@contextlib.contextmanager
def _started(arguments: list[str], workdir: Workdir) -> Iterator[subprocess.Popen]:
    """Runs main.py in a subprocess, which is stopped at the end of the block.

    Schedulers may send SIGTERM to this process only.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "convbert_jax.main", *arguments, f"--workdir={workdir}"],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_TO_SAVE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen, name: str) -> None:
    if process.wait() != 0:
        raise ResumeError(
            f"{name} failed with exit code {process.returncode}. See its output above.",
            value=process.returncode,
        )


def _kill_after(
    process: subprocess.Popen, killed: Workdir, steps: int, number: signal.Signals
) -> int:
    """Stops the run after a checkpoint of the middle or later; returns its last checkpoint."""
    middle = steps // 2
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ResumeError(
                f"The run exited with code {process.returncode} before it could be killed. Raise "
                f"--verify_steps={steps}.",
                field="--verify_steps",
                value=steps,
            )
        done = [step for step in killed.steps() if step >= middle]
        if done:
            process.send_signal(number)
            process.wait()
            return killed.steps()[-1]
        time.sleep(0.02)
    raise ResumeError(f"No checkpoint of step {middle} after {_PATIENCE} s; the run was stopped.")
