"""The work behind `corpus.prepare`: lock, sample, tokenizer, process pool, progress."""

import collections
import contextlib
import multiprocessing
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import tqdm
from absl import logging

from convbert_jax import files
from convbert_jax.config import Config, DataSection
from convbert_jax.data.corpus.shards import record_path, shard_path
from convbert_jax.data.corpus.unit_worker import (
    Job,
    heldout_hash,
    process_unit,
    process_unit_in_worker,
    start_worker,
)
from convbert_jax.data.errors import DataError
from convbert_jax.data.records import read_record
from convbert_jax.data.sources.source import Source
from convbert_jax.data.tokenizer.tokenizer import (
    Tokenizer,
    check_tokenizer,
    load_tokenizer,
    train_tokenizer,
)

CHECKED_BYTES = 2_000_000  # of text, to check a vocabulary on
LOCK_PATIENCE = 12 * 3600  # seconds
LOG_EVERY = 10  # seconds
_STARTING = threading.Lock()  # held while this process has no main script, see `_without_script`
COUNTS = {"rows": int, "file_bytes": int}
RECORD_FIELDS = {
    "unit": int,
    "splits": {"train": COUNTS, "validation": COUNTS},
    **dict.fromkeys(("bytes", "dropped", "pieces", "unknown", "undecodable", "skipped"), int),
    "encoding_errors": str,
}


@contextlib.contextmanager
def lock(directory: Path) -> Iterator[None]:
    """Holds `directory` alone; waits while another process has it, and says so.

    The operating system releases the lock of a process that dies. Raises DataError after
    `LOCK_PATIENCE` seconds.
    """
    with open(directory / "lock", "w") as file:
        started = logged = time.monotonic()
        while not files.try_lock(
            file, f"{directory} cannot be locked; let one process prepare it."
        ):
            now = time.monotonic()
            if now - started > LOCK_PATIENCE:
                raise DataError(
                    f"{directory} has been in use by another process for {LOCK_PATIENCE // 3600} "
                    "hours; end that one or name another config.data.directory."
                )
            if logged == started or now - logged > 60:
                logging.info("Waiting: another process prepares %s.", directory)
                logged = now
            time.sleep(0.2)
        yield


