"""Whatever a folder or a checkpoint holds, it is read as it was written or refused in a sentence:
at once, in little memory, without a traceback.
"""

import contextlib
import pathlib
import re
import shutil
import signal
import threading
import time

import numpy as np
import pytest

from convbert_jax.config import UserError
from convbert_jax.interop import sources
from convbert_jax.interop.huggingface import folder as huggingface
from convbert_jax.interop.networks import split
from convbert_jax.interop.tensorflow1 import checkpoint as tensorflow1
from tests.interop import hostile_files
from tests.interop.conftest import make_config, random_network, random_params

SECONDS = 10
MEGABYTES = 1_000
# What nobody asks for, or what has a default, may be anything.
HARMLESS = (
    "an entry that nests", "a state of binary", "a state of another", "heads that nest",
    "architectures of numbers", "labels by the million", "use that nests", "vocabulary of lists",
    "a problem of lists",
)  # fmt: skip


@pytest.fixture(scope="module")
def network():
    return random_network(generator={"kind": "uniform"}, mask_convolution=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, network):
    place = tmp_path_factory.mktemp("sound") / "folder"
    huggingface.write_network(place, network, pad_id=0)
    return place


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = make_config(mask_convolution=False)
    place = tmp_path_factory.mktemp("sound") / "checkpoint"
    networks = split(config, random_params(config))
    tensorflow1.write_checkpoint(place / "model.ckpt-7", networks, step=7, moments=(networks,) * 2)
    return place


@contextlib.contextmanager
def limits():
    """Fails where reading takes too long or too much memory."""

    def stop(*_):
        raise TimeoutError(f"still reading after {SECONDS} seconds")

    forget_peak()
    before = peak()
    assert threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    start = time.monotonic()
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    assert time.monotonic() - start < SECONDS
    assert peak() - before < MEGABYTES


def forget_peak() -> None:
    with contextlib.suppress(OSError):  # not on every system; then only a new peak is seen
        pathlib.Path("/proc/self/clear_refs").write_text("5")


def peak() -> float:
    """Megabytes of memory this process has held at once."""
    with contextlib.suppress(OSError):
        status = pathlib.Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024
    return 0.0


def read_or_refuse(place, sound) -> bool:
    """Whether it was read, and then it is what was written."""
    with limits():
        try:
            source = sources.read_source(str(place))
        except UserError as error:
            refused = str(error)
        else:
            refused = ""
    if refused:
        assert "\n" not in refused
        assert len(refused.encode()) < 1_000
        return False
    for name, read in source.networks.items():
        for path, array in read.parameters.items():
            np.testing.assert_array_equal(array, sound.networks[name].parameters[path])
    return True


@pytest.mark.parametrize("name", hostile_files.TENSORFLOW)
def test_tensorflow(checkpoint, tmp_path, name):
    sound = sources.read_source(str(checkpoint))
    shutil.copytree(checkpoint, tmp_path / "it")
    hostile_files.TENSORFLOW[name](tmp_path / "it")
    read = read_or_refuse(tmp_path / "it", sound)
    assert read == (name in HARMLESS)


@pytest.mark.filterwarnings("ignore")  # PyTorch's, of what is made here
@pytest.mark.parametrize("name", hostile_files.HUGGING_FACE)
def test_hugging_face(folder, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    sound = sources.read_source(str(folder))
    shutil.copytree(folder, tmp_path / "it")
    hostile_files.HUGGING_FACE[name](tmp_path / "it")
    read = read_or_refuse(tmp_path / "it", sound)
    assert read == (name in HARMLESS)
    assert not (tmp_path / "executed").exists()
