"""Applies a network to rows on the device, batched by length in a few compiled shapes.

Functions of hidden states (`Finish`), such as pooling or predictions for masked tokens, are part of
the compiled program.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from convbert_jax.config.training import POOLINGS
from convbert_jax.data.samplers import choose_buckets
from convbert_jax.data.tasks.labelled_text import Rows
from convbert_jax.finetuning.fitting import predict_rows
from convbert_jax.inference.predictor import choose_batch_sizes, several_batch_sizes
from convbert_jax.interop.networks import Network, make_modules, stack, to_tree
from convbert_jax.objectives.contrastive import pool
from convbert_jax.ops import dispatch
from convbert_jax.training import environment, memory

PRETRAINING_HEADS = ("mlm_head", "rtd_head")
# (modules by name, hidden states [B, L, C], batch, option) -> arrays [B, ...] by name
# With a capture the second argument is (hidden states, `models.encoder.Seen`).
Finish = Callable[[nnx.Dict, Any, Any, Any], dict[str, jax.Array]]


class NetworkOnDevice:
    """An encoder with embeddings and pre-training heads on the device, without dropout."""

    def __init__(self, network: Network, dtype: jnp.dtype):
        """
        Args:
          dtype: dtype of the computation; parameters and logits are float32.
        """
        outputs = {head: 1 for head in PRETRAINING_HEADS if network.has(head)}
        # Convolutions read zeros beyond the end of a row, so padding does not change its outputs.
        encoder = network.encoder.with_mixers(mask_convolution=True)
        graphdef = nnx.graphdef(make_modules(network.embeddings, encoder, outputs))
        parts = ("embeddings/", "encoder/", *(f"{name}/" for name in outputs))
        flat = stack(network.parameters, network.encoder)
        tree = to_tree({path: leaf for path, leaf in flat.items() if path.startswith(parts)})
        self._params = memory.put_on_device(tree)
        self._graphdef = graphdef
        self._reads_padding = encoder.reads_padding

        def run(finish, option, capture, params, batch):
            parts = nnx.merge(graphdef, params)
            segments = batch["segment_ids"]
            x = parts["embeddings"](batch["tokens"], segments, batch["type_ids"], dtype=dtype)
            encoded = parts["encoder"](x, segments, capture=capture)
            found = finish(parts, encoded, batch, option)
            return {name: leaf[None] for name, leaf in found.items()}

        self._run = jax.jit(run, static_argnums=(0, 1, 2))

    @functools.cached_property
    def offers(self) -> tuple[frozenset[str], ...]:
        """Names of the captures that each stage offers."""
        return nnx.merge(self._graphdef, self._params)["encoder"].offers()

    @property
    def programs(self) -> int:
        """Number of compiled programs: one per batch shape, `finish`, option and capture."""
        return environment.count_compiled(self._run)

    def lower(self, batch: Any, finish: Finish, option: Any = None) -> jax.stages.Lowered:
        """Lowers the program that `run` compiles."""
        return self._run.lower(finish, option, (), self._params, batch)

    def run(
        self, batch: Any, finish: Finish, option: Any = None, capture: tuple[str, ...] = ()
    ) -> dict[str, jax.Array]:
        """Applies the network and `finish` to one batch; see `apply`.

        Returns:
          Arrays [1, B, ...] by name, on the device.
        """
        return self._run(finish, option, capture, self._params, batch)

    def apply(
        self,
        rows: Rows,
        finish: Finish,
        option: Any = None,
        *,
        batch_size: int,
        capture: tuple[str, ...] = (),
        several_sizes: bool = False,
    ) -> dict[str, list[np.ndarray]]:
        """Applies the network and `finish` to all rows.

        The outputs of a row do not depend on other rows: if a mixer reads padding, as third-party
        mixers may, only rows of equal length share a batch.

        Args:
          finish: module-level function, compiled for each `option`.
          option: hashable static argument of `finish`.
          batch_size: maximum rows of a batch.
          capture: names that a layer offers, see `Encoder`.
          several_sizes: use batches of several sizes, which need less padding for few rows, but
            more programs.

        Returns:
          For each name a list of one array per row, in order. Their length axis is padded to the
          bucket.
        """

        if not len(rows):
            return {}
        longest = int(rows.lengths.max())
        with memory.explain_out_of_memory(
            f"computing up to {batch_size} rows of up to {longest} tokens",
            "pass fewer or shorter texts at once, in Python by batch_size and length",
            lambda: memory.find_state(self._params),
        ):
            choose = functools.partial(choose_batch_sizes, len(rows))
            choose = several_batch_sizes if several_sizes else choose
            sizes_of = functools.partial(choose, batch_size)
            return self._apply(rows, finish, option, sizes_of, capture)

    def _apply(self, rows, finish, option, sizes_of, capture) -> dict[str, list[np.ndarray]]:
        def run(batch):
            return self.run(batch, finish, option, capture)

        if not self._reads_padding:
            buckets = find_buckets(rows.by_token["tokens"].shape[1])
            return predict_rows(run, rows, buckets=buckets, batch_size=sizes_of(buckets))
        found: dict[str, list] = {}
        for length in np.unique(rows.lengths):
            places = np.flatnonzero(rows.lengths == length)
            chosen = take(rows, places)
            outputs = predict_rows(run, chosen, buckets=(length,), batch_size=sizes_of((length,)))
            for name, values in outputs.items():
                kept = found.setdefault(name, [None] * len(rows))
                for place, value in zip(places, values, strict=True):
                    kept[place] = value
        return found


def take(rows: Rows, places: np.ndarray) -> Rows:
    """Selects the rows at `places`."""
    by_token = {name: values[places] for name, values in rows.by_token.items()}
    by_row = {name: values[places] for name, values in rows.by_row.items()}
    return Rows(rows.lengths[places], by_token, by_row)


def find_buckets(width: int) -> tuple[int, ...]:
    """Returns bucket lengths for rows of `width` tokens: powers of two and `width`.

    On a CPU also the midpoints, because padding costs as much as tokens.
    """
    lengths = [16 << i for i in range(width.bit_length())]
    if dispatch.platform() == "cpu":
        lengths += [8, 12, *(length * 3 // 2 for length in lengths)]
    return choose_buckets(lengths, width)


def _pool(pooling: str) -> Finish:
    def finish(parts, hidden, batch, _):
        return {"vectors": pool(hidden, batch["segment_ids"], pooling)}

    return finish


def _all(parts, hidden, batch, _):
    return {"vectors": hidden.astype(jnp.float32)}


POOLED = {pooling: _pool(pooling) for pooling in POOLINGS} | {"none": _all}


def predict_masked(parts, hidden, batch, option):
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


def log_probability(parts, hidden, batch, entries):
    """Returns the log probability of batch["target"] [B] at batch["place"] [B].

    Args:
      entries: number of vocabulary entries.
    """
    picked = jnp.take_along_axis(hidden, batch["place"][:, None, None], axis=1)
    logits = parts["mlm_head"](picked, parts["embeddings"])[:, 0, :entries]
    own = jnp.take_along_axis(logits, batch["target"][:, None], axis=1)[:, 0]
    return {"value": own - jax.nn.logsumexp(logits, axis=1)}


def captured(parts, encoded, batch, _):
    """Returns the captures of each stage as "STAGE/NAME" [B, layers, ...]."""
    _, seen = encoded
    return {
        f"{stage}/{name}": jnp.swapaxes(array, 0, 1)
        for stage, arrays in enumerate(seen)
        for name, array in arrays.items()
    }


def predict_replaced(parts, hidden, batch, _):
    return {"probability": jax.nn.sigmoid(parts["rtd_head"](hidden))}
