"""Setup before JAX is imported: a CPU with eight simulated devices; location of real data."""

import gc
import os
import pathlib
import signal

from tests import compiling

os.environ["JAX_PLATFORMS"] = os.environ.get("CONVBERT_TEST_PLATFORM", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), compiling.flags(8, compiling.ANYWHERE)]
)
# Simulated devices wait for each other in a thread pool with one thread per core. With two cores,
# an all-gather over eight devices would deadlock, and XLA would abort.
os.environ["PJRT_NPROC"] = "32"
# Omits the hundred stack frames of pytest and JAX from each operation, which halves tracing time.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# Compile-only use of the TPU compiler (marker tpu_compile). Without the second variable two test
# processes collide on a lock file.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import absl.logging
import hypothesis
import jax
import pytest

# A shell that starts the tests in the background ignores SIGINT, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# No deadline, because the first example compiles. Examples are the same in each run;
# --hypothesis-profile=random draws new ones.
hypothesis.settings.register_profile("random", deadline=None)
hypothesis.settings.register_profile("convbert_jax", deadline=None, derandomize=True)
hypothesis.settings.load_profile("convbert_jax")

PLATFORM = os.environ["JAX_PLATFORMS"]
if PLATFORM == "cpu":
    # XLA reads its flags once, here. Afterwards the environment has only flags that libtpu
    # supports, and cache keys contain only these.
    with pytest.MonkeyPatch.context() as patch:
        ours = f"{compiling.CHEAPLY} {compiling.PATIENTLY}"
        patch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} {ours}")
        jax.devices()

pytest_plugins = ["tests.running", "tests.runs"]

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Clears compiled programs after each module.

    Each program holds memory maps, and a process may have 65,530. The programs of all modules would
    exceed that limit and crash the compiler.
    """
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def _log_as_before():
    """Restores the log level of absl, which flags set by a test would change permanently."""
    logger = absl.logging.get_absl_logger()
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True, scope="session")
def _keep_programs(pytestconfig):
    """Caches compiled programs across tests, their processes and later runs."""
    if cache := getattr(pytestconfig, "cache", None):
        folder = str(cache.mkdir("convbert_jax-programs"))
        os.environ.update(compiling.keep_in(folder))
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@pytest.fixture(autouse=True, scope="session")
def _no_profiler():
    """Disables the profiler.

    A trace covers the whole process. In a process with half an hour of tests and a hundred threads
    the profiler crashes with a segmentation fault.
    """

    def refuse(*_, **__):
        raise AssertionError("tests must start the profiler in a separate process")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.profiler, "start_trace", refuse)
        yield


@pytest.fixture(scope="session")
def real_data() -> pathlib.Path:
    """Folder of real text (CONVBERT_DATA, default ../shared/data); skips if it does not exist."""
    folder = pathlib.Path(os.environ.get("CONVBERT_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"needs the real data folder; {folder.name} is absent, set CONVBERT_DATA")
    return folder


def pytest_collection_finish():
    """Excludes a million imported objects from garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    """Skips accelerator tests without an accelerator, even if selected by -m."""
    for name, platforms in (("gpu", ("gpu", "cuda")), ("tpu", ("tpu",))):
        for item in items:
            if item.get_closest_marker(name) and PLATFORM not in platforms:
                reason = f"needs a {name.upper()}: CONVBERT_TEST_PLATFORM={platforms[-1]}"
                item.add_marker(pytest.mark.skip(reason=reason))
