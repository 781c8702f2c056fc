"""Speed and memory of the input pipeline, from text to batches.

    python benchmarks/speed/input_pipeline.py [--json] [--kinds sentencepiece wordpiece]

For each kind of tokenizer, on the Wikipedia text in CONVBERT_DATA (default ../shared/data): trains
a vocabulary, tokenizes and writes shards on all cores, then reads batches of 256 rows of 128
tokens. Every step runs in a fresh process, so that peak memory is measured separately.
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import pathlib
import resource
import sys
import tempfile
import time
from concurrent import futures

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from convbert_jax.config import Config, DataSection, TokenizerSection
from convbert_jax.data import batching, corpus
from convbert_jax.data.readers.sources import open_source
from convbert_jax.data.tokenizer.tokenizer import train_tokenizer

SHARED = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data"


def train(config: Config, folder: pathlib.Path) -> dict:
    section = config.tokenizer
    source = open_source(config.data, config.data.source)
    started = time.monotonic()
    texts = corpus.sample(source, section.train_megabytes * 1_000_000)
    tokenizer = train_tokenizer(texts, section, folder)
    return {
        "seconds": time.monotonic() - started,
        "vocab_size": tokenizer.vocab_size,
        "path": str(tokenizer.path),
    } | _memory()


def prepare(config: Config, folder: pathlib.Path) -> dict:
    started = time.monotonic()
    corpus.prepare(config, folder)
    seconds = time.monotonic() - started
    metadata = json.loads((folder / "metadata.json").read_text())
    train_split = metadata["splits"]["train"]
    return {
        "seconds": seconds,
        "megabytes_per_second": metadata["bytes"] / 1e6 / seconds,
        "megabytes": metadata["bytes"] / 1e6,
        "tokens": train_split["tokens"],
        "fill": train_split["fill"],
        "unknown_rate": metadata["unknown_rate"],
        "shard_megabytes": sum(shard[2] for shard in train_split["shards"]) / 1e6,
    } | _memory()


def read(config: Config, folder: pathlib.Path, *, batches: int = 2000) -> dict:
    prepared = corpus.prepare(config, folder)
    stream = batching.training_batches(prepared, batch_size=256, seed=0)
    for _ in itertools.islice(stream, 64):
        pass
    started, cpu = time.monotonic(), time.process_time()
    for _ in itertools.islice(stream, batches):
        pass
    seconds = time.monotonic() - started
    cpu = time.process_time() - cpu
    stream.close()
    return {
        "tokens_per_second": batches * 256 * config.data.length / seconds,
        "cpu_seconds_per_second": cpu / seconds,
    } | _memory()


def _memory() -> dict:
    """Returns the peak resident MB of this process and its largest child (Linux: kB units)."""
    own, children = (
        resource.getrusage(who).ru_maxrss / 1000
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return {"peak_megabytes": own, "peak_megabytes_largest_child": children}


def _in_fresh_process(function, *arguments) -> dict:
    context = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--kinds", nargs="+", default=["sentencepiece", "wordpiece"])
    parser.add_argument("--vocab-size", type=int, default=30_522)
    parser.add_argument("--train-megabytes", type=int, default=100)
    parser.add_argument("--workers", type=int, default=0, help="0 is one per core")
    arguments = parser.parse_args()
    data = pathlib.Path(os.environ.get("CONVBERT_DATA", SHARED))
    for kind in arguments.kinds:
        config = Config(
            tokenizer=TokenizerSection(
                kind=kind,
                vocab_size=arguments.vocab_size,
                train_megabytes=arguments.train_megabytes,
            ),
            data=DataSection(
                source=f"text:{data}/pretrain/enwiki-2015/train/*", workers=arguments.workers
            ),
        )
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch)
            trained = _in_fresh_process(train, config, folder / "tokenizer")
            tokenizer = dataclasses.replace(config.tokenizer, path=trained.pop("path"))
            config = dataclasses.replace(config, tokenizer=tokenizer)
            results = {
                "train_tokenizer": trained,
                "prepare": _in_fresh_process(prepare, config, folder / "corpus"),
                "read_batches": _in_fresh_process(read, config, folder / "corpus"),
            }
        for step, figures in results.items():
            if arguments.json:
                print(json.dumps({"step": step, "kind": kind} | figures), flush=True)
                continue
            text = ", ".join(
                f"{name} {value:,.3f}" if isinstance(value, float) else f"{name} {value:,}"
                for name, value in figures.items()
            )
            print(f"{step} ({kind}): {text}", flush=True)


if __name__ == "__main__":
    main()
