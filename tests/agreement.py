"""When the gradients of two meshes are the same."""

import numpy as np

from convbert_jax.training.state import flatten
from convbert_jax.training.task import Params


def assert_agree(found: Params, expected: Params, tolerance: float = 1e-5) -> None:
    """Every array to `tolerance` of its largest value, biases to that of their layer.

    A bias gets the sum of what its layer's other gradients are made of, and where these cancel, as
    those of a key's bias do, which changes no softmax, their rounding alone is left.
    """
    found, expected = flatten(found), flatten(expected)
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
