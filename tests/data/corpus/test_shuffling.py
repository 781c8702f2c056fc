import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.data.corpus.shuffling import shuffled

PINNED = [3, 5, 9, 7, 8, 4, 6, 1, 2, 0, 2, 6, 5, 1, 9, 3, 0, 8, 4, 7]


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 3000), seed=st.integers(-5, 2**70), epoch=st.integers(0, 10**6))
def test_every_epoch_is_a_permutation(size, seed, epoch):
    positions = np.arange(size) + epoch * size
    assert sorted(shuffled(size, seed)(positions).tolist()) == list(range(size))


def test_order_does_not_depend_on_how_it_is_asked_for():
    order = shuffled(1000, 3)
    whole = order(np.arange(5000))
    some = np.asarray([4999, 0, 1234, 1000, 999])
    assert order(some).tolist() == whole[some].tolist()


def test_epochs_and_seeds_differ():
    rows = shuffled(1000, 0)(np.arange(3000)).reshape(3, 1000)
    others = shuffled(1000, 1)(np.arange(3000)).reshape(3, 1000)
    orders = [tuple(order) for order in (*rows, *others)]
    assert len(set(orders)) == 6
    for a in range(6):
        for b in range(a):  # two random orders agree in one place on average
            assert np.sum(np.equal(orders[a], orders[b])) < 10


def test_order_is_pinned():
    """A change here changes the data order of every run that is resumed."""
    assert shuffled(10, 0)(np.arange(20)).tolist() == PINNED


def test_positions_are_evenly_distributed():
    """Each row is equally often at the first place, and neighbors do not stay together."""
    size = 64
    first = np.bincount(shuffled(size, 1)(np.arange(6400) * size), minlength=size)
    assert np.sum((first - 100) ** 2 / 100) < 110  # chi square, 63 degrees of freedom: p = 0.0002
    order = shuffled(100_000, 2)(np.arange(100_000))
    assert np.mean(np.abs(np.diff(order)) < 100) < 0.005  # 0.2 % by chance
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.02
