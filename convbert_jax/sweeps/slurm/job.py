"""One runner as a job of Slurm: the ordinary command, stopped and put back before its time is up.

SIGUSR2, before the end of --time and where a cluster sends it on preemption too, is submitit's: it
calls `checkpoint`, which ends the runner, and has Slurm put the job back into the queue. SIGTERM,
of preemption and of scancel, is passed on. Some clusters signal this process alone and some every
process of the job, so what comes twice is one (`StopSignals`), and SIGUSR2 is for this one alone.
"""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from typing import Any

_OF_SUBMITIT = signal.SIGUSR2
# How launch/sweep.py ends that a signal stopped: with a cell to save, and before it had any.
_STOPPED = (130, -signal.SIGTERM)


@dataclasses.dataclass
class Job:
    """What submitit calls on a node, and again after each time that Slurm put the job back.

    Attributes:
      command: of the runner, the interpreter first.
      folder: where it was typed; paths in the command are from there.
    """

    command: tuple[str, ...]
    folder: str

    def __post_init__(self):
        self._process: subprocess.Popen | None = None
        self._told = False

    def __call__(self) -> None:
        """Ends with the runner, and with its exit code.

        Raises:
          SystemExit: some cells failed, or the job was cancelled.
        """
        self._process = subprocess.Popen(
            self.command,
            cwd=self.folder,
            # a cell that knows nothing of submitit's signal would die of it
            preexec_fn=lambda: signal.signal(_OF_SUBMITIT, signal.SIG_IGN),
        )
        signal.signal(signal.SIGTERM, lambda number, frame: self._tell())
        self._wait()
        code = self._process.wait()
        if code in _STOPPED and _is_still_wanted():
            signal.raise_signal(_OF_SUBMITIT)  # preempted without it: put back all the same
        if code:
            sys.exit(code)

    def checkpoint(self) -> Any:
        """Ends the runner, whose cell saves its state first.

        Returns:
          the same job to be done again, as submitit takes it.
        """
        from submitit.helpers import DelayedSubmission

        if self._process:
            self._tell()
            self._wait()
        return DelayedSubmission(Job(self.command, self.folder))

    def _tell(self) -> None:
        """Has the runner stop; once, for the second time it would not wait for its cell.

        Told before it is noted: a signal's handler may run between the two, and would wait for a
        runner that nobody told. Told twice in an instant is told once (`StopSignals`).
        """
        if not self._told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)
            self._told = True

    def _wait(self) -> None:
        """Until the runner is dead. Not by `Popen.wait`, whose lock a signal's handler, where
        `checkpoint` is called, cannot have a second time.
        """
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)


def _is_still_wanted() -> bool:
    """Whether this job is neither cancelled nor put back by Slurm itself."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return False
    asked = subprocess.run(
        ["squeue", "--noheader", f"--jobs={job}", "--format=%T"], capture_output=True, text=True
    )
    return asked.stdout.strip() == "RUNNING"
