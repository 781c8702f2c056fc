"""Starts one run: `python -m convbert_jax.main --config=configs/base.py`.

`--help` lists modes and flags, `--config=FILE --help` the fields of a config with their comments.
--config.section.field=value overrides a field; `configs/base.py:paper` selects a variant. --workdir
alone resumes the run in that folder. Flags are defined in `command_line/`; `recipes/` implements
the modes.
"""

import contextlib
import dataclasses
import errno
import functools
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence

from convbert_jax import console

with console.missing_package_message():
    from absl import app, logging

    from convbert_jax import command_line, console, interrupts, machine, storage
    from convbert_jax.command_line import exit_codes
    from convbert_jax.config import Config, UserError
    from convbert_jax.machine import find_accelerators

# Storage failures during a run, in any library.
_STORAGE_FAULTS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EIO, errno.ESTALE),
)
_DOCTOR_PATIENCE = 60.0  # seconds that --mode=doctor waits for the other processes


def start(beside: Callable[[], None] | None = None) -> None:
    """Runs the program with the arguments of the command line.

    Args:
      beside: called before the work, to start background threads.
    """
    with interrupts.exiting_despite_threads():
        app.run(functools.partial(main, beside=beside), flags_parser=_read_command_line)


def main(request: command_line.Request, beside: Callable[[], None] | None = None) -> None:
    """Executes a request.

    A `UserError` prints one line and exits with code 1. A run that is stopped by SIGTERM exits with
    75 (saved but not finished; launchers restart it), by Ctrl-C with 130.
    """
    if request.mode in ("train", "eval", "predict") and _computes_on_cpu(_platform(request)):
        machine.keep_memory()  # must be called before threads start, as in the next lines
    if beside:
        beside()
    with interrupts.handled():
        _answer(request)


def _answer(request: command_line.Request) -> None:
    stopped_by = None
    try:
        if request.mode == "doctor":
            _examine(request)
        elif request.multihost or request.processes:
            with _together(request):
                from convbert_jax.training import consistency

                consistency.check_start(request.config)
                stopped_by = _run(request)
        else:
            stopped_by = _run(request)
    except UserError as error:
        logging.flush()
        console.fail(str(error))
    except KeyboardInterrupt as error:  # pre-training saves and returns instead
        kept = "resumes from the work that is finished"
        if request.mode == "predict":
            kept = "resumes if it reads a file and writes JSON lines, and otherwise starts again"
        by = error.by if isinstance(error, interrupts.Stopped) else "SIGINT"
        console.fail(f"interrupted; the same command {kept}.", code=interrupts.exit_code(by))
    except BrokenPipeError:
        _stop_printing()
        sys.exit(exit_codes.FAILED)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            console.fail(_name_too_long(error))
        if error.errno not in _STORAGE_FAULTS:
            raise
        logging.flush()
        console.fail(
            f"{error.filename or 'writing'}: {error.strerror}; free some space, repair the storage "
            "or choose another --workdir, then start again: finished work is kept."
        )
    if stopped_by:
        sys.exit(interrupts.exit_code(stopped_by))


def _computes_on_cpu(platform: str) -> bool:
    """Returns whether the run uses a CPU, determined without loading jax."""
    return platform == "cpu" or not any(dataclasses.astuple(find_accelerators()))


def _run(request: command_line.Request) -> str | None:
    """Returns the name of the signal that stopped pre-training, or None."""
    # Imported late, so that errors in flags are reported before jax is loaded.
    if request.mode == "plan":
        from convbert_jax.analysis import tpu_pricing

        tpu_pricing.use_compile_only_tpu()
    with console.missing_package_message():
        from convbert_jax import recipes
        from convbert_jax.interop import conversion, hub, importing
        from convbert_jax.training import environment

    config, workdir = request.config, request.workdir
    environment.prepare_platform(_platform(request))
    if request.mode in ("train", "eval", "predict", "inspect"):
        environment.enable_compile_cache(request.compile_cache)
    result = stopped_by = None
    if request.mode == "show":
        print(recipes.show(config, workdir, request.given), flush=True)
    elif request.mode == "plan":
        with interrupts.nothing_to_save():
            result = recipes.plan(
                config,
                workdir,
                request.given,
                topology=request.topology,
                largest_batch=request.largest_batch,
                compare=request.compare,
                price=request.price,
                output=request.output,
            )
    elif request.mode == "prepare":
        recipes.prepare(
            config,
            workdir,
            request.given,
            runner=request.runner,
            runner_options=request.runner_options,
        )
    elif request.mode == "eval":
        result = recipes.evaluate(
            config,
            workdir,
            request.given,
            step=request.step,
            average=request.average,
            output=request.output,
        )
    elif request.mode == "verify_resume":
        from convbert_jax.analysis import verify_resume

        sentence = verify_resume.run(request.config_flags, workdir, steps=request.verify_steps)
        print(sentence, flush=True)
    elif request.mode == "export":
        output = storage.to_path(request.output) if request.output else None
        options = {"form": request.format, "with_generator": request.generator}
        options["quantize"] = request.quantize
        if request.push_to_hub:
            hub.check(request.push_to_hub)
        if request.source:
            folder = conversion.convert(request.source, output, **options)
        else:
            folder = conversion.export(workdir, step=request.step, output=output, **options)
        if request.push_to_hub:
            hub.push(folder, request.push_to_hub)
    elif request.mode == "predict":
        recipes.predict(
            str(workdir),
            request.input,
            request.output or "-",
            input_format=request.input_format,
            texts=request.texts,
            decoding=request.decoding,
        )
    elif request.mode == "inspect":
        result = recipes.inspect(
            request.source or str(workdir),
            beside=request.beside,
            step=request.step,
            texts=None if request.input == "-" else request.input,
            word=request.word,
            layers=request.layers,
            output=request.output,
        )
    elif request.mode == "import" and config.spec.generates:
        importing.import_generative(request.source, config, workdir, request.given)
    elif request.mode == "import":
        importing.import_run(request.source, config, workdir, request.given)
    else:
        result = recipes.train(config, workdir, request.given)
        stopped_by = result.stopped_by
    if result and result.report:
        print(result.report, flush=True)
    if request.mode == "plan" and not result.fits:
        console.fail(f"{config.name} does not fit {request.topology}; see the remedies above.")
    return stopped_by


