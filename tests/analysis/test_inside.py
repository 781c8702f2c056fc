"""Statistics of attention maps and filters against hand-computed values, and their figures."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.analysis import inspection
from tests.pictures import shows_something


def uniform(n):
    return np.full((1, n, n), 1 / n)


def shifted(n, by):
    """Returns attention maps in which every token attends `by` positions ahead, cyclically."""
    return np.roll(np.eye(n), by, axis=1)[None]


def random_maps(n, heads=3, seed=0):
    weights = np.random.default_rng(seed).random((heads, n, n))
    return weights / weights.sum(-1, keepdims=True)


@given(st.integers(1, 60), st.integers(0, 12))
@settings(deadline=None, max_examples=30)
def test_concentration_of_simple_maps(n, window):
    by_hand = sum(min(n - 1, i + window) - max(0, i - window) + 1 for i in range(n)) / n**2
    assert inspection.chance(n, window) == pytest.approx(by_hand)
    assert inspection.concentration(uniform(n), window)[0] == pytest.approx(by_hand)
    assert inspection.concentration(shifted(n, 0), window)[0] == 1
    assert inspection.concentration(shifted(40, 4))[0] == pytest.approx(36 / 40)  # 4 wrap around
    assert inspection.concentration(shifted(40, 5))[0] == 0
    to_first = np.zeros((1, 20, 20))
    to_first[..., 0] = 1
    assert inspection.concentration(to_first)[0] == pytest.approx(5 / 20)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6))
@settings(deadline=None, max_examples=15)
def test_texts_count_by_their_number_of_tokens(lengths):
    sums = inspection.MapSums(30)
    texts = [random_maps(n, seed=n) for n in lengths]
    for text in texts:
        sums.add({0: text, 2: uniform(text.shape[-1])})
    first, second = sums.layers()
    assert (first.layer, second.layer) == (0, 2)
    assert sums.texts == len(lengths)
    assert sums.tokens == sum(lengths)
    # weighted equally by query
    near = [
        sum(text[:, i, max(0, i - 4) : i + 5].sum(-1) for i in range(text.shape[-1]))
        for text in texts
    ]
    np.testing.assert_allclose(first.concentration, sum(near) / sum(lengths))
    np.testing.assert_allclose(second.concentration, sums.chance)
    longest = max(lengths)
    assert first.mean.shape == (3, longest, longest)  # only positions within texts
    for i, j in [(0, 0), (longest - 1, 0), (longest // 2, longest // 2)]:
        having = [text[:, i, j] for text in texts if max(i, j) < text.shape[-1]]
        np.testing.assert_allclose(first.mean[:, i, j], np.mean(having, axis=0))


def test_the_spread_of_filters():
    same = np.broadcast_to(np.full((2, 5), 0.2), (7, 2, 5))
    np.testing.assert_allclose(inspection.spread(same), 0, atol=1e-12)
    # half of the occurrences have one tap, half another
    apart = np.zeros((4, 1, 3))
    apart[:2, :, 0] = apart[2:, :, 2] = 1
    np.testing.assert_allclose(inspection.spread(apart), 0.5)


def test_a_word_is_found_as_a_whole_word():
    text = "Bank on it: the riverbank, banks and the bank."
    words = [(0, 4), (5, 7), (8, 11), (12, 15), (16, 21), (21, 25), (27, 32), (33, 36), (37, 40)]
    places = np.asarray([*words, (41, 45), (45, 46)])
    found = inspection.find_word("bank", 3, text, places)
    assert [(each.text, each.token) for each in found] == [(3, 1), (3, 10)]
    assert found[0].snippet == "BANK on it: the riverbank,…"
    assert found[1].snippet.endswith("the BANK.")
    assert inspection.find_word("bank", 3, text, places[:5]) == found[:1]  # cut off
    assert not inspection.find_word("b.nk", 3, text, places)
    marked = np.asarray([(0, 1), (0, 2), (2, 4)])  # token spans: the space marker, "ba", "nk"
    assert inspection.find_word("bank", 0, "bank", marked)[0].token == 2


def test_the_layers_to_draw():
    layers = [0, 1, 2, 3, 4, 5]
    chosen = {asked: inspection.chosen_layers(layers, asked) for asked in ((), (1, 5), (9,))}
    assert chosen == {(): [0, 3, 5], (1, 5): [1, 5], (9,): []}
    assert inspection.chosen_layers([4], ()) == [4]
    assert inspection.chosen_layers([], ()) == []


def test_figures_show_something(tmp_path):
    sums = inspection.MapSums(70)
    for n in (70, 20):
        sums.add({layer: random_maps(n, heads) for layer, heads in ((0, 2), (1, 4))})
    layers = sums.layers()
    inspection.draw_maps(layers, "a model", tmp_path / "maps.png")
    models = [("one", layers, 0.1), ("another", layers[:1], 0.2)]
    inspection.draw_concentration(models, inspection.WINDOW, tmp_path / "concentration.png")
    taps = np.random.default_rng(0).dirichlet(np.ones(9), (30, 9))
    occurrences = [inspection.Occurrence(i, 1, f"the bank number {i}") for i in range(30)]
    of_word = [inspection.LayerFilters(0, taps), inspection.LayerFilters(3, taps[:, :2, :4])]
    inspection.draw_filters(of_word, occurrences, "a model", tmp_path / "filters.png")
    for name in ("maps", "concentration", "filters"):
        assert shows_something(tmp_path / f"{name}.png")
