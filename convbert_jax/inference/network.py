"""One network on the device, applied to any number of rows: short ones with short ones, in batches
of a few fixed shapes, each compiled once.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from convbert_jax.config import EncoderConfig, mixers
from convbert_jax.data.tasks.encoding import Rows
from convbert_jax.data.tasks.length_buckets import choose_buckets
from convbert_jax.finetuning.fitting import predict_rows
from convbert_jax.inference.predictor import choose_batch_sizes
from convbert_jax.interop.modules import modules
from convbert_jax.interop.networks import Network, stack, to_tree
from convbert_jax.ops import dispatch
from convbert_jax.training import memory
from convbert_jax.training.environment import private_jax

PRETRAINING_HEADS = ("mlm_head", "rtd_head")
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
        encoder = _of_single_rows(network.encoder)
        graphdef = nnx.graphdef(modules(network.embeddings, encoder, outputs))
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
        """What the layers of each stage can show, as names for a capture."""
        return nnx.merge(self._graphdef, self._params)["encoder"].offers()

    @property
    def programs(self) -> int:
        """How many were compiled: one for each shape of a batch, `finish`, option and capture."""
        return private_jax.count_compiled(self._run)

    def lower(self, batch: Any, finish: Finish, option: Any = None) -> jax.stages.Lowered:
        """The program that `run` would compile."""
        return self._run.lower(finish, option, (), self._params, batch)

    def run(
        self, batch: Any, finish: Finish, option: Any = None, capture: tuple[str, ...] = ()
    ) -> dict[str, jax.Array]:
        """What `finish` makes of one batch, [1, B, ...] by name, on the device; arguments as of
        `apply`.
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
    ) -> dict[str, list[np.ndarray]]:
        """What `finish` makes of each row, in their order; L of an output is that of its bucket.

        No row's outputs depend on the others. Where padding is read all the same, as mixers that
        are not of this package may do, only rows of one length share a batch.

        Args:
          finish: a function of a module, compiled once for each `option`, which is hashable.
          batch_size: of the largest batches.
          capture: as of `Encoder`; names that a layer offers.
        """

        if not len(rows):
            return {}
        longest = int(rows.lengths.max())
        with memory.explain_out_of_memory(
            f"computing up to {batch_size} rows of up to {longest} tokens",
            "give fewer or shorter texts at once, in Python by batch_size and length",
            lambda: memory.find_state(self._params),
        ):
            return self._apply(rows, finish, option, batch_size, capture)

    def _apply(self, rows, finish, option, batch_size, capture) -> dict[str, list[np.ndarray]]:
        def run(batch):
            return self.run(batch, finish, option, capture)

        if not self._reads_padding:
            buckets = _buckets(rows)
            sizes = choose_batch_sizes(len(rows), batch_size, buckets)
            return predict_rows(run, rows, buckets=buckets, batch_size=sizes)
        found: dict[str, list] = {}
        for length in np.unique(rows.lengths):
            places = np.flatnonzero(rows.lengths == length)
            chosen = take(rows, places)
            sizes = choose_batch_sizes(len(rows), batch_size, (length,))
            outputs = predict_rows(run, chosen, buckets=(length,), batch_size=sizes)
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


def _of_single_rows(encoder: EncoderConfig) -> EncoderConfig:
    """The encoder that computes for padded rows of one segment what `encoder` computes for each row
    alone: beyond its end a convolution reads zeros, whether nothing stands there or what is masked.

    Not unrolled on a CPU: XLA makes loops of the slices of unrolled layers, which take 20 ms a
    batch of `small`, and three times as long to compile.
    """
    stages = tuple(
        dataclasses.replace(
            stage,
            layer=dataclasses.replace(
                stage.layer, mixer=mixers.change(stage.layer.mixer, mask_convolution=True)
            ),
        )
        for stage in encoder.stages
    )
    unroll = 1 if dispatch.platform() == "cpu" else encoder.scan_unroll
    return dataclasses.replace(encoder, stages=stages, scan_unroll=unroll)


def _buckets(rows: Rows) -> tuple[int, ...]:
    """Powers of two, on a CPU those between them too, where a token of padding costs as much as any
    other; and at last the width of the rows.
    """
    width = rows.by_token["tokens"].shape[1]
    lengths = [16 << i for i in range(width.bit_length())]
    if dispatch.platform() == "cpu":
        lengths += [8, 12, *(length * 3 // 2 for length in lengths)]
    return choose_buckets(lengths, width)
