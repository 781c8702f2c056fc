"""Checks the storage of a run: workdir, free space, locks, compile cache and clock."""

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator

from etils import epath

from convbert_jax import storage
from convbert_jax.config import Config
from convbert_jax.doctor.finding import Finding, good, warning, wrong

_CLOCK = 2.0  # allowed offset of the file system's clock in seconds
_MOMENTS = 3  # arrays in a checkpoint: the parameters and two moments
_BYTES = 4  # per float32


@contextlib.contextmanager
def made(folder: epath.Path) -> Iterator[None]:
    """Creates `folder` with its parents, if possible, and removes the created folders at exit."""
    absent: list[epath.Path] = []
    if not storage.is_remote(folder):
        place = folder
        while not place.exists() and place != place.parent:
            absent.append(place)
            place = place.parent
    new = []
    try:
        with contextlib.suppress(OSError):  # the check in the block reports the problem
            for place in reversed(absent):
                place.mkdir()
                new.append(place)
        yield
    finally:
        for place in reversed(new):
            with contextlib.suppress(OSError):  # no longer empty
                place.rmdir()


def check_workdir(workdir: epath.Path) -> list[Finding]:
    """Checks write access, locks and clock of the workdir; leaves no files there."""
    with made(workdir):
        if fault := _fault_of_writing(workdir):
            fix = "choose another --workdir, or grant this user write permission"
            return [wrong("workdir", f"cannot write to {workdir} ({fault})", fix)]
        findings = [good("workdir", f"{workdir} is writable")]
        if storage.is_remote(workdir):
            text = "a bucket has no locks; a run writes heartbeats, which a second start checks"
            return [*findings, good("locks", text)]
        return [*findings, _check_locks(workdir), _check_clock(workdir)]


def check_space(workdir: epath.Path, config: Config, parameters: int) -> list[Finding]:
    """Checks that the disk of the workdir has enough space for the checkpoints.

    Args:
      parameters: number of parameters of the model.
    """
    if storage.is_remote(workdir):
        return []
    need = max(0, checkpoint_bytes(config, parameters) - _bytes_of_checkpoints(workdir))
    place = workdir
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    text = f"{_gib(free)} free, the run's checkpoints need {_gib(need)} more"
    if free < need:
        fix = "free disk space, choose another --workdir, or reduce config.checkpoint.keep"
        if config.recipe == "finetune":
            fix = "free disk space, or set another --workdir or config.finetune.save_models=false"
        return [wrong("space", text, fix)]
    return [good("space", text)]


def _bytes_of_checkpoints(workdir: epath.Path) -> int:
    """Returns the size of the existing checkpoints, which a running process may be removing."""
    size = 0
    for path in workdir.rglob("checkpoints/**/*"):
        with contextlib.suppress(OSError):
            size += path.stat().st_size
    return size


def checkpoint_bytes(config: Config, parameters: int) -> int:
    """Returns the maximum size of the checkpoints of a run in bytes.

    Counts the checkpoints that are kept and the one that is written before the oldest is deleted;
    for fine-tuning also the saved models, which have no moments.
    """
    one = parameters * _MOMENTS * _BYTES
    if config.recipe == "finetune":
        f = config.finetune
        tries = max(1, len(f.learning_rates)) * max(1, len(f.epochs))
        runs = len(f.tasks) * tries * f.seeds
        return 2 * one + (runs * parameters * _BYTES if f.save_models else 0)
    c = config.checkpoint
    count = c.keep + 1 + bool(c.best_metric)
    if c.keep_every:
        count += config.train.steps // c.keep_every
    return one * count


def check_compile_cache(name: str) -> list[Finding]:
    """Checks that compiled functions can be cached.

    Args:
      name: `config.train.compile_cache`; JAX_COMPILATION_CACHE_DIR takes precedence, as in jax.
    """
    name = os.environ.get("JAX_COMPILATION_CACHE_DIR") or name
    if not name:
        text = "off: each start compiles everything again"
        return [warning("compile cache", text, "set config.train.compile_cache to a folder")]
    folder = storage.to_path(name)
    with made(folder):
        if fault := _fault_of_writing(folder):
            fix = "set config.train.compile_cache to another folder"
            return [warning("compile cache", f"cannot write to {folder} ({fault})", fix)]
    return [good("compile cache", f"{folder} is writable")]


@contextlib.contextmanager
def probe(folder: epath.Path) -> Iterator[epath.Path]:
    """Yields a path in `folder` for a temporary file, which is removed at exit."""
    path = folder / f".doctor-{secrets.token_hex(8)}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _fault_of_writing(folder: epath.Path) -> str:
    """Writes, syncs and reads a file; returns the problem, or "" on success."""
    text = os.urandom(16).hex()
    try:
        with probe(folder) as path:
            storage.write_text(path, text)
            read = path.read_text()
    except (OSError, ImportError) as error:  # ImportError: no library for the bucket
        return getattr(error, "strerror", None) or str(error).partition("\n")[0]
    return "" if read == text else "a file had other content than was written"


def _check_locks(folder: epath.Path) -> Finding:
    fix = "run only one process at a time in this folder; nothing prevents a second one"
    with probe(folder) as path, path.open("w") as first, path.open("w") as second:
        try:
            taken = storage.try_lock(first, f"{folder} has no locks.")
            again = storage.try_lock(second, f"{folder} has no locks.")
        except OSError as error:
            return wrong(
                "locks",
                f"{folder} cannot be locked ({error.strerror})",
                "choose a --workdir on another file system",
            )
    if taken and not again:
        return good("locks", "file locks work: two runs cannot use the same folder")
    return warning("locks", f"file locks do not work in {folder}", fix)


def _check_clock(folder: epath.Path) -> Finding:
    with probe(folder) as path:
        began = time.time()
        path.write_text("")
        ended = time.time()
        written = path.stat().st_mtime
    ahead = max(written - ended, 0.0) + min(written - began, 0.0)
    if abs(ahead) > _CLOCK:
        text = f"the file system's is {abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}"
        return warning("clock", text, "synchronize both with NTP; times in logs and files differ")
    return good("clock", "the clocks of this machine and of the file system agree")


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
