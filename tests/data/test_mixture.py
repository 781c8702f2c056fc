"""Mixtures: exact shares and epochs of each source, limits, one vocabulary, resume."""

import dataclasses
import itertools
import json
import pathlib

import numpy as np
import pytest

from convbert_jax.config import SourceSection
from convbert_jax.data import batching, mixture
from convbert_jax.data.samplers import CYCLE, Mixture
from tests.data.conftest import make_documents

SIZES = [1_000, 300]


def count_rows(rows, source: int) -> np.ndarray:
    """Returns how often each row of a source occurs."""
    start = sum(SIZES[:source])
    own = rows[(rows >= start) & (rows < start + SIZES[source])]
    return np.bincount(own - start, minlength=SIZES[source])


def test_a_cycle_has_exact_shares_in_random_order():
    mixed = Mixture([0.9, 0.1], SIZES, [None, None], seed=3)
    rows = mixed.order(np.arange(2 * CYCLE))
    is_second = rows >= SIZES[0]
    assert [is_second[:CYCLE].sum(), is_second[CYCLE:].sum()] == [1638, 1638]  # 1638.4
    assert 0.08 < is_second[:2_000].mean() < 0.12
    assert not np.array_equal(is_second[:CYCLE], is_second[CYCLE:])
    assert not np.array_equal(
        rows, Mixture([0.9, 0.1], SIZES, [None, None], seed=4).order(np.arange(2 * CYCLE))
    )


def test_each_source_is_read_epoch_by_epoch_across_streams():
    """A second stream with other weights continues where the first one stopped."""
    first = Mixture([0.9, 0.1], SIZES, [None, None], seed=3)
    drawn = first.drawn(4_000)
    second = Mixture([0.2, 0.8], SIZES, [None, None], seed=3, drawn=drawn, stream=1)
    rows = np.concatenate([first.order(np.arange(4_000)), second.order(np.arange(3_000))])
    for source, size in enumerate(SIZES):
        found = count_rows(rows, source)
        assert found.max() - found.min() <= 1
        assert found.sum() == second.drawn(3_000)[source] > 2 * size
    assert second.drawn(0).tolist() == drawn.tolist()


def test_a_source_is_left_out_at_its_limit():
    mixed = Mixture([0.5, 0.4, 0.1], [*SIZES, 50], [None, 450, 50], seed=0)
    rows = mixed.order(np.arange(6_000))
    assert set(count_rows(rows, 1)) == {1, 2}  # one and a half epochs
    assert mixed.drawn(6_000).tolist() == [5_500, 450, 50]
    assert mixed.end is None
    last = np.flatnonzero(rows >= SIZES[0]).max()
    assert last < 2_000


def test_a_mixture_ends_when_all_sources_reach_their_limits():
    mixed = Mixture([0.5, 0.5], SIZES, [2_000, 600], seed=0)
    assert mixed.end == 2_600
    rows = mixed.order(np.arange(2_700))[: mixed.end]
    assert [set(count_rows(rows, source)) for source in (0, 1)] == [{2}, {2}]


@pytest.fixture(scope="module")
def mixed(make_config, tmp_path_factory):
    """A config with two sources, and their prepared rows."""
    folder = tmp_path_factory.mktemp("mixture")
    sections = []
    for number, (name, weight) in enumerate({"domain": 0.75, "general": 0.25}.items()):
        path = pathlib.Path(folder, f"{name}.txt")
        path.write_text("\n\n".join(make_documents(60, seed=number + 1)) + "\n")
        sections.append(SourceSection(name, f"text:{path}", weight=weight))
    config = replace(make_config(folder), mixture=tuple(sections))
    return config, mixture.prepare(config, folder / "data")


def replace(config, **fields):
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **fields))


def make_batches(mixed, **options):
    sizes = [source.splits["train"].rows for source in mixed.sources.values()]
    order = Mixture([0.75, 0.25], sizes, [None, 40], seed=5)
    return batching.mixed_batches(mixed, order, batch_size=8, seed=5, **options)


def test_sources_share_a_vocabulary(mixed):
    config, found = mixed
    prints = {source.tokenizer.fingerprint for source in found.sources.values()}
    assert prints == {found.tokenizer.fingerprint}
    assert found.tokenizer.section.path == ""
    folder = found.tokenizer.path.parent
    again = mixture.open_prepared(config, folder)
    assert again.fingerprint == found.fingerprint
    third = SourceSection("third", config.data.mixture[0].source, weight=0.0)
    assert (
        mixture.open_prepared(replace(config, mixture=(*config.data.mixture, third)), folder)
        is None
    )


def test_batches_resume_at_any_point_and_do_not_depend_on_processes(mixed, monkeypatch):
    monkeypatch.setattr(batching, "BLOCK_ROWS", 40)
    _, found = mixed
    batches = make_batches(found, prefetch=4)
    states, whole = [], []
    for _ in range(40):
        states.append(json.loads(json.dumps(batches.get_state())))
        whole.append(next(batches)["tokens"])
    assert batches.metrics() == {"domain/share": 280 / 320, "general/share": 40 / 320}
    for place in (33, 0, 17):
        batches.set_state(states[place])
        again = [batch["tokens"] for batch in itertools.islice(batches, 40 - place)]
        assert np.array_equal(again, whole[place:])
    batches.close()
    halves = [make_batches(found, process_index=i, process_count=2) for i in range(2)]
    parts = [[next(half)["tokens"] for _ in range(40)] for half in halves]
    assert np.array_equal(np.concatenate(parts, axis=1), whole)
    for half in halves:
        half.close()
