"""Masking and sampling: statistics, static shapes, and the release's rules against plain Python."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import small
from convbert_jax.config import ObjectiveSection, from_config_dict
from convbert_jax.interfaces.special_ids import SpecialIds
from convbert_jax.objectives import masked_lm, masking

SPECIAL = SpecialIds(pad=0, unknown=1, cls=2, sep=3, mask=4)
VOCABULARY = 50


def rows(lengths, length=128, seed=0):
    """Rows of [CLS] text [SEP] and padding, with so many real tokens each."""
    tokens = np.random.default_rng(seed).integers(5, VOCABULARY, (len(lengths), length))
    segments = np.zeros((len(lengths), length), np.int32)
    for row, real in enumerate(lengths):
        tokens[row, 0], tokens[row, real - 1], tokens[row, real:] = SPECIAL.cls, SPECIAL.sep, 0
        segments[row, :real] = 1
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(segments)


def apply_mask(tokens, segments, key=0, slots=24, most=19, **changes):
    run = functools.partial(
        masking.mask,
        objective=dataclasses.replace(ObjectiveSection(), **changes),
        special=SPECIAL,
        vocab_size=VOCABULARY,
        most=most,
        slots=slots,
    )
    return jax.jit(run)(jax.random.key(key), tokens, segments)


@pytest.mark.parametrize("most", [1, 7, 40])
def test_count_is_the_release_formula(most):
    real = np.arange(129)  # 30 * 0.15 is a half, as are five others
    segments = (np.arange(128) < real[:, None]).astype(np.int32)
    expected = [max(1, min(most, round(0.15 * n))) for n in real.tolist()]  # half to even as well
    assert masking.count_predictions(segments, 0.15, most).tolist() == expected


@pytest.mark.parametrize("with_replacement", [False, True])
def test_only_ordinary_real_tokens_are_chosen(with_replacement):
    tokens, segments = rows([128, 60, 17, 3, 2])
    for key in range(5):
        masked = apply_mask(tokens, segments, key, sample_with_replacement=with_replacement)
        used = np.asarray(masked.weights) > 0
        chosen = np.asarray(masked.positions)
        assert masked.tokens.shape == tokens.shape
        assert masked.positions.shape == (5, 24)
        assert used.sum(axis=1).tolist() == [19, 9, 3, 1, 0]  # the last row has none to choose
        for row in range(5):
            picked = chosen[row][used[row]]
            assert np.isin(tokens[row, picked], [SPECIAL.cls, SPECIAL.sep, SPECIAL.mask]).sum() == 0
            assert (segments[row, picked] == 1).all()
            assert (np.asarray(masked.labels)[row][used[row]] == tokens[row, picked]).all()
            if not with_replacement:
                assert len(set(picked.tolist())) == len(picked)
            untouched = np.setdiff1d(np.arange(128), picked)
            assert (masked.tokens[row, untouched] == tokens[row, untouched]).all()


def test_replacement_draws_some_position_twice():
    tokens, segments = rows([128] * 64)
    masked = apply_mask(
        tokens, segments, sample_with_replacement=True, prediction_multiple=1, slots=19
    )
    distinct = [len(set(row.tolist())) for row in np.asarray(masked.positions)]
    # 19 draws of 126 meet about 1.3 times.
    assert 17.0 < np.mean(distinct) < 18.4


@pytest.mark.parametrize("with_replacement", [False, True])
def test_positions_are_uniform(with_replacement):
    tokens, segments = rows([30] * 4000, length=32)
    masked = apply_mask(tokens, segments, slots=8, most=5, sample_with_replacement=with_replacement)
    counts = np.bincount(np.asarray(masked.positions)[np.asarray(masked.weights) > 0], minlength=32)
    assert counts[0] == counts[29:].sum() == 0
    expected = counts.sum() / 28
    assert np.abs(counts[1:29] - expected).max() < 5 * np.sqrt(expected)


@pytest.mark.parametrize(("hidden", "swapped"), [(0.85, 0.0), (0.8, 0.1), (1.0, 0.0)])
def test_branches(hidden, swapped):
    tokens, segments = rows([128] * 512)
    masked = apply_mask(tokens, segments, mask_token_fraction=hidden, random_token_fraction=swapped)
    used = np.asarray(masked.weights) > 0
    now = np.asarray(masking.gather(masked.tokens, masked.positions))[used]
    before = np.asarray(masked.labels)[used]
    assert np.mean(now == SPECIAL.mask) == pytest.approx(hidden + swapped / VOCABULARY, abs=0.015)
    kept = 1 - hidden - swapped
    assert np.mean(now == before) == pytest.approx(kept + swapped / VOCABULARY, abs=0.015)


def test_what_is_hidden_does_not_depend_on_the_platform():
    """On TPUs keys are of RBG, whose numbers are other ones and are not divided by the compiler."""
    tokens, segments = rows([128, 60, 9])
    logits = jax.random.normal(jax.random.key(1), (3, 24, VOCABULARY))

    def draw():
        key = jax.random.fold_in(jax.random.key(7), 3)
        mask_key, sample_key = jax.random.split(key)
        masked = masking.mask(
            mask_key, tokens, segments, objective=ObjectiveSection(), special=SPECIAL,
            vocab_size=VOCABULARY, most=19, slots=24,
        )  # fmt: skip
        settings = {"objective": ObjectiveSection()}
        return *masked, masking.sample_tokens(sample_key, logits, masked.labels, **settings)

    here = draw()
    with jax.default_prng_impl("rbg"):
        program = jax.make_jaxpr(draw)()
        on_a_tpu = draw()
    jax.tree.map(np.testing.assert_array_equal, on_a_tpu, here)
    assert "rng_bit_generator" not in str(program)


def scatter_update(sequence, values, positions):
    """The release's rule in plain Python: sum of ids // number of writes, never at position 0."""
    result = sequence.copy()
    for position in set(positions) - {0}:
        written = [v for v, p in zip(values, positions, strict=True) if p == position]
        result[position] = sum(written) // len(written)
    return result


