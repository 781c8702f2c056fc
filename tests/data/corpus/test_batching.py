import itertools
import json
import random

import numpy as np
import pytest

from convbert_jax.data.corpus import batching
from convbert_jax.data.corpus.batching import evaluation_batches, training_batches
from convbert_jax.data.corpus.corpus import prepare
from convbert_jax.data.corpus.rows import ShardReader
from convbert_jax.data.errors import DataError
from convbert_jax.data.sources import documents as documents_module
from convbert_jax.files import DamagedFileError
from convbert_jax.interfaces.batch import Batch
from tests.batches import check_batch


@pytest.fixture(scope="module")
def corpus(make_config, tmp_path_factory):
    """Several shards of some 20 rows of 64."""
    folder = tmp_path_factory.mktemp("corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "UNIT_BYTES", 12_000)
        return prepare(make_config(folder), folder / "prepared")


def take(batches, count):
    result = list(itertools.islice(batches, count))
    if hasattr(batches, "close"):
        batches.close()
    return result


def keys(batch):
    """Each row as bytes."""
    return [row.tobytes() for row in batch["tokens"]]


def same(a, b):
    return all(np.array_equal(a[name], b[name]) for name in ("tokens", "segment_ids", "type_ids"))


def all_same(first, second):
    """As many batches, and each the same."""
    return len(first) == len(second) > 0 and all(map(same, first, second))


def test_a_batch_is_as_described(corpus):
    (batch,) = take(training_batches(corpus, batch_size=6, seed=0), 1)
    check_batch(batch, Batch)
    assert batch["tokens"].shape == (6, 64)
    check_batch(next(evaluation_batches(corpus, batch_size=6)), Batch)
    special = corpus.tokenizer.special
    assert (batch["tokens"][:, 0] == special.cls).all()
    assert ((batch["tokens"] == special.pad) == (batch["segment_ids"] == 0)).all()
    assert not batch["type_ids"].any()


def test_every_epoch_has_every_row_once(corpus):
    rows = corpus.splits["train"].rows
    assert len(corpus.splits["train"].shards) > 4
    batches = training_batches(corpus, batch_size=1, seed=5)
    stream = [keys(batch)[0] for batch in take(batches, 3 * rows)]
    epochs = [stream[i * rows : (i + 1) * rows] for i in range(3)]
    assert len(set(epochs[0])) == rows
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert len(set(map(tuple, epochs))) == 3


def test_batches_span_epochs(corpus):
    rows = corpus.splits["train"].rows
    size = rows + rows // 2
    (batch,) = take(training_batches(corpus, batch_size=size, seed=0), 1)
    assert len(set(keys(batch))) == rows
    one_by_one = take(training_batches(corpus, batch_size=1, seed=0), size)
    assert keys(batch) == [keys(b)[0] for b in one_by_one]


@pytest.mark.parametrize("release_shuffle", [False, True])
def test_global_batches_do_not_depend_on_the_processes(corpus, release_shuffle):
    arguments = {"batch_size": 8, "seed": 3, "release_shuffle": release_shuffle}
    alone = take(training_batches(corpus, **arguments), 40)
    for count in (2, 4, 8):
        parts = [
            take(training_batches(corpus, **arguments, process_index=p, process_count=count), 40)
            for p in range(count)
        ]
        for whole, *pieces in zip(alone, *parts, strict=True):
            joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in whole}
            assert same(whole, joined)


def test_batches_do_not_depend_on_read_ahead(corpus, monkeypatch):
    expected = take(training_batches(corpus, batch_size=7, seed=1, prefetch=0), 60)
    for prefetch, block in ((1, 8192), (3, 8192), (8, 21), (100, 1), (8, 700)):
        monkeypatch.setattr(batching, "BLOCK_ROWS", block)
        got = take(training_batches(corpus, batch_size=7, seed=1, prefetch=prefetch), 60)
        assert all_same(expected, got)


