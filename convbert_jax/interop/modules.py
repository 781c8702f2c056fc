"""Flax modules of a network: parameter shapes and outputs."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from convbert_jax.config import EmbeddingsConfig, EncoderConfig
from convbert_jax.interop.networks import Network, stack, to_tree, unstack
from convbert_jax.models import heads
from convbert_jax.models.embeddings import Embeddings
from convbert_jax.models.encoder import Encoder
from convbert_jax.models.layers import initializers
from convbert_jax.training.state import flatten

HEADS = {
    "mlm_head": heads.MaskedLanguageHead,
    "rtd_head": heads.DiscriminatorHead,
    "pair_head": heads.PairHead,
    "sequence_head": heads.SequenceHead,
    "token_head": heads.TokenHead,
    "span_head": heads.TokenHead,
}


def shapes(
    embeddings: EmbeddingsConfig, encoder: EncoderConfig, outputs: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter of a network by canonical path.

    Args:
      outputs: head -> number of logits.
    """
    parts = modules(embeddings, encoder, outputs)
    flat = flatten(nnx.to_pure_dict(nnx.state(parts, nnx.Param)))
    # Broadcasting a scalar avoids allocating arrays whose shape alone is needed.
    counted = unstack({path: np.broadcast_to(0.0, leaf.shape) for path, leaf in flat.items()})
    return {path: leaf.shape for path, leaf in counted.items()}


def forward(network: Network):
    """Returns a jitted float32 forward pass of a network, without dropout.

    The function maps (tokens, segment_ids, type_ids), each [B, L], to a dict of "hidden" [B, L, C]
    and the logits of each head.
    """
    outputs = {head: _outputs(network, head) for head in HEADS if network.has(head)}
    graphdef = nnx.graphdef(modules(network.embeddings, network.encoder, outputs))
    params = jax.tree.map(jnp.asarray, to_tree(stack(network.parameters, network.encoder)))

    @jax.jit
    def run(params, tokens, segment_ids, type_ids):
        parts = nnx.merge(graphdef, params)
        x = parts["embeddings"](tokens, segment_ids, type_ids)
        hidden = parts["encoder"](x, segment_ids)
        results = {"hidden": hidden}
        for head in outputs:
            table = (parts["embeddings"],) if head == "mlm_head" else ()
            results[head] = parts[head](hidden, *table)
        return results

    return functools.partial(run, params)


def modules(
    embeddings: EmbeddingsConfig, encoder: EncoderConfig, outputs: Mapping[str, int]
) -> nnx.Dict:
    """Builds the modules of a network with abstract parameters (shapes and dtypes only)."""
    return _modules(embeddings, encoder, tuple(outputs.items()))


@functools.lru_cache(maxsize=8)
def _modules(embeddings, encoder, outputs) -> nnx.Dict:
    def make():
        starts, rngs = initializers("release", 0.02), nnx.Rngs(0)
        parts = {
            "embeddings": Embeddings(embeddings, starts.dense, rngs),
            "encoder": Encoder(encoder, rngs),
        }
        for head, count in outputs:
            own = {"mlm_head": (embeddings,), "rtd_head": (), "pair_head": ()}
            sizes = own.get(head, (count,))
            parts[head] = HEADS[head](encoder.hidden_size, *sizes, starts, rngs)
        return nnx.Dict(parts)

    return nnx.eval_shape(make)


def _outputs(network: Network, head: str) -> int:
    last = "output_bias" if head == "mlm_head" else "output/bias"
    return network.parameters[f"{head}/{last}"].shape[0]
