"""Runner that processes units with an Apache Beam pipeline.

Workers run on this machine or share a disk with it. Elements of the pipeline are `Assignment`s; the
results are files. A Beam runner may process a unit twice, or continue after the process that
started it died. Each attempt therefore writes to its own folder, `attempts-ID/UNIT-ID`, and renames
its files into place, the record last. The next start removes these folders, which stops attempts
that are still running.

Beam is imported only when it is used.
"""

import contextlib
import dataclasses
import importlib.util
import io
import os
import re
import shutil
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from absl import logging

from convbert_jax import storage
from convbert_jax.config import UserError
from convbert_jax.console import show_progress
from convbert_jax.data.errors import DataError, shorten
from convbert_jax.data.units import Assignment, Work, make_attempts, record_path, remove_attempts

WATCH_EVERY = 1.0  # seconds
_FAILED = ".failed"  # suffix of a file with the error message of a unit
_QUIET = ("--default_sdk_harness_log_level=WARNING",)  # the user's options come later and override
# Beam reports the error of a worker as the last lines of a traceback, as text.
_RAISED = re.compile(
    r"^\S*(?:Data|Tokenizer|DamagedFile|User)Error: (.+?)(?: \[while running|$)", re.M
)


def open_runner(name: str, options: Sequence[str] = ()) -> "BeamPipeline":
    """Opens a Beam runner.

    Args:
      name: name or class of the runner.
      options: options of the runner, for example "--project=mine".

    Raises:
      DataError: Beam is not installed, the runner does not exist, or an option is missing or
        invalid.
    """
    if importlib.util.find_spec("apache_beam") is None:
        raise DataError(
            f"--runner={name} needs Apache Beam: pip install apache-beam, or convbert_jax[beam]. "
            "It conflicts with the exact versions of the lock files.",
            field="--runner",
            value=name,
        )
    opened = BeamPipeline(name, tuple(options))
    shutil.rmtree(opened.make_pipeline().local_tempdir, ignore_errors=True)
    return opened


