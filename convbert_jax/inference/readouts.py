"""Functions of hidden states on the device (`network.Finish`): pooling, masks, replaced tokens.

Each is (modules by name, hidden states [B, L, C], batch, option) -> {name: [B, ...]} in float32;
`captured` returns captures of layers instead.
"""

import jax
import jax.numpy as jnp


def _mean(parts, hidden, batch, _):
    real = (batch["segment_ids"] > 0)[..., None]
    total = jnp.where(real, hidden.astype(jnp.float32), 0.0).sum(axis=1)
    return {"vectors": total / real.sum(axis=1)}


def _first(parts, hidden, batch, _):
    return {"vectors": hidden[:, 0].astype(jnp.float32)}


def _all(parts, hidden, batch, _):
    return {"vectors": hidden.astype(jnp.float32)}


POOLINGS = {"mean": _mean, "cls": _first, "none": _all}


def fill(parts, hidden, batch, option):
    """Returns the most probable tokens at batch["places"] [B, M].

    Args:
      option: (top_k, number of vocabulary entries; a padded embedding table has more rows).

    Returns:
      `scores` and `tokens`, [B, M, top_k].
    """
    top_k, entries = option
    picked = jnp.take_along_axis(hidden, batch["places"][..., None], axis=1)
    logits = parts["mlm_head"](picked, parts["embeddings"])[..., :entries]
    scores, tokens = jax.lax.top_k(jax.nn.softmax(logits), top_k)
    return {"scores": scores, "tokens": tokens}


def captured(parts, encoded, batch, _):
    """Returns the captures of each stage as "STAGE/NAME" [B, layers, ...]."""
    _, seen = encoded
    return {
        f"{stage}/{name}": jnp.swapaxes(array, 0, 1)
        for stage, arrays in enumerate(seen)
        for name, array in arrays.items()
    }


def suspect(parts, hidden, batch, _):
    return {"probability": jax.nn.sigmoid(parts["rtd_head"](hidden))}
