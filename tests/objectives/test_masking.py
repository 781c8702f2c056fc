"""Masking and sampling against plain Python with the same random numbers.

The definitions use the same keys, so comparisons are exact. A separate test checks that the
definitions choose uniformly.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import small
from convbert_jax.config import ObjectiveSection, from_config_dict
from convbert_jax.interfaces import SpecialIds
from convbert_jax.objectives import masking

SENTINEL = 6
SPECIAL = SpecialIds(pad=0, unknown=1, cls=2, sep=3, mask=4, extra={"<extra_id_0>": SENTINEL})
VOCABULARY, LENGTH, SLOTS, MOST = 50, 32, 8, 5


def rows(lengths):
    """Make rows of [CLS] text [SEP] and padding with `lengths` real tokens; few are sentinels."""
    tokens = np.random.default_rng(0).integers(5, VOCABULARY, (len(lengths), LENGTH), np.int32)
    segments = (np.arange(LENGTH) < np.asarray(lengths)[:, None]).astype(np.int32)
    for row, real in enumerate(lengths):
        tokens[row, 0], tokens[row, real - 1], tokens[row, real:] = SPECIAL.cls, SPECIAL.sep, 0
    return tokens, segments


def mask(key, tokens, segments, **changes):
    return masking.mask(
        key, tokens, segments, objective=ObjectiveSection(**changes), special=SPECIAL,
        vocab_size=VOCABULARY, most=MOST, slots=SLOTS,
    )  # fmt: skip


def masked_by_definition(key, tokens, segments, o):
    """Return (tokens, per row the [(position, label)] of used slots)."""
    position_key, branch_key, token_key = jax.random.split(key, 3)
    shape = len(tokens), SLOTS
    drawn = jax.random.uniform(position_key, shape if o.sample_with_replacement else tokens.shape)
    branch = np.asarray(jax.random.uniform(branch_key, shape))
    other = np.asarray(jax.random.randint(token_key, shape, 0, VOCABULARY))
    result, slots = tokens.copy(), []
    for row, (ids, real) in enumerate(zip(tokens, segments, strict=True)):
        never = (SPECIAL.cls, SPECIAL.sep, SPECIAL.mask, SENTINEL)
        candidates = [i for i in range(LENGTH) if real[i] and ids[i] not in never]
        count = max(1, min(MOST, round(o.mask_fraction * int(real.sum()))))
        if o.sample_with_replacement:
            draws = np.asarray(drawn[row, :count]) * np.float32(len(candidates))
            chosen = [candidates[int(draw)] for draw in draws] if candidates else []
        else:
            noise = np.asarray(drawn[row])
            chosen = sorted(candidates, key=lambda i: -noise[i])[:count]
        slots.append([(i, int(ids[i])) for i in chosen])
        for slot, i in reversed(list(enumerate(chosen))):  # the first of duplicates wins
            if branch[row, slot] < o.mask_token_fraction:
                result[row, i] = SPECIAL.mask
            elif branch[row, slot] < o.mask_token_fraction + o.random_token_fraction:
                result[row, i] = other[row, slot]
    return result, slots


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sample_with_replacement": True, "mask_fraction": 0.3},
        {"mask_token_fraction": 0.4, "random_token_fraction": 0.3},
        {"sample_with_replacement": True, "mask_token_fraction": 0.2, "random_token_fraction": 0.6},
    ],
    ids=str,
)
def test_masking_is_its_definition(fields):
    tokens, segments = rows([LENGTH, 20, 10, 3, 2, *range(4, LENGTH)])
    tokens[2, 1:9] = SENTINEL  # no candidates, as in a row of two tokens
    run = jax.jit(functools.partial(mask, **fields))
    o, twice = ObjectiveSection(**fields), 0
    for seed in range(3):
        key = jax.random.key(seed)
        masked = run(key, tokens, segments)
        wanted, slots = masked_by_definition(key, tokens, segments, o)
        np.testing.assert_array_equal(masked.tokens, wanted)
        assert masked.positions.shape == masked.labels.shape == (len(tokens), SLOTS)
        for row, used in enumerate(slots):
            twice += len(dict(used)) < len(used)
            weights = [1.0] * len(used) + [0.0] * (SLOTS - len(used))
            assert masked.weights[row].tolist() == weights
            assert masked.positions[row].tolist() == [i for i, _ in used] + [0] * weights.count(0)
            assert masked.labels[row][: len(used)].tolist() == [label for _, label in used]
    assert bool(twice) == o.sample_with_replacement


def test_the_number_of_predictions_is_that_of_the_release():
    """Rounds half to even: 30 * 0.15 and five others are ties."""
    real = np.arange(129)
    segments = (np.arange(128) < real[:, None]).astype(np.int32)
    for most in (1, 7, 40):
        expected = [max(1, min(most, round(0.15 * n))) for n in real.tolist()]
        assert masking.count_predictions(segments, 0.15, most).tolist() == expected


@pytest.mark.parametrize("with_replacement", [False, True])
def test_positions_are_uniform(with_replacement):
    """Bounds are five standard deviations: one in 50,000 draws fails by chance."""
    candidates = jnp.broadcast_to(
        (np.arange(LENGTH) > 0) & (np.arange(LENGTH) < 29), (4000, LENGTH)
    )
    run = functools.partial(masking.choose_positions, with_replacement=with_replacement)
    counts = jnp.full(4000, MOST)
    positions, used = jax.jit(run, static_argnums=3)(jax.random.key(0), candidates, counts, SLOTS)
    found = np.bincount(np.asarray(positions)[np.asarray(used) > 0], minlength=LENGTH)
    assert found[0] == found[29:].sum() == 0
    expected = 4000 * MOST / 28
    assert np.abs(found[1:29] - expected).max() < 5 * np.sqrt(expected)


def test_slots_beyond_a_row_are_unused():
    candidates = jnp.ones((2, 3), bool)
    positions, weights = masking.choose_positions(
        jax.random.key(0), candidates, jnp.asarray([2, 3]), 5, with_replacement=False
    )
    assert weights.tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]
    assert sorted(positions[1, :3].tolist()) == [0, 1, 2]
    assert positions[1, 3:].tolist() == [0, 0]


def test_variants_hide_what_their_papers_say():
    """Fractions of masked, replaced and kept tokens, and sampling with or without replacement."""
    for variant, hidden, swapped, twice in (
        ("default", 0.85, 0.0, False), ("paper", 0.85, 0.0, True), ("bert", 0.8, 0.1, False),
    ):  # fmt: skip
        config = from_config_dict(small.get_config(variant))
        o = config.objective
        assert (o.mask_token_fraction, o.random_token_fraction) == (hidden, swapped)
        assert o.sample_with_replacement == twice
        assert config.max_predictions == 19  # int(0.155 * 128), as in the official code


def test_what_is_hidden_does_not_depend_on_the_platform():
    """RBG keys, used on TPUs, give other numbers and are not partitioned by the compiler."""
    tokens, segments = rows([LENGTH, 20, 9])
    logits = jax.random.normal(jax.random.key(1), (3, SLOTS, VOCABULARY))

    def draw():
        key = jax.random.fold_in(jax.random.key(7), 3)
        mask_key, sample_key = jax.random.split(key)
        masked = mask(mask_key, tokens, segments)
        settings = {"objective": ObjectiveSection()}
        return *masked, masking.sample_tokens(sample_key, logits, masked.labels, **settings)

    here = jax.jit(draw)()
    with jax.default_prng_impl("rbg"):
        program = jax.jit(lambda: draw())
        jax.tree.map(np.testing.assert_array_equal, program(), here)
        assert "rng_bit_generator" not in program.lower().as_text()


@given(st.data())
@settings(max_examples=30)
def test_putting_sampled_tokens_in(data):
    """With averaging as in the official scatter_update: sum of the ids // number of writes."""
    length, slots = 12, 6

    def draw(values):
        return np.array(data.draw(st.lists(values, min_size=slots, max_size=slots)))

    positions, values = draw(st.integers(1, length - 1)), draw(st.integers(0, 30_000))
    used, tokens = draw(st.booleans()), np.arange(length) + 100
    averaged, first = tokens.copy(), tokens.copy()
    for position in set(positions[used]):
        written = values[used & (positions == position)].tolist()
        averaged[position], first[position] = sum(written) // len(written), written[0]
    for wanted, average in ((averaged, True), (first, False)):
        arrays = (jnp.asarray(x[None]) for x in (tokens, positions, values, used))
        found = _put(*arrays, average)[0]
        np.testing.assert_array_equal(found, wanted)


