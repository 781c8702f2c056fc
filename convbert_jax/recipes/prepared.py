"""What a recipe learns from, prepared: a corpus, or pairs of texts; the rest sees no difference."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from convbert_jax import files, interrupts
from convbert_jax.analysis import flops
from convbert_jax.config import Config, UserError
from convbert_jax.data.corpus import batching as of_corpus
from convbert_jax.data.corpus import corpus as corpora
from convbert_jax.data.errors import DataError
from convbert_jax.data.parallel import batching as of_pairs
from convbert_jax.data.parallel import parallel_text
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.data.units import bucket
from convbert_jax.data.units.work import Runner
from convbert_jax.interfaces.batch import Batch
from convbert_jax.objectives import span_corruption
from convbert_jax.training import consistency, sharding
from convbert_jax.training.loop import Batches
from convbert_jax.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class Effort:
    """What a step takes, on average over batches.

    Attributes:
      tokens: input positions, of source and target.
      flops: of forward and backward.
      shapes: that batches have.
    """

    tokens: int
    flops: float
    shapes: int = 1


@dataclasses.dataclass(frozen=True)
class Data:
    """What is learned from.

    Attributes:
      tokenizers: of what is read and of what is written; one object twice where they are one.
      training: (mesh) -> endless batches of this process.
      heldout: (mesh) -> what gives the held-out batches of this process, from the first, each time
        it is called.
      effort: (mesh) -> what a step takes.
      corpus: None of pairs.
      pairs: None of a corpus.
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
    """Makes tokenizer and shards, or finds them; those for a bucket are made in the copy of it on
    this machine, and put there.

    Args:
      compare: reads the sources of finished units again even if no file seems to have changed.

    Raises:
      DataError: a runner whose workers would have to share a bucket; and as a corpus and parallel
        text do.
    """
    if runner and files.is_remote(directory):
        raise DataError(
            f"{directory} is a bucket, and the workers of a runner write to a disk that they "
            "share; name a folder there with --config.data.directory.",
            field="config.data.directory",
            path=directory,
        )
    # What is finished is on disk, and what trains a vocabulary hears no signal for many minutes; a
    # runner has processes of its own, which it ends itself.
    stoppable = contextlib.nullcontext() if runner else interrupts.nothing_to_save()
    with _on_disk(config, directory) as here, stoppable:
        found = _kind(config).prepare(config, here, runner, compare=compare)
    if files.is_remote(directory):
        bucket.publish(here, directory)
    return found


def open_data(config: Config, workdir: Workdir) -> Data:
    """What the config learns from, prepared if this is the only process.

    Raises:
      DataError: it is one of several, which would wait for the one that prepares; and as `prepare`.
      RollCallError: another process has other data, or another config.
    """
    directory, processes = workdir.data(config), jax.process_count()
    if processes == 1:
        found = prepare(config, directory)
    else:
        with _on_disk(config, directory) as here:
            found = _kind(config).open_prepared(config, here)
        if not found:
            shared = "" if files.is_remote(directory) else ", on a disk that all of them read,"
            raise DataError(
                f"{directory} is not prepared, and {processes} processes would wait for it; start "
                f"the command once with --mode=prepare, as one process{shared} and then again.",
                field="--mode",
                path=directory,
            )
    consistency.check_data(config, found.fingerprint)
    return (_of_pairs if config.reads_pairs else _of_corpus)(config, found)


def _kind(config: Config):
    return parallel_text if config.reads_pairs else corpora


@contextlib.contextmanager
def _on_disk(config: Config, directory: epath.Path) -> Iterator[Path]:
    """The folder, or the copy of one in a bucket; what is refused is told of the folder that the
    user named.
    """
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
    """Raises ShardingError for a batch, or rows, that do not split evenly, when `training` into
    microbatches too; batches of pairs are made to, if the lengths that they are padded to do.
    """
    if config.reads_pairs:
        multiple = config.parallel.length_multiple
        sharding.check_length(multiple, mesh, field="config.parallel.length_multiple")
    else:
        sharding.check_length(config.data.length, mesh)
        if config.recipe == "span_corruption":
            of_row = f"of rows of config.data.length={config.data.length}: length"
            counts = span_corruption.count_spans(config)
            sharding.check_length(counts.source, mesh, field=f"sources {of_row}")
            sharding.check_length(counts.target, mesh, field=f"targets {of_row}")
        sharding.check_batch_size(
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
    """Of rows of config.data.length."""
    tokens = config.train.batch_size * config.data.length
    return Effort(tokens, tokens * flops.training_flops_per_token(config))


def _of_pairs(config: Config, text: parallel_text.ParallelText) -> Data:
    processes = {"process_index": jax.process_index(), "process_count": jax.process_count()}

    def multiple(mesh):
        return mesh.shape["data"] * mesh.shape["fsdp"] * config.train.accumulation

    def training(mesh):
        return of_pairs.training_batches(
            text,
            config.parallel,
            seed=config.seed,
            row_multiple=multiple(mesh),
            prefetch=config.data.prefetch,
            **processes,
        )

    def heldout(mesh):
        return lambda: of_pairs.evaluation_batches(
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
