"""Number of documents in a batch of 128 rows, with `:paper` and with the default reading order.

    python benchmarks/speed/documents_in_batches.py --vocabulary=vocab.txt [--files=40]

Uses the Wikipedia text in CONVBERT_DATA (default ../shared/data) and a WordPiece vocabulary. Rows
are made as in preparing a corpus, but only counted, by document.
"""

import argparse
import os
import pathlib
import random
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from convbert_jax.config import DataSection, TokenizerSection
from convbert_jax.data import samplers
from convbert_jax.data.layouts import ElectraRows
from convbert_jax.data.readers.sources import open_source
from convbert_jax.data.tokenizer.tokenizer import Tokenizer

SHARED = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data"


def rows_of_documents(source, tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the number of rows of each document, per unit, shuffled."""
    result = []
    for index, unit in enumerate(source.units):
        documents = list(source.documents(unit))
        random.Random(index).shuffle(documents)
        builder = ElectraRows(128, tokenizer.special, release_bug=True, seed=str(index))
        lines = ([line for line in text.split("\n") if line.strip()] for text in documents)
        result.append([len(list(builder.add(tokenizer.encode(text)))) for text in lines])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vocabulary", required=True, help="vocab.txt of BERT")
    parser.add_argument("--files", type=int, default=40)
    parser.add_argument("--batches", type=int, default=2000)
    arguments = parser.parse_args()
    data = pathlib.Path(os.environ.get("CONVBERT_DATA", SHARED))
    paths = sorted((data / "pretrain" / "enwiki-2015" / "train").iterdir())[: arguments.files]
    source = open_source(DataSection(), "text:" + ",".join(map(str, paths)))
    section = TokenizerSection(kind="wordpiece", path=arguments.vocabulary)
    units = rows_of_documents(source, Tokenizer(section, pathlib.Path(arguments.vocabulary)))
    counts = [count for unit in units for count in unit]
    document_of = np.repeat(np.arange(len(counts)), counts)
    print(f"{len(document_of)} rows of {len(counts)} documents")
    for name, order in (
        ("paper", samplers.release_order([sum(unit) for unit in units], 0)),
        ("default", samplers.shuffled(len(document_of), 0)),
        ("in order", lambda positions: positions % len(document_of)),
    ):
        rows = order(np.arange(arguments.batches * 128)).reshape(-1, 128)
        found = [len(set(batch)) for batch in document_of[rows].tolist()]
        print(f"{name}: mean {np.mean(found):.1f}, {min(found)} to {max(found)}")


if __name__ == "__main__":
    main()