@functools.partial(jax.jit, static_argnums=4)
def _put(tokens, positions, values, used, average):
    return masking.put(tokens, positions, values, used, average_duplicates=average)


# --- Sampling ---


def invert(logits, points):
    """Invert the cumulative distribution at `points`, in float64.

    Returns (indices, whether a point is too close to a boundary for float32, weights).
    """
    weights = np.exp(np.asarray(logits, np.float64) - np.asarray(logits).max(-1, keepdims=True))
    ends = np.cumsum(weights, axis=-1) / weights.sum(axis=-1, keepdims=True)
    points = np.asarray(points)[..., None]
    return (ends <= points).sum(axis=-1), np.abs(ends - points).min(axis=-1) < 1e-5, weights


def draw_logits(size, draws):
    """Draw logits with some tokens masked out."""
    rng = np.random.default_rng(size)
    logits = 5 * rng.standard_normal((2, draws, size)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.3] = -1e9
    logits[..., size // 2] = 1.0
    return logits


@pytest.mark.parametrize("size", [1, 256, 700])
@pytest.mark.parametrize("search", ["_search_by_slices", "_search_by_products"])
def test_each_search_inverts_the_cumulative_distribution(size, search):
    """A token with probability 1 is always found, also at block boundaries and the last index."""
    peaks = sorted({0, size // 2, min(255, size - 1), min(256, size - 1), size - 1})
    certain = np.full((len(peaks), 100, size), -1e4, np.float32)
    for row, peak in enumerate(peaks):
        certain[row, :, peak] = 0.0
    logits = np.concatenate([draw_logits(size, 100), certain])
    points = np.random.default_rng(1).random(logits.shape[:2], np.float32)
    points[2:] = np.linspace(0, 1, 100)  # includes 1, which is never drawn
    found = np.asarray(jax.jit(getattr(masking, search))(logits, points))
    np.testing.assert_array_equal(found[2:], np.repeat([peaks], 100, axis=0).T)
    expected, near, weights = invert(logits[:2], points[:2])
    assert near.mean() < 0.1
    np.testing.assert_array_equal(found[:2][~near], expected[~near])
    assert np.take_along_axis(weights, found[:2, :, None], axis=-1).min() > 0


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 2.0}, {"disallow_correct": True, "temperature": 0.5}], ids=str
)
@pytest.mark.parametrize("gumbel", [False, True])
def test_samples_are_of_the_softmax(fields, gumbel):
    o = ObjectiveSection(release_gumbel=gumbel, **fields)
    assert masking.adds_up_blocks(o) == (not fields and not gumbel)
    size, key = 300, jax.random.key(3)
    logits = draw_logits(size, 100)
    labels = logits.argmax(axis=-1)
    sampled = jax.jit(functools.partial(masking.sample_tokens, objective=o))(key, logits, labels)
    assert sampled.dtype == jnp.int32
    exact = logits / o.temperature
    if o.disallow_correct:
        np.put_along_axis(exact, labels[..., None], -1e9, -1)
        assert (np.asarray(sampled) != labels).all()
    if gumbel:
        uniform = np.asarray(jax.random.uniform(key, logits.shape), np.float64)
        noisy = exact - np.log(-np.log(uniform + 1e-9) + 1e-9)
        first, second = np.sort(noisy, axis=-1)[..., -1], np.sort(noisy, axis=-1)[..., -2]
        expected, near = noisy.argmax(axis=-1), first - second < 1e-4
    else:
        expected, near, _ = invert(exact, jax.random.uniform(key, logits.shape[:2]))
    assert near.mean() < 0.1
    np.testing.assert_array_equal(np.asarray(sampled)[~near], expected[~near])
