"""The options of the block, in pairs: a document alone, padded and packed has the same states."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.config import ConfigError, MeshSection
from convbert_jax.config.mixers import MIXERS
from convbert_jax.config.network import group_layers
from convbert_jax.models.decoder import DecoderLayer
from convbert_jax.models.encoder import Encoder, Layer
from convbert_jax.models.networks import MaskedLanguageModel, PretrainingModel
from convbert_jax.training import partitioning
from tests.models.definitions import Context, by_head
from tests.pairwise import pairwise
from tests.refusals import refused

FIELDS = {
    "mixer": list(MIXERS),
    "norm": ["pre", "post"],
    "normalization": ["layer", "rms"],
    "activation": ["geglu", "gelu", "swiglu", "relu", "gated_gelu"],
    "biases": [False, True],
    "embedding_norm": [True, False],
    "position_embedding": ["rotary", "learned", "none", "sinusoidal"],
    "window": [2, 0],
    "global_every": [2, 0],
    "qk_norm": [True, False],
    "key_value_heads": [2, 0, 1],
    "canon": ["ABCD", "", "AC", "BD"],
    "types": [0, 2],
    "remat": ["none", "full", "dots"],
    "embedding_size": [32, 16],
    "layers": [4, 5],
}
WITH_KEYS = ("attention", "bottleneck", "mixed")  # mixers with queries, keys and values
CASES = [dict(zip(FIELDS, row, strict=True)) for row in pairwise(*FIELDS.values())]
MODERN = {
    "mixer": "attention", "embedding_size": 32, "layers": 4, "norm": "pre", "activation": "geglu",
    "biases": False, "position_embedding": "rotary", "types": 0, "window": 2, "dropout": 0.0,
    "attention_dropout": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_document_alone_padded_and_packed_is_the_same(number, make_config, randomize):
    fields = CASES[number]
    if fields["mixer"] != "attention":
        fields = fields | {"key_value_heads": 0}
    if fields["mixer"] not in WITH_KEYS:
        fields = fields | {"canon": fields["canon"].replace("B", "")}
    config = make_config(recipe="masked_lm", kernel_size=3, layer_norm_epsilon=1e-5, **fields)
    graphdef, params = randomize(lambda rngs: MaskedLanguageModel(config, rngs))
    tokens = jax.random.randint(jax.random.key(0), (1, 18), 5, 50)
    types = jnp.tile(jnp.asarray([[0, 1]]), (1, 9)) * (fields["types"] > 0)
    packed = jnp.asarray([[1] * 7 + [2] * 9 + [0] * 2])
    padded = jnp.asarray([[1] * 9 + [0] * 9])

    @jax.jit
    def run(params):
        def encode(tokens, ids, types):
            return nnx.merge(graphdef, params).encode(tokens, ids, types)

        def loss(params):
            net = nnx.merge(graphdef, params)
            return jnp.square(net.generate(tokens, packed, types, jnp.arange(7)[None])).mean()

        second = (x[:, 7:16] for x in (tokens, types))
        tokens_2, types_2 = second
        alone = encode(tokens_2, jnp.ones((1, 9), int), types_2)
        longer = (jnp.pad(x, ((0, 0), (0, 9)), constant_values=3) for x in (tokens_2, types_2))
        tokens_3, types_3 = longer
        types_3 = jnp.minimum(types_3, max(0, fields["types"] - 1))
        return (
            alone[0],
            encode(tokens, packed, types)[0, 7:16],
            encode(tokens_3, padded, types_3)[0, :9],
            jax.grad(loss)(params),
        )

    alone, in_pack, with_padding, gradient = run(params)
    assert np.abs(alone).mean() > 0.1
    np.testing.assert_allclose(in_pack, alone, atol=1e-5)
    np.testing.assert_allclose(with_padding, alone, atol=1e-5)
    # Every parameter is trained, except types and positions that no token has.
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert 0 < np.abs(leaf).max() < np.inf, path


@pytest.mark.parametrize(
    "fields",
    [MODERN | {"canon": "ABCD"}, MODERN | {"mixer": "mixed", "qk_norm": True, "canon": "BD"}],
)
def test_devices_that_divide_rows_heads_and_positions_compute_the_same(
    fields, make_config, randomize
):
    config = make_config(**fields)
    graphdef, params = randomize(lambda rngs: PretrainingModel(config, rngs))
    tokens = jax.random.randint(jax.random.key(0), (4, 16), 5, 50)
    ids = jnp.asarray([[1] * 7 + [2] * 9] * 2 + [[1] * 12 + [0] * 4] * 2)

    def loss(params):
        net = nnx.merge(graphdef, params)
        found = net.discriminate(tokens, ids, tokens * 0)
        return jnp.square(found).mean(), found

    results = []
    for sizes in (MeshSection(), MeshSection(fsdp=2, tensor=2, sequence=2)):
        devices = jax.devices()[: 1 if sizes == MeshSection() else 8]
        with jax.set_mesh(partitioning.make_mesh(sizes, devices)):
            results.append(jax.jit(jax.value_and_grad(loss, has_aux=True))(params))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), *results)


# --- Patterns of layers ---


@pytest.mark.parametrize(
    ("layers", "every", "norm", "stages"),
    [
        (7, 3, "pre", [(1, 1), (6, 3)]),  # the first layer has no norm
        (22, 3, "pre", [(1, 1), (21, 3)]),
        (7, 3, "post", [(6, 3), (1, 1)]),
        (6, 1, "post", [(6, 1)]),
        (6, 0, "post", [(6, 1)]),
        (4, 3, "post", [(4, 4)]),
    ],
)
def test_layers_form_few_stages(layers, every, norm, stages, make_config):
    fields = MODERN | {"layers": layers, "norm": norm, "global_every": every}
    encoder = make_config(**fields).encoder
    assert [(stage.depth, len(stage.pattern)) for stage in encoder.stages] == stages
    windows = [layer.mixer.options.window for layer in encoder.layers]
    assert windows == [2 * bool(not every or n % every) for n in range(layers)]
    assert group_layers(encoder.layers) == encoder.stages


def test_bases_are_of_global_and_of_local_attention(make_config):
    fields = MODERN | {"rotary_base": 500.0, "local_rotary_base": 50.0, "global_every": 2}
    encoder = make_config(**fields).encoder
    assert [layer.mixer.options.rotary_base for layer in encoder.layers] == [500, 50, 500, 50]


def test_a_pattern_is_its_layers_in_order(make_config, randomize):
    """One scan over a pattern gives what the layers give, one after the other."""
    config = make_config(**MODERN, global_every=2).encoder
    graphdef, params = randomize(lambda rngs: Encoder(config, rngs))
    apart = dataclasses.replace(
        config, stages=tuple(stage for layer in config.layers for stage in group_layers([layer]))
    )
    of_layers = [
        jax.tree.map(lambda leaf, n=n: leaf[n : n + 1], params["stages"][str(i)])
        for i, stage in enumerate(config.stages)
        for n in range(stage.depth)
    ]
    x = jax.random.normal(jax.random.key(1), (2, 12, 32))
    ids = jnp.ones((2, 12), int)
    whole, seen = nnx.merge(graphdef, params)(x, ids, capture=("attention", "hidden"))
    other, _ = nnx.split(nnx.eval_shape(lambda: Encoder(apart, nnx.Rngs(0))))
    stages = {str(i): layer for i, layer in enumerate(of_layers)}
    parts, found = nnx.merge(other, params | {"stages": stages})(
        x, ids, capture=("attention", "hidden")
    )
    np.testing.assert_allclose(parts, whole, atol=1e-5)
    for name in ("attention", "hidden"):
        joined = [np.concatenate([each[name] for each in part]) for part in (seen, found)]
        np.testing.assert_allclose(*joined, atol=1e-5)


# --- Canon layers ---


@pytest.mark.parametrize("causal", [False, True])
def test_canon_layers_are_at_their_positions(causal, make_config, randomize):
    """A layer computed from its parts; the filters are those of `definitions.Context`."""
    fields = {"window": 0, "position_embedding": "none", "global_every": 0, "embedding_norm": False}
    config = make_config(**MODERN | fields | {"layers": 1, "canon": "ABCD"}).encoder.layers[0]
    build = functools.partial(DecoderLayer, config, None) if causal else functools.partial(
        Layer, config
    )  # fmt: skip
    layer = nnx.merge(*randomize(build))
    ids = jnp.asarray([[1] * 5 + [2] * 4 + [0] * 2])
    x = jax.random.normal(jax.random.key(1), (1, 11, 32))
    context = Context(config.mixer, ids, causal)

    def canon(module, name, x):
        filters = np.asarray(getattr(module, f"{name}_canon").depthwise[...])
        return x + context.depthwise(np.asarray(x), filters)

    mixer, block = layer.mixer, layer.feed_forward
    inner = canon(layer, "mixer", layer.mixer_norm(x))
    parts = (canon(mixer, name, getattr(mixer, name)(inner)) for name in ("query", "key", "value"))
    h = x + mixer.output(context.attend(*(by_head(part, 4) for part in parts)))
    inner = canon(layer, "feed_forward", layer.feed_forward_norm(h))
    units, gate = (
        canon(block, name, getattr(block, name)(inner)) for name in ("intermediate", "gate")
    )
    wanted = h + block.output(jax.nn.gelu(units, approximate=False) * gate)
    found = layer(x, ids, None, None) if causal else layer(x, ids)
    np.testing.assert_allclose(found[:, :9], wanted[:, :9], atol=1e-4)


# --- Errors ---


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ({"key_value_heads": 3}, "config.model.key_value_heads", 3),
        ({"key_value_heads": 2, "mixer": "mixed"}, "config.model.key_value_heads", 2),
        ({"hidden_size": 36, "heads": 4}, "config.model.position_embedding", "rotary"),
        ({"canon": "AB", "mixer": "short"}, "config.model.canon", "AB"),
    ],
)
def test_forms_that_heads_cannot_have_are_refused(fields, field, value, make_config):
    with refused(ConfigError, field=field, value=value):
        _ = make_config(**MODERN | fields).encoder
