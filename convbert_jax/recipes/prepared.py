"""Prepares and opens the data of a recipe: a corpus or text pairs, with one interface."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from convbert_jax import interrupts, storage
from convbert_jax.analysis import flops
from convbert_jax.config import Config, UserError
from convbert_jax.data import batching as of_corpus
from convbert_jax.data import batching as of_pairs
from convbert_jax.data import bucket, parallel_text
from convbert_jax.data import corpus as corpora
from convbert_jax.data.errors import DataError
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.data.units import Runner
from convbert_jax.interfaces import Batch
from convbert_jax.objectives import span_corruption
from convbert_jax.training import consistency, partitioning
from convbert_jax.training.loop import Batches
from convbert_jax.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class Effort:
    """Cost of a training step, averaged over batches.

    Attributes:
      tokens: input positions, source plus target.
      flops: forward and backward FLOPs.
      shapes: number of distinct batch shapes.
    """

    tokens: int
    flops: float
    shapes: int = 1


@dataclasses.dataclass(frozen=True)
class Data:
    """Training and held-out data of a recipe.

    Attributes:
      tokenizers: of source and target; the same object twice if they share one.
      training: (mesh) -> endless batches of this process.
      heldout: (mesh) -> function that returns a new iterator over the held-out batches of this
        process.
      effort: (mesh) -> cost of a training step.
      corpus: None for pairs.
      pairs: None for a corpus.
    """

    tokenizers: tuple[Tokenizer, Tokenizer]
    training: Callable[[Mesh], Batches]
    heldout: Callable[[Mesh], Callable[[], Iterator[Batch]]]
    effort: Callable[[Mesh], Effort]
    corpus: corpora.Corpus | None = None
    pairs: parallel_text.ParallelText | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        return self.tokenizers[1]


def prepare(
    config: Config, directory: epath.Path, runner: Runner | None = None, *, compare: bool = False
) -> corpora.Corpus | parallel_text.ParallelText:
    """Builds tokenizer and shards, or opens existing ones.

    For a bucket, they are built in a local copy and then uploaded.

    Args:
      compare: read the sources of finished units again even if no file seems to have changed.

    Raises:
      DataError: `runner` is combined with a bucket, or the data cannot be prepared.
    """
    if runner and storage.is_remote(directory):
        raise DataError(
            f"{directory} is a bucket, but the workers of a Beam runner need a shared disk. "
            "Set --config.data.directory to a folder on it.",
            field="config.data.directory",
            path=directory,
        )
    # Finished units are on disk, and vocabulary training does not react to signals for minutes, so
    # the process may exit at once. A runner stops its workers itself.
    stoppable = contextlib.nullcontext() if runner else interrupts.nothing_to_save()
    with _on_disk(config, directory) as here, stoppable:
        found = _kind(config).prepare(config, here, runner, compare=compare)
    if storage.is_remote(directory):
        bucket.publish(here, directory)
    return found


def open_data(config: Config, workdir: Workdir) -> Data:
    """Opens the data of the config; a single process prepares it if needed.

    Raises:
      DataError: the data is not prepared and there are several processes; and as `prepare`.
      RollCallError: data or config differ between processes.
    """
    directory, processes = workdir.data(config), jax.process_count()
    if processes == 1:
        found = prepare(config, directory)
    else:
        with _on_disk(config, directory) as here:
            found = _kind(config).open_prepared(config, here)
        if not found:
            shared = "" if storage.is_remote(directory) else ", on a disk that all of them can read"
            raise DataError(
                f"{directory} is not prepared, and {processes} processes were started. First run "
                f"the same command with --mode=prepare as a single process{shared}.",
                field="--mode",
                path=directory,
            )
    consistency.check_data(config, found.fingerprint)
    return (_of_pairs if config.reads_pairs else _of_corpus)(config, found)


def _kind(config: Config):
    return parallel_text if config.reads_pairs else corpora


@contextlib.contextmanager
def _on_disk(config: Config, directory: epath.Path) -> Iterator[Path]:
    """Yields the folder, or the local copy of a bucket; errors name the user's path."""
    here = bucket.fetch(directory, config.data.cache)
    try:
        yield here
    except UserError as error:
        raise type(error)(
            str(error).replace(str(here), str(directory)),
            field=error.field,
            value=error.value,
            path=error.path and error.path.replace(str(here), str(directory)),
            line=error.line,
        ) from None


