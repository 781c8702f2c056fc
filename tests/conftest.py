"""Runs before anything imports jax: a CPU with eight simulated devices; where real data is."""

import gc
import os
import pathlib
import signal

from tests import compiling

os.environ["JAX_PLATFORMS"] = os.environ.get("CONVBERT_TEST_PLATFORM", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), compiling.flags(8, compiling.ANYWHERE)]
)
# Devices wait for each other in threads of a pool that is as large as the machine has cores: on two
# of them, eight devices that gather wait forever, and XLA ends the process.
os.environ["PJRT_NPROC"] = "32"
# No operation carries the hundred frames above it, of pytest and of jax: tracing is half the time.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# Compile-only use of the TPU compiler (marker tpu_compile); without the second one two test
# processes collide on a lock file.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import absl.logging
import hypothesis
import jax
import pytest

# A shell that starts the tests in the background ignores SIGINT, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# No deadline, because the first example compiles. The same examples in each run; others are drawn
# with --hypothesis-profile=random.
hypothesis.settings.register_profile("random", deadline=None)
hypothesis.settings.register_profile("convbert_jax", deadline=None, derandomize=True)
hypothesis.settings.load_profile("convbert_jax")

PLATFORM = os.environ["JAX_PLATFORMS"]
if PLATFORM == "cpu":
    # XLA reads its flags once, here. What is loaded later finds those that it knows too, and what
    # is compiled is kept under those alone.
    with pytest.MonkeyPatch.context() as patch:
        ours = f"{compiling.CHEAPLY} {compiling.PATIENTLY}"
        patch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} {ours}")
        jax.devices()

pytest_plugins = ["tests.running", "tests.runs"]

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Each compiled program holds memory maps, of which a process has 65,530: with the programs of
    all modules the compiler ends in a segmentation fault.
    """
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def _log_as_before():
    """Flags that a test sets and gives back set the level of absl's log, and leave it there."""
    logger = absl.logging.get_absl_logger()
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True, scope="session")
def _keep_programs(pytestconfig):
    """Compiles each program once for all tests and the processes that they start, of this run and
    of the next ones.
    """
    if cache := getattr(pytestconfig, "cache", None):
        folder = str(cache.mkdir("convbert_jax-programs"))
        os.environ.update(compiling.keep_in(folder))
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@pytest.fixture(autouse=True, scope="session")
def _no_profiler():
    """A trace is of the whole process: in that of all tests, half an hour old and with a hundred
    threads, the profiler ends in a segmentation fault.
    """

    def refuse(*_, **__):
        raise AssertionError("a test starts the profiler in a process of its own")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.profiler, "start_trace", refuse)
        yield


@pytest.fixture(scope="session")
def real_data() -> pathlib.Path:
    """Folder of real text (CONVBERT_DATA, default ../shared/data); skips where it is absent."""
    folder = pathlib.Path(os.environ.get("CONVBERT_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"needs the real data folder; {folder.name} is absent, set CONVBERT_DATA")
    return folder


def pytest_collection_finish():
    """What was imported stays: no collection of garbage need look at a million objects of it."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    """Tests for an accelerator need one, also where -m on the command line selects them."""
    for name, platforms in (("gpu", ("gpu", "cuda")), ("tpu", ("tpu",))):
        for item in items:
            if item.get_closest_marker(name) and PLATFORM not in platforms:
                reason = f"needs a {name.upper()}: CONVBERT_TEST_PLATFORM={platforms[-1]}"
                item.add_marker(pytest.mark.skip(reason=reason))
