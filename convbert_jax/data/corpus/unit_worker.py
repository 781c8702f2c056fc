"""Processing of one unit of documents: writes a shard for each split and a record of counts."""

import dataclasses
import functools
import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from convbert_jax.data.corpus.packing import ElectraRows, PackedRows, Row
from convbert_jax.data.corpus.pairs import UNLABELLED, PairRows, split_sentences
from convbert_jax.data.corpus.rows import ShardWriter, row_dtype, to_records
from convbert_jax.data.corpus.shards import checksum, shard_path
from convbert_jax.data.records import write_record
from convbert_jax.data.sources.documents import cut_document
from convbert_jax.data.sources.source import Source
from convbert_jax.data.tokenizer.tokenizer import Tokenizer, count_characters
from convbert_jax.data.units.changes import hashed, new_digest
from convbert_jax.data.units.work import record_path

BATCH_CHARACTERS = 200_000  # tokenized at once
SHUFFLED_CHARACTERS = 64_000_000  # of documents that are shuffled in memory


@dataclasses.dataclass(frozen=True)
class Job:
    """Settings shared by all units of a corpus."""

    directory: Path
    tokenizer: Tokenizer
    length: int
    layout: str
    sentence_pairs: str  # of the layout "pairs"
    release_bug: bool
    shuffle_documents: bool
    heldout_fraction: float
    pieces: int  # per document; more than 1 if the source is a single document
    encoding_errors: str


def heldout_hash(text: str) -> float:
    """Hashes a text to a number in [0, 1); texts below the held-out fraction are held out."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def process_unit(
    job: Job, index: int, source: Source, unit: Any, split: str = ""
) -> dict[str, Any]:
    """Writes the shards of unit `index`, then its record, and returns the record.

    Args:
      split: "train" or "validation" for all documents, or "" to hold some out by their hash.

    Raises:
      DataError: the text is unreadable or the disk is full; no record is written.
    """
    started = time.monotonic()
    special = job.tokenizer.special
    dtype = row_dtype(job.length, job.tokenizer.vocab_size, job.layout)
    counts = {name: Counter() for name in ("train", "validation")}
    tally: Counter = Counter()
    padded = functools.partial(to_records, dtype=dtype, pad=special.pad)
    layouts, writers = {}, {}
    for name in counts:
        layouts[name] = _make_layout(job, seed=f"{index} {name}")
        writers[name] = ShardWriter(shard_path(job.directory, name, index), padded)

    def write(name: str, rows: Iterable[Row]) -> None:
        rows = list(rows)
        counts[name]["tokens"] += sum(len(row.tokens) for row in rows)
        if job.layout == "pairs":
            counts[name]["pairs"] += sum(row.pair_label != UNLABELLED for row in rows)
        writers[name].write(rows)

    digest = new_digest()
    documents = hashed(source.documents(unit, tally), digest)
    if job.pieces > 1:
        documents = (piece for text in documents for piece in cut_document(text, job.pieces))
    if job.shuffle_documents:
        documents = _shuffled(documents, random.Random(f"{index} documents"))
    cut = split_sentences if job.layout == "pairs" else None
    for text, parts, lines in _encoded(documents, job.tokenizer, cut):
        tally["bytes"] += len(text.encode())
        if not any(lines):
            tally["dropped"] += 1
            continue
        pairs = zip(parts, lines, strict=True)
        affected = [part for part, line in pairs if special.unknown in line]
        tally["unknown"] += job.tokenizer.count_unknown(affected)
        tally["characters"] += count_characters([text])
        name = split or ("validation" if heldout_hash(text) < job.heldout_fraction else "train")
        counts[name]["documents"] += 1
        write(name, layouts[name].add(lines))
    for name in counts:
        write(name, layouts[name].flush())
        counts[name]["file_bytes"] = writers[name].finish()
        counts[name]["rows"] = writers[name].rows
        if writers[name].rows:
            counts[name]["crc32"] = checksum(writers[name].path)
    record = {
        "unit": index,
        "digest": digest.hexdigest(),
        "splits": counts,
        **{name: tally[name] for name in ("bytes", "dropped", "characters", "unknown")},
        "undecodable": tally["undecodable"],
        "skipped": tally["skipped"],
        "encoding_errors": job.encoding_errors,
        "seconds": round(time.monotonic() - started, 3),
    }
    write_record(record_path(job.directory, index), record)
    return record


def _make_layout(job: Job, seed: str) -> PackedRows | ElectraRows | PairRows:
    length, special = job.length, job.tokenizer.special
    if job.layout == "electra":
        return ElectraRows(length, special, release_bug=job.release_bug, seed=seed)
    if job.layout == "pairs":
        return PairRows(length, special, pairs=job.sentence_pairs, seed=seed)
    return PackedRows(length, special)


def _shuffled(documents: Iterator[str], rng: random.Random) -> Iterator[str]:
    """Shuffles `documents` within buffers of `SHUFFLED_CHARACTERS`, which hold most units."""
    waiting, size = [], 0
    for text in documents:
        waiting.append(text)
        size += len(text)
        if size >= SHUFFLED_CHARACTERS:
            rng.shuffle(waiting)
            yield from waiting
            waiting, size = [], 0
    rng.shuffle(waiting)
    yield from waiting


def _encoded(
    documents: Iterator[str], tokenizer: Tokenizer, cut: Callable[[str], list[str]] | None = None
) -> Iterator[tuple[str, list[str], list[list[int]]]]:
    """Yields (document, lines, token ids of each line), tokenizing many documents at once.

    Args:
      cut: splits a line into sentences, which take the place of the lines.
    """

    def encode(batch: list[str]) -> Iterator[tuple[str, list[str], list[list[int]]]]:
        lines = [[line for line in text.split("\n") if line.strip()] for text in batch]
        if cut:
            lines = [[part for line in document for part in cut(line)] for document in lines]
        ids = iter(tokenizer.encode([line for document in lines for line in document]))
        for text, document in zip(batch, lines, strict=True):
            yield text, document, [next(ids) for _ in document]

    batch, size = [], 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield from encode(batch)
            batch, size = [], 0
    yield from encode(batch)
