"""Batches of a corpus and of pairs: every row once, exact resuming, damage detected."""

import itertools
import json
import random
from collections import Counter

import numpy as np
import pytest

from convbert_jax.data import batching, shards
from convbert_jax.data.errors import DataError
from convbert_jax.data.shards import ShardReader
from convbert_jax.storage import DamagedFileError
from tests.batches import check_batch
from tests.refusals import refused


def take(batches, count):
    result = list(itertools.islice(batches, count))
    if hasattr(batches, "close"):
        batches.close()
    return result


def same(first, second):
    return len(first) == len(second) > 0 and all(
        a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
        for a, b in zip(first, second, strict=True)
    )


def until_each_row(kind, batches, count):
    """Return the first `count` rows of a stream."""
    stream = itertools.chain.from_iterable(map(kind.rows, batches))
    rows = list(itertools.islice(stream, count))
    batches.close()
    return rows


def test_every_epoch_has_every_row_once(kind, store):
    config, prepared = store
    assert len(prepared.splits["train"].shards) > 3
    expected = kind.read(prepared, "train")
    first = next(iter(batches := kind.batches(prepared, config)))
    batches.close()
    check_batch(first, kind.description)
    size = len(expected)
    stream = until_each_row(kind, kind.batches(prepared, config, seed=3), 3 * size)
    epochs = [stream[i * size : (i + 1) * size] for i in range(3)]
    assert all(Counter(epoch) == Counter(expected) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert until_each_row(kind, kind.batches(prepared, config, seed=4), size) != epochs[0]


@pytest.mark.parametrize("prefetch", [0, 4])
def test_state_restores_at_any_point(kind, store, prefetch, monkeypatch):
    monkeypatch.setattr(batching, "BLOCK_ROWS", 40)
    config, prepared = store
    batches = kind.batches(prepared, config, seed=5, prefetch=prefetch)
    states, whole = [], []
    for _ in range(60):  # more than one epoch
        states.append(json.loads(json.dumps(batches.get_state())))
        whole.append(next(batches))
    for place in (33, 0, 57, 12):
        batches.set_state(states[place])
        assert batches.get_state() == states[place]
        assert same(list(itertools.islice(batches, 60 - place)), whole[place:])
    batches.close()
    other = kind.batches(prepared, config, seed=6, prefetch=prefetch)
    with refused(DataError, 5, field="seed", value=6):
        other.set_state(states[0])
    assert not same(take(other, 4), whole[:4])


def test_batches_do_not_depend_on_read_ahead(kind, store, monkeypatch):
    config, prepared = store
    expected = take(kind.batches(prepared, config, prefetch=0), 40)
    for prefetch, block in ((1, 8192), (3, 8192), (8, 21), (100, 1), (8, 700)):
        monkeypatch.setattr(batching, "BLOCK_ROWS", block)
        assert same(take(kind.batches(prepared, config, prefetch=prefetch), 40), expected)


def joined(parts):
    return [
        {name: np.concatenate([part[name] for part in of_batch]) for name in of_batch[0]}
        for of_batch in zip(*parts, strict=True)
    ]


def test_processes_share_the_rows_of_a_batch(kind, store):
    config, prepared = store
    whole = take(kind.batches(prepared, config), 20)
    held = list(kind.evaluation(prepared, config))
    for count in (2, 4):
        places = [{"process_index": i, "process_count": count} for i in range(count)]
        assert same(joined([take(kind.batches(prepared, config, **p), 20) for p in places]), whole)
        parts = [list(kind.evaluation(prepared, config, **place)) for place in places]
        assert same(joined(parts), held)
    with refused(DataError, 3):
        kind.batches(prepared, config, process_count=3)


def test_evaluation_is_exact(kind, store):
    config, prepared = store
    everything = [row for b in kind.evaluation(prepared, config) for row in kind.rows(b)]
    expected = kind.read(prepared, "validation")
    assert Counter(everything) == Counter(expected)
    for count in (6, 1):
        found, again = (
            [row for b in kind.evaluation(prepared, config, rows=count) for row in kind.rows(b)]
            for _ in range(2)
        )
        assert found == again
        chosen = [expected[i * len(expected) // count] for i in range(count)]  # evenly spread
        assert Counter(found) == Counter(chosen)
    more = [b for b in kind.evaluation(prepared, config, rows=10_000) for _ in kind.rows(b)]
    assert len(more) == len(expected)
    last = list(kind.evaluation(prepared, config))[-1]
    check_batch(last, kind.description)


# --- Damage ---


def flip(path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_damage_ends_a_run_at_its_beginning(kind, copied, split):
    """Damage to any byte stops a run at its start, even outside the rows."""
    config, folder = copied
    prepared = kind.prepare(config, folder)
    path, _ = prepared.splits[split].shards[-1]
    flip(path, path.stat().st_size - 1)
    batches = kind.batches(prepared, config)
    with refused(DamagedFileError, path=path):
        batches._verification.wait()
    with refused(DamagedFileError, path=path):
        next(batches)
    batches.close()


def test_processes_verify_all_shards_between_them(kind, store, monkeypatch):
    config, prepared = store
    seen = []
    monkeypatch.setattr(
        batching, "Verification", lambda found: seen.extend(found) or shards.Verification(())
    )
    for process in range(4):
        kind.batches(prepared, config, process_index=process, process_count=4).close()
    there = set(prepared.directory.glob("*.array_record"))
    assert {path for path, checksum in seen if checksum is not None} == there
    assert len(seen) == len(there)


def test_a_flipped_byte_is_found(kind, copied):
    """Damage never changes a value: each row has a hash that is checked on reading."""
    config, folder = copied
    prepared = kind.prepare(config, folder)
    split = prepared.splits["train"]
    (path, rows), checksum = split.shards[0], split.checksums[0]
    content, expected, named = path.read_bytes(), kind.read(prepared, "train"), 0
    for place in random.Random(0).sample(range(3_000), 60):
        flip(path, place)
        try:
            assert kind.read(prepared, "train") == expected
        except DamagedFileError as error:
            named += error.path == str(path)
        with refused(DamagedFileError, path=path):
            shards.Verification([(path, checksum)]).wait()
        path.write_bytes(content)
    assert named > 30  # the other bytes belong to no row
    shards.Verification([(path, checksum)]).wait()
    path.unlink()
    with refused(DamagedFileError, path=path):
        shards.Verification([(path, checksum)]).wait()
    with refused(DataError, path=path):
        kind.read(prepared, "train")
    path.write_bytes(content)
    reader = ShardReader([(path, rows + 1)], np.dtype("u1"))
    with refused(DamagedFileError, rows, rows + 1, path=path):
        reader.read(np.asarray([0]))
