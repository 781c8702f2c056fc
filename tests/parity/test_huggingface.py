"""Hidden states and gradients equal those of Hugging Face's PyTorch classes with equal weights.

Their convolutions ignore the attention mask, so ours run with mask_convolution=False.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.config import Config
from convbert_jax.models.embeddings import Embeddings
from convbert_jax.models.encoder import Encoder
from tests.parity.pytorch_weights import read

pytestmark = pytest.mark.parity
torch = transformers = None  # set by imported_late

LENGTH = 40
SIZES = {
    "small": dict(layers=2, hidden_size=256, embedding_size=128, heads=4, ffn_size=1024),
    "medium_small": dict(
        layers=3, hidden_size=384, embedding_size=128, heads=8, ffn_size=1536, ffn_groups=2
    ),
    "base": dict(layers=2, hidden_size=768, embedding_size=768, heads=12, ffn_size=3072),
    "bert": dict(
        layers=3, hidden_size=256, embedding_size=256, heads=4, ffn_size=1024, mixer="attention"
    ),
    "electra": dict(
        layers=3, hidden_size=256, embedding_size=128, heads=4, ffn_size=1024, mixer="attention"
    ),
}


@pytest.fixture(scope="module", autouse=True)
def imported_late():
    """Import PyTorch only when the tests run."""
    global torch, transformers
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))


def build_theirs(name, model):
    import torch
    import transformers

    settings = dict(
        vocab_size=500, num_hidden_layers=model.layers, hidden_size=model.hidden_size,
        num_attention_heads=model.heads, intermediate_size=model.ffn_size, layer_norm_eps=1e-12,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        pad_token_id=None,
    )  # fmt: skip
    if name == "bert":
        module = transformers.BertModel(
            transformers.BertConfig(**settings), add_pooling_layer=False
        )
    elif name == "electra":
        settings["embedding_size"] = model.embedding_size
        module = transformers.ElectraModel(transformers.ElectraConfig(**settings))
    else:
        settings |= dict(
            embedding_size=model.embedding_size, num_groups=model.ffn_groups, pad_token_id=0
        )
        module = transformers.ConvBertModel(transformers.ConvBertConfig(**settings))
    # Larger than at initialization, to make mistakes visible in the output.
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in module.named_parameters():
            noise = 0.05 * torch.randn_like(parameter)
            parameter.copy_(noise + 1 if "LayerNorm.weight" in parameter_name else noise)
    return module.eval()


def build_ours(model):
    config = dataclasses.replace(
        Config(), model=dataclasses.replace(Config().model, **model, positions=64),
        tokenizer=dataclasses.replace(Config().tokenizer, vocab_size=500),
    )  # fmt: skip

    def build():
        rngs = nnx.Rngs(0)
        return nnx.Dict(
            embeddings=Embeddings(config.embeddings, jax.nn.initializers.zeros, rngs),
            encoder=Encoder(config.encoder, rngs),
        )

    graphdef = nnx.graphdef(nnx.eval_shape(build))

    def apply(params, tokens, segment_ids, type_ids):
        parts = nnx.merge(graphdef, params)
        return parts["encoder"](parts["embeddings"](tokens, segment_ids, type_ids), segment_ids)

    return config.model, apply


@pytest.mark.parametrize("name", SIZES)
def test_hidden_states_and_gradients(name):
    """Covers a full row and a padded row."""
    model, apply = build_ours(SIZES[name] | {"mask_convolution": False})
    theirs = build_theirs(name, model)
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 500, (2, LENGTH))
    types = rng.integers(0, 2, (2, LENGTH))
    mask = np.ones((2, LENGTH), np.int64)
    mask[1, 23:], tokens[1, 23:], types[1, 23:] = 0, 0, 0
    cotangent = rng.standard_normal((2, LENGTH, model.hidden_size)).astype(np.float32)

    out = theirs(
        input_ids=torch.tensor(tokens), attention_mask=torch.tensor(mask),
        token_type_ids=torch.tensor(types),
    ).last_hidden_state  # fmt: skip
    (out * torch.tensor(cotangent)).sum().backward()
    named = dict(theirs.named_parameters())
    params = read(model.layers, {name: p.detach().numpy() for name, p in named.items()})

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(params):
        out = apply(params, jnp.asarray(tokens), jnp.asarray(mask), jnp.asarray(types))
        return jnp.sum(out * cotangent), out

    (_, ours), gradients = run(params)
    # Includes padding, which leaks into the real tokens in their code.
    np.testing.assert_allclose(ours, out.detach().numpy(), atol=1e-5)

    wanted = read(model.layers, {name: p.grad.numpy() for name, p in named.items()})
    if name not in ("bert", "electra"):
        # Their embedding of [PAD] has no gradient.
        table = gradients["embeddings"]["word"]["embedding"]
        gradients["embeddings"]["word"]["embedding"] = table.at[0].set(0)
    # Relative to the largest gradient of each parameter, with a floor: key biases have gradient 0.
    floor = 1e-2 * max(np.abs(leaf).max() for leaf in jax.tree.leaves(wanted))

    def compare(ours, theirs):
        np.testing.assert_allclose(
            ours, theirs, rtol=0, atol=1e-4 * max(np.abs(theirs).max(), floor)
        )

    jax.tree.map(compare, gradients, wanted)
