"""The vocabularies that a run has learned with: copies in its folder, so that it is all that its
model needs, wherever it is moved to.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from absl import logging

from convbert_jax import files
from convbert_jax.config import Config, TokenizerSection
from convbert_jax.data.corpus import metadata as corpus
from convbert_jax.data.parallel import metadata as pairs
from convbert_jax.data.parallel import vocabularies
from convbert_jax.data.tokenizer.tokenizer import KINDS, Tokenizer, TokenizerError, load_tokenizer
from convbert_jax.data.units import bucket
from convbert_jax.workdir import Workdir


def trained_folder(workdir: Workdir, config: Config) -> Path:
    """Where the vocabularies lie that were trained for a run: of shards in a bucket, their copy."""
    return bucket.fetch(workdir.data(config), config.data.cache, rows=False)


def keep_vocabularies(workdir: Workdir, config: Config, tokenizers: Sequence[Tokenizer]) -> None:
    """Puts copies into the folder of the run, in place of others.

    Args:
      tokenizers: the one of the run, or what its model reads and what it writes.

    Raises:
      WorkdirError: the folder cannot be written.
    """
    sections = _sections(config)
    made = tokenizers if len(sections) > 1 else tokenizers[:1]
    names = [name for name, _ in sections]
    workdir.keep_vocabularies(
        {name: tokenizer.path for name, tokenizer in zip(names, made, strict=True)},
        {name: tokenizer.fingerprint for name, tokenizer in zip(names, made, strict=True)},
    )


def use_copies(workdir: Workdir, config: Config) -> Config:
    """`config` of a run that has begun, with its own copy of each vocabulary whose file is gone, as
    that of a teacher or of the weights it started from; the rows tell whether it is the same. Of
    a run in a bucket each process would have a copy of its own: as it is.
    """
    if files.is_remote(workdir.path):
        return config
    paths = [config.tokenizer.path, config.parallel.target_vocabulary]
    for number, (name, section) in enumerate(_sections(config)):
        copy = workdir.vocabulary / name / _file_name(section)
        if section.path and not files.expand(section.path).exists() and copy.is_file():
            logging.warning("%s is gone; the run has a copy, %s.", section.path, copy)
            paths[number] = str(copy.absolute())
    return dataclasses.replace(
        config,
        tokenizer=dataclasses.replace(config.tokenizer, path=paths[0]),
        parallel=dataclasses.replace(config.parallel, target_vocabulary=paths[1]),
    )


def check_learned(workdir: Workdir, config: Config, tokenizers: Sequence[Tokenizer]) -> None:
    """Refuses rows of other vocabularies than those that the run learned with, as far as it keeps
    these: ids of the one are other words of the other.

    Args:
      tokenizers: of the rows, as `keep_vocabularies` takes them.

    Raises:
      TokenizerError: they differ.
    """
    learned = workdir.read_fingerprints()
    fields = ("tokenizer.path", "parallel.target_vocabulary")
    for (name, section), tokenizer, field in zip(
        _sections(config), tokenizers, fields, strict=False
    ):
        if learned and learned.get(name) != tokenizer.fingerprint:
            copy = workdir.vocabulary / name / _file_name(section)
            raise TokenizerError(
                f"the rows in {workdir.data(config)} were made with {tokenizer.path}, which is not "
                f"the vocabulary that {workdir} learned with; put its own rows back, or make "
                f"others with --config.{field}={copy} --config.data.directory=FOLDER.",
                field=f"config.{field}",
                path=tokenizer.path,
            )


def read_tokenizer(workdir: Workdir, config: Config) -> tuple[Tokenizer, TokenizerSection]:
    """(the vocabulary of an encoder's run, the settings to open its file with).

    Raises:
      TokenizerError: it is not there any more, or another than the one that the run learned with.
      DamagedFileError: what tells of that is not what was written.
    """
    tokenizer = read_tokenizers(workdir, config)[0]
    return tokenizer, dataclasses.replace(tokenizer.section, path=str(tokenizer.path.absolute()))


def read_tokenizers(workdir: Workdir, config: Config) -> tuple[Tokenizer, Tokenizer]:
    """Of what the model reads and of what it writes; one object twice where they are one.

    Raises:
      as `read_tokenizer`.
    """
    sections = _sections(config)
    copies = [workdir.vocabulary / name / _file_name(section) for name, section in sections]
    if all(copy.is_file() for copy in copies):
        where, learned = workdir.vocabulary, workdir.read_fingerprints()
        found = [
            load_tokenizer(dataclasses.replace(s, path=str(files.local_copy(copy))), Path())
            for (_, s), copy in zip(sections, copies, strict=True)
        ]
    else:  # of a run that began before there were copies
        named = all(section.path for _, section in sections)
        where = Path(workdir.data(config)) if named else trained_folder(workdir, config)
        found = [load_tokenizer(section, where / name) for name, section in sections]
        learned = _prepared_fingerprints(config, where)
    for (name, _), tokenizer in zip(sections, found, strict=True):
        if learned and learned.get(name) != tokenizer.fingerprint:
            raise TokenizerError(
                f"{tokenizer.path} is not the vocabulary that {workdir} learned with, as {where} "
                "tells; put that back.",
                path=tokenizer.path,
            )
    return found[0], found[-1]


def _sections(config: Config) -> list[tuple[str, TokenizerSection]]:
    """(name, settings) of each vocabulary; the name is "" where there is one."""
    return vocabularies.list_sections(config) if config.reads_pairs else [("", config.tokenizer)]


def _file_name(section: TokenizerSection) -> str:
    return Path(section.path).name if section.path else KINDS[section.kind].FILE


def _prepared_fingerprints(config: Config, folder: Path) -> dict[str, str]:
    """Name -> fingerprint of the vocabularies that rows in this folder were made with, if any."""
    if not config.reads_pairs:
        metadata = corpus.read_metadata(folder)
        return {"": metadata["tokenizer"]} if metadata else {}
    metadata = pairs.read_metadata(folder)
    names = [name for name, _ in _sections(config)]
    return dict(zip(names, metadata["tokenizers"], strict=False)) if metadata else {}
