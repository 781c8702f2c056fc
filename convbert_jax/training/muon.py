"""Muon for the matrices of the encoder layers, Adam for all other parameters."""

import re

import jax
import optax
import optax.contrib

from convbert_jax.training.state import parameter_path

# Matrices between hidden states; leading axes are layers and groups.
_MATRIX = re.compile(r"(^|/)stages/.*/(kernel|pointwise|conv_kernel)$")
_UPDATE_SIZE = 0.2  # typical RMS of Adam's updates, which Muon's are scaled to


def scale_by_muon(adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024): Nesterov momentum 0.95, orthogonalized by 5 Newton-Schulz steps.

    Updates are multiplied by 0.2 sqrt(max(inputs, outputs)), so learning rates and weight decay of
    Adam can be reused (Liu et al. 2025, §2.2).

    Args:
      adam: transformation of all other parameters: embeddings, heads, vectors, depthwise filters.
    """
    matrices = optax.chain(
        optax.contrib.scale_by_muon(weight_dimension_numbers=_dimensions),
        optax.stateless(lambda updates, params: jax.tree.map(_resize, updates)),
    )
    return optax.chain(optax.masked(matrices, find_matrices), optax.masked(adam, _find_others))


def find_matrices(params):
    """Returns a mask tree: True for parameters that Muon updates."""
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