def _examine(request: command_line.Request) -> None:
    """Prints a line for each check of --mode=doctor, on process 0."""
    from convbert_jax import doctor

    several, first, together = False, True, contextlib.nullcontext()
    if not doctor.fault_of_jax():
        from convbert_jax.training import distributed, environment

        environment.prepare_platform(_platform(request))
        if several := bool(request.multihost or request.processes):
            together = _together(request, _DOCTOR_PATIENCE)
    wrong = []
    with together:
        if several:
            first = distributed.place()[0] == 0
        for finding in doctor.examine(request.config, request.workdir, request.given):
            if first:
                print(finding, flush=True)
            if finding.state == "wrong":
                wrong.append(finding.name)
        if wrong:
            where = "above" if first else "the output of process 0"
            message = f"a run would fail here ({', '.join(dict.fromkeys(wrong))}); see {where}."
            if doctor.is_stuck() and not several:  # Python would wait for the stuck thread
                _give_up(message)
            raise UserError(message)


def _platform(request: command_line.Request) -> str:
    return request.config.platform if request.config else "any"


@contextlib.contextmanager
def _together(request: command_line.Request, timeout: float = 300.0) -> Iterator[None]:
    """Connects all processes; the exit of one of them ends all.

    Args:
      timeout: seconds to wait for the other processes.
    """
    from convbert_jax.training import consistency, distributed, environment

    if given := request.processes:
        process = distributed.ProcessId(given.coordinator, given.count, given.index)
        hint = _command_of
    else:
        process, hint = distributed.detect_process(), _start_everywhere
    silence = (request.config or Config()).train.silence_seconds
    with distributed.connect(process, timeout=timeout, silence=silence, hint=hint):
        environment.prepare_platform(_platform(request))
        logging.info("Process %d of %d.", *distributed.place())
        consistency.check_flags({"--mode": request.mode, "--step": request.step})
        yield


def _command_of(missing: Sequence[int]) -> str:
    """Returns the command that starts the first missing process of a run with --coordinator."""
    arguments = shlex.join(sys.argv[1:])
    own = re.sub(r"--?process[= ]\S+", f"--process={missing[0]}", arguments)
    return f"Start it with: python -m convbert_jax.main {own}"


def _start_everywhere(missing: Sequence[int]) -> str:
    del missing
    return (
        "Start the same command on every host of the TPU slice, with srun or with mpirun, and look "
        "at the logs of the missing processes."
    )


def _give_up(message: str) -> None:
    """Exits immediately, without waiting for threads that are stuck in a library."""
    try:
        console.fail(message)
    except SystemExit as error:
        os._exit(error.code)


def _name_too_long(error: OSError) -> str:
    return str(UserError(f"file name too long: {error.filename}. Choose a shorter one."))


def _stop_printing() -> None:
    """Discards further output after the reader closed the pipe, as `| head` does."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _read_command_line(argv: Sequence[str]) -> command_line.Request:
    """Parses the command line; errors print one line and exit with code 2."""
    console.set_up_logging()
    try:
        if text := command_line.describe(argv):
            print(text, flush=True)
            sys.exit()
        return command_line.read(argv)
    except BrokenPipeError:
        _stop_printing()
        sys.exit()
    except UserError as error:
        console.fail(str(error), code=exit_codes.INVALID)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        console.fail(_name_too_long(error), code=exit_codes.INVALID)


if __name__ == "__main__":
    start()
