"""What was compiled, and what the cache on disk saved."""

import contextlib
from collections.abc import Iterator

import jax
from absl import logging
from jax.experimental.compilation_cache import compilation_cache

from convbert_jax import files, progress
from convbert_jax.training.environment import private_jax

# Of the run. What jax calls "cache_misses" are the programs that it wrote to the folder, and of
# several processes only the first one writes.
_events = {"cache_hits": 0, "compile_requests_use_cache": 0}
_folder: str | None = None  # of compiled programs, where it is this module that named it to jax


def enable_compile_cache(path: str) -> None:
    """Keeps compiled programs in the folder `path` over restarts; "" keeps none.

    To be called when a run begins: `describe_compile_cache` counts from here on. What this process
    compiled before stays in its memory. Several hosts need one path that all can read. A folder
    that somebody else named goes first, by the environment variable JAX_COMPILATION_CACHE_DIR for
    one. A folder that cannot be made is a warning, and nothing is kept: jax would take every
    program for one that may be there, and say of each why not.

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
    # The defaults leave out what is small or compiles in under a second.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # jax asks for the folder once, when it first compiles.
    compilation_cache.reset_cache()


def _make_folder(path: str) -> str | None:
    """The folder as jax wants it; None where it is not there and cannot be made."""
    folder = files.to_path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logging.warning(
            "config.train.compile_cache=%s cannot be made (%s): the next start compiles everything "
            "anew; name a folder that can be written.",
            path,
            error.strerror or error,
        )
        return None
    return str(folder)


def describe_compile_cache() -> str:
    """Hits and misses of the run in this process, in words; "off" without a cache."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder:
        return "compile cache off"
    found, asked = _events["cache_hits"], _events["compile_requests_use_cache"]
    return f"compile cache {folder}: {found} programs found, {asked - found} compiled"


@contextlib.contextmanager
def compiling(what: str) -> Iterator[None]:
    """Logs `what` and the seconds so far while a program compiles in this block.

    Replaces XLA's alarms ("Very slow compile?", "Constant folding an instruction is taking > 1s"),
    which have level ERROR and no switch of their own. Failures of XLA are Python exceptions.
    """
    with private_jax.hide_xla_alarms(), progress.log_seconds(what):
        yield


class RecompileWatch:
    """Warns when a function is compiled more often than for the `shapes` of its input."""

    def __init__(self, function, name: str, shapes: int = 1):
        self._function = function
        self._name = name
        self._known = shapes

    def check(self, step: int) -> None:
        compiled = private_jax.count_compiled(self._function)
        if compiled > self._known:
            logging.warning(
                "The %s was compiled again by step %d (%d versions now): shapes or types of its "
                "input change, and every new one stops the run to compile.",
                self._name,
                step,
                compiled,
            )
            self._known = compiled


def _count_event(event: str, **_) -> None:
    name = event.removeprefix("/jax/compilation_cache/")
    if name in _events:
        _events[name] += 1


jax.monitoring.register_event_listener(_count_event)  # once, however many runs there are
