"""One network on the device, applied to any number of rows: short ones with short ones, in batches
of a few fixed shapes, each compiled once.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from convbert_jax.data.tasks.encoding import Rows
from convbert_jax.data.tasks.length_buckets import choose_buckets
from convbert_jax.finetuning.fitting import predict_rows
from convbert_jax.inference.predictor import choose_batch_size
from convbert_jax.interop.modules import modules
from convbert_jax.interop.networks import Network, stack, to_tree

PRETRAINING_HEADS = ("mlm_head", "rtd_head")
_SHORTEST = 16  # tokens that a row is padded to
# (parts of the network by name, hidden states [B, L, C], the batch, an option) -> [B, ...] by name
# With a capture what comes second is (hidden states, `models.encoder.Seen`).
Finish = Callable[[nnx.Dict, Any, Any, Any], dict[str, jax.Array]]


class NetworkOnDevice:
    """An encoder with its embeddings and its heads of pre-training; deterministic."""

    def __init__(self, network: Network, dtype: jnp.dtype):
        """
        Args:
          dtype: of the computation; parameters and logits are float32.
        """
        outputs = {head: 1 for head in PRETRAINING_HEADS if network.has(head)}
        graphdef = nnx.graphdef(modules(network.embeddings, network.encoder, outputs))
        parts = ("embeddings/", "encoder/", *(f"{name}/" for name in outputs))
        flat = stack(network.parameters, network.encoder)
        tree = to_tree({path: leaf for path, leaf in flat.items() if path.startswith(parts)})
        self._params = jax.device_put(tree)
        self._graphdef = graphdef
        self._reads_padding = network.encoder.reads_padding

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
        """What the layers of each stage can show, as names for a capture."""
        return nnx.merge(self._graphdef, self._params)["encoder"].offers()

    def apply(
        self,
        rows: Rows,
        finish: Finish,
        option: Any = None,
        *,
        batch_size: int,
        capture: tuple[str, ...] = (),
    ) -> dict[str, list[np.ndarray]]:
        """What `finish` makes of each row, in their order; L of an output is that of its bucket.

        No row's outputs depend on the others: where the network reads padding, only rows of one
        length share a batch, so that there is none.

        Args:
          finish: a function of a module, compiled once for each `option`, which is hashable.
          batch_size: of the largest batches.
          capture: as of `Encoder`; names that a layer offers.
        """

        def run(batch):
            return self._run(finish, option, capture, self._params, batch)

        if not len(rows):
            return {}
        size = choose_batch_size(len(rows), batch_size)
        if not self._reads_padding:
            return predict_rows(run, rows, buckets=_buckets(rows), batch_size=size)
        found: dict[str, list] = {}
        for length in np.unique(rows.lengths):
            places = np.flatnonzero(rows.lengths == length)
            chosen = take(rows, places)
            outputs = predict_rows(run, chosen, buckets=(length,), batch_size=size)
            for name, values in outputs.items():
                kept = found.setdefault(name, [None] * len(rows))
                for place, value in zip(places, values, strict=True):
                    kept[place] = value
        return found


def take(rows: Rows, places: np.ndarray) -> Rows:
    """The rows at `places`."""
    by_token = {name: values[places] for name, values in rows.by_token.items()}
    by_row = {name: values[places] for name, values in rows.by_row.items()}
    return Rows(rows.lengths[places], by_token, by_row)


def _buckets(rows: Rows) -> tuple[int, ...]:
    """Powers of two, and at last the width of the rows."""
    width = rows.by_token["tokens"].shape[1]
    return choose_buckets([_SHORTEST << i for i in range(width.bit_length())], width)
