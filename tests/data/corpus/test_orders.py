"""Row orders: permutations by position, and the simulated order of the official code."""

import collections
import itertools
import random
import re

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.data import layouts
from convbert_jax.data.batching import training_batches
from convbert_jax.data.corpus import prepare
from convbert_jax.data.errors import DataError
from convbert_jax.data.samplers import BLOCK, release_order, shuffled
from convbert_jax.data.shards import ShardReader
from tests.refusals import refused


def test_orders_are_pinned():
    """A change here changes the data order of every resumed run."""
    pinned = [3, 5, 9, 7, 8, 4, 6, 1, 2, 0, 2, 6, 5, 1, 9, 3, 0, 8, 4, 7]
    assert shuffled(10, 0)(np.arange(20)).tolist() == pinned
    pinned = [4, 7, 11, 8, 9, 6, 1, 9, 3, 5, 9, 1]
    assert release_order([3, 4, 5], 0)(np.arange(12)).tolist() == pinned


@settings(max_examples=40)
@given(size=st.integers(1, 3000), seed=st.integers(-5, 2**70), epoch=st.integers(0, 10**6))
def test_every_epoch_is_a_permutation(size, seed, epoch):
    order = shuffled(size, seed)
    rows = order(np.arange(size) + epoch * size)
    assert sorted(rows.tolist()) == list(range(size))
    some = np.asarray([size - 1, 0, size // 2])  # any subset of positions
    assert order(some + epoch * size).tolist() == rows[some].tolist()


def test_permutations_are_random():
    """First rows are uniformly distributed, and neighbors are separated."""
    orders = [
        *shuffled(1000, 0)(np.arange(3000)).reshape(3, 1000),
        *shuffled(1000, 1)(np.arange(3000)).reshape(3, 1000),
    ]
    for a, b in itertools.combinations(orders, 2):  # on average 1 position is equal
        assert np.sum(np.equal(a, b)) < 10
    size = 64
    first = np.bincount(shuffled(size, 1)(np.arange(6400) * size), minlength=size)
    assert np.sum((first - 100) ** 2 / 100) < 110  # chi-squared, 63 degrees of freedom: p = 0.0002
    order = shuffled(100_000, 2)(np.arange(100_000))
    assert np.mean(np.abs(np.diff(order)) < 100) < 0.005  # 0.2% by chance
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.02


# --- The order of the official code ---


def simulate(rows, files: int, cycle: int, buffer: int, seed: int):
    """Yield rows forever in the official code's order: files, queues and shuffle buffers."""
    rng = random.Random(seed)

    def shuffle(stream, size):
        held = list(itertools.islice(stream, size))
        for value in stream:
            place = rng.randrange(len(held))
            yield held[place]
            held[place] = value

    written = [rows[name::files] for name in range(files) if len(rows[name::files])]
    names = shuffle(itertools.cycle(range(len(written))), len(written))

    def read():
        opened = (iter(written[next(names)]) for _ in range(min(cycle, len(written))))
        reading = collections.deque(opened)
        while True:
            row = next(reading[0], None)
            if row is None:
                reading[0] = iter(written[next(names)])
                continue
            yield row
            reading.rotate(-1)

    return shuffle(read(), buffer)


def documents_in_batches(rows, batches: int, size: int = 128) -> np.ndarray:
    """Count the distinct documents in each batch; each row is given as its document."""
    taken = np.asarray(rows[: batches * size]).reshape(batches, size)
    return np.asarray([len(set(batch.tolist())) for batch in taken])


def test_a_batch_is_of_as_many_documents_as_in_the_official_code():
    """A batch of 128 rows has 111 to 128 documents; in document order it would have 22 to 24."""
    lengths = 1 + np.random.default_rng(0).geometric(0.12, 7000).clip(max=60)
    document_of = np.repeat(np.arange(len(lengths)), lengths)  # about 60,000 rows, in order
    batches = 1200  # two and a half epochs
    stream = itertools.islice(simulate(document_of, 1000, 4, 100, 0), batches * 128)
    expected = documents_in_batches(list(stream), batches)
    assert expected.min() >= 105
    for shards in (1, 7):
        sizes = [len(part) for part in np.array_split(document_of, shards)]
        rows = release_order(sizes, 0)(np.arange(batches * 128))
        found = documents_in_batches(document_of[rows], batches)
        assert abs(found.mean() - expected.mean()) < 0.5
        assert found.min() >= 105
        assert found.max() == 128
    assert documents_in_batches(document_of, 400).max() < 40


def test_rows_are_dealt_to_files_and_four_are_read_in_turn(monkeypatch):
    """Without the shuffle buffer, each lane reads whole files in the order written."""
    monkeypatch.setattr("convbert_jax.data.samplers.BUFFER", 1)
    size, files = 25_300, 1000
    rows = release_order([size], 3)(np.arange(4 * size))
    for lane in range(4):
        mine = rows[lane::4]
        starts = np.flatnonzero(mine < files)
        assert starts[0] == 0
        for begin, end in itertools.pairwise(starts):
            assert np.array_equal(mine[begin:end], np.arange(mine[begin], size, files))
    names = rows[rows < files]
    assert set(np.bincount(names, minlength=files).tolist()) <= set(range(10))


def test_epochs_flow_into_each_other_but_no_row_is_forgotten():
    size = 3000
    rows = release_order([1000, 1500, 500], 1)(np.arange(40 * size))
    assert len(set(rows[:size].tolist())) < size
    counts = np.bincount(rows, minlength=size)
    assert counts.min() > 30
    assert counts.max() < 50
    other = release_order([1000, 1500, 500], 2)(np.arange(size))
    assert np.mean(rows[:size] == other) < 0.01


@settings(max_examples=6)
@given(
    shards=st.lists(st.integers(1, 700), min_size=1, max_size=9),
    seed=st.integers(-5, 2**70),
    far=st.integers(0, 3 * BLOCK),
)
def test_order_is_a_function_of_the_position(shards, seed, far):
    positions = np.asarray([0, 1, far, far + 1, BLOCK - 1, BLOCK, 7])
    at_once = release_order(shards, seed)(positions)
    assert at_once.min() >= 0
    assert at_once.max() < sum(shards)
    order = release_order(shards, seed)
    one_by_one = [int(order(np.asarray([p]))[0]) for p in reversed(positions)]
    assert one_by_one[::-1] == at_once.tolist()


# --- From documents to batches ---


def test_shuffled_documents(config, change, tmp_path, small_units, contents, monkeypatch):
    """400 documents of about 8 rows; each line contains its document's number."""
    rng = random.Random(0)
    words = ["ba", "de", "ki", "lo", "mu", "na", "pe", "ri", "so", "tu"]
    lines = {n: [rng.choices(words, k=20) for _ in range(rng.randint(2, 14))] for n in range(400)}
    text = "\n\n".join(
        "\n".join(f"{1000 + n} {' '.join(line)}" for line in part) for n, part in lines.items()
    )
    (tmp_path / "corpus.txt").write_text(text)
    fields = {"layout": "electra", "length": 32, "heldout_fraction": 0.02}
    plain = change(config, data=fields, tokenizer={"vocab_size": 60})
    config = change(plain, data={"shuffle_documents": True})

    def numbers(corpus, tokens) -> list[int]:
        """Return the documents of rows, from the numbers in their text."""
        found = [re.search(r"\d{4}", corpus.tokenizer.decode(row.tolist())) for row in tokens]
        return [int(match[0]) for match in found if match]

    def order(corpus):
        split = corpus.splits["train"]
        tokens = ShardReader(split.shards, corpus.row_dtype).read(np.arange(split.rows))["tokens"]
        return [number for number, _ in itertools.groupby(numbers(corpus, tokens))]

    shuffled, whole = prepare(config, tmp_path / "one"), prepare(plain, tmp_path / "plain")
    assert len(shuffled.splits["train"].shards) > 3
    assert order(whole) == sorted(order(whole))
    assert sorted(order(shuffled)) == order(whole)  # each document stays contiguous
    assert order(shuffled) != order(whole)
    assert shuffled.fingerprint != whole.fingerprint
    with refused(DataError, "layout", path=tmp_path / "plain"):
        prepare(config, tmp_path / "plain")

    batches = training_batches(shuffled, batch_size=128, seed=0, release_shuffle=True)
    found = [len(set(numbers(shuffled, next(batches)["tokens"]))) for _ in range(12)]
    batches.close()
    drawn = 380 * (1 - (1 - 1 / 380) ** 128)  # expected for random rows
    assert min(found) > 0.85 * drawn

    prepare(change(config, data={"workers": 2}), tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    monkeypatch.setattr(layouts, "SHUFFLED_CHARACTERS", 3000)
    short = prepare(config, tmp_path / "short")
    for name in ("train", "validation"):
        assert short.splits[name].counts["documents"] == whole.splits[name].counts["documents"]
