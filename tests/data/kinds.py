"""A common interface for tests of both kinds of prepared data: a corpus and pairs."""

import dataclasses
import functools
import itertools
from collections import Counter
from pathlib import Path

import numpy as np

from convbert_jax.config import Config
from convbert_jax.data import batching, corpus, parallel_text
from convbert_jax.data.readers import pair_sources, text_files
from convbert_jax.data.shards import ShardReader, records_to_pairs
from convbert_jax.interfaces import Batch, SequenceBatch
from tests.data.parallel.conftest import write_files


def changed(config: Config, path: str, value) -> Config:
    """Return `config` with one field replaced: changed(config, "data.length", 32)."""
    section, name = path.split(".")
    new = dataclasses.replace(getattr(config, section), **{name: value})
    return dataclasses.replace(config, **{section: new})


class CorpusKind:
    """A corpus: rows are ids of packed documents, texts are documents."""

    name, description, fields = "corpus", Batch, ("tokens", "segment_ids", "type_ids")
    prepare = staticmethod(corpus.prepare)
    units = (corpus, "process_unit")  # the function that a worker runs
    source_field, heldout_field = "data.source", "data.heldout_fraction"
    validation_field = "data.validation_source"

    def __init__(self, documents, make_config):
        self.texts = documents
        self.config = make_config

    def write(self, folder: Path, texts) -> str:
        path = folder / "corpus.txt"
        path.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
        return f"text:{path}"

    def read(self, prepared, split: str) -> list[tuple]:
        shards = prepared.splits[split]
        reader = ShardReader(shards.shards, prepared.row_dtype)
        rows = reader.read(np.arange(shards.rows))
        reader.close()
        return [tuple(row["tokens"][row["segment_ids"] > 0].tolist()) for row in rows]

    def letters(self, prepared) -> Counter:
        """Count each letter in the text of all rows."""
        special = set(prepared.tokenizer.special.by_name.values())
        found = Counter()
        for split, row in ((s, row) for s in prepared.splits for row in self.read(prepared, s)):
            del split
            found.update(prepared.tokenizer.decode([i for i in row if i not in special]))
        return found

    def batches(self, prepared, config, *, seed=0, **arguments):
        del config
        return batching.training_batches(prepared, batch_size=8, seed=seed, **arguments)

    def evaluation(self, prepared, config, **arguments):
        del config
        return batching.evaluation_batches(prepared, batch_size=8, **arguments)

    def rows(self, batch) -> list[tuple]:
        """Return the rows of a batch as `read` does, without padding."""
        found = zip(batch["tokens"], batch["segment_ids"], strict=True)
        return [tuple(tokens[ids > 0].tolist()) for tokens, ids in found if ids.any()]


class PairsKind:
    """Pairs: rows are ids of a source and its target, texts are pairs."""

    name, description = "pairs", SequenceBatch
    fields = ("source", "source_ids", "tokens", "segment_ids", "labels")
    prepare = staticmethod(parallel_text.prepare)
    units = (parallel_text, "process_pairs")
    source_field, heldout_field = "parallel.source", "parallel.heldout_fraction"
    validation_field = "parallel.validation_source"

    def __init__(self, pairs, make_config):
        self.texts = pairs
        self.config = lambda folder: make_config(write_files(folder, pairs))

    def write(self, folder: Path, texts) -> str:
        return write_files(folder, texts)

    def read(self, prepared, split: str) -> list[tuple]:
        shards = prepared.splits[split]
        to_pairs = functools.partial(records_to_pairs, form=prepared.form)
        reader = ShardReader(shards.shards, prepared.id_dtype, to_pairs, returned=np.dtype(object))
        rows = reader.read(np.arange(shards.rows))
        reader.close()
        return [tuple(tuple(map(int, ids)) for ids in row.ids) for row in rows]

    def letters(self, prepared) -> Counter:
        found = Counter()
        rows = itertools.chain.from_iterable(self.read(prepared, s) for s in prepared.splits)
        for sides in rows:
            for ids, tokenizer in zip(sides, prepared.vocabularies, strict=True):
                found.update(tokenizer.decode(ids))
        return found

    def batches(self, prepared, config, *, seed=0, **arguments):
        return batching.pair_training_batches(
            prepared, config.parallel, seed=seed, row_multiple=4, **arguments
        )

    def evaluation(self, prepared, config, **arguments):
        return batching.pair_evaluation_batches(
            prepared, config.parallel, row_multiple=4, **arguments
        )

    def rows(self, batch) -> list[tuple]:
        found = []
        for source, source_ids, labels, ids in zip(
            *(batch[name] for name in ("source", "source_ids", "labels", "segment_ids")),
            strict=True,
        ):
            assert source_ids.any() == ids.any()
            if ids.any():
                sides = source[source_ids > 0].tolist(), labels[ids > 0].tolist()
                found.append(tuple(tuple(side[:-1]) for side in sides))  # without the end token
        return found


KINDS = {"corpus": CorpusKind, "pairs": PairsKind}


def small_units(patch) -> None:
    """Use small units: about five for the texts of either kind."""
    patch.setattr(text_files, "UNIT_BYTES", 9_000)
    patch.setattr(pair_sources, "MARK_LINES", 16)
