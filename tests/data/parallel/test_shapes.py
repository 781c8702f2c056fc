"""Epoch plans: every pair once, in shapes that fit it, with minimal padding."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.data.errors import DataError
from convbert_jax.data.samplers import Plan, choose_shapes, shape_of_rows
from tests.refusals import refused

PAIR = st.tuples(st.integers(1, 60), st.integers(1, 60))
LENGTHS = st.lists(PAIR, min_size=1, max_size=150).map(np.array)


def choose(lengths, most=3, batch_tokens=512, row_multiple=1, length_multiple=1):
    names = {"row_multiple": row_multiple, "length_multiple": length_multiple}
    return choose_shapes(lengths, most=most, batch_tokens=batch_tokens, **names)


@settings(max_examples=60)
@given(
    lengths=LENGTHS,
    most=st.integers(1, 6),
    row_multiple=st.sampled_from([1, 2, 8]),
    length_multiple=st.sampled_from([1, 8]),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_an_epoch_has_every_pair_once(lengths, most, row_multiple, length_multiple, epoch, seed):
    shapes = choose(lengths, most, 512, row_multiple, length_multiple)
    assert len(shapes) <= most
    for shape in shapes:
        assert shape.rows % row_multiple == 0
        assert shape.source % length_multiple == shape.target % length_multiple == 0
        assert shape.rows * max(shape.source, shape.target) <= 512
    plan = Plan(shape_of_rows(lengths, shapes), shapes, seed)
    numbers = range(epoch * plan.batches, (epoch + 1) * plan.batches)
    batches = [plan.batch(number) for number in numbers]
    assert {found for _, _, found in batches} == {epoch}
    rows = np.concatenate([rows for _, rows, _ in batches])
    assert sorted(rows[rows >= 0]) == list(range(len(lengths)))
    assert sum((rows < 0).any() for _, rows, _ in batches) <= 1
    for number, members, _ in batches:
        shape = shapes[number]
        assert len(members) == shape.rows
        assert (lengths[members[members >= 0]] <= (shape.source, shape.target)).all()


@settings(max_examples=40)
@given(lengths=LENGTHS, most=st.integers(1, 3))
def test_no_other_lengths_pad_less(lengths, most):
    """Compares with every choice of equally many lengths."""
    longer = lengths.max(axis=1)
    edges = sorted({max(s.source, s.target) for s in choose(lengths, most, 10**6)})

    def cost(edges):
        edges = np.asarray(edges)
        return edges[np.searchsorted(edges, longer)].sum()

    below = sorted(set(longer) - {longer.max()})
    ways = itertools.chain.from_iterable(
        itertools.combinations(below, count) for count in range(most)
    )
    assert cost(edges) == min(cost([*way, longer.max()]) for way in ways)


def test_a_batch_is_a_function_of_seed_and_number():
    lengths = np.random.default_rng(0).integers(1, 60, (200, 2))
    shapes = choose(lengths)
    plan, again, other = (Plan(shape_of_rows(lengths, shapes), shapes, s) for s in (1, 1, 2))
    numbers = list(range(3 * plan.batches))
    forward = {n: plan.batch(n)[1].tolist() for n in numbers}
    assert {n: again.batch(n)[1].tolist() for n in reversed(numbers)} == forward
    assert {n: other.batch(n)[1].tolist() for n in numbers} != forward
    assert forward[0] != forward[plan.batches]


def test_padding_is_counted_and_too_small_batches_are_refused():
    lengths = np.array([[4, 2]] * 8 + [[8, 8]] * 3)
    shapes = choose(lengths, 2, 32)
    assert [(s.rows, s.source, s.target) for s in shapes] == [(8, 4, 2), (4, 8, 8)]
    plan = Plan(shape_of_rows(lengths, shapes), shapes, 0)
    assert plan.batches == 2
    assert plan.padding_share(lengths) == 1 - (8 * 6 + 3 * 16) / (8 * 6 + 4 * 16)
    with refused(DataError, 8, 60, 480, field="config.parallel.batch_tokens", value=400):
        choose(np.array([[60, 3]]), batch_tokens=400, row_multiple=8)
    choose(np.array([[60, 3]]), batch_tokens=480, row_multiple=8)
    with refused(DataError):
        shape_of_rows(np.array([[9, 3]]), choose(np.array([[8, 8]])))
