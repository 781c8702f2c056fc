"""Speed and memory of the input pipeline, from text to batches.

    python -m benchmarks.speed.input_pipeline --kinds sentencepiece wordpiece

For each kind of tokenizer, on the Wikipedia text in CONVBERT_DATA: trains a vocabulary, tokenizes
and writes shards on all cores, then reads batches of 256 rows of 128 tokens. Every step runs in a
fresh process, so that peak memory is measured separately.
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import pathlib
import resource
import tempfile
import time
from concurrent import futures

from benchmarks import public_data, timing
from convbert_jax.config import Config, DataSection, TokenizerSection
from convbert_jax.data import batching, corpus
from convbert_jax.data.readers.sources import open_source
from convbert_jax.data.tokenizer.tokenizer import train_tokenizer

ROWS = 256


def train(config: Config, folder: pathlib.Path):
    """Returns the path of the vocabulary, seconds and megabytes of text."""
    source = open_source(config.data, config.data.source)
    started = time.monotonic()
    megabytes = config.tokenizer.train_megabytes
    texts = corpus.sample(source, megabytes * 1_000_000)
    tokenizer = train_tokenizer(texts, config.tokenizer, folder)
    return str(tokenizer.path), time.monotonic() - started, megabytes


def prepare(config: Config, folder: pathlib.Path):
    """Returns the number of tokens, seconds and megabytes of text."""
    started = time.monotonic()
    corpus.prepare(config, folder)
    seconds = time.monotonic() - started
    metadata = json.loads((folder / "metadata.json").read_text())
    return metadata["splits"]["train"]["tokens"], seconds, metadata["bytes"] / 1e6


def read(config: Config, folder: pathlib.Path, batches: int = 2000):
    """Returns the number of tokens and seconds."""
    prepared = corpus.prepare(config, folder)
    stream = batching.training_batches(prepared, batch_size=ROWS, seed=0)
    for _ in itertools.islice(stream, 64):
        pass
    started = time.monotonic()
    for _ in itertools.islice(stream, batches):
        pass
    seconds = time.monotonic() - started
    stream.close()
    return batches * ROWS * config.data.length, seconds, None


def with_memory(function, *arguments):
    """Returns the results and the peak resident MB of this process and its largest child."""
    found = function(*arguments)
    own, children = (
        resource.getrusage(who).ru_maxrss / 1000  # Linux: kB
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return *found, own, children


def in_fresh_process(*arguments):
    context = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(with_memory, *arguments).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=["sentencepiece", "wordpiece"])
    parser.add_argument("--vocab-size", type=int, default=30_522)
    parser.add_argument("--train-megabytes", type=int, default=100)
    parser.add_argument("--files", default="*", help="pattern of the files to read")
    parser.add_argument("--workers", type=int, default=0, help="0 is one per core")
    arguments = parser.parse_args()
    text = public_data.folder("pretrain/enwiki-2015/train")
    data = DataSection(source=f"text:{text}/{arguments.files}", workers=arguments.workers)
    columns = ("seconds", "MB of text", "million tokens/s", "peak MB", "peak MB of a child")
    table = timing.Table("step", "tokenizer", *columns)
    for kind in arguments.kinds:
        section = TokenizerSection(
            kind=kind, vocab_size=arguments.vocab_size, train_megabytes=arguments.train_megabytes
        )
        config = Config(tokenizer=section, data=data)
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch)
            path, *found = in_fresh_process(train, config, folder / "tokenizer")
            table.add("train the tokenizer", kind, *found[:2], None, *found[2:])
            config = dataclasses.replace(config, tokenizer=dataclasses.replace(section, path=path))
            for name, step in (("tokenize and write", prepare), ("read batches", read)):
                tokens, seconds, size, *memory = in_fresh_process(step, config, folder / "corpus")
                table.add(name, kind, seconds, size, tokens / seconds / 1e6, *memory)


if __name__ == "__main__":
    main()
