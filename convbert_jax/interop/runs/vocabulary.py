"""Vocabularies of a run; copies in its folder make the run self-contained."""

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
    """Returns the folder of the vocabularies trained for a run, copied from a bucket if needed."""
    return bucket.fetch(workdir.data(config), config.data.cache, rows=False)


def keep_vocabularies(workdir: Workdir, config: Config, tokenizers: Sequence[Tokenizer]) -> None:
    """Copies vocabularies into the folder of the run and replaces earlier copies.

    Args:
      tokenizers: the tokenizer of the run, or the source and target tokenizers.

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
    """Returns the config of a started run with copies in place of missing vocabulary files.

    A vocabulary may be missing if it belonged to a teacher or to initial weights that were moved.
    Whether the copy is the same vocabulary is checked against the rows. The config of a run in a
    bucket is unchanged, because paths of local copies would differ between processes.
    """
    if files.is_remote(workdir.path):
        return config
    paths = [config.tokenizer.path, config.parallel.target_vocabulary]
    for number, (name, section) in enumerate(_sections(config)):
        copy = workdir.vocabulary / name / _file_name(section)
        if section.path and not files.expand(section.path).exists() and copy.is_file():
            logging.warning("%s does not exist; using the run's copy %s.", section.path, copy)
            paths[number] = str(copy.absolute())
    return dataclasses.replace(
        config,
        tokenizer=dataclasses.replace(config.tokenizer, path=paths[0]),
        parallel=dataclasses.replace(config.parallel, target_vocabulary=paths[1]),
    )


def check_learned(workdir: Workdir, config: Config, tokenizers: Sequence[Tokenizer]) -> None:
    """Checks that rows were made with the vocabularies of the run, if the run has recorded them.

    Args:
      tokenizers: tokenizers of the rows, as in `keep_vocabularies`.

    Raises:
      TokenizerError: a vocabulary differs.
    """
    learned = workdir.read_fingerprints()
    fields = ("tokenizer.path", "parallel.target_vocabulary")
    for (name, section), tokenizer, field in zip(
        _sections(config), tokenizers, fields, strict=False
    ):
        if learned and learned.get(name) != tokenizer.fingerprint:
            copy = workdir.vocabulary / name / _file_name(section)
            raise TokenizerError(
                f"The rows in {workdir.data(config)} were made with {tokenizer.path}, which is not "
                f"the vocabulary of the run {workdir}. Restore the original rows, or prepare new "
                f"ones with --config.{field}={copy} --config.data.directory=FOLDER.",
                field=f"config.{field}",
                path=tokenizer.path,
            )


def read_tokenizer(workdir: Workdir, config: Config) -> tuple[Tokenizer, TokenizerSection]:
    """Returns the tokenizer of an encoder's run and the settings to open its file with.

    Raises:
      TokenizerError: the vocabulary is missing, or differs from the one that the run was trained
        with.
      DamagedFileError: the recorded fingerprints are damaged.
    """
    tokenizer = read_tokenizers(workdir, config)[0]
    return tokenizer, dataclasses.replace(tokenizer.section, path=str(tokenizer.path.absolute()))


def read_tokenizers(workdir: Workdir, config: Config) -> tuple[Tokenizer, Tokenizer]:
    """Returns the tokenizers of source and target; the same object twice if they are shared.

    Raises:
      TokenizerError, DamagedFileError: as in `read_tokenizer`.
    """
    sections = _sections(config)
    copies = [workdir.vocabulary / name / _file_name(section) for name, section in sections]
    if all(copy.is_file() for copy in copies):
        where, learned = workdir.vocabulary, workdir.read_fingerprints()
        found = [
            load_tokenizer(dataclasses.replace(s, path=str(files.local_copy(copy))), Path())
            for (_, s), copy in zip(sections, copies, strict=True)
        ]
    else:  # the run has no copies
        named = all(section.path for _, section in sections)
        where = Path(workdir.data(config)) if named else trained_folder(workdir, config)
        found = [load_tokenizer(section, where / name) for name, section in sections]
        learned = _prepared_fingerprints(config, where)
    for (name, _), tokenizer in zip(sections, found, strict=True):
        if learned and learned.get(name) != tokenizer.fingerprint:
            raise TokenizerError(
                f"{tokenizer.path} is not the vocabulary that {workdir} was trained with (its "
                f"fingerprint is recorded in {where}). Restore the original file.",
                path=tokenizer.path,
            )
    return found[0], found[-1]


def _sections(config: Config) -> list[tuple[str, TokenizerSection]]:
    """Returns (name, settings) of each vocabulary; the name of a single one is ""."""
    return vocabularies.list_sections(config) if config.reads_pairs else [("", config.tokenizer)]


def _file_name(section: TokenizerSection) -> str:
    return Path(section.path).name if section.path else KINDS[section.kind].FILE


def _prepared_fingerprints(config: Config, folder: Path) -> dict[str, str]:
    """Returns name -> fingerprint of the vocabularies of the rows in a folder, if any."""
    if not config.reads_pairs:
        metadata = corpus.read_metadata(folder)
        return {"": metadata["tokenizer"]} if metadata else {}
    metadata = pairs.read_metadata(folder)
    names = [name for name, _ in _sections(config)]
    return dict(zip(names, metadata["tokenizers"], strict=False)) if metadata else {}
