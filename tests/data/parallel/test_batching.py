"""Batches of pairs: as described, resumed exactly, the same for any number of processes."""

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from convbert_jax.data.errors import DataError
from convbert_jax.data.parallel.batching import (
    evaluation_batches,
    list_shapes,
    training_batches,
)
from convbert_jax.data.parallel.parallel_text import prepare
from convbert_jax.interfaces.batch import SequenceBatch
from tests.batches import check_batch
from tests.data.parallel.conftest import write_files

FIELDS = ("source", "source_ids", "tokens", "segment_ids", "labels")


def take(batches, count):
    result = list(itertools.islice(batches, count))
    batches.close()
    return result


def same(first, second):
    return len(first) == len(second) > 0 and all(
        np.array_equal(a[name], b[name])
        for a, b in zip(first, second, strict=True)
        for name in FIELDS
    )


def read_back(batches, text):
    """How often each pair of texts comes."""
    found = collections.Counter()
    for batch in batches:
        for row in range(len(batch["tokens"])):
            sizes = [int((batch[name][row] != 0).sum()) for name in ("source_ids", "segment_ids")]
            if not sizes[0]:
                assert not sizes[1]
                continue
            source, labels = batch["source"][row, : sizes[0]], batch["labels"][row, : sizes[1]]
            tokens, special = batch["tokens"][row, : sizes[1]], text.vocabularies.target.special
            assert source[-1] == labels[-1] == special.sep
            assert tokens[0] == special.cls
            assert (tokens[1:] == labels[:-1]).all()
            found[
                text.vocabularies.source.decode(source[:-1]),
                text.vocabularies.target.decode(labels[:-1]),
            ] += 1
    return found


def batches_an_epoch(text, section, **arguments):
    batches = training_batches(text, section, seed=0, prefetch=0, **arguments)
    batches.close()
    return batches._plan.batches


def test_an_epoch_is_every_pair_once_in_few_shapes(prepared, pairs):
    config, text = prepared
    section = config.parallel
    count = batches_an_epoch(text, section, row_multiple=2)
    shapes = {(s.rows, s.source, s.target) for s in list_shapes(text, section, 2)}
    assert 1 < len(shapes) <= section.shapes
    batches = take(training_batches(text, section, seed=3, row_multiple=2), 2 * count)
    for batch in batches:
        check_batch(batch, SequenceBatch)
        assert (*batch["source"].shape, batch["tokens"].shape[1]) in shapes
    epochs = [read_back(batches[:count], text), read_back(batches[count:], text)]
    held = read_back(evaluation_batches(text, section, row_multiple=2), text)
    assert epochs[0] == epochs[1]
    assert epochs[0] + held == collections.Counter(pairs)
    assert not same(batches[:count], batches[count:])


@pytest.mark.parametrize("prefetch", [0, 3])
def test_resumed_batches_are_those_that_would_have_come(prepared, prefetch):
    config, text = prepared
    count = batches_an_epoch(text, config.parallel)
    batches = training_batches(text, config.parallel, seed=5, prefetch=prefetch)
    states, whole = [], []
    for _ in range(2 * count):
        states.append(batches.get_state())
        whole.append(next(batches))
    for place in (count + 3, 0, count - 1):
        batches.set_state(states[place])
        assert same(list(itertools.islice(batches, 4)), whole[place : place + 4])
    batches.close()
    other = training_batches(text, config.parallel, seed=6, prefetch=prefetch)
    with pytest.raises(DataError, match="seed=5 but this run has seed=6"):
        other.set_state(states[0])
    assert not same(take(other, 4), whole[:4])


