"""What a run asks of the devices that it finds."""

import dataclasses
import importlib.metadata

import jax
import pytest

from convbert_jax.config import Config, ConfigError
from convbert_jax.training.environment import devices


@pytest.fixture
def libtpu(monkeypatch):
    """Sets the version of libtpu that seems to be installed, None for none."""

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
    """Sets what jax is told to look for."""
    before = jax.config.jax_platforms
    yield lambda names: jax.config.update("jax_platforms", names)
    jax.config.update("jax_platforms", before)


def _fitting() -> str:
    (asked,) = (r for r in importlib.metadata.requires("jax") if r.startswith("libtpu"))
    return asked.partition(";")[0].partition("==")[2].replace("*", "0").strip()


@pytest.mark.parametrize("names", [None, "", "tpu,cpu"])
def test_a_trace_with_a_libtpu_of_another_jax_is_refused(libtpu, platforms, names):
    """It ended the program by a segmentation fault in the middle of training."""
    libtpu("0.0.1")
    platforms(names)
    config = Config()
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, profile_start=2))
    with pytest.raises(ConfigError, match=r"profile_start=2: .* libtpu==.*, and 0\.0\.1 is"):
        devices.check_devices(config, jax.devices("cpu")[0])
    devices.check_devices(Config(), jax.devices("cpu")[0])


@pytest.mark.parametrize(
    ("names", "version"), [("cpu", "0.0.1"), (None, None), (None, _fitting()), ("cuda,cpu", "9")]
)
def test_one_that_fits_or_is_not_loaded_is_not(libtpu, platforms, names, version):
    libtpu(version)
    platforms(names)
    assert devices.fault_of_profiler() == ""


@pytest.mark.parametrize(("dtype", "unit", "said"), [
    ("auto", True, True), ("auto", False, False), ("float32", True, False),
])  # fmt: skip
def test_a_matrix_unit_that_nobody_asked_for_is_named(dtype, unit, said, caplog, monkeypatch):
    if jax.default_backend() != "cpu":
        pytest.skip("of CPUs alone")
    monkeypatch.setattr(devices.processor, "multiplies_bfloat16", lambda: unit)
    with caplog.at_level("INFO"):
        config = dataclasses.replace(Config(), compute_dtype=dtype)
        devices.advise_dtype(config, devices.find_devices(config)[0])
    assert ("--config.compute_dtype=bfloat16" in caplog.text) == said
