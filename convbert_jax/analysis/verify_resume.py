"""Is a resumed run the same run? Trains twice, once killed in the middle, and compares all bits."""

import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
from absl import logging

from convbert_jax.config import UserError
from convbert_jax.training.checkpoint_reading import list_steps, load_arrays

_PATIENCE = 1_800  # seconds for one run to show a new checkpoint


class ResumeError(UserError):
    """The two runs differ, or could not be compared."""


def run(arguments: list[str], workdir: pathlib.Path, *, steps: int) -> None:
    """Runs `steps` steps straight and with a SIGKILL after the first checkpoint past the middle;
    compares the results.

    Args:
      arguments: flags of main.py: --config and overrides.
      workdir: of the run to verify; everything is written below WORKDIR/verify_resume.

    Raises:
      ResumeError: parameters, optimizer state or data position differ in any bit.
    """
    folder = workdir / "verify_resume"
    for name in ("straight", "killed"):
        shutil.rmtree(folder / name, ignore_errors=True)
    every = max(1, steps // 8)
    shared = [
        *arguments,
        f"--config.train.steps={steps}",
        f"--config.optimizer.warmup_steps={max(1, steps // 10)}",
        f"--config.train.eval_every={every}",
        f"--config.train.log_every={every}",
        f"--config.checkpoint.every={every}",
        f"--config.data.directory={folder / 'data'}",
    ]
    logging.info("Preparing the data and training %d steps without a break.", steps)
    _wait(_start(shared, folder / "straight"), "the straight run")

    logging.info("Training again, to be killed in the middle.")
    process = _start(shared, folder / "killed")
    killed_at = _kill_after(process, folder / "killed" / "checkpoints", steps // 2, steps)
    logging.info("Killed after the checkpoint of step %d; resuming.", killed_at)
    _wait(_start(shared, folder / "killed"), "the resumed run")

    straight, resumed = (
        load_arrays(folder / name / "checkpoints", steps)[1] for name in ("straight", "killed")
    )
    differing = compare(straight, resumed)
    if differing:
        raise ResumeError(
            f"resuming is not exact: {len(differing)} of {len(straight)} parts differ, first "
            f"{differing[0]}; both runs "
            f"are kept in {folder}."
        )
    print(
        f"Exact: {len(straight)} parts (parameters, optimizer state, data position) of the run "
        "killed after step "
        f"{killed_at} equal those of the straight run bit for bit at step {steps}."
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


def _start(arguments: list[str], workdir: pathlib.Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "convbert_jax.main", *arguments, f"--workdir={workdir}"],
        stdout=subprocess.DEVNULL,
    )


def _wait(process: subprocess.Popen, name: str) -> None:
    if process.wait() != 0:
        raise ResumeError(
            f"{name} ended with exit code {process.returncode}; its message stands above."
        )


def _kill_after(
    process: subprocess.Popen, checkpoints: pathlib.Path, middle: int, steps: int
) -> int:
    """Kills the run as soon as a checkpoint of step `middle` or later is complete."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ResumeError(
                f"the run ended (exit code {process.returncode}) before it could be killed; "
                f"raise --verify_steps={steps}."
            )
        done = [step for step in list_steps(checkpoints) if step >= middle]
        if done:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return max(done)
        time.sleep(0.02)
    process.kill()
    raise ResumeError(f"no checkpoint of step {middle} within {_PATIENCE} s; the run was stopped.")