@dataclasses.dataclass(frozen=True)
class BeamPipeline:
    """A `Runner` that uses Apache Beam; made by `open_runner`."""

    name: str
    options: tuple[str, ...]

    def make_pipeline(self):
        """Returns an empty pipeline. Raises DataError as `open_runner`."""
        import apache_beam
        from apache_beam.options.pipeline_options import PipelineOptions

        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):  # argparse prints errors and exits
                options = PipelineOptions([f"--runner={self.name}", *_QUIET, *self.options])
                options.get_all_options()  # options are parsed lazily
                return apache_beam.Pipeline(options=options)
        except SystemExit:
            lines = said.getvalue().strip().splitlines() or ["error: wrong"]
            raise DataError(
                f"Cannot parse --runner_options: {lines[-1].partition('error: ')[2]}.",
                field="--runner_options",
            ) from None
        # The name is not a runner or not a class, or a package of the runner is missing.
        except (ValueError, ImportError, AttributeError, TypeError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise DataError(
                f"Cannot use --runner={self.name}: {reason}. Check --runner and --runner_options.",
                field="--runner",
                value=self.name,
            ) from None

    def run(self, work: Work, assignments: Sequence[Assignment]) -> None:
        """Processes units as `Runner.run`; starts no unit after the first one that failed.

        Raises:
          DataError: a unit failed (with the error of the first one), or the pipeline failed.
        """
        directory = work.job.directory
        attempts = make_attempts(directory)
        worker = _Worker(work, attempts, os.getpid())
        logging.info("Processing %d units with Apache Beam's %s.", len(assignments), self.name)
        try:
            with (
                show_progress(sum(each.size for each in assignments)) as advance,
                _watching(directory, assignments, advance),
            ):
                self._run_pipeline(worker.do, assignments)
            failures = sorted(attempts.glob(f"*{_FAILED}"), key=lambda path: path.stat().st_mtime)
            if failures:
                raise DataError(failures[0].read_text())
        finally:
            remove_attempts(directory)

    def _run_pipeline(self, do: Callable, assignments: Sequence[Assignment]) -> None:
        import apache_beam

        pipeline = self.make_pipeline()
        # Create distributes its elements over the workers.
        _ = pipeline | "Units" >> apache_beam.Create(assignments) | "Do" >> apache_beam.Map(do)
        result = None
        with _noticing_deaths() as deaths:
            try:
                result = pipeline.run()
                state = result.wait_until_finish()
            except BaseException as error:
                if result is not None:
                    with contextlib.suppress(Exception):  # unsupported, or already finished
                        result.cancel()
                if deaths:
                    raise DataError(
                        f"A worker of --runner={self.name} was killed, probably out of memory. "
                        "Start again with fewer workers in --runner_options; finished units are "
                        "kept.",
                        field="--runner",
                        value=self.name,
                    ) from error
                if not isinstance(error, Exception):
                    raise
                raise DataError(self._explain(error)) from error
        if state not in (None, "DONE"):  # for example canceled by another user
            raise DataError(
                f"--runner={self.name} ended in state {state}. Start again; finished units are "
                "kept.",
                field="--runner",
                value=self.name,
            )

    def _explain(self, error: Exception) -> str:
        """Returns the message of a worker's error in `error`, or of a failed runner."""
        text = str(error)
        if raised := _RAISED.findall(text):
            return raised[-1]
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        reason = shorten(lines[-1] if lines else type(error).__name__, 300).rstrip(".")
        return (
            f"--runner={self.name} failed: {reason}. Correct this and start again; finished units "
            "are kept."
        )


@dataclasses.dataclass(frozen=True)
class _Worker:
    """The function that Beam workers run, with its data; picklable."""

    work: Work
    attempts: Path
    submitter: int  # process

    def do(self, assignment: Assignment) -> None:
        """Processes a unit, or writes its error message to a file.

        Raises:
          DataError: the folder does not exist on this machine, or the message cannot be written.
        """
        if os.getpid() != self.submitter:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers already run in parallel
        if any(self.attempts.glob(f"*{_FAILED}")):
            return
        name = f"{assignment.index:05d}-{uuid.uuid4().hex}"
        attempt = self.attempts / name
        try:
            attempt.mkdir()
        except FileNotFoundError:
            raise DataError(
                f"{self.attempts} does not exist on {socket.gethostname()}. All workers need the "
                "source and config.data.directory at the same paths on a shared disk.",
                field="config.data.directory",
                path=self.attempts,
            ) from None
        try:
            (attempt / "units").mkdir()
            job = dataclasses.replace(self.work.job, directory=attempt)
            dataclasses.replace(self.work, job=job).do(assignment)
        except UserError as error:
            sentence = str(error).replace(str(attempt), str(self.work.job.directory))
            try:
                storage.write_text(self.attempts / f"{name}{_FAILED}", sentence)
            except OSError:  # for example on a full disk
                raise DataError(sentence) from None
            return
        self._publish(attempt, assignment)

    def _publish(self, attempt: Path, assignment: Assignment) -> None:
        """Moves the files of an attempt into place, the record last."""
        directory = self.work.job.directory
        for path in sorted(attempt.iterdir()):
            if path.is_file():
                os.replace(path, directory / path.name)
        index = assignment.index
        os.replace(record_path(attempt, index), record_path(directory, index))
        shutil.rmtree(attempt)


@contextlib.contextmanager
def _noticing_deaths() -> Iterator[list[BaseException]]:
    """Raises KeyboardInterrupt in the block when a local worker process is killed.

    The direct runner would wait for it forever. Yields the list of such exceptions.
    """
    deaths: list[BaseException] = []
    before, main = threading.excepthook, threading.main_thread()

    def notice(told: threading.ExceptHookArgs) -> None:
        before(told)
        if "Worker subprocess exited" in str(told.exc_value) and not deaths:
            deaths.append(told.exc_value)
            signal.pthread_kill(main.ident, signal.SIGINT)

    if threading.current_thread() is main:  # only the main thread can be interrupted
        threading.excepthook = notice
    try:
        yield deaths
    finally:
        threading.excepthook = before


@contextlib.contextmanager
def _watching(
    directory: Path, assignments: Sequence[Assignment], advance: Callable[[int], object]
) -> Iterator[None]:
    """Calls `advance` with the size of each unit whose record appears during the block."""
    waiting = {record_path(directory, each.index): each.size for each in assignments}
    over = threading.Event()

    def look():
        for path in [path for path in waiting if path.is_file()]:
            advance(waiting.pop(path))

    def watch():
        while not over.wait(WATCH_EVERY):
            look()

    thread = threading.Thread(target=watch, name="watch units", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        look()
