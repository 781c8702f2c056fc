"""Devices, compile cache, signals and watchdog of a run."""

import dataclasses
import http.server
import importlib.metadata
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from convbert_jax.config import Config, ConfigError
from convbert_jax.training import distributed, signals
from convbert_jax.training import environment as environment_lib
from convbert_jax.training.signals import StopSignals
from tests.conftest import REPOSITORY
from tests.refusals import refused

# Devices


@pytest.fixture
def libtpu(monkeypatch):
    """Sets the apparent version of libtpu; None: not installed."""

    def set_version(version: str | None):
        real = importlib.metadata.version

        def installed(name):
            if name != "libtpu":
                return real(name)
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(importlib.metadata, "version", installed)

    return set_version


@pytest.fixture
def platforms():
    """Sets the platforms that JAX looks for."""
    before = jax.config.jax_platforms
    yield lambda names: jax.config.update("jax_platforms", names)
    jax.config.update("jax_platforms", before)


def test_a_trace_with_a_libtpu_of_another_jax_is_refused(libtpu, platforms):
    """This combination caused a segmentation fault in the middle of training."""
    config = dataclasses.replace(
        Config(), train=dataclasses.replace(Config().train, profile_start=2)
    )
    libtpu("0.0.1")
    for names in (None, "", "tpu,cpu"):
        platforms(names)
        with refused(ConfigError, "0.0.1", field="config.train.profile_start", value=2):
            environment_lib.check_devices(config, jax.devices("cpu")[0])
        environment_lib.check_devices(Config(), jax.devices("cpu")[0])
    (asked,) = (r for r in importlib.metadata.requires("jax") if r.startswith("libtpu"))
    fitting = asked.partition(";")[0].partition("==")[2].replace("*", "0").strip()
    for names, version in (("cpu", "0.0.1"), (None, None), (None, fitting), ("cuda,cpu", "9")):
        libtpu(version)
        platforms(names)
        environment_lib.check_devices(config, jax.devices("cpu")[0])


@pytest.mark.parametrize(
    ("dtype", "unit", "advised"),
    [("auto", True, True), ("auto", False, False), ("float32", True, False)],
)
def test_an_unused_matrix_unit_is_named(dtype, unit, advised, caplog, monkeypatch):
    if jax.default_backend() != "cpu":
        pytest.skip("only CPUs")
    monkeypatch.setattr(environment_lib.machine, "multiplies_bfloat16", lambda: unit)
    with caplog.at_level("INFO"):
        config = dataclasses.replace(Config(), compute_dtype=dtype)
        environment_lib.advise_dtype(config, environment_lib.find_devices(config)[0])
    assert ("--config.compute_dtype=bfloat16" in caplog.text) == advised


# Compilation


@pytest.fixture
def no_cache(monkeypatch):
    settings = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in settings}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(environment_lib, "_folder", None, raising=False)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compile_one(number) -> list[int] | None:
    """Compiles a distinct program per number; returns [cache hits, compilations] or None."""
    jax.jit(lambda x: x * number + 1).lower(1.0).compile()
    described = environment_lib.describe_compile_cache()
    if described == "compile cache off":
        return None
    counts = described.rpartition(": ")[2]
    return [int(word) for word in counts.split() if word.isdecimal()]


def test_each_run_counts_its_own_programs_in_its_own_folder(no_cache, tmp_path):
    assert compile_one(5) is None  # JAX has already looked for a folder without success
    for name, expected in (("one", [0, 1]), ("one", [1, 0]), ("one", [1, 0]), ("two", [0, 1])):
        environment_lib.enable_compile_cache(str(tmp_path / name))
        assert compile_one(3) == expected
        assert str(tmp_path / name) in environment_lib.describe_compile_cache()
        assert list((tmp_path / name).iterdir())
    before = sorted(tmp_path.rglob("*"))
    environment_lib.enable_compile_cache("")
    assert compile_one(7) is None
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_cannot_be_made_is_reported_once(no_cache, tmp_path, caplog):
    """JAX would warn for every program and log an unusable folder."""
    (tmp_path / "file").touch()
    environment_lib.enable_compile_cache(str(tmp_path / "file" / "cache"))
    with warnings.catch_warnings(action="error"):
        assert compile_one(13) is compile_one(15) is None
    (record,) = caplog.records
    assert f"config.train.compile_cache={tmp_path}/file/cache" in record.getMessage()


def test_a_folder_from_the_environment_goes_first(no_cache, tmp_path):
    theirs = str(tmp_path / "theirs")
    jax.config.update("jax_compilation_cache_dir", theirs)
    for path in (str(tmp_path / "ours"), ""):
        environment_lib.enable_compile_cache(path)
        compile_one(9)
        assert theirs in environment_lib.describe_compile_cache()
    assert not (tmp_path / "ours").exists()


def test_more_versions_than_shapes_are_reported(caplog):
    step = jax.jit(lambda x: x + 1)
    watch = environment_lib.RecompileWatch(step, "training step", shapes=2)
    for length in (1, 2, 2):
        step(jnp.ones(length))
        watch.check(step=10)
    assert not caplog.records
    step(jnp.ones(3))
    watch.check(step=20)
    watch.check(step=30)
    (record,) = caplog.records
    assert record.args[1:] == (20, 3)


