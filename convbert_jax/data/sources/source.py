"""Opens document sources by their spec, for example "text:corpus/*.txt".

A source is split into units of about 16 MB of text. One process reads a whole unit, so units are
the granularity of parallel work and of resuming.
"""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from convbert_jax.config import DataSection
from convbert_jax.data.errors import DataError
from convbert_jax.data.sources import docstrings, indexed_rows, parquet_files, text_files


class Source(Protocol):
    """A corpus split into units of documents; picklable.

    A unit is small, picklable and the same on every run. Its `size` is in bytes of text, estimated
    for compressed files.

    Attributes:
      fingerprint: hash of the names, sizes and both ends of the files and of the reading options,
        not of the folder or the modification times. It is cheap to compute; the content of units
        is hashed when they are read.
      files: all local files of the corpus.
    """

    name: str
    fingerprint: str
    files: Collection[Path]
    units: Sequence[Any]

    def documents(self, unit: Any, tally: Counter | None = None) -> Iterator[str]:
        """Yields the documents of a unit.

        Args:
          tally: counts "undecodable" byte sequences and the documents "skipped" because of them.
        """


OPENERS = {
    "docstrings": docstrings.open_docstrings,
    "text": text_files.open_text,
    "parquet": parquet_files.open_parquet,
    "hub": parquet_files.open_hub,
    "tfds": indexed_rows.open_tfds,
    "datasets": indexed_rows.open_datasets,
}
REMOTE = ("hub", "datasets")  # may need the network


def open_source(section: DataSection, spec: str) -> Source:
    """Opens the source `spec`, for example "text:corpus/**/*.txt", with the options of `section`.

    Raises:
      DataError: unknown kind of source, or a source without text.
    """
    kind, _, rest = spec.partition(":")
    if kind not in OPENERS or (kind != "docstrings" and not rest):
        if os.path.exists(spec) or re.search(r"[*?/]|\.\w+$", spec):
            hint = f"Use text:{spec} for text files"
        else:
            kinds = ", ".join(f"{name}:…" for name in OPENERS if name != "docstrings")
            hint = f"Choose one of: docstrings, {kinds}"
        raise DataError(f"Unknown source '{spec}'. {hint}.", value=spec)
    source = OPENERS[kind](rest, section)
    if not source.units:
        raise DataError(f"Source '{spec}' has no text. Check its files.", value=spec)
    return source


def refuse_shared_text(source, validation, *, section: str) -> None:
    """Raises DataError if training and validation data share files, for example by a broad glob.

    Args:
      source: training data with a name and a fingerprint, and optionally `files`.
      validation: validation data with the same attributes.
      section: the config section whose fields name them.
    """
    trained, held = (
        {os.path.realpath(path) for path in getattr(each, "files", ())}
        for each in (source, validation)
    )
    shared = sorted(trained & held)
    if not shared and source.fingerprint != validation.fingerprint:
        return
    what = f"reads {shared[0]}, which is part of" if shared else "has the same text as"
    raise DataError(
        f"config.{section}.validation_source='{validation.name}' {what} the training data "
        f"config.{section}.source='{source.name}'. Use other files, or leave it empty to hold out "
        f"config.{section}.heldout_fraction of the training data.",
        field=f"config.{section}.validation_source",
        value=validation.name,
    )
