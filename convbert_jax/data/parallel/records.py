"""Storage of pairs: token ids of both texts, and the texts if tokenization is sampled."""

import dataclasses
from collections.abc import Sequence

import numpy as np

COUNT = np.dtype("<u4")


@dataclasses.dataclass(frozen=True)
class Pair:
    """Token ids of source and target without special ids; texts are "" if not stored."""

    source: np.ndarray  # [tokens]
    target: np.ndarray  # [tokens]
    source_text: str = ""
    target_text: str = ""


def id_dtype(source_vocab: int, target_vocab: int) -> np.dtype:
    """Returns the stored dtype of token ids."""
    return np.dtype("<u2" if max(source_vocab, target_vocab) <= 1 << 16 else "<i4")


def to_records(pairs: Sequence[Pair], dtype: np.dtype) -> list[bytes]:
    """Converts pairs to records of four counts (tokens, tokens, bytes, bytes) and four parts."""
    records = []
    for pair in pairs:
        parts = [
            *(np.asarray(ids, dtype).tobytes() for ids in (pair.source, pair.target)),
            *(text.encode() for text in (pair.source_text, pair.target_text)),
        ]
        counts = [len(pair.source), len(pair.target), len(parts[2]), len(parts[3])]
        records.append(b"".join([np.asarray(counts, COUNT).tobytes(), *parts]))
    return records


def from_records(records: Sequence[bytes], dtype: np.dtype) -> np.ndarray:
    """Converts records to an object array of `Pair`. Raises ValueError for an invalid record."""
    pairs = np.empty(len(records), object)
    for i, record in enumerate(records):
        sources, targets, source_bytes, target_bytes = map(int, np.frombuffer(record, COUNT, 4))
        cuts = np.cumsum([16, sources * dtype.itemsize, targets * dtype.itemsize, source_bytes])
        if cuts[-1] + target_bytes != len(record):
            raise ValueError("the size of a record does not match its counts")
        pairs[i] = Pair(
            np.frombuffer(record, dtype, sources, int(cuts[0])),
            np.frombuffer(record, dtype, targets, int(cuts[1])),
            record[cuts[2] : cuts[3]].decode(),
            record[cuts[3] :].decode(),
        )
    return pairs
