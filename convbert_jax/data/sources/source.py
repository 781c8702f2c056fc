"""Where documents come from: one function from a spec to a `Source`.

A source is cut into units of some 16 MB of text. One process reads a unit from its beginning to its
end, which makes it the grain of parallel work and of resuming.
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
    """A corpus as units of documents; picklable.

    A unit is small and picklable, the same on every run; its `size` is in bytes of text, estimated
    where compressed.

    Attributes:
      fingerprint: depends on names, sizes and both ends of the files and on how they are read, not
        on the folder or the modification time. It is cheap; the content of units is hashed when
        they are read.
      files: every local file that is read.
    """

    name: str
    fingerprint: str
    files: Collection[Path]
    units: Sequence[Any]

    def documents(self, unit: Any, tally: Counter | None = None) -> Iterator[str]:
        """Documents of a unit. Adds to `tally` the "undecodable" places of the text and the
        documents "skipped" because of them.
        """


OPENERS = {
    "docstrings": docstrings.open_docstrings,
    "text": text_files.open_text,
    "parquet": parquet_files.open_parquet,
    "hub": parquet_files.open_hub,
    "tfds": indexed_rows.open_tfds,
    "datasets": indexed_rows.open_datasets,
}
REMOTE = ("hub", "datasets")  # opening these may need the network


def open_source(section: DataSection, spec: str) -> Source:
    """The source that `spec` names, e.g. "text:corpus/**/*.txt"; `section` says how to read it.

    Raises:
      DataError: an unknown kind, or nothing to read there.
    """
    kind, _, rest = spec.partition(":")
    if kind not in OPENERS or (kind != "docstrings" and not rest):
        if os.path.exists(spec) or re.search(r"[*?/]|\.\w+$", spec):
            hint = f"write text:{spec} for text files"
        else:
            kinds = ", ".join(f"{name}:…" for name in OPENERS if name != "docstrings")
            hint = f"choose one of: docstrings, {kinds}"
        raise DataError(f"Source '{spec}' is not understood; {hint}.", value=spec)
    source = OPENERS[kind](rest, section)
    if not source.units:
        raise DataError(f"Source '{spec}' has no text; check it and its files.", value=spec)
    return source


def refuse_shared_text(source, validation, *, section: str) -> None:
    """Raises DataError where what is evaluated on is trained on too: held-out numbers would not be
    of held-out text. A glob for all files takes those for evaluation along.

    Args:
      source, validation: with a name and a fingerprint, and the `files` that they read, if any.
      section: of the config, whose fields name them.
    """
    trained, held = (
        {os.path.realpath(path) for path in getattr(each, "files", ())}
        for each in (source, validation)
    )
    shared = sorted(trained & held)
    if not shared and source.fingerprint != validation.fingerprint:
        return
    what = f"reads {shared[0]}, which" if shared else "is the text that"
    raise DataError(
        f"config.{section}.validation_source='{validation.name}' {what} "
        f"config.{section}.source='{source.name}' trains on; name files that are not among those, "
        f"or leave it empty to hold out a part by config.{section}.heldout_fraction.",
        field=f"config.{section}.validation_source",
        value=validation.name,
    )
