"""Prepares and opens training and held-out data: a corpus or text pairs, with one interface."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from convbert_jax import interrupts, storage
from convbert_jax.analysis import flops
from convbert_jax.config import Config, SourceSection, UserError
from convbert_jax.data import batching as of_corpus
from convbert_jax.data import batching as of_pairs
from convbert_jax.data import bucket, mixture, parallel_text, samplers
from convbert_jax.data import corpus as corpora
from convbert_jax.data.errors import DataError
from convbert_jax.data.stores import store_of
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.data.units import Runner
from convbert_jax.interfaces import Batch
from convbert_jax.training import consistency
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
      heldout: (mesh) -> function that returns new iterators over the held-out batches of this
        process, by the name of the source; the name of a single source is "".
      effort: (mesh) -> cost of a training step.
      corpus: None for pairs; the first source of a mixture.
      pairs: None for a corpus.
    """

    tokenizers: tuple[Tokenizer, Tokenizer]
    training: Callable[[Mesh], Batches]
    heldout: Callable[[Mesh], Callable[[], dict[str, Iterator[Batch]]]]
    effort: Callable[[Mesh], Effort]
    corpus: corpora.Corpus | None = None
    pairs: parallel_text.ParallelText | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        return self.tokenizers[1]


def prepare(
    config: Config, directory: epath.Path, runner: Runner | None = None, *, compare: bool = False
) -> corpora.Corpus | mixture.MixedCorpus | parallel_text.ParallelText:
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
    several = config.data.mixture or any(phase.row_length for phase in config.phases)
    if several and storage.is_remote(directory):
        raise DataError(
            f"{directory} is a bucket, which config.data.mixture and phases with another "
            "row_length do not support. Set --config.data.directory to a folder on a disk.",
            field="config.data.directory",
            path=directory,
        )
    # Finished units are on disk, and vocabulary training does not react to signals for minutes, so
    # the process may exit at once. A runner stops its workers itself.
    stoppable = contextlib.nullcontext() if runner else interrupts.nothing_to_save()
    with _on_disk(config, directory) as here, stoppable:
        found = store_of(config).prepare(config, here, runner, compare=compare)
        for rows, longer in _with_other_rows(config, found).items():
            store_of(config).prepare(longer, here / rows, runner, compare=compare)
    if storage.is_remote(directory):
        bucket.publish(here, directory)
    return found


def open_phases(config: Config, workdir: Workdir, effort: Callable[[Config], Effort]) -> list[Data]:
    """Opens the data of each phase of config.phases, whose lengths are numbers of steps.

    A phase continues in each source where the phase before it stopped. With rows of another length
    it starts at the same fraction of an epoch, in another order.

    Raises:
      DataError: as `open_prepared`, or the sources reach their epochs before the last step.
    """
    base, found, drawn = open_prepared(config, workdir), [], None
    others = _with_other_rows(config, base)
    rows_before = None
    for number, (phase, of_phase) in enumerate(
        zip(config.phases, config.phase_configs, strict=True)
    ):
        mixed = base
        if rows := folder_of_rows(config, of_phase):
            mixed = open_prepared(others[rows], workdir, rows)
        if isinstance(mixed, corpora.Corpus):
            mixed = mixture.MixedCorpus(mixed.tokenizer, {"": mixed})
        sizes = [source.splits["train"].rows for source in mixed.sources.values()]
        if drawn is not None:
            ratios = zip(drawn, sizes, rows_before, strict=True)
            drawn = [round(count * now / before) for count, now, before in ratios]
        data, order = _make_mixed(
            of_phase, mixed, effort, phase.weights, phase.length, drawn, number
        )
        found.append(data)
        drawn, rows_before = order.drawn(phase.length * of_phase.train.batch_size).tolist(), sizes
    return found


def folder_of_rows(config: Config, of_phase: Config) -> str:
    """Returns the subfolder of the rows of a phase; "" if they have config.data.length tokens."""
    length = of_phase.data.length
    return "" if length == config.data.length else f"rows-{length}"


def _with_other_rows(config: Config, found) -> dict[str, Config]:
    """Returns subfolder -> config of the rows of phases with other lengths, with the vocabulary.

    Args:
      found: prepared rows of config.data.length.
    """
    configs = {}
    for of_phase in config.phase_configs:
        if rows := folder_of_rows(config, of_phase):
            tokenizer = found.tokenizer
            section = dataclasses.replace(tokenizer.section, path=str(tokenizer.path))
            configs[rows] = dataclasses.replace(of_phase, tokenizer=section, phases=())
    return configs


