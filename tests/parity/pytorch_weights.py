"""Conversion of parameters or gradients of Hugging Face's PyTorch encoders to our layout."""

import types

import jax
import jax.numpy as jnp
import numpy as np

from convbert_jax.interop import tables
from convbert_jax.interop.networks import stack, to_tree
from convbert_jax.models.mixers.mixed import Mixed


def read(depth, theirs):
    """Convert arrays by name to {"embeddings": ..., "encoder": ...}; all arrays must be used."""
    left = dict(theirs)
    groups = left["encoder.layer.0.intermediate.dense.weight"].ndim - 1  # 0 if not grouped
    mixer = {f"mixer/{name}": row for name, row in tables.MIXERS[Mixed][1].items()}
    layer = types.SimpleNamespace(mixer=Mixed.__new__(Mixed), ffn_groups=groups)
    layers = {f"layers/{i}/{module}": entry for i in range(depth) for module, entry in
              (tables.LAYER | (tables.GROUPED if groups > 1 else {}) | mixer).items()}  # fmt: skip
    paths = [
        f"{module}/{leaf}"
        for module, (kind, *_) in (tables.OUTSIDE | layers).items()
        for leaf in tables.KINDS[kind]
    ]
    places = tables.huggingface_places(paths, "convbert", layer, prefix="")
    flat = {
        path: np.ascontiguousarray(place.layout.read(left.pop(place.name)))
        for path, place in places.items()
        if place.name in left
    }
    assert not left, f"unused arrays: {sorted(left)}"
    stages = types.SimpleNamespace(stages=[types.SimpleNamespace(depth=depth)])
    return jax.tree.map(jnp.asarray, to_tree(stack(flat, stages)))
