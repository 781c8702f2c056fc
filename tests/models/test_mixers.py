"""Every mixer against its formula in numpy (definitions.py), in one compiled program per form.

The formula covers padding, packed and separate documents, and causal masks.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.config import MeshSection, StageConfig
from convbert_jax.config.mixers import check_causal
from convbert_jax.decoding.state import move, pack
from convbert_jax.models.encoder import Encoder
from convbert_jax.models.layers import initializers
from convbert_jax.models.mixers.attention import attend
from convbert_jax.models.networks import sharding_rules
from convbert_jax.ops.convolution import (
    depthwise_conv,
    depthwise_conv_step,
    dynamic_conv,
    dynamic_conv_step,
)
from convbert_jax.training import partitioning
from tests.agreement import assert_agree
from tests.models.definitions import COUNTS, DEFINITIONS, KINDS, Context, check_gradients
from tests.models.mean_mixer import NAME
from tests.refusals import refused

UNMASKED = {
    f"{name}, unmasked": {**KINDS[name], "mask_convolution": False} for name in ("mixed", "light")
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def mixer_of(config):
    return config.encoder.stages[0].layer.mixer


def module_of(mixer, rngs, **options):
    return mixer.module(32, initializers("release", 0.02), rngs, **options)


def define(kind, mixer, params, x, ids, causal=False):
    """Evaluate the formula in float64."""
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (params, x))
    return DEFINITIONS[(KINDS | UNMASKED)[kind]["mixer"]](*exact, Context(mixer, ids, causal))


@pytest.mark.parametrize("kind", KINDS | UNMASKED)
def test_a_mixer_and_its_gradient_are_those_of_the_formula(make_config, randomize, packed, kind):
    mixer = mixer_of(make_config(**(KINDS | UNMASKED)[kind]))
    graphdef, params = randomize(functools.partial(module_of, mixer))
    x, cotangent = jax.random.normal(jax.random.key(1), (2, 2, 24, 32))
    real, second = np.asarray(packed != 0), np.asarray(packed == 2)
    cotangent = np.where(second[..., None], cotangent, 0)  # of one document per row
    draws = 200

    def run(params, x, key=None):
        return nnx.merge(graphdef, params)(x, packed, key)

    @jax.jit
    def program(params, x, keys):
        out, back = jax.vjp(run, params, x)
        rounded = run(params, x.astype(jnp.bfloat16))
        dropped = jax.vmap(lambda key: run(params, x, key))(keys)
        return out, back(jnp.asarray(cotangent)), rounded, dropped.mean(0), dropped.std(0)

    keys = jax.random.split(jax.random.key(0), draws)
    out, gradients, rounded, mean, deviation = program(params, x, keys)
    wanted = define(kind, mixer, params, x, packed)
    np.testing.assert_allclose(out[real], wanted[real], atol=2e-5)

    assert rounded.dtype == jnp.bfloat16
    scale = float(np.abs(wanted[real]).max())
    np.testing.assert_allclose(rounded.astype(jnp.float32)[real], wanted[real], atol=0.03 * scale)

    def total(params, x):
        return (define(kind, mixer, params, x, packed) * cotangent).sum()

    check_gradients(gradients, total, (params, x))
    if kind in KINDS:  # no gradient reaches padding or another document
        np.testing.assert_array_equal(gradients[1][~second], 0)

    if hasattr(mixer, "attention_dropout"):
        assert deviation[real].max() > 1e-2
        # Five standard deviations: fails by chance for one in 1,000 sets of keys.
        assert np.abs(mean - out).max() < 5 * deviation.max() / draws**0.5
    else:
        np.testing.assert_allclose(mean, out, atol=1e-5)


# --- Causal mixers ---

SIZES = {kind: {"kernel_size": (4, 1, 9, 16, 3)[i % 5]} for i, kind in enumerate(KINDS)}
ROWS, LENGTH, BEGUN, COPIES = 3, 13, 4, 2


@every_kind
def test_a_causal_mixer_is_its_formula_as_a_whole_and_step_by_step(make_config, randomize, kind):
    """Steps start from an empty state or from left-padded prompts.

    Rows of a group exchange their pasts, as in beam search; unread entries are dropped.
    """
    mixer = mixer_of(make_config(**{**SIZES[kind], **KINDS[kind]}))
    check_causal(mixer, kind)
    graphdef, params = randomize(functools.partial(module_of, mixer, causal=True))
    x = jax.random.normal(jax.random.key(1), (ROWS, LENGTH, 32))
    ids = jnp.asarray([[1] * LENGTH, [1] * 5 + [2] * 6 + [0] * 2, [1] * 12 + [2]])
    first = np.asarray([0, BEGUN - 1, 1])
    prompt_ids = jnp.asarray(np.arange(BEGUN) >= first[:, None], jnp.int32)

    @jax.jit
    def begin(params, x):
        module = nnx.merge(graphdef, params)
        return module(x, ids), *module.prefill(x[:, :BEGUN], prompt_ids, LENGTH, COPIES)

    @jax.jit
    def step(params, x, state, order, packs, places):
        state = move(state, order)
        state = jax.lax.cond(packs, pack, lambda state: state, state)
        return nnx.merge(graphdef, params).step(x[:, None], state, places)

    def check_steps(state, past, places, length, packs):
        """Continue rows after `past` [R, P, 32], of which the last `places` [R] are real."""
        rng = np.random.default_rng(2)
        group = np.arange(0, COPIES * ROWS, COPIES).repeat(COPIES)
        for t in range(past.shape[1], length):
            order = group + rng.integers(0, COPIES, COPIES * ROWS)
            new = rng.standard_normal((COPIES * ROWS, 32)).astype(np.float32)
            past = np.concatenate([past[order], new[:, None]], axis=1)
            out, state = step(params, new, state, order, packs and t % 2 == 0, places)
            for row, place in enumerate(places):
                own = past[row : row + 1, t - place :]
                np.testing.assert_allclose(out[row, 0], alone(own)[-1], atol=1e-5)
            places = places + 1

    def alone(row):
        ones = np.ones(row.shape[:2], int)
        return define(kind, mixer, params, row, ones, causal=True)[0]

    whole, given, state = begin(params, x)
    wanted = define(kind, mixer, params, x, ids, causal=True)
    real = np.asarray(ids != 0)
    np.testing.assert_allclose(whole[real], wanted[real], atol=2e-5)
    for row, begins in enumerate(first):
        own = x[row : row + 1, begins:BEGUN]
        np.testing.assert_allclose(given[row, begins:], alone(own), atol=2e-5)

    prompts = np.repeat(x[:, :BEGUN], COPIES, axis=0)
    check_steps(state, prompts, BEGUN - first.repeat(COPIES), LENGTH, packs=True)
    # Use the cache capacity that follows the prompts, so that `step` compiles once:
    # P + J (L - P) entries in a group equal J (L - P / J).
    module, length, zeros = nnx.merge(graphdef, params), LENGTH - BEGUN // COPIES, [0] * 2 * ROWS
    state = module.start(COPIES * ROWS, length, jnp.float32, COPIES)
    check_steps(state, prompts[:, :0], np.asarray(zeros), length, packs=False)

    short = jax.eval_shape(lambda: module.start(COPIES * ROWS, length, jnp.bfloat16, COPIES))
    rows = jax.ShapeDtypeStruct((COPIES * ROWS, 1, 32), jnp.bfloat16)
    rounded = jax.eval_shape(module.step, rows, short, jnp.asarray(zeros))
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(rounded)}
    assert dtypes - {jnp.dtype(bool), jnp.dtype(jnp.int32)} == {jnp.dtype(jnp.bfloat16)}


def test_entries_that_rows_of_a_group_share_are_kept_once(make_config, randomize):
    mixer = mixer_of(make_config(mixer="attention"))
    module = nnx.merge(*randomize(functools.partial(module_of, mixer, causal=True)))
    x = jnp.broadcast_to(jax.random.normal(jax.random.key(1), (LENGTH, 32)), (ROWS, LENGTH, 32))
    step = jax.jit(lambda state, t: module.step(x[:, t, None], state, jnp.full(ROWS, t)))
    state = module.start(ROWS, LENGTH, jnp.float32, ROWS)
    for t in range(LENGTH - 2):
        _, state = step(state, t)
    assert state[0].used == ROWS * (LENGTH - 2)
    state = pack(move(state, jnp.asarray([1, 1, 1])))
    assert state[0].used == LENGTH - 2
    state = pack(step(state, LENGTH - 2)[1])
    assert state[0].used == LENGTH - 2 + ROWS  # the last ones differ
    state = pack(move(state, jnp.asarray([0, 2, 0])))
    assert state[0].used == LENGTH - 2 + 2
    cache, canons = state
    state = cache.resize(LENGTH + 3), canons  # exactly the capacity that the next step needs
    out, _ = step(state, LENGTH - 1)
    whole = module(x[:1], jnp.ones((1, LENGTH), jnp.int32))
    np.testing.assert_allclose(out[:, 0], jnp.repeat(whole[:, -1], ROWS, axis=0), atol=1e-5)


def test_steps_of_dilated_convolutions_are_the_whole_convolutions():
    """With a dilation that no mixer gives to `dynamic_conv_step`."""
    rng, taps, dilation = np.random.default_rng(0), 3, 2
    values, filters, few = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((2, 9, 2, 3), (2, 9, 2, taps), (taps, 6))
    )
    options = {"dilation": dilation, "causal": True}
    dynamic = dynamic_conv(values, filters, **options)
    light = dynamic_conv(values, filters[0, 0], **options)
    depthwise = depthwise_conv(values.reshape(2, 9, 6), few, **options)
    padded = np.pad(values, ((0, 0), (4, 0), (0, 0), (0, 0)))
    windows = np.stack([padded[:, t : t + 5] for t in range(9)])

    @jax.vmap
    def steps(window, filters):
        return (
            dynamic_conv_step(window, filters, dilation=dilation),
            dynamic_conv_step(window, filters_of_all, dilation=dilation),
            depthwise_conv_step(window.reshape(2, -1, 6), few, dilation=dilation),
        )

    filters_of_all = filters[0, 0]
    found = steps(windows, filters.swapaxes(0, 1))
    for whole, each in zip((dynamic, light, depthwise), found, strict=True):
        np.testing.assert_allclose(each.swapaxes(0, 1), whole, atol=1e-5)
    with refused(ValueError, "dynamic_conv_step", 5):
        dynamic_conv_step(jnp.zeros((1, 4, 1, 2)), jnp.zeros((1, 3)), dilation=2)


# --- Other properties ---


def test_a_mixer_has_the_parameters_of_its_formula(make_config):
    starts = initializers("release", 0.02)
    for kind, (channels, heads) in itertools.product(KINDS, ((64, 4), (768, 12))):
        config = make_config(hidden_size=channels, embedding_size=16, heads=heads, **KINDS[kind])
        build = functools.partial(mixer_of(config).module, channels, starts)
        state = nnx.eval_shape(lambda build=build: build(nnx.Rngs(0)))
        count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(state, nnx.Param)))
        assert count == COUNTS[kind](channels, heads, config.model.kernel_size), kind


def test_attention_in_a_row_of_padding_stays_finite():
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 24, 2, 8))
    ids = jnp.zeros((2, 24), jnp.int32)
    out, back = jax.vjp(lambda value: attend(query, key, value, ids), value)
    assert jnp.isfinite(out).all()
    assert jnp.isfinite(back(jnp.ones_like(out))[0]).all()


def test_a_mixer_of_the_user_keeps_segments_apart(make_config, randomize, packed):
    mixer = mixer_of(make_config(mixer=NAME))
    module = nnx.merge(*randomize(functools.partial(module_of, mixer)))
    x = jax.random.normal(jax.random.key(0), (2, 24, 32))
    alone = module(x[:1, :5], jnp.ones((1, 5), jnp.int32))
    np.testing.assert_allclose(module(x, packed)[0, :5], alone[0], atol=1e-5)


@pytest.mark.slow
def test_on_eight_devices_they_are_what_they_are_on_one(make_config, randomize):
    """Outputs and gradients of each layer, with rows, positions, parameters and heads sharded."""
    configs = [
        make_config(
            hidden_size=256, embedding_size=256, ffn_size=64, attention_dropout=0.0, **fields
        )
        for fields in KINDS.values()
    ]
    stages = tuple(StageConfig(1, (config.encoder.stages[0].layer,)) for config in configs)
    all_kinds = dataclasses.replace(configs[0].encoder, stages=stages)
    graphdef, params = randomize(lambda rngs: Encoder(all_kinds, rngs), scale=0.05)
    ids = jnp.asarray([[1] * 5 + [2] * 3, [1] * 6 + [0] * 2] * 4)
    x, cotangent = (jax.random.normal(jax.random.key(i), (8, 8, 256)) for i in range(2))
    rules = (*sharding_rules(all_kinds), *partitioning.RULES)

    def total(params, x):
        out = nnx.merge(graphdef, params)(x, ids)
        return jnp.sum(jnp.where((ids != 0)[..., None], out, 0) * cotangent), out

    def run(section, devices):
        mesh = partitioning.make_mesh(section, jax.devices()[:devices])
        places = partitioning.tree_shardings({"encoder": params}, mesh, rules)["encoder"]
        rows = partitioning.batch_sharding(mesh)
        with jax.set_mesh(mesh):
            given = jax.device_put(params, places), jax.device_put(x, rows)
            step = jax.jit(jax.grad(total, has_aux=True), in_shardings=(places, rows))
            return places, jax.device_get(step(*given))

    _, (expected, wanted) = run(MeshSection(data=1), 1)
    places, (actual, out) = run(MeshSection(data=1, fsdp=2, tensor=2, sequence=2), 8)
    np.testing.assert_allclose(out, wanted, atol=1e-5 * np.abs(wanted).max())
    assert_agree(actual, expected)
    for stage in places["stages"].values():
        assert any("tensor" in leaf.spec for leaf in jax.tree.leaves(stage["mixer"]))