@pytest.mark.parametrize("prefetch", [0, 3])
def test_other_devices_go_on_with_the_batches_that_there_were(prepared, prefetch):
    config, text = prepared
    # As batches of a multiple of 8 rows could not be told apart, those of an older run.
    began = training_batches(text, config.parallel, seed=5, prefetch=0)
    shapes = [[s.rows - 2, s.source, s.target] for s in began._plan.shapes]
    state = began.get_state() | {"shapes": shapes}
    began.set_state(state)
    whole = list(itertools.islice(began, 5))
    later = began.get_state()
    assert {len(batch["tokens"]) for batch in whole} <= {rows for rows, *_ in shapes}
    assert later["shapes"] == shapes
    batches = training_batches(text, config.parallel, seed=5, row_multiple=2, prefetch=prefetch)
    batches.set_state(state)
    assert same(list(itertools.islice(batches, 5)), whole)
    assert batches.get_state() == later
    batches.close()
    many = training_batches(text, config.parallel, seed=5, row_multiple=4, prefetch=prefetch)
    with pytest.raises(DataError, match=r"began with batches of \d+ pairs, which 4, the devices"):
        many.set_state(state)
    many.close()
    began.close()


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_up_to_eight_devices_have_the_batches_of_one(prepared, devices):
    config, text = prepared
    section = dataclasses.replace(config.parallel, batch_tokens=1_000)  # 8 of the longest fit
    assert list_shapes(text, section, devices) == list_shapes(text, section)


def test_processes_share_the_rows_of_a_batch(prepared):
    config, text = prepared
    whole = take(training_batches(text, config.parallel, seed=1, row_multiple=4), 9)
    parts = [
        take(
            training_batches(
                text, config.parallel, seed=1, row_multiple=4, process_index=i, process_count=2
            ),
            9,
        )
        for i in range(2)
    ]
    joined = [
        {name: np.concatenate([a[name], b[name]]) for name in FIELDS}
        for a, b in zip(*parts, strict=True)
    ]
    assert same(joined, whole)
    with pytest.raises(DataError, match="cannot be divided over 3 processes"):
        training_batches(text, config.parallel, seed=1, row_multiple=4, process_count=3)


def test_evaluation_can_take_some_rows(prepared):
    config, text = prepared
    found = read_back(evaluation_batches(text, config.parallel, rows=7), text)
    assert found.total() == 7


def test_documents_that_are_too_long_are_drawn_anew_too(pairs, make_config, tmp_path):
    document = " ".join(source for source, _ in pairs[:40])
    spec = write_files(tmp_path, [*pairs[:60], (document, "only this")])
    config = make_config(spec, sampling=0.3, max_length=64, cut_sources=True, heldout_fraction=0.05)
    text = prepare(config, tmp_path / "prepared")
    count = batches_an_epoch(text, config.parallel)
    drawn = []
    for batch in take(training_batches(text, config.parallel, seed=1), 3 * count):
        for row, ids in zip(batch["source"], batch["source_ids"], strict=True):
            if ids.sum() == 64:
                drawn.append(tuple(row))
    assert len(drawn) == 3
    assert len(set(drawn)) > 1
    for row in drawn:
        assert document.startswith(text.vocabularies.source.decode(row[:63]))


def test_texts_are_cut_anew_in_each_epoch(pairs, make_config, tmp_path):
    config = make_config(write_files(tmp_path, pairs), sampling=0.3)
    text = prepare(config, tmp_path / "prepared")
    count = batches_an_epoch(text, config.parallel)

    def run(seed, skipped=0):
        batches = training_batches(text, config.parallel, seed=seed)
        batches.set_state(batches.get_state() | {"next_batch": skipped})
        return take(batches, 2 * count - skipped)

    whole = run(1)
    assert same(run(1, count + 2), whole[count + 2 :])
    # The same texts, now in other pieces.
    first, second = (read_back(part, text) for part in (whole[:count], whole[count:]))
    assert first == second
    held = evaluation_batches(text, config.parallel)
    assert first + read_back(held, text) == collections.Counter(pairs)

    def pieces(batches):
        return sum(int((batch["source_ids"] != 0).sum()) for batch in batches)

    assert pieces(whole[:count]) != pieces(whole[count:])
    assert pieces(whole[:count]) > text.splits["train"].tokens[0]
