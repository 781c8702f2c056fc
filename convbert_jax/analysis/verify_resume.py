"""Is a resumed run the same run? Trains twice, once killed in the middle, and compares all bits."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
from absl import logging
from etils import epath

from convbert_jax import files, links
from convbert_jax.config import UserError
from convbert_jax.training.checkpoints.reading import load_arrays
from convbert_jax.workdir import Workdir

_TO_SAVE = 60.0  # seconds that a run which is to stop has for its last checkpoint
_PATIENCE = 1_800  # seconds for one run to show a new checkpoint


class ResumeError(UserError):
    """The two runs differ, or could not be compared."""


def run(arguments: list[str], workdir: epath.PathLike, *, steps: int) -> str:
    """Runs `steps` steps straight and with a SIGKILL after the first checkpoint past the middle;
    compares the results.

    Args:
      arguments: flags of main.py: --config and overrides.
      workdir: of the run to verify; everything is written below WORKDIR/verify_resume.

    Returns:
      What was compared, in a sentence.

    Raises:
      ResumeError: parameters, optimizer state or data position differ in any bit.
    """
    workdir = Workdir(workdir)
    straight, killed = (workdir.trial(name) for name in ("straight", "killed"))
    links.check(workdir.path)
    for trial in (straight, killed):
        files.remove_tree(trial.path)
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
    logging.info("Preparing the data and training %d steps without a break.", steps)
    with _started(shared, straight) as process:
        _wait(process, "the straight run")

    logging.info("Training again, to be killed in the middle.")
    with _started(shared, killed) as process:
        killed_at = _kill_after(process, killed, steps // 2, steps)
    logging.info("Killed after the checkpoint of step %d; resuming.", killed_at)
    with _started(shared, killed) as process:
        _wait(process, "the resumed run")

    expected, resumed = (load_arrays(w.checkpoints, steps)[1] for w in (straight, killed))
    differing = compare(expected, resumed)
    if differing:
        raise ResumeError(
            f"resuming is not exact: {len(differing)} of {len(expected)} parts differ, first "
            f"{differing[0]}; both runs are kept in {straight.path.parent}.",
            path=straight.path.parent,
        )
    return (
        f"Exact: {len(expected)} parts (parameters, optimizer state, data position) of the run "
        f"killed after step {killed_at} equal those of the straight run bit for bit at step "
        f"{steps}."
    )


def compare(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> list[str]:
    """Names of the parts that are not the same to the bit, missing ones too."""
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
    """Context with a run, which does not outlive it: SIGTERM is for this process alone."""
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
            f"{name} ended with exit code {process.returncode}; its message stands above.",
            value=process.returncode,
        )


def _kill_after(process: subprocess.Popen, killed: Workdir, middle: int, steps: int) -> int:
    """Kills the run as soon as a checkpoint of step `middle` or later is complete."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ResumeError(
                f"the run ended (exit code {process.returncode}) before it could be killed; "
                f"raise --verify_steps={steps}.",
                field="--verify_steps",
                value=steps,
            )
        done = [step for step in killed.steps() if step >= middle]
        if done:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return max(done)
        time.sleep(0.02)
    raise ResumeError(f"no checkpoint of step {middle} within {_PATIENCE} s; the run was stopped.")
