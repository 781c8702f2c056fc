"""Tolerances for equal gradients on two meshes."""

import numpy as np

from convbert_jax.training.partitioning import Params, flatten_params


def assert_agree(found: Params, expected: Params, tolerance: float = 1e-5) -> None:
    """Asserts that arrays agree within `tolerance` of their largest value.

    Biases are compared relative to the gradients of their layer. Their gradients are sums that can
    cancel, as for a key's bias, which the softmax ignores; only rounding remains then.
    """
    found, expected = flatten_params(found), flatten_params(expected)
    assert found.keys() == expected.keys()
    largest = {path: np.abs(leaf).max() for path, leaf in expected.items()}
    wrong = {}
    for path, leaf in expected.items():
        layer, _, name = path.rpartition("/")
        beside = (p for p in largest if p.startswith(f"{layer}/")) if name == "bias" else (path,)
        error = np.abs(found[path] - leaf).max()
        if not error <= tolerance * max(largest[p] for p in beside):
            wrong[path] = f"{error:.1e}, of values up to {largest[path]:.1e}"
    assert not wrong, wrong