@pytest.mark.parametrize("release_shuffle", [False, True])
@pytest.mark.parametrize("prefetch", [0, 4])
def test_state_restores_at_any_point(corpus, prefetch, release_shuffle, monkeypatch):
    monkeypatch.setattr(batching, "BLOCK_ROWS", 40)
    rng = random.Random(0)
    arguments = {"batch_size": 8, "seed": 2, "prefetch": prefetch}
    arguments["release_shuffle"] = release_shuffle
    expected = take(training_batches(corpus, **arguments), 60)
    for _ in range(10):
        stop = rng.randrange(50)
        first = training_batches(corpus, **arguments)
        for _ in range(stop):
            next(first)
        state = json.loads(json.dumps(first.get_state()))
        first.close()
        second = training_batches(corpus, **arguments)
        for _ in range(rng.randrange(3)):
            next(second)
        second.set_state(state)
        assert second.get_state() == state
        assert all_same(expected[stop:], take(second, 60 - stop))


def test_state_of_another_run_is_refused(corpus):
    arguments = {"batch_size": 8, "seed": 2, "prefetch": 0}
    state = training_batches(corpus, **arguments).get_state()
    for changed in ({"batch_size": 4}, {"seed": 3}, {"release_shuffle": True}):
        other = training_batches(corpus, **(arguments | changed))
        with pytest.raises(DataError, match=f"saved with {next(iter(changed))}="):
            other.set_state(state)
    with pytest.raises(DataError, match="saved with corpus='other'"):
        training_batches(corpus, **arguments).set_state(state | {"corpus": "other"})


def test_batch_size_must_fit_the_processes(corpus):
    with pytest.raises(DataError, match="batch_size=6 is not divisible by the 4 processes"):
        training_batches(corpus, batch_size=6, seed=0, process_count=4)


@pytest.mark.parametrize("process_count", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [4, 12, 1000])
def test_evaluation_is_exact(corpus, batch_size, process_count):
    split = corpus.splits["validation"]
    parts = [
        list(
            evaluation_batches(
                corpus, batch_size=batch_size, process_index=p, process_count=process_count
            )
        )
        for p in range(process_count)
    ]
    assert len({len(part) for part in parts}) == 1
    rows = [
        (row.tobytes(), segments)
        for batches in zip(*parts, strict=True)
        for batch in batches
        for row, segments in zip(batch["tokens"], batch["segment_ids"], strict=True)
    ]
    assert len(rows) % batch_size == 0
    real = [row for row, segments in rows if segments.any()]
    assert len(real) == len(set(real)) == split.rows
    assert all(batch["tokens"].shape[0] == batch_size // process_count for batch in parts[0])
    padding = [row for row, segments in rows if not segments.any()]
    assert set(padding) <= {np.full(64, corpus.tokenizer.special.pad, np.int32).tobytes()}
    tokens = sum(np.count_nonzero(segments) for _, segments in rows)
    assert tokens == split.tokens


def test_evaluation_of_some_rows_is_spread_and_fixed(corpus):
    everything = [k for b in evaluation_batches(corpus, batch_size=4) for k in keys(b)]
    total = corpus.splits["validation"].rows
    first, again = (
        [k for b in evaluation_batches(corpus, batch_size=2, rows=6) for k in keys(b)]
        for _ in range(2)
    )
    assert first == again
    places = [everything.index(key) for key in first]
    assert places == [i * total // 6 for i in range(6)]
    more = list(evaluation_batches(corpus, batch_size=4, rows=10_000))
    assert len(more) == -(-total // 4)


def test_a_missing_shard_is_named(corpus, tmp_path):
    reader = ShardReader([(tmp_path / "train-00000.array_record", 5)], corpus.row_dtype)
    with pytest.raises(DataError, match=r"train-00000\.array_record is missing"):
        reader.read(np.asarray([0]))
    path, rows = corpus.splits["train"].shards[0]
    reader = ShardReader([(path, rows + 1)], corpus.row_dtype)
    with pytest.raises(DamagedFileError, match=f"it has {rows} rows instead of {rows + 1}"):
        reader.read(np.asarray([0]))
