"""All uses of JAX's private APIs in the package: for each, JAX has no public one.

- `detect_process`: `jax.distributed.initialize` detects the cluster and connects in one call, which
  aborts if a process is missing. `distributed.connect` has to know the processes before that.
- `hide_xla_alarms`: XLA's alarms about slow compilation have level ERROR and no switch.
- `count_compiled`: JAX exports no number of compiled versions of a function.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from jax._src import clusters
from jax._src.lib import utils

_FATAL = 3  # absl's log level in C++


def detect_process() -> tuple[str | None, int | None, int | None]:
    """Returns (coordinator, number of processes, number of this process); None: not detected.

    Detects TPU slices, Slurm and Open MPI.

    Raises:
      ValueError, RuntimeError, OSError: from JAX's detection.
    """
    return clusters.ClusterEnv.auto_detect_unset_distributed_params(
        os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None, None, 300
    )[:3]


@contextlib.contextmanager
def hide_xla_alarms() -> Iterator[None]:
    """Hides log lines of XLA within the block. Failures of XLA are Python exceptions."""
    utils.absl_set_min_log_level(_FATAL)
    try:
        yield
    finally:
        utils.absl_set_min_log_level(int(os.environ["TF_CPP_MIN_LOG_LEVEL"]))  # JAX sets it


def count_compiled(function: Callable[..., Any]) -> int:
    """Returns how many versions of a function made by `jax.jit` are compiled."""
    return function._cache_size()
