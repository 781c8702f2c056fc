"""Units done by a pipeline of Apache Beam: here, or by workers that share a disk with this machine.

An element of the pipeline is an `Assignment`; what comes out of it are files. A runner may do a
unit twice, or go on after the process that started it is dead, so each attempt writes into a folder
of its own, `attempts-ID/UNIT-ID`, and renames what it made into place, the record last. The next
start removes those folders, so what still runs of this one ends.

Beam is imported where it is asked for.
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

from convbert_jax import files
from convbert_jax.config import UserError
from convbert_jax.data.errors import DataError, shorten
from convbert_jax.data.units.work import (
    Assignment,
    Work,
    make_attempts,
    record_path,
    remove_attempts,
)
from convbert_jax.progress import show_progress

WATCH_EVERY = 1.0  # seconds
_FAILED = ".failed"  # ending of a file with the sentence of a unit that cannot be done
_QUIET = ("--default_sdk_harness_log_level=WARNING",)  # a later one counts
# How Beam hands on what a worker raised: the end of a traceback, as text.
_RAISED = re.compile(
    r"^\S*(?:Data|Tokenizer|DamagedFile|User)Error: (.+?)(?: \[while running|$)", re.M
)


def open_runner(name: str, options: Sequence[str] = ()) -> "BeamPipeline":
    """A runner of Beam by its name or its class, and options of its own, as "--project=mine".

    Raises:
      DataError: Beam is not installed, it has no such runner, or an option that is missing or
        wrong; one sentence.
    """
    if importlib.util.find_spec("apache_beam") is None:
        raise DataError(
            f"--runner={name} needs Apache Beam: pip install 'apache-beam', or convbert_jax[beam]; "
            "it does not go with the exact versions of the lock files.",
            field="--runner",
            value=name,
        )
    opened = BeamPipeline(name, tuple(options))
    shutil.rmtree(opened.make_pipeline().local_tempdir, ignore_errors=True)
    return opened


@dataclasses.dataclass(frozen=True)
class BeamPipeline:
    """A runner of units, see `open_runner`."""

    name: str
    options: tuple[str, ...]

    def make_pipeline(self):
        """An empty pipeline; DataError as `open_runner` has it."""
        import apache_beam
        from apache_beam.options.pipeline_options import PipelineOptions

        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):  # argparse explains itself there, and exits
                options = PipelineOptions([f"--runner={self.name}", *_QUIET, *self.options])
                options.get_all_options()  # they are not read before somebody asks
                return apache_beam.Pipeline(options=options)
        except SystemExit:
            lines = said.getvalue().strip().splitlines() or ["error: wrong"]
            raise DataError(
                f"--runner_options are not understood: {lines[-1].partition('error: ')[2]}.",
                field="--runner_options",
            ) from None
        # A name that is no runner, one that is no class, a package of its own that is missing.
        except (ValueError, ImportError, AttributeError, TypeError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise DataError(
                f"--runner={self.name} cannot be used: {reason}; see --runner and "
                "--runner_options.",
                field="--runner",
                value=self.name,
            ) from None

    def run(self, work: Work, assignments: Sequence[Assignment]) -> None:
        """As `Runner` has it; after a unit that cannot be done no other is begun.

        Raises:
          DataError: what the first such unit raised, or the pipeline failed.
        """
        directory = work.job.directory
        attempts = make_attempts(directory)
        worker = _Worker(work, attempts, os.getpid())
        logging.info("%d units go to %s of Apache Beam.", len(assignments), self.name)
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
        # Create spreads its elements over the workers.
        _ = pipeline | "Units" >> apache_beam.Create(assignments) | "Do" >> apache_beam.Map(do)
        result = None
        with _noticing_deaths() as deaths:
            try:
                result = pipeline.run()
                state = result.wait_until_finish()
            except BaseException as error:
                if result is not None:
                    with contextlib.suppress(Exception):  # not every runner can, or it is over
                        result.cancel()
                if deaths:
                    raise DataError(
                        f"A worker of --runner={self.name} was killed, most likely for memory; run "
                        "again with fewer of them by --runner_options: what was finished is kept.",
                        field="--runner",
                        value=self.name,
                    ) from error
                if not isinstance(error, Exception):
                    raise
                raise DataError(self._explain(error)) from error
        if state not in (None, "DONE"):  # somebody else has cancelled it
            raise DataError(
                f"--runner={self.name} ended as {state}; start again: what was finished is kept.",
                field="--runner",
                value=self.name,
            )

    def _explain(self, error: Exception) -> str:
        """One sentence; `error` is of a worker, as the runner tells it, or of the runner."""
        text = str(error)
        if raised := _RAISED.findall(text):
            return raised[-1]
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        reason = shorten(lines[-1] if lines else type(error).__name__, 300).rstrip(".")
        return (
            f"--runner={self.name} failed ({reason}); mend that and start again: what was finished "
            "is kept."
        )


@dataclasses.dataclass(frozen=True)
class _Worker:
    """What is sent to the workers."""

    work: Work
    attempts: Path
    submitter: int  # process

    def do(self, assignment: Assignment) -> None:
        """Does a unit, or writes down why it cannot be done.

        Raises:
          DataError: this machine does not have the folder, or it cannot be written down.
        """
        if os.getpid() != self.submitter:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a runner has many workers already
        if any(self.attempts.glob(f"*{_FAILED}")):
            return
        name = f"{assignment.index:05d}-{uuid.uuid4().hex}"
        attempt = self.attempts / name
        try:
            attempt.mkdir()
        except FileNotFoundError:
            raise DataError(
                f"{self.attempts} is not there on {socket.gethostname()}; every worker needs the "
                "source and config.data.directory under the same names, on a disk that they share.",
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
                files.write_text(self.attempts / f"{name}{_FAILED}", sentence)
            except OSError:  # a full disk is full for this too
                raise DataError(sentence) from None
            return
        self._publish(attempt, assignment)

    def _publish(self, attempt: Path, assignment: Assignment) -> None:
        """Puts the files of an attempt into their place, the record last."""
        directory = self.work.job.directory
        for path in sorted(attempt.iterdir()):
            if path.is_file():
                os.replace(path, directory / path.name)
        index = assignment.index
        os.replace(record_path(attempt, index), record_path(directory, index))
        shutil.rmtree(attempt)


@contextlib.contextmanager
def _noticing_deaths() -> Iterator[list[BaseException]]:
    """Context that is interrupted, as by Ctrl-C, when a worker process of this machine is killed,
    and what was said of it: the direct runner would wait for it for ever.
    """
    deaths: list[BaseException] = []
    before, main = threading.excepthook, threading.main_thread()

    def notice(told: threading.ExceptHookArgs) -> None:
        before(told)
        if "Worker subprocess exited" in str(told.exc_value) and not deaths:
            deaths.append(told.exc_value)
            signal.pthread_kill(main.ident, signal.SIGINT)

    if threading.current_thread() is main:  # no other can be interrupted
        threading.excepthook = notice
    try:
        yield deaths
    finally:
        threading.excepthook = before


@contextlib.contextmanager
def _watching(
    directory: Path, assignments: Sequence[Assignment], advance: Callable[[int], object]
) -> Iterator[None]:
    """Context in which each unit that gets its record is told to `advance`."""
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
