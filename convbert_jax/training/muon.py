"""Muon for the matrices of a network's layers, Adam for all else."""

import re

import jax
import optax
import optax.contrib

from convbert_jax.training.state import parameter_path

# Matrices that take hidden states to hidden states; leading axes are layers and groups.
_MATRIX = re.compile(r"(^|/)stages/.*/(kernel|pointwise|conv_kernel)$")
_UPDATE_SIZE = 0.2  # root mean square of Adam's updates, near which Muon's are brought


def scale_by_muon(adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """The momentum of each matrix with its singular values brought near 1 (Jordan et al. 2024:
    Nesterov, 0.95, five steps of Newton-Schulz), times 0.2 sqrt(max(inputs, outputs)), so that
    rates and decay of Adam suit (Liu et al. 2025, §2.2).

    Args:
      adam: for embeddings, heads, vectors, and filters that are no matrix.
    """
    matrices = optax.chain(
        optax.contrib.scale_by_muon(weight_dimension_numbers=_dimensions),
        optax.stateless(lambda updates, params: jax.tree.map(_resize, updates)),
    )
    return optax.chain(optax.masked(matrices, find_matrices), optax.masked(adam, _find_others))


def find_matrices(params):
    """True for what Muon updates."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: bool(_MATRIX.search(parameter_path(path))), params
    )


def _find_others(params):
    return jax.tree.map(lambda found: not found, find_matrices(params))


def _dimensions(params):
    return jax.tree.map(
        lambda leaf: optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1), params
    )


def _resize(update: jax.Array) -> jax.Array:
    return _UPDATE_SIZE * max(update.shape[-2:]) ** 0.5 * update
