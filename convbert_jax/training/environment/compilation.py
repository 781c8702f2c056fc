"""Persistent compilation cache, progress of compilations and detection of recompilation."""

import contextlib
from collections.abc import Iterator

import jax
from absl import logging
from jax.experimental.compilation_cache import compilation_cache

from convbert_jax import files, progress
from convbert_jax.training.environment import private_jax

# Counts of the run. JAX's event "cache_misses" counts programs written, by process 0 only.
_events = {"cache_hits": 0, "compile_requests_use_cache": 0}
_folder: str | None = None  # cache folder set by this module


def enable_compile_cache(path: str) -> None:
    """Sets the folder of JAX's persistent compilation cache; "" disables the cache.

    Call it at the start of a run: it resets the counts of `describe_compile_cache`. A folder that
    is already set, for example by JAX_COMPILATION_CACHE_DIR, takes precedence. If the folder cannot
    be created, logs a warning and disables the cache; JAX would warn for every program.

    Args:
      path: folder; several hosts need a path that all can read.

    Raises:
      UserError: as `files.to_path`.
    """
    global _folder
    _events.update(dict.fromkeys(_events, 0))
    if jax.config.jax_compilation_cache_dir != _folder:
        return
    wanted = _make_folder(path) if path else None
    if wanted == _folder:
        return
    _folder = wanted
    jax.config.update("jax_compilation_cache_dir", wanted)
    # The defaults skip programs that are small or compile in less than a second.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # JAX reads the folder only at its first compilation.
    compilation_cache.reset_cache()


def _make_folder(path: str) -> str | None:
    """Creates the cache folder; returns its path for JAX, or None if it cannot be created."""
    folder = files.to_path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logging.warning(
            "config.train.compile_cache=%s cannot be created: %s. The next start will compile all "
            "programs again. Set a writable folder.",
            path,
            error.strerror or error,
        )
        return None
    return str(folder)


def describe_compile_cache() -> str:
    """Describes cache hits and misses of the run in this process, or "compile cache off"."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder:
        return "compile cache off"
    found, asked = _events["cache_hits"], _events["compile_requests_use_cache"]
    return f"compile cache {folder}: {found} programs found, {asked - found} compiled"


@contextlib.contextmanager
def compiling(what: str) -> Iterator[None]:
    """Logs `what` and the seconds so far while a program compiles in this block.

    Hides XLA's alarms ("Very slow compile?", "Constant folding an instruction is taking > 1s"),
    which have level ERROR and no switch. Failures of XLA are Python exceptions.
    """
    with private_jax.hide_xla_alarms(), progress.log_seconds(what):
        yield


class RecompileWatch:
    """Monitor that warns if a function is compiled for more than `shapes` input shapes."""

    def __init__(self, function, name: str, shapes: int = 1):
        self._function = function
        self._name = name
        self._known = shapes

    def check(self, step: int) -> None:
        compiled = private_jax.count_compiled(self._function)
        if compiled > self._known:
            logging.warning(
                "The %s was recompiled by step %d (%d versions): the shapes or dtypes of its input "
                "change, and the run stops for each compilation.",
                self._name,
                step,
                compiled,
            )
            self._known = compiled


def _count_event(event: str, **_) -> None:
    name = event.removeprefix("/jax/compilation_cache/")
    if name in _events:
        _events[name] += 1


jax.monitoring.register_event_listener(_count_event)  # once per process
