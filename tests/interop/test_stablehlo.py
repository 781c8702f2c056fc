"""The exported encoder runs from its files only, at any batch size and length."""

import json

import numpy as np
import pytest

from convbert_jax.interop import parity, stablehlo
from tests.interop.conftest import random_network


@pytest.mark.parametrize(
    "fields",
    [{"canon": "ABCD"}, pytest.param({"mixer": "attention"}, marks=pytest.mark.slow)],
    ids=["mixed, canon", "attention"],
)
def test_the_same_numbers_at_any_size(tmp_path, fields):
    network = random_network(**fields)
    stablehlo.write(tmp_path, network)
    run = stablehlo.load(tmp_path)
    rng = np.random.default_rng(0)
    for batch, length in ((1, 24), (5, 17), (2, 3)):
        tokens = rng.integers(0, 60, (batch, length))
        ids = np.where(np.arange(length) < 11, 1, 0) * np.ones((batch, 1), int)
        types = rng.integers(0, 2, (batch, length))
        expected = parity.our_outputs(network, tokens, ids, types)["hidden"]
        real = ids.astype(bool)
        found = np.asarray(run(tokens, ids, types))
        np.testing.assert_allclose(found[real], expected[real], atol=1e-5)
    signature = json.loads((tmp_path / "signature.json").read_text())
    assert signature["platforms"] == ["cpu", "cuda", "tpu"]
    assert signature["arguments"][-1]["shape"] == ["batch", "length"]
    module = (tmp_path / "encoder.mlir").read_bytes()
    assert module.startswith(b"ML\xefR")
    assert b"custom_call_target" not in module  # no platform-specific kernel
    assert b"tpu_custom_call" not in module