# Constant folding for seconds raises an XLA alarm. The alarm for slow compilation comes from the
# same C++ file at the same level, but only after two minutes.
FOLDS = """
import sys
import jax, jax.numpy as jnp
from convbert_jax.training import environment

def compile(side):
    def sums():
        ones = jnp.ones((side, side))
        return jax.lax.reduce_window(ones, 0.0, jax.lax.add, (9, 9), (1, 1), "SAME")
    jax.jit(sums).lower().compile()

with environment.compiling("Compiling"):
    compile(220)
print("after", file=sys.stderr, flush=True)
compile(221)
"""


@pytest.mark.slow
def test_alarms_of_the_compiler_are_hidden_while_it_compiles_only():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "1"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    result = subprocess.run(
        [sys.executable, "-c", FOLDS], env=environment, capture_output=True, text=True, check=True
    )
    during, after = result.stderr.split("after\n")
    assert during == ""
    assert "slow_operation_alarm" in after  # the level is restored


# Signals


def test_a_second_interrupt_is_handled_as_before():
    """KeyboardInterrupt is raised, also in a notebook; the process continues."""
    # Also if the tests run with SIGINT ignored, as after `&`.
    kept = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with StopSignals() as stop:
            assert stop.requested() is None
            signal.raise_signal(signal.SIGINT)
            assert stop.requested() == "SIGINT"
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, kept)


class Metadata(http.server.BaseHTTPRequestHandler):
    """Simulates the metadata server: answers last_etag=0 at once, later requests on a change."""

    def do_GET(self):
        self.server.asked.append((self.path, self.headers["Metadata-Flavor"]))
        key = self.path.partition("?")[0].rpartition("/")[2]
        if key == "maintenance-event":
            self.server.both.set()
        if not self.path.endswith("last_etag=0"):
            self.server.changed.wait(60)
        changed = self.server.changed.is_set() and key == "preempted"
        text = b"TRUE" if changed else {"preempted": b"FALSE"}.get(key, b"NONE")
        self.send_response(200)
        self.send_header("ETag", "f00" if not changed else "f01")
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def metadata(monkeypatch):
    with http.server.ThreadingHTTPServer(("localhost", 0), Metadata) as server:
        server.daemon_threads = True
        server.asked, server.changed, server.both = [], threading.Event(), threading.Event()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_HOST", f"localhost:{server.server_port}")
        yield server
        server.changed.set()
        server.shutdown()


def test_a_preemption_notice_stops_as_a_signal_and_leaves_the_first_signal_to_come(metadata):
    with StopSignals() as stop:
        ours = signal.getsignal(signal.SIGTERM)
        assert stop.requested() is None
        assert metadata.both.wait(60)
        metadata.changed.set()
        deadline = time.monotonic() + 60
        while stop.requested() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stop.requested() == "SIGTERM"
        assert signal.getsignal(signal.SIGTERM) == ours  # a second one keeps the save
    paths, flavors = zip(*metadata.asked, strict=True)
    for key in ("preempted", "maintenance-event"):
        assert any(f"/instance/{key}?wait_for_change=true" in path for path in paths)
    assert set(flavors) == {"Google"}


def test_no_notice_is_read_without_a_tpu_or_a_server(monkeypatch):
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    before = set(threading.enumerate())
    with StopSignals():
        assert not [t for t in threading.enumerate() if t not in before and "notice" in t.name]


# Watchdog


@pytest.fixture
def ended(monkeypatch):
    """Event that is set when a watchdog ends the process."""
    event = threading.Event()
    monkeypatch.setattr(distributed, "exit_after_hang", event.set)
    return event


def test_the_first_batch_of_its_shapes_may_take_longer(ended):
    """New shapes are compiled, for example another pair length or another task's bucket."""
    seen, watched = [], signals.Watchdog(0.5)

    def program(factor, batch):
        if batch["token_ids"].shape not in seen:
            seen.append(batch["token_ids"].shape)
            time.sleep(2)
        return factor * batch["token_ids"].sum()

    def call(length):
        batch = {"token_ids": jnp.ones((2, length))}
        return watched.call(program, 3.0, batch, batch=batch)

    with watched.watching():
        for length in (8, 16, 8):
            assert call(length) == 6 * length
        assert not ended.is_set()
        seen.clear()
        call(8)  # compiled before, so this is a hang
        assert ended.is_set()


def test_a_first_step_may_take_longer_and_not_forever(ended, monkeypatch):
    """Compilation is slow, but restoring or waiting for other processes can hang."""
    with signals.Watchdog(0.1).watching():
        assert not ended.wait(0.5)
    monkeypatch.setattr(signals, "_FIRST", 0.2)
    with signals.Watchdog(0.1).watching():
        assert ended.wait(10)


HANGS = """
import time
from convbert_jax.training.signals import Watchdog
watchdog = Watchdog(3.0)
with watchdog.watching():
    for _ in range(4):
        watchdog.beat()
        time.sleep(0.3)
    print("alive", flush=True)
    a_place_to_find = time.sleep
    a_place_to_find(60)
"""


def test_a_run_that_hangs_ends_with_its_stacks():
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", HANGS],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.stdout == "alive\n"
    assert done.returncode == distributed.EXIT_CODE
    assert "config.train.hang_seconds=3" in done.stderr
    assert 'File "<string>", line 11' in done.stderr
    assert time.monotonic() - started < 60