def check_batches(config: Config, mesh: Mesh, *, training: bool = True) -> None:
    """Checks that batch size and row length are divisible by the mesh axes.

    With `training` the batch must also be divisible into microbatches. For pairs only the length
    multiple is checked: their batches are built to be divisible.

    Raises:
      ShardingError: a size is not divisible.
    """
    if config.reads_pairs:
        multiple = config.parallel.length_multiple
        partitioning.check_length(multiple, mesh, field="config.parallel.length_multiple")
    else:
        partitioning.check_length(config.data.length, mesh)
        if config.recipe == "span_corruption":
            of_row = f"of rows of config.data.length={config.data.length}: length"
            counts = span_corruption.count_spans(config)
            partitioning.check_length(counts.source, mesh, field=f"sources {of_row}")
            partitioning.check_length(counts.target, mesh, field=f"targets {of_row}")
        partitioning.check_batch_size(
            config.train.batch_size,
            config.train.accumulation if training else 1,
            mesh,
            replicas=config.optimizer.release_replicas if training else 1,
        )


def _of_corpus(config: Config, corpus: corpora.Corpus) -> Data:
    processes = {"process_index": jax.process_index(), "process_count": jax.process_count()}

    def training(mesh):
        return of_corpus.training_batches(
            corpus,
            batch_size=config.train.batch_size,
            seed=config.seed,
            release_shuffle=config.data.release_shuffle,
            prefetch=config.data.prefetch,
            **processes,
        )

    def heldout(mesh):
        return lambda: of_corpus.evaluation_batches(
            corpus,
            batch_size=config.train.batch_size,
            rows=config.train.eval_rows,
            **processes,
        )

    tokenizers = (corpus.tokenizer, corpus.tokenizer)
    return Data(tokenizers, training, heldout, lambda mesh: effort_of_corpus(config), corpus)


def effort_of_corpus(config: Config) -> Effort:
    """Returns the cost of a step on rows of config.data.length tokens."""
    tokens = config.train.batch_size * config.data.length
    return Effort(tokens, tokens * flops.training_flops_per_token(config))


def _of_pairs(config: Config, text: parallel_text.ParallelText) -> Data:
    processes = {"process_index": jax.process_index(), "process_count": jax.process_count()}

    def multiple(mesh):
        return mesh.shape["data"] * mesh.shape["fsdp"] * config.train.accumulation

    def training(mesh):
        return of_pairs.pair_training_batches(
            text,
            config.parallel,
            seed=config.seed,
            row_multiple=multiple(mesh),
            prefetch=config.data.prefetch,
            **processes,
        )

    def heldout(mesh):
        return lambda: of_pairs.pair_evaluation_batches(
            text,
            config.parallel,
            row_multiple=multiple(mesh),
            rows=config.train.eval_rows,
            **processes,
        )

    def effort(mesh):
        plan = of_pairs.make_plan(text, config.parallel, config.seed, multiple(mesh))
        shapes, counts = zip(*plan.counts(), strict=True)
        tokens = [shape.rows * (shape.source + shape.target) for shape in shapes]
        work = [
            3 * shape.rows * flops.pair_forward_flops(config, shape.source, shape.target)
            for shape in shapes
        ]
        tokens, work = (float(np.average(each, weights=counts)) for each in (tokens, work))
        return Effort(round(tokens), work, len(shapes))

    return Data(tuple(text.vocabularies), training, heldout, effort, pairs=text)