def sample(source: Source, size: int) -> Iterator[str]:
    """Some `size` bytes of text, taken from the beginning of every unit in equal parts."""
    whole = sum(unit.size for unit in source.units) <= size
    share = max(1, size // len(source.units))
    for unit in source.units:
        left = share
        for text in source.documents(unit):
            yield text if whole else text[:left]
            left -= len(text)
            if left <= 0 and not whole:
                break


def prepare_tokenizer(config: Config, directory: Path, source: Source) -> Tokenizer:
    """Loads or trains the tokenizer, and checks it on a sample of `source`."""
    section, data = config.tokenizer, config.data
    texts = list(sample(source, CHECKED_BYTES))
    if not texts:
        raise DataError(
            f"config.data.source='{data.source}' has no text; check it and config.data.format."
        )
    if not data.validation_source and sum(unit.size for unit in source.units) <= CHECKED_BYTES:
        if len(texts) == 1:
            raise DataError(_one_document(data, source, texts[0]))
        hashes = [heldout_hash(text) for text in texts]
        if min(hashes) >= data.heldout_fraction:
            raise DataError(nothing_held_out(data, hashes))
    if section.path:
        tokenizer = load_tokenizer(section, directory)
    else:
        started = time.monotonic()
        logging.info("Training a %s vocabulary of %d.", section.kind, section.vocab_size)
        tokenizer = train_tokenizer(
            sample(source, section.train_megabytes * 1_000_000), section, directory
        )
        logging.info("Trained %s in %.0f s.", tokenizer.path, time.monotonic() - started)
    check_tokenizer(tokenizer, section, texts)
    return tokenizer


def _one_document(data: DataSection, source: Source, text: str) -> str:
    """What to say of a corpus from which no document can be held out."""
    read_as = getattr(source, "format", "")  # text files have one
    parts = {
        "blank_lines": len(re.split(r"\n\s*\n", text)),
        "lines": sum(bool(line.strip()) for line in text.split("\n")),
    }
    better = [
        f"config.data.format={name} ({count} documents)"
        for name, count in parts.items()
        if read_as in ("blank_lines", "file") and count > 1 and name != read_as
    ]
    advice = f"set {' or '.join(better)}, " if better else "add more text "
    return (
        f"config.data.source='{data.source}' is a single document"
        + (f" (config.data.format={data.format}, read as '{read_as}')" if read_as else "")
        + f", so none can be held out to evaluate on; {advice}or name another text in "
        "config.data.validation_source."
    )


def nothing_held_out(data: DataSection, hashes: Sequence[float] = ()) -> str:
    """What to say when no document fell into the held-out part."""
    advice = "raise it and name another config.data.directory,"
    if hashes and min(hashes) < 0.5:
        advice = f"set --config.data.heldout_fraction={min(hashes) + 0.005:.2f}"
    return (
        f"config.data.heldout_fraction={data.heldout_fraction} holds out no document; "
        f"{advice} or name config.data.validation_source."
    )


def process_units(
    config: Config, directory: Path, tokenizer: Tokenizer, sources: dict[str, Source]
) -> list[dict[str, Any]]:
    """Records of all units, doing those that are not there yet.

    Raises:
      DataError: the first that a unit raised; finished units are kept.
    """
    data = config.data
    job = Job(
        directory=directory,
        tokenizer=tokenizer,
        length=data.length,
        layout=data.layout,
        sentence_pairs=config.objective.sentence_pairs,
        release_bug=data.release_builder_bug,
        shuffle_documents=data.shuffle_documents,
        heldout_fraction=data.heldout_fraction,
        encoding_errors=data.encoding_errors,
    )
    units = [
        (name, position, unit)
        for name, source in sources.items()
        for position, unit in enumerate(source.units)
    ]
    # Without a validation source each unit is split by the hash of its documents.
    split = {name: name if "validation" in sources else "" for name in sources}
    records = {i: _finished(directory, i, data.encoding_errors) for i in range(len(units))}
    todo = [i for i, record in records.items() if record is None]
    if len(todo) < len(units):
        logging.info("%d of %d units are there already.", len(units) - len(todo), len(units))
    workers = min(data.workers or _cores(), len(todo))
    with _progress(sum(units[i][2].size for i in todo)) as advance:
        if workers <= 1:
            for i in todo:
                name, _, unit = units[i]
                records[i] = process_unit(job, i, sources[name], unit, split[name])
                advance(unit.size)
            return list(records.values())
        with _pool(workers, job, sources) as pool:
            waiting = {}
            with _without_script():  # a submission may start a worker
                for i in todo:
                    name, position, _ = units[i]
                    task = pool.submit(process_unit_in_worker, i, name, position, split[name])
                    waiting[task] = i
            for task in futures.as_completed(waiting):
                i = waiting[task]
                records[i] = task.result()
                advance(units[i][2].size)
    return list(records.values())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _finished(directory: Path, index: int, encoding_errors: str) -> dict[str, Any] | None:
    path = record_path(directory, index)
    remedy = "delete it and start again: that part is prepared anew"
    try:
        record = read_record(path, remedy=remedy, fields=RECORD_FIELDS)
    except FileNotFoundError:
        return None
    counts = [count for split in record["splits"].values() for count in split.values()]
    if record["unit"] != index or not all(isinstance(count, int) for count in counts):
        raise files.damaged(path, "it is of another unit or has other counts", remedy)
    for split, counts in record["splits"].items():
        if counts["rows"] and not shard_path(directory, split, index).is_file():
            logging.warning("A shard of unit %d is missing; it is prepared anew.", index)
            return None
    # A unit without undecodable text is the same under every policy.
    if record["undecodable"] and record["encoding_errors"] != encoding_errors:
        return None
    return record


@contextlib.contextmanager
def _pool(workers: int, job: Job, sources: dict[str, Source]):
    others = multiprocessing.active_children()
    # Fresh interpreters: the parent may have started jax, whose threads do not survive a fork.
    pool = futures.ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=start_worker,
        initargs=(job, sources),
    )
    try:
        yield pool
    except BrokenProcessPool:
        raise DataError(
            "A process that tokenizes was killed, most likely for memory; run again with fewer "
            "--config.data.workers: what was finished is kept."
        ) from None
    except KeyboardInterrupt:  # a unit can take long; after a DataError it is worth the wait
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _without_script() -> Iterator[None]:
    """Context in which processes start without running the user's script again.

    A process that is spawned imports the main module first, in case what it is sent is defined
    there. Ours is sent nothing of it, and a script without `if __name__ == "__main__":` would begin
    all over in each.
    """
    main = sys.modules["__main__"]
    with _STARTING:  # two threads that hide the same would put back what is hidden
        hidden = {
            name: vars(main).pop(name) for name in ("__spec__", "__file__") if name in vars(main)
        }
        main.__spec__ = None
        try:
            yield
        finally:
            del main.__spec__
            vars(main).update(hidden)


@contextlib.contextmanager
def _progress(total: int):
    """Gives a function to call with the bytes done: a bar on a terminal, otherwise log lines."""
    if sys.stderr.isatty():
        with tqdm.tqdm(total=total, unit="B", unit_scale=True, desc="Tokenizing") as bar:
            yield bar.update
        return
    state = collections.Counter()
    started = time.monotonic()

    def advance(size: int) -> None:
        state["done"] += size
        elapsed = time.monotonic() - started
        if elapsed - state["logged"] > LOG_EVERY:
            state["logged"] = elapsed
            rate = state["done"] / elapsed
            logging.info(
                "Tokenizing: %.0f of %.0f MB, %.1f MB/s, %.0f s left.",
                state["done"] / 1e6,
                total / 1e6,
                rate / 1e6,
                (total - state["done"]) / rate,
            )

    yield advance
