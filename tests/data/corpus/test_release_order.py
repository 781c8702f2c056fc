"""The order of rows of ConvBERT's release, against its pipeline simulated step by step."""

import collections
import itertools
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.data.corpus import unit_worker
from convbert_jax.data.corpus.batching import training_batches
from convbert_jax.data.corpus.corpus import prepare
from convbert_jax.data.corpus.rows import ShardReader
from convbert_jax.data.corpus.shuffling import BLOCK, release_order
from convbert_jax.data.errors import DataError

PINNED = [4, 7, 11, 8, 9, 6, 1, 9, 3, 5, 9, 1]


def simulate(rows, files: int, cycle: int, buffer: int, seed: int):
    """Endless rows as the release writes and reads them: real files, queues and buffers."""
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
        reading = collections.deque(
            iter(written[next(names)]) for _ in range(min(cycle, len(written)))
        )
        while True:
            row = next(reading[0], None)
            if row is None:
                reading[0] = iter(written[next(names)])
                continue
            yield row
            reading.rotate(-1)

    return shuffle(read(), buffer)


def documents_in_batches(rows, batches: int, size: int = 128) -> np.ndarray:
    """Distinct documents in each of `batches` batches; a row is given as its document."""
    taken = np.asarray(rows[: batches * size]).reshape(batches, size)
    return np.asarray([len(set(batch.tolist())) for batch in taken])


@pytest.fixture(scope="module")
def document_of() -> np.ndarray:
    """The document of each of some 60,000 rows, as written: 1 to 60 rows each."""
    lengths = 1 + np.random.default_rng(0).geometric(0.12, 7000).clip(max=60)
    return np.repeat(np.arange(len(lengths)), lengths)


@pytest.mark.parametrize("shards", [1, 7])
def test_a_batch_is_of_as_many_documents_as_in_the_release(document_of, shards):
    """128 rows are of 111 to 128 documents, wherever one looks; in document order of 22 to 24."""
    batches = 1200  # two and a half epochs
    sizes = [len(part) for part in np.array_split(document_of, shards)]
    expected = documents_in_batches(
        list(itertools.islice(simulate(document_of, 1000, 4, 100, 0), batches * 128)), batches
    )
    rows = release_order(sizes, 0)(np.arange(batches * 128))
    found = documents_in_batches(document_of[rows], batches)
    assert abs(found.mean() - expected.mean()) < 0.5
    assert found.min() >= 105
    assert expected.min() >= 105
    assert found.max() == 128
    neighbors = documents_in_batches(document_of, 400)
    assert neighbors.max() < 40


def test_rows_are_dealt_to_files_and_four_are_read_in_turn(monkeypatch):
    """Without the buffer of rows: each lane reads whole files, in the order written."""
    monkeypatch.setattr("convbert_jax.data.corpus.shuffling.BUFFER", 1)
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


@settings(deadline=None, max_examples=10)
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


def test_order_is_pinned():
    """A change here changes the data order of every run that is resumed."""
    assert release_order([3, 4, 5], 0)(np.arange(12)).tolist() == PINNED


def test_seeds_differ():
    first, second = (release_order([5000] * 3, seed)(np.arange(15_000)) for seed in (0, 1))
    assert np.mean(first == second) < 0.01


# --- From documents to batches ---


@pytest.fixture
def marked(config, change, tmp_path):
    """A corpus of 400 documents of some 8 rows, each line with the number of its document."""
    rng = random.Random(0)
    words = ["ba", "de", "ki", "lo", "mu", "na", "pe", "ri", "so", "tu"]
    documents = [
        "\n".join(
            f"{number} " + " ".join(rng.choices(words, k=20)) for _ in range(rng.randint(2, 14))
        )
        for number in range(1000, 1400)
    ]
    (tmp_path / "corpus.txt").write_text("\n\n".join(documents))
    return change(
        config,
        data={"layout": "electra", "length": 32, "heldout_fraction": 0.02},
        tokenizer={"vocab_size": 60},
    )


def numbers(corpus, tokens) -> list[int]:
    """The documents of rows, by the numbers in their text."""
    found = [re.search(r"\d{4}", corpus.tokenizer.decode(row.tolist())) for row in tokens]
    return [int(match[0]) for match in found if match]


def test_paper_batches_are_of_many_documents(marked, change, tmp_path, small_units):
    config = change(marked, data={"shuffle_documents": True})
    corpus = prepare(config, tmp_path / "prepared")
    assert len(corpus.splits["train"].shards) > 3
    batches = training_batches(corpus, batch_size=128, seed=0, release_shuffle=True)
    found = [len(set(numbers(corpus, next(batches)["tokens"]))) for _ in range(12)]
    batches.close()
    drawn = 380 * (1 - (1 - 1 / 380) ** 128)  # of so many documents, at random
    assert min(found) > 0.85 * drawn


def test_documents_are_shuffled_whole(marked, change, tmp_path):
    plain = prepare(marked, tmp_path / "plain")
    config = change(marked, data={"shuffle_documents": True})
    shuffled, again = (prepare(config, tmp_path / name) for name in ("shuffled", "again"))

    def order(corpus):
        split = corpus.splits["train"]
        tokens = ShardReader(split.shards, corpus.row_dtype).read(np.arange(split.rows))["tokens"]
        return [number for number, _ in itertools.groupby(numbers(corpus, tokens))]

    assert order(plain) == sorted(order(plain))
    assert sorted(order(shuffled)) == order(plain)  # each in one piece
    assert order(shuffled) != order(plain)
    assert order(again) == order(shuffled)
    assert plain.fingerprint != shuffled.fingerprint == again.fingerprint
    with pytest.raises(DataError, match="of shuffled documents' wanted"):
        prepare(config, tmp_path / "plain")


def test_workers_and_short_stretches(marked, change, tmp_path, small_units, contents, monkeypatch):
    config = change(marked, data={"shuffle_documents": True})
    prepare(config, tmp_path / "one")
    prepare(change(config, data={"workers": 2}), tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    monkeypatch.setattr(unit_worker, "SHUFFLED_CHARACTERS", 3000)
    corpus = prepare(config, tmp_path / "short")
    whole = prepare(marked, tmp_path / "plain")
    for name in ("train", "validation"):
        assert corpus.splits[name].documents == whole.splits[name].documents
