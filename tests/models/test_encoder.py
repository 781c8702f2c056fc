"""Encoders: stages, rematerialization, dropout, and captured layer outputs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.config import StageConfig
from convbert_jax.config.mixers import MIXERS
from convbert_jax.models.encoder import Encoder
from convbert_jax.models.networks import HEADS, FinetunedModel
from convbert_jax.objectives import classification, span_extraction
from tests.models.definitions import Context, layer
from tests.models.mean_mixer import NAME
from tests.refusals import refused


@pytest.fixture(scope="module")
def build(randomize, packed):
    """Return build(config) -> (forward(params, key), params)."""

    @functools.cache
    def build(config, dtype=jnp.float32):
        graphdef, params = randomize(lambda rngs: Encoder(config, rngs))
        x = jax.random.normal(jax.random.key(1), (*packed.shape, config.embedding_size))

        def forward(params, key=None):
            return nnx.merge(graphdef, params)(x.astype(dtype), packed, key)

        return forward, params

    return build


def test_unrolling_and_rematerialization_change_no_number(make_config, build):
    key = jax.random.key(7)  # rematerialization must draw the same dropout masks again
    config = make_config(mixer="light").encoder

    def differentiate(**fields):
        forward, params = build(dataclasses.replace(config, **fields))
        return jax.jit(jax.value_and_grad(lambda params: forward(params, key)[:, 3].sum()))(params)

    wanted = differentiate()
    for fields in ({"scan_unroll": 9, "remat": "dots"}, {"remat": "full"}):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-3),
            differentiate(**fields),
            wanted,
        )


@pytest.mark.parametrize(("both", "own", "found"), [(1, 1, 1), (1, 9, 9), (9, 1, 9)])
def test_a_generator_is_unrolled_with_the_encoder_or_alone(make_config, both, own, found):
    config = make_config(scan_unroll=both, generator={"scan_unroll": own})
    assert config.encoder.scan_unroll == both
    assert config.generator_encoder.scan_unroll == found


def test_stages_in_order_are_one_stack_and_bfloat16_is_close(make_config, build, randomize):
    config = make_config(layers=3, mixer="light", ffn_groups=2).encoder
    one = config.stages[0].layer
    split = dataclasses.replace(config, stages=(StageConfig(1, (one,)), StageConfig(2, (one,))))
    (forward, params), (in_parts, _) = build(config), build(split)
    (rounded, _) = build(config, jnp.bfloat16)

    @jax.jit
    def run(params):
        stack = params["stages"]["0"]
        parts = {
            "0": jax.tree.map(lambda x: x[:1], stack),
            "1": jax.tree.map(lambda x: x[1:], stack),
        }
        return forward(params), in_parts(params | {"stages": parts}), rounded(params)

    whole, parts, short = run(params)
    np.testing.assert_allclose(parts, whole, atol=1e-5)
    assert short.dtype == jnp.bfloat16
    np.testing.assert_allclose(short.astype(jnp.float32), whole, atol=0.1)
    gradients = jax.eval_shape(jax.grad(lambda p: rounded(p).astype(jnp.float32).sum()), params)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(gradients))


def test_layers_of_a_stack_start_differently(make_config):
    config = make_config(mixer="light").encoder
    kernel = Encoder(config, nnx.Rngs(0)).stages["0"].mixer.value.kernel[...]
    assert not np.allclose(kernel[0], kernel[1])


def test_each_dropout_acts_with_a_key_alone(make_config, build):
    """Covers dropout of the mixer and of the layer; a rate of 0 drops nothing."""
    config = make_config(layers=1, mixer="light", dropout=0.0, attention_dropout=0.0).encoder
    one = config.stages[0].layer
    mixer = dataclasses.replace(one.mixer, attention_dropout=0.5)
    keys = jax.random.split(jax.random.key(0))
    for number, changed in enumerate(({}, {"dropout": 0.5}, {"mixer": mixer})):
        stage = StageConfig(1, (dataclasses.replace(one, **changed),))
        forward, params = build(dataclasses.replace(config, stages=(stage,)))
        whole, (first, second) = jax.jit(
            lambda params, forward=forward: (
                forward(params),
                jax.vmap(lambda key: forward(params, key))(keys),
            )
        )(params)
        if number == 0:
            np.testing.assert_allclose(first, whole, atol=1e-6)
        else:
            assert np.abs(first - whole).max() > 0.1
            assert np.abs(first - second).max() > 0.1


# --- Captures ---


@pytest.fixture(scope="module")
def stages(make_config):
    """Return stages(*mixers, **fields of the encoder) -> a config with one stage per mixer.

    Embeddings have the hidden size, so the first layer reads x.
    """

    def make(*mixers, **fields):
        made = [make_config(embedding_size=32, convolution="xla", mixer=m).encoder for m in mixers]
        each = tuple(
            StageConfig(1 + (i == 0), (encoder.stages[0].layer,)) for i, encoder in enumerate(made)
        )
        return dataclasses.replace(made[0], stages=each, **fields)

    return make


@pytest.fixture(scope="module")
def x(packed):
    return jax.random.normal(jax.random.key(1), (*packed.shape, 32))


@pytest.mark.parametrize("fields", [{}, {"remat": "dots", "scan_unroll": 2}], ids=str)
def test_a_capture_has_what_each_layer_computed(stages, randomize, packed, x, fields):
    """Hidden states, attention maps, scores and filters match their formulas."""
    names = ("mixed", "attention", "light", "dynamic") if not fields else ("mixed",)
    config = stages(*names, **fields)
    graphdef, params = randomize(lambda rngs: Encoder(config, rngs))
    everything = ("attention", "scores", "filters", "hidden")

    @jax.jit
    def run(params):
        encoder = nnx.merge(graphdef, params)
        return encoder(x, packed), *encoder(x, packed, capture=everything)

    plain, hidden, seen = run(params)
    np.testing.assert_array_equal(hidden, plain)
    given = np.asarray(x, np.float64)
    for i, (name, of_stage) in enumerate(zip(names, seen, strict=True)):
        for n in range(config.stages[i].depth):
            exact = jax.tree.map(
                lambda p, n=n: np.asarray(p[n], np.float64), params["stages"][str(i)]
            )
            context = Context(config.stages[i].layer.mixer, packed)
            out = layer(exact, given, name, context)
            assert of_stage.keys() == context.seen.keys() | {"hidden"}
            for what, wanted in context.seen.items():
                assert of_stage[what].dtype == jnp.float32
                np.testing.assert_allclose(of_stage[what][n], wanted, atol=5e-5)
            given = np.asarray(of_stage["hidden"][n], np.float64)
            np.testing.assert_allclose(given, out, atol=1e-4)
    np.testing.assert_array_equal(given, plain)


def test_a_stage_is_without_what_its_mixer_does_not_offer(stages, packed, x):
    encoder = Encoder(stages("attention", "dilated", NAME), nnx.Rngs(0))
    hidden, seen = jax.jit(lambda x: encoder(x, packed, capture=("attention", "shares")))(x)
    assert hidden.shape == x.shape
    assert [set(stage) for stage in seen] == [{"attention"}, set(), {"shares"}]
    same = packed[:, :, None] == packed[:, None, :]
    np.testing.assert_allclose(seen[2]["shares"][0], same / same.sum(-1, keepdims=True), atol=1e-6)
    with refused(ValueError, "filters", "attention", "hidden", "scores", "shares"):
        jax.eval_shape(lambda x: encoder(x, packed, capture=("attention", "filters")), x)


def test_offers_are_known_before_anything_is_computed(stages):
    names = ("mixed", "attention", "light", "dynamic", "dilated", NAME)
    encoder = nnx.eval_shape(lambda: Encoder(stages(*names), nnx.Rngs(0)))
    attention, filters = {"attention", "scores"}, {"filters"}
    wanted = [attention | filters, attention, filters, filters, set(), {"shares"}]
    assert [set(offer) for offer in encoder.offers()] == wanted


@pytest.mark.parametrize("key", [None, jax.random.key(3)], ids=["eval", "dropout"])
def test_without_a_capture_the_program_is_a_plain_scan(make_config, packed, x, key):
    config = make_config(embedding_size=32).encoder
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Encoder(config, nnx.Rngs(0))))

    def ours(params, x):
        return nnx.merge(graphdef, params)(x, packed, key)

    def bare(params, x):
        encoder = nnx.merge(graphdef, params)
        keys = None if key is None else jax.random.split(jax.random.fold_in(key, 0), 2)

        def run(x, layer_and_key):
            layer, layer_key = layer_and_key
            return layer(x, packed, layer_key), None

        return jax.lax.scan(run, x, (encoder.stages["0"], keys))[0]

    assert str(jax.make_jaxpr(ours)(params, x)) == str(jax.make_jaxpr(bare)(params, x))


def test_captured_maps_are_without_dropout(stages, packed, x):
    config = stages("attention")
    encoder = Encoder(config, nnx.Rngs(0))

    @jax.jit
    def run(key):
        return [encoder(x, packed, k, capture="attention")[1][0]["attention"] for k in (key, None)]

    dropped, seen = run(jax.random.key(0))
    np.testing.assert_allclose(dropped[0], seen[0], atol=1e-6)
    np.testing.assert_allclose(dropped.sum(-1), 1, atol=1e-5)


# --- Every mixer with every fine-tuning head ---

LOSSES = {
    "sequence": classification.text_losses,
    "first_and_mean": classification.text_losses,
    "first_token": classification.text_losses,
    "token": classification.tag_losses,
    "span": span_extraction.plain_losses,
    "span_beam": span_extraction.beam_losses,
}


def finetuning_batch():
    """Return rows of different lengths; the second half of each row is its second text."""
    rng, places = np.random.default_rng(0), np.arange(12)
    lengths, row = np.asarray([12, 9, 7])[:, None], np.zeros(3, np.int32)
    return {
        "tokens": rng.integers(5, 50, (3, 12)),
        "segment_ids": (places < lengths).astype(np.int32),
        "type_ids": ((places >= lengths // 2) & (places < lengths)).astype(np.int32),
        "label": np.asarray([0, 1, 0]),
        "value": row * 1.0,
        "is_regression": np.asarray(False),
        "outputs": np.ones(2, bool),
        "tags": np.where((places > 0) & (places < lengths - 1), places % 2, -1),
        "start": np.asarray([6, 5, 4]),
        "end": np.asarray([8, 6, 4]),
        "impossible": row,
    }


@pytest.mark.slow
def test_a_step_under_each_head_reaches_all_parameters_of_every_mixer(make_config, randomize):
    """Heads vmapped over an axis, each with its own seed, equal separate heads, with dropout."""
    configs = [make_config(embedding_size=32, mixer=mixer) for mixer in MIXERS]
    each = tuple(StageConfig(1, (config.encoder.stages[0].layer,)) for config in configs)
    encoder = dataclasses.replace(configs[0].encoder, stages=each)
    batch, graphdefs, heads = finetuning_batch(), {}, {}
    for head in HEADS:
        outputs = dataclasses.replace(configs[0].outputs, head=head, labels=("a", "b"))

        def model(rngs, outputs=outputs):
            whole = FinetunedModel(dataclasses.replace(configs[0], outputs=outputs), rngs)
            whole.encoder = Encoder(encoder, rngs)
            return whole

        graphdefs[head], body = randomize(model)
        heads[head] = body.pop("head")

    def loss(params, shares, key):
        def merged(head):
            return nnx.merge(graphdefs[head], {**params["body"], "head": params["heads"][head]})

        rows = (batch[name] for name in ("tokens", "segment_ids", "type_ids"))
        hidden = merged("sequence").encode(*rows, key=key)
        total = 0.0
        for share, head in zip(shares, HEADS, strict=True):
            on_top = merged(head)
            on_top.encode = lambda *_, **__: hidden  # computed once for all heads
            losses, _ = LOSSES[head](on_top, batch, key, dtype=jnp.float32)
            total += share * losses.sum()
        return total

    run, params = jax.jit(jax.value_and_grad(loss)), {"body": body, "heads": heads}
    keys, shares = jax.random.split(jax.random.key(1), len(HEADS)), jnp.eye(len(HEADS))
    scales = 1 - jnp.arange(len(HEADS)) / 20
    starts = jax.tree.map(lambda p: scales.reshape(-1, *[1] * p.ndim) * p, params)
    losses, gradients = jax.jit(jax.vmap(run))(starts, shares, keys)
    assert len(set(losses.tolist())) == len(HEADS)
    for number, head in enumerate(HEADS):
        start = jax.tree.map(lambda p, number=number: p[number], starts)
        loss, alone = run(start, shares[number], keys[number])
        np.testing.assert_allclose(losses[number], loss, rtol=1e-5)
        reached = {"body": alone["body"], "head": alone["heads"][head]}
        together = {"body": gradients["body"], "head": gradients["heads"][head]}
        for (place, one), many in zip(
            jax.tree_util.tree_leaves_with_path(reached), jax.tree.leaves(together), strict=True
        ):
            path = jax.tree_util.keystr(place, simple=True, separator="/")
            # Probabilities add up to 1, so the gradient of a span head's bias is rounding error.
            scale = max(1e-2, float(np.abs(one).max()))
            np.testing.assert_allclose(many[number], one, atol=1e-4 * scale, err_msg=path)
            # The key bias shifts all scores of a query equally and has no gradient.
            assert np.any(one) or path.endswith("mixer/key/bias"), (head, path)
