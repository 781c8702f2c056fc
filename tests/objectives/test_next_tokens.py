"""What comes next in packed rows: within a document, never across."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.data.corpus.packing import PackedRows
from convbert_jax.interfaces.batch import LanguageBatch
from convbert_jax.interfaces.special_ids import SpecialIds
from convbert_jax.objectives.next_tokens import shift
from tests.batches import check_batch

SPECIAL = SpecialIds(pad=0, unknown=1, cls=2, sep=3, mask=4)
LENGTH = 24


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(5, 99), min_size=1, max_size=40), min_size=1, max_size=8))
def test_documents_come_back(documents):
    layout = PackedRows(LENGTH, SPECIAL)
    rows = [row for document in documents for row in layout.add([document])] + [*layout.flush()]
    tokens, segments = (
        np.array([values + [0] * (LENGTH - len(values)) for values in part], np.int32)
        for part in ([r.tokens for r in rows], [r.segment_ids for r in rows])
    )
    batch = {name: np.asarray(a) for name, a in shift(tokens, segments, pad=0).items()}
    check_batch(batch, LanguageBatch)
    assert batch["tokens"].shape == (len(rows), LENGTH)
    real = batch["segment_ids"] != 0
    cut = tokens[:, -1] == SPECIAL.sep
    assert real.sum() == (segments != 0).sum() - (tokens == SPECIAL.cls).sum() - cut.sum()
    assert (batch["labels"][~real] == 0).all()
    assert (batch["tokens"][~real] == 0).all()
    text = [token for document in documents for token in document]
    written = batch["labels"][real]
    assert written[written != SPECIAL.sep].tolist() == text
    read = batch["tokens"][real]
    before_cuts = tokens[:, : LENGTH - 2]  # the last token of a full row has nothing to tell
    assert read[read != SPECIAL.cls].tolist() == before_cuts[before_cuts > SPECIAL.mask].tolist()
    assert not (read == SPECIAL.sep).any()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_only_ends_of_documents_are_told(lengths):
    """Where a row cuts a document its text does not end: a model that learned that would end every
    text at the length of a row.
    """
    layout = PackedRows(LENGTH, SPECIAL)
    documents = [[5 + number] * length for number, length in enumerate(lengths)]
    rows = [row for document in documents for row in layout.add([document])] + [*layout.flush()]
    left = dict(enumerate(lengths))
    for row in rows:
        given = [np.array([v + [0] * (LENGTH - len(v))]) for v in (row.tokens, row.segment_ids)]
        told = shift(*given, pad=0)
        read, labels = np.asarray(told["tokens"][0]), np.asarray(told["labels"][0])
        for segment in range(1, max(row.segment_ids) + 1):
            place = row.segment_ids.index(segment)
            size = row.segment_ids.count(segment) - 2
            number = row.tokens[place + 1] - 5
            left[number] -= size
            ends = labels[(read == number + 5)][-1] == SPECIAL.sep
            last = place + size + 2 == LENGTH
            assert ends == (left[number] == 0 and not last)
    assert set(left.values()) == {0}
