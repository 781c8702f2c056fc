"""Runs in one process, each with its own folder of compiled programs."""

import os
import subprocess
import sys
import warnings

import jax
import pytest
from jax._src import distributed
from jax.experimental.compilation_cache import compilation_cache

from convbert_jax.training.environment import compilation

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch):
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(compilation, "_folder", None, raising=False)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compile_one(number):
    """A program of its own for each number."""
    jax.jit(lambda x: x * number + 1).lower(1.0).compile()
    return compilation.describe_compile_cache()


def test_each_run_counts_its_own(tmp_path):
    folder = str(tmp_path / "cache")
    for found, compiled in ((0, 1), (1, 0), (1, 0)):
        compilation.enable_compile_cache(folder)
        said = compile_one(3)
        assert said == f"compile cache {folder}: {found} programs found, {compiled} compiled"


def test_a_process_that_keeps_nothing_counts_what_it_compiles(tmp_path, monkeypatch):
    """Of several processes jax lets the first one alone write to the folder."""
    monkeypatch.setattr(distributed.global_state, "process_id", 1)
    compilation.enable_compile_cache(str(tmp_path))
    for _ in range(2):
        said = compile_one(11)
    assert said.endswith("0 programs found, 2 compiled")
    assert not list(tmp_path.iterdir())


def test_each_run_has_its_own_folder(tmp_path):
    compile_one(5)  # jax has looked for a folder, and found none
    for name in ("one", "two"):
        compilation.enable_compile_cache(str(tmp_path / name))
        assert compile_one(5).endswith(f"{name}: 0 programs found, 1 compiled")
        assert list((tmp_path / name).iterdir())
    before = sorted(tmp_path.rglob("*"))
    compilation.enable_compile_cache("")
    assert compile_one(7) == "compile cache off"
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_cannot_be_made_is_said_once(tmp_path, caplog):
    """jax would warn at every program, and the log would name a folder that later starts use."""
    (tmp_path / "file").touch()
    compilation.enable_compile_cache(str(tmp_path / "file" / "cache"))
    with warnings.catch_warnings(action="error"):
        assert compile_one(13) == compile_one(15) == "compile cache off"
    assert (
        caplog.text.count(f"config.train.compile_cache={tmp_path}/file/cache cannot be made") == 1
    )


def test_a_folder_that_somebody_else_named_goes_first(tmp_path):
    theirs = str(tmp_path / "theirs")
    jax.config.update("jax_compilation_cache_dir", theirs)
    for path in (str(tmp_path / "ours"), ""):
        compilation.enable_compile_cache(path)
        assert theirs in compile_one(9)
    assert not (tmp_path / "ours").exists()


def test_as_many_versions_as_shapes_are_no_news(caplog):
    class Step:
        versions = 0

        def _cache_size(self):
            return self.versions

    step = Step()
    watch = compilation.RecompileWatch(step, "training step", shapes=2)
    for step.versions in (1, 2, 2):
        watch.check(step=10)
    assert "compiled again" not in caplog.text
    step.versions = 3
    watch.check(step=20)
    assert "compiled again by step 20 (3 versions now)" in caplog.text


# Folds a constant for seconds, for which XLA raises an alarm. The alarm of a slow compile comes
# from the same C++ file at the same level, but only after two minutes.
FOLDS = """
import sys
import jax, jax.numpy as jnp
from convbert_jax.training.environment import compilation

def compile(side):
    def sums():
        ones = jnp.ones((side, side))
        return jax.lax.reduce_window(ones, 0.0, jax.lax.add, (9, 9), (1, 1), "SAME")
    jax.jit(sums).lower().compile()

with compilation.compiling("Compiling"):
    compile(220)
print("after", file=sys.stderr, flush=True)
compile(221)
"""


def test_alarms_of_the_compiler_are_hidden_while_it_compiles_only():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "1"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    result = subprocess.run(
        [sys.executable, "-c", FOLDS], env=environment, capture_output=True, text=True, check=True
    )
    during, after = result.stderr.split("after\n")
    assert during == ""
    assert "slow_operation_alarm" in after  # the level is what it was