@given(st.data())
@settings(deadline=None, max_examples=50)
def test_put(data):
    length, slots = 12, 6
    integers = lambda low, high: st.lists(  # noqa: E731
        st.integers(low, high), min_size=slots, max_size=slots
    )
    positions = np.array(data.draw(integers(1, length - 1)))
    values = np.array(data.draw(integers(0, 30_000)))
    used = np.array(data.draw(st.lists(st.booleans(), min_size=slots, max_size=slots)))
    tokens = np.arange(length) + 100
    arguments = jnp.asarray(tokens[None]), jnp.asarray(positions[None]), jnp.asarray(values[None])
    averaged = masking.put(*arguments, jnp.asarray(used[None]), average_duplicates=True)[0]
    expected = scatter_update(tokens, values[used].tolist(), positions[used].tolist())
    np.testing.assert_array_equal(averaged, expected)
    first = masking.put(*arguments, jnp.asarray(used[None]))[0]
    expected = tokens.copy()
    for value, position in reversed(list(zip(values[used], positions[used], strict=True))):
        expected[position] = value
    np.testing.assert_array_equal(first, expected)


@pytest.mark.parametrize("gumbel", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_samples_follow_the_softmax(gumbel, temperature):
    size, draws = 700, 40_000  # more than two blocks, the last one short
    logits = jax.random.normal(jax.random.key(1), (size,)) * 2
    objective = dataclasses.replace(
        ObjectiveSection(), release_gumbel=gumbel, temperature=temperature
    )
    sample = jax.jit(functools.partial(masking.sample_tokens, objective=objective))
    sampled = sample(
        jax.random.key(2),
        jnp.broadcast_to(logits, (1, draws, size)),
        jnp.zeros((1, draws), jnp.int32),
    )
    expected = np.asarray(jax.nn.softmax(logits / temperature)) * draws
    counts = np.bincount(np.asarray(sampled)[0], minlength=size)
    common = expected > 20
    chi_square = ((counts - expected)[common] ** 2 / expected[common]).sum()
    freedom = common.sum()
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("gumbel", [False, True])
def test_disallow_correct(gumbel):
    logits = jnp.zeros((1, 5000, 10)).at[:, :, 3].set(5.0)
    objective = dataclasses.replace(
        ObjectiveSection(), disallow_correct=True, release_gumbel=gumbel
    )
    labels = jnp.full((1, 5000), 3)
    sampled = np.asarray(
        masking.sample_tokens(jax.random.key(0), logits, labels, objective=objective)
    )
    assert (sampled != 3).all()
    assert len(set(sampled.ravel().tolist())) == 9


SEARCHES = {"slices": masking._search_by_slices, "products": masking._search_by_products}
each_search = pytest.mark.parametrize("search", SEARCHES)


@each_search
@pytest.mark.parametrize("peak", [0, 255, 256, 699])
def test_certain_token_is_always_sampled(peak, search):
    """Block borders and the far end, where rounding could step over."""
    logits = jnp.full((1, 100, 700), -1e4).at[:, :, peak].set(0.0)
    points = jnp.linspace(0, 1, 100)[None]  # 1 itself too, which is never drawn
    assert (np.asarray(SEARCHES[search](logits, points)) == peak).all()


@each_search
@pytest.mark.parametrize("size", [1, 10, 256, 257, 1000])
def test_the_search_inverts_the_cumulative_distribution(size, search):
    """In float64, but where a point is nearer to a border than float32 can tell."""
    logits = 5 * jax.random.normal(jax.random.key(size), (2, 500, size))
    logits = jnp.where(jax.random.bernoulli(jax.random.key(1), 0.3, logits.shape), -1e9, logits)
    logits = logits.at[..., size // 2].set(1.0)
    points = jax.random.uniform(jax.random.key(2), (2, 500))
    found = np.asarray(SEARCHES[search](logits, points))
    weights = np.exp(np.asarray(logits, np.float64) - np.asarray(logits).max(-1, keepdims=True))
    ends = np.cumsum(weights, axis=-1) / weights.sum(axis=-1, keepdims=True)
    near = np.abs(ends - np.asarray(points)[..., None]).min(axis=-1) < 1e-5
    expected = (ends <= np.asarray(points)[..., None]).sum(axis=-1)
    assert near.mean() < 0.1
    np.testing.assert_array_equal(found[~near], expected[~near])
    assert np.take_along_axis(weights, found[..., None], axis=-1).min() > 0


def test_extra_special_ids_are_never_hidden():
    """Every real token but one is a sentinel: that one is hidden, whatever the key."""
    tokens = jnp.full((4, 16), 7, jnp.int32).at[:, 5].set(9)
    special = dataclasses.replace(SPECIAL, extra={"<extra_id_0>": 7})
    masked = masking.mask(
        jax.random.key(0),
        tokens,
        jnp.ones_like(tokens),
        objective=ObjectiveSection(mask_fraction=0.5, mask_token_fraction=1.0),
        special=special,
        vocab_size=VOCABULARY,
        most=8,
        slots=8,
    )
    np.testing.assert_array_equal(masked.tokens, tokens.at[:, 5].set(SPECIAL.mask))
    assert masked.weights.sum(axis=1).tolist() == [1.0] * 4
    assert special.by_name == SPECIAL.by_name | {"<extra_id_0>": 7}


# Shares of the chosen positions that are hidden, swapped and kept, and whether one can be drawn
# twice: as in the papers and the release.
@pytest.mark.parametrize(
    ("variant", "hidden", "swapped", "kept", "twice"),
    [("default", 0.85, 0.0, 0.15, False), ("paper", 0.85, 0.0, 0.15, True),
     ("bert", 0.8, 0.1, 0.1, False)],
)  # fmt: skip
def test_variants_hide_what_their_papers_say(variant, hidden, swapped, kept, twice):
    config = from_config_dict(small.get_config(variant))
    tokens, segments = rows([config.data.length] * 400, length=config.data.length)

    class Silent:
        def generate(self, *arguments, dtype, key):
            return None

    run = jax.jit(
        lambda key: masked_lm.hide_and_predict(
            Silent(),
            {"tokens": tokens, "segment_ids": segments, "type_ids": jnp.zeros_like(tokens)},
            key,
            None,
            dtype=jnp.float32,
            config=dataclasses.replace(
                config, tokenizer=dataclasses.replace(config.tokenizer, vocab_size=VOCABULARY)
            ),
            special=SPECIAL,
        )[0]
    )
    masked = run(jax.random.key(0))
    used = np.asarray(masked.weights) > 0
    assert set(used.sum(axis=1)) == {19}  # int(0.155 * 128), the release's most
    now = np.asarray(masking.gather(masked.tokens, masked.positions))[used]
    before = np.asarray(masked.labels)[used]
    places = [set(row[u].tolist()) for row, u in zip(masked.positions, used, strict=True)]
    drawn_twice = any(len(p) < u.sum() for p, u in zip(places, used, strict=True))
    assert drawn_twice == twice
    # A position that is drawn twice is hidden if one of its two slots is.
    slack = 0.02 + 0.03 * twice
    assert np.mean(now == SPECIAL.mask) == pytest.approx(hidden, abs=slack)
    assert np.mean(now == before) == pytest.approx(kept + swapped / VOCABULARY, abs=slack)
