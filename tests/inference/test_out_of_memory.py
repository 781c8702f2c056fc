"""Out of device memory in a loaded model: the error names the work and the setting to change."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import convbert_jax
from convbert_jax.training import loop, memory
from tests.inference.test_writing import make_writer, tokenizer  # noqa: F401
from tests.refusals import refused


def take_too_much(_):
    return jnp.ones((2**50,), jnp.uint8).block_until_ready()


@pytest.fixture
def small_device(monkeypatch):
    """Every batch runs out of memory when its result is fetched."""

    monkeypatch.setattr(loop, "jax", SimpleNamespace(device_get=take_too_much))


def check(error, *parts):
    for part in (*parts, "1125899906842624", "parameters", "MiB"):  # bytes requested, bytes used
        assert part in str(error.value)


@pytest.mark.parametrize(("kind", "options"), [("one", {"texts": ("said",)}), ("answers", {})])
def test_predicting(kind, options, models, predict, small_device):
    with pytest.raises(memory.OutOfMemoryError) as error:
        predict(kind, "question\tcontext\tsaid\nsun\ta moon\tover\n", "in.tsv", **options)
    check(error, "finetune.eval_batch_size")


def test_encoding(models, small_device):
    model = convbert_jax.load(str(models["one"]))
    with pytest.raises(memory.OutOfMemoryError) as error:
        model.encode(["the sun", "a moon"])
    check(error, "64 rows", "batch_size")


def test_writing(tokenizer, small_device):  # noqa: F811
    writer = make_writer(tokenizer)
    with pytest.raises(memory.OutOfMemoryError) as error:
        writer.write(["a b c"])
    check(error, "4096 tokens", "config.decoding.batch_tokens")


def test_loading(monkeypatch):
    monkeypatch.setattr(jax, "device_put", take_too_much)
    with pytest.raises(memory.OutOfMemoryError) as error:
        memory.put_on_device({"kernel": jnp.ones(2**20)})
    assert "parameters 4.0 MiB" in str(error.value)


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_jaxlib_raises_one_of_two(kind):
    """jaxlib raises ValueError instead of JaxRuntimeError in some processes."""
    with (
        refused(memory.OutOfMemoryError, "counting", "7 bytes"),
        memory.explain_out_of_memory("counting", "count less"),
    ):
        raise kind("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.")
    with pytest.raises(kind, match="another"), memory.explain_out_of_memory("counting", ""):
        raise kind("another fault")
