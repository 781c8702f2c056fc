"""Where a run writes: its folder, the space there, locks, the compile cache, the clock."""

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator

from etils import epath

from convbert_jax import files
from convbert_jax.config import Config
from convbert_jax.doctor.finding import Finding, good, warning, wrong

_CLOCK = 2.0  # seconds that a file system's clock may be off
_MOMENTS = 3  # a checkpoint has the parameters and two moments of their size
_BYTES = 4  # of a float32


@contextlib.contextmanager
def made(folder: epath.Path) -> Iterator[None]:
    """Context in which `folder` is there, if it can be made; what was made is removed again."""
    absent: list[epath.Path] = []
    if not files.is_remote(folder):
        place = folder
        while not place.exists() and place != place.parent:
            absent.append(place)
            place = place.parent
    new = []
    try:
        with contextlib.suppress(OSError):  # the check that follows says what is wrong
            for place in reversed(absent):
                place.mkdir()
                new.append(place)
        yield
    finally:
        for place in reversed(new):
            with contextlib.suppress(OSError):  # somebody else uses it by now
                place.rmdir()


def check_workdir(workdir: epath.Path) -> list[Finding]:
    """Whether it can be written, what guards it, and its clock; leaves nothing there."""
    with made(workdir):
        if fault := _fault_of_writing(workdir):
            fix = "choose another --workdir, or let this user write there"
            return [wrong("workdir", f"{workdir} cannot be written ({fault})", fix)]
        findings = [good("workdir", f"{workdir} can be written")]
        if files.is_remote(workdir):
            text = "a bucket has none; a run gives signs of life there, which a second start heeds"
            return [*findings, good("locks", text)]
        return [*findings, _check_locks(workdir), _check_clock(workdir)]


def check_space(workdir: epath.Path, config: Config, parameters: int) -> list[Finding]:
    """Whether the checkpoints of the run have space on the disk of the nearest folder there is.

    Args:
      parameters: of the model.
    """
    if files.is_remote(workdir):
        return []
    need = max(0, checkpoint_bytes(config, parameters) - _bytes_of_checkpoints(workdir))
    place = workdir
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    text = f"{_gib(free)} free, the run's checkpoints will take {_gib(need)} more"
    if free < need:
        fix = "free some, choose another --workdir, or keep fewer: config.checkpoint.keep"
        if config.recipe == "finetune":
            fix = "free some, choose another --workdir, or set config.finetune.save_models=false"
        return [wrong("space", text, fix)]
    return [good("space", text)]


def _bytes_of_checkpoints(workdir: epath.Path) -> int:
    """What those take that are there; a run that is under way may remove them meanwhile."""
    size = 0
    for path in workdir.rglob("checkpoints/**/*"):
        with contextlib.suppress(OSError):
            size += path.stat().st_size
    return size


def checkpoint_bytes(config: Config, parameters: int) -> int:
    """What the checkpoints of a whole run take at most: those that are kept and the one that is
    written before the oldest goes; of fine-tuning also the models, which have no moments.
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
    """Whether compiled programs can be kept.

    Args:
      name: `config.train.compile_cache`; what the environment names goes first, as for jax.
    """
    name = os.environ.get("JAX_COMPILATION_CACHE_DIR") or name
    if not name:
        text = "off: each start compiles everything anew"
        return [warning("compile cache", text, "name a folder with config.train.compile_cache")]
    folder = files.to_path(name)
    with made(folder):
        if fault := _fault_of_writing(folder):
            fix = "name another folder with config.train.compile_cache"
            return [warning("compile cache", f"{folder} cannot be written ({fault})", fix)]
    return [good("compile cache", f"{folder} can be written")]


@contextlib.contextmanager
def probe(folder: epath.Path) -> Iterator[epath.Path]:
    """A name in `folder` for a file of a check, which is removed in the end."""
    path = folder / f".doctor-{secrets.token_hex(8)}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _fault_of_writing(folder: epath.Path) -> str:
    """Why a file could not be written, synced and read again, "" if it could."""
    text = os.urandom(16).hex()
    try:
        with probe(folder) as path:
            files.write_text(path, text)
            read = path.read_text()
    except (OSError, ImportError) as error:  # a library that talks to a bucket is absent or refused
        return getattr(error, "strerror", None) or str(error).partition("\n")[0]
    return "" if read == text else "what is read is not what was written"


def _check_locks(folder: epath.Path) -> Finding:
    fix = "let one run at a time use the folder; nothing else guards it"
    with probe(folder) as path, path.open("w") as first, path.open("w") as second:
        try:
            taken = files.try_lock(first, f"{folder} has no locks.")
            again = files.try_lock(second, f"{folder} has no locks.")
        except OSError as error:
            return wrong(
                "locks",
                f"{folder} cannot be locked ({error.strerror})",
                "choose a --workdir on another file system",
            )
    if taken and not again:
        return good("locks", "they work there: two runs cannot take one folder")
    return warning("locks", f"{folder} has none that work", fix)


def _check_clock(folder: epath.Path) -> Finding:
    with probe(folder) as path:
        began = time.time()
        path.write_text("")
        ended = time.time()
        written = path.stat().st_mtime
    ahead = max(written - ended, 0.0) + min(written - began, 0.0)
    if abs(ahead) > _CLOCK:
        text = f"that of the file system is {abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}"
        return warning("clock", text, "set both by NTP, or times in logs and files mislead")
    return good("clock", "this machine and the file system agree")


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
