"""Every mixer as a decoder has it: it reads the past alone, its one-step form is the whole one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.config import PluginError
from convbert_jax.config.mixers import check_causal
from convbert_jax.decoding.state import move, pack
from convbert_jax.models.layers import initializers
from convbert_jax.ops.depthwise_conv import depthwise_conv
from convbert_jax.ops.dynamic_conv import dynamic_conv
from convbert_jax.ops.one_step import depthwise_conv_step, dynamic_conv_step
from tests.models.definitions import KINDS
from tests.models.mean_mixer import Mean

ROWS, LENGTH = 3, 13
every_kind = pytest.mark.parametrize("kind", KINDS)
# Filters longer than the row, even ones, and one of a single tap.
SIZES = {kind: {"kernel_size": (4, 1, 9, 16, 3)[i % 5]} for i, kind in enumerate(KINDS)}


@pytest.fixture(scope="module")
def causal(make_config, randomize):
    """causal(kind) -> (module, states [3, 13, 32])."""

    def make(kind):
        fields = {**SIZES[kind], **KINDS[kind]}
        mixer = make_config(**fields).encoder.stages[0].layer.mixer
        check_causal(mixer, kind)
        start = initializers("release", 0.02)
        made = randomize(lambda rngs: mixer.module(32, start, rngs, causal=True))
        return nnx.merge(*made), jax.random.normal(jax.random.key(1), (ROWS, LENGTH, 32))

    return make


def by_steps(module, x, length=LENGTH, copies=1):
    """All positions, one after the other; and the state behind the last."""

    def step(state, given):
        place, x = given
        out, state = module.step(x[:, None], state, jnp.full(len(x), place))
        return state, out[:, 0]

    state = module.start(len(x), length, x.dtype, copies)
    places = jnp.arange(x.shape[1])
    state, out = jax.lax.scan(step, state, (places, x.swapaxes(0, 1)))
    return out.swapaxes(0, 1), state


@every_kind
def test_step_by_step_it_is_what_it_is_as_a_whole(causal, kind):
    module, x = causal(kind)
    ones = jnp.ones((ROWS, LENGTH), jnp.int32)
    whole = jax.jit(lambda x: module(x, ones))(x)
    steps, state = jax.jit(functools.partial(by_steps, module))(x)
    np.testing.assert_allclose(steps, whole, atol=1e-5)
    roomy, _ = jax.jit(functools.partial(by_steps, module, length=LENGTH + 3))(x)
    np.testing.assert_allclose(roomy, whole, atol=1e-5)
    assert all(leaf.shape[0] == ROWS for leaf in jax.tree.leaves(state) if leaf.ndim)
    rounded = jax.eval_shape(lambda x: by_steps(module, x.astype(jnp.bfloat16)), x)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(rounded)}
    assert dtypes - {jnp.dtype(bool), jnp.dtype(jnp.int32)} == {jnp.dtype(jnp.bfloat16)}


@every_kind
def test_rows_in_another_order_go_on_as_they_began(causal, kind):
    """What a beam search does: a row takes the state of another; what none reads is dropped."""
    module, x = causal(kind)
    order = jnp.asarray([2, 0, 2, 3, 5, 4])  # of two groups of three
    x = jnp.concatenate([x, x[::-1] + 1])

    @jax.jit
    def run(x):
        _, state = by_steps(module, x[:, :-2], copies=3)
        for place in (LENGTH - 2, LENGTH - 1):  # moved twice, with a step between
            state = pack(move(state, order))
            x = x[order]
            out, state = module.step(x[:, place, None], state, jnp.full(len(x), place))
        return out[:, 0]

    whole = jax.jit(lambda x: by_steps(module, x)[0])(x[order][order])
    np.testing.assert_allclose(run(x), whole[:, -1], atol=1e-5)


@every_kind
@pytest.mark.parametrize("begun", [2, LENGTH - 1])
def test_what_is_given_is_read_at_once(causal, kind, begun):
    """Padding is before shorter rows; each goes on in two ways, which then change places."""
    module, x = causal(kind)
    first = jnp.asarray([0, begun - 1, 1])
    ids = (jnp.arange(begun) >= first[:, None]).astype(jnp.int32)
    behind = jnp.stack([x[:, begun], x[:, begun] + 1], axis=1).reshape(2 * ROWS, 1, -1)

    @jax.jit
    def run(x):
        given, state = module.prefill(x[:, :begun], ids, LENGTH, copies=2)
        state = move(state, jnp.asarray([1, 0, 2, 2, 5, 4]))
        places = begun - jnp.repeat(first, 2)
        return given, module.step(behind, state, places)[0]

    given, out = run(x)
    for row in range(2 * ROWS):
        begins = int(first[row // 2])
        own = jnp.concatenate([x[row // 2, begins:begun], behind[row]])[None]
        whole = module(own, jnp.ones(own.shape[:2], jnp.int32))[0]
        np.testing.assert_allclose(given[row // 2, begins:], whole[:-1], atol=1e-5)
        np.testing.assert_allclose(out[row, 0], whole[-1], atol=1e-5)


def test_what_the_rows_of_a_group_have_in_common_is_kept_once(causal):
    module, x = causal("attention")
    x = jnp.broadcast_to(x[1], x.shape)
    _, state = by_steps(module, x[:, :-2], length=LENGTH, copies=ROWS)
    assert state.used == ROWS * (LENGTH - 2)
    state = pack(move(state, jnp.asarray([1, 1, 1])))
    assert state.used == LENGTH - 2
    state = pack(module.step(x[:, :1], state, jnp.full(ROWS, LENGTH - 2))[1])
    assert state.used == LENGTH - 2 + ROWS  # the last ones differ
    state = pack(move(state, jnp.asarray([0, 2, 0])))
    assert state.used == LENGTH - 2 + 2
    state = state.resize(LENGTH + 3)  # no more than it needs
    out, _ = module.step(x[:, -1:], state, jnp.full(ROWS, LENGTH - 1))
    read = jnp.concatenate([x[:, :-2], x[:, :1], x[:, -1:]], axis=1)
    whole = module(read, jnp.ones(read.shape[:2], jnp.int32))
    np.testing.assert_allclose(out[:, 0], whole[:, -1], atol=1e-5)


@every_kind
def test_it_reads_the_past_alone_and_documents_apart(causal, kind):
    module, x = causal(kind)
    ids = jnp.asarray([[1] * 5 + [2] * 6 + [0] * 2] * ROWS)

    @jax.jit
    def run(x, ids):
        return module(x, ids)

    whole = run(x, ids)
    changed = run(x.at[:, 8:].add(1.0), ids)
    np.testing.assert_allclose(changed[:, :8], whole[:, :8], atol=1e-6)
    assert np.abs(changed[:, 8] - whole[:, 8]).max() > 1e-3
    alone = run(jnp.pad(x[:, 5:11], ((0, 0), (0, 7), (0, 0))), jnp.asarray([[1] * 6 + [0] * 7] * 3))
    np.testing.assert_allclose(whole[:, 5:11], alone[:, :6], atol=1e-5)


@pytest.mark.parametrize(("taps", "dilation"), [(1, 1), (4, 1), (3, 2), (31, 1)])
def test_the_ops_step_by_step(taps, dilation):
    rng = np.random.default_rng(0)
    values, filters, few = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((2, 9, 2, 3), (2, 9, 2, taps), (taps, 6))
    )
    x = values.reshape(2, 9, 6)
    whole = dynamic_conv(values, filters, dilation=dilation, causal=True)
    light = dynamic_conv(values, filters[0, 0], dilation=dilation, causal=True)
    depthwise = depthwise_conv(x, few, dilation=dilation, causal=True)
    before = (taps - 1) * dilation
    padded = jnp.pad(values, ((0, 0), (before, 0), (0, 0), (0, 0)))
    for t in range(9):
        window = padded[:, t : t + before + 1]
        out = dynamic_conv_step(window, filters[:, t], dilation=dilation)
        np.testing.assert_allclose(out, whole[:, t], atol=1e-5)
        out = dynamic_conv_step(window, filters[0, 0], dilation=dilation)
        np.testing.assert_allclose(out, light[:, t], atol=1e-5)
        out = depthwise_conv_step(window.reshape(2, -1, 6), few, dilation=dilation)
        np.testing.assert_allclose(out, depthwise[:, t], atol=1e-5)


def test_a_window_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"dynamic_conv_step: window is .* must have 5 positions"):
        dynamic_conv_step(jnp.zeros((1, 4, 1, 2)), jnp.zeros((1, 3)), dilation=2)


def test_a_mixer_without_a_causal_form_is_refused():
    with pytest.raises(PluginError, match=r"config.model.mixer=mine has no causal form"):
        check_causal(Mean(), "config.model.mixer=mine")