def open_prepared(
    config: Config, workdir: Workdir, rows: str = ""
) -> corpora.Corpus | mixture.MixedCorpus | parallel_text.ParallelText:
    """Opens the data of the config; a single process prepares it if needed.

    Args:
      rows: a subfolder of the data folder, see `folder_of_rows`.

    Raises:
      DataError: the data is not prepared and there are several processes; and as `prepare`.
      RollCallError: data or config differ between processes.
    """
    directory, processes = workdir.data(config), jax.process_count()
    directory = directory / rows if rows else directory
    if processes == 1:
        found = prepare(config, directory)
    else:
        with _on_disk(config, directory) as here:
            found = store_of(config).open_prepared(config, here)
        if not found:
            shared = "" if storage.is_remote(directory) else ", on a disk that all of them can read"
            raise DataError(
                f"{directory} is not prepared, and {processes} processes were started. First run "
                f"the same command with --mode=prepare as a single process{shared}.",
                field="--mode",
                path=directory,
            )
    consistency.check_data(config, found.fingerprint)
    return found


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


def corpus_data(config: Config, corpus: corpora.Corpus, effort: Callable[[Config], Effort]) -> Data:
    """Returns the data of a recipe that reads rows of a corpus."""
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

    tokenizers = (corpus.tokenizer, corpus.tokenizer)
    heldout = _heldout_of(config, {"": corpus})
    return Data(tokenizers, training, heldout, lambda mesh: effort(config), corpus)


def _heldout_of(config: Config, sources: dict[str, corpora.Corpus]):
    """Returns `Data.heldout` of some corpora by name; each has config.train.eval_rows rows."""
    options = {"batch_size": config.train.batch_size, "rows": config.train.eval_rows}
    options |= {"process_index": jax.process_index(), "process_count": jax.process_count()}
    return lambda mesh: (
        lambda: {n: of_corpus.evaluation_batches(s, **options) for n, s in sources.items()}
    )


def mixed_data(
    config: Config, mixed: mixture.MixedCorpus, effort: Callable[[Config], Effort]
) -> Data:
    """Returns the data of a recipe that reads rows of several corpora."""
    steps = None if config.phases or isinstance(config.train.steps, str) else config.train.steps
    return _make_mixed(config, mixed, effort, (), steps, None, 0)[0]


def _make_mixed(
    config: Config,
    mixed: mixture.MixedCorpus,
    effort: Callable[[Config], Effort],
    weights: Sequence[float],
    steps: int | None,
    drawn: Sequence[int] | None,
    stream: int,
) -> tuple[Data, samplers.Mixture]:
    """Returns the data of a run or phase of `steps` steps, and the order of its rows.

    Args:
      weights: of the sources; (): those of the config.
      steps: the number of rows is checked for these; None: not.
      drawn, stream: see `samplers.Mixture`.
    """
    sources = mixed.sources.values()
    sections = config.data.mixture or (SourceSection(weight=1.0),)
    sizes = [source.splits["train"].rows for source in sources]
    weights = weights or [section.weight for section in sections]
    order = samplers.Mixture(
        weights,
        sizes,
        [
            max(1, round(section.epochs * size)) if section.epochs else None
            for section, size in zip(sections, sizes, strict=True)
        ],
        config.seed,
        drawn=drawn,
        stream=stream,
    )
    count = None if order.end is None else order.end // config.train.batch_size
    if steps and count is not None and count < steps:
        raise DataError(
            f"config.data.mixture gives {count:,} batches until all sources reach their epochs, "
            f"but {steps:,} steps need them. Raise the epochs of a source, or lower the steps.",
            field="config.data.mixture",
        )

    def training(mesh):
        return of_corpus.mixed_batches(
            mixed,
            order,
            batch_size=config.train.batch_size,
            seed=config.seed,
            settings=[list(weights), [section.epochs for section in sections], stream, drawn],
            prefetch=config.data.prefetch,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )

    data = Data(
        (mixed.tokenizer, mixed.tokenizer),
        training,
        _heldout_of(config, mixed.sources),
        lambda mesh: effort(config),
        next(iter(sources)),
    )
    return data, order


def pair_data(config: Config, text: parallel_text.ParallelText) -> Data:
    """Returns the data of a recipe that reads pairs of texts."""
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
        return lambda: {
            "": of_pairs.pair_evaluation_batches(
                text,
                config.parallel,
                row_multiple=multiple(mesh),
                rows=config.train.eval_rows,
                **processes,
            )
        }

    def effort(mesh):
        plan = of_pairs.make_plan(text, config.parallel, config.seed, multiple(mesh))
        shapes, counts = zip(*plan.counts(), strict=True)
        others = config.spec.pair_format(config).texts - 1
        tokens = [shape.rows * (shape.source + others * shape.target) for shape in shapes]
        work = [
            3 * shape.rows * flops.pair_forward_flops(config, shape.source, shape.target)
            for shape in shapes
        ]
        tokens, work = (float(np.average(each, weights=counts)) for each in (tokens, work))
        return Effort(round(tokens), work, len(shapes))

    return Data(tuple(text.vocabularies), training, heldout, effort, pairs=text)
