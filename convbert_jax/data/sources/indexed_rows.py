"""Data sets with random access by row number: TensorFlow Datasets, Hugging Face `datasets`.

Neither needs TensorFlow: TFDS reads what was prepared as array_record by itself.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from convbert_jax.config import DataSection
from convbert_jax.data.errors import DataError, shorten
from convbert_jax.data.sources.documents import clean, decode, unit_bytes
from convbert_jax.data.sources.text_files import fingerprint_files
from convbert_jax.data.tables.table_files import find_value, list_columns

ROWS_AT_ONCE = 128
SAMPLED_ROWS = 64  # to estimate how much text there is
_TFDS = "tensorflow_datasets."  # how the names of its classes begin
SAVED = ("state.json", "dataset_dict.json")  # of these `save_to_disk` leaves one in a folder


@dataclasses.dataclass(frozen=True)
class RowRange:
    start: int
    stop: int
    size: int


@dataclasses.dataclass(frozen=True)
class IndexedRows:
    name: str
    fingerprint: str
    opener: str  # key of OPEN_ROWS
    arguments: tuple[str, ...]
    text_field: str
    encoding_errors: str
    files: frozenset[Path]  # that hold the rows; empty if only the package knows them
    units: tuple[RowRange, ...]

    def documents(self, unit: RowRange, tally: Counter | None = None) -> Iterator[str]:
        """Texts of the rows of `unit`; null and blank ones are left out."""
        rows = OPEN_ROWS[self.opener](*self.arguments)
        for start in range(unit.start, unit.stop, ROWS_AT_ONCE):
            indices = range(start, min(start + ROWS_AT_ONCE, unit.stop))
            for index, row in zip(indices, rows_at(rows, indices, self.name), strict=True):
                text = find_value(row, self.text_field)
                if isinstance(text, bytes):
                    try:
                        text = decode(text, self.encoding_errors, tally)
                    except UnicodeDecodeError:
                        raise DataError(
                            f"Row {index} of {self.name} is not UTF-8; set "
                            "config.data.encoding_errors to 'replace' or 'skip'.",
                            field="config.data.encoding_errors",
                            line=index,
                        ) from None
                yield from clean(text or "")


def open_tfds(rest: str, section: DataSection) -> IndexedRows:
    """A prepared directory (the one with `dataset_info.json`) or a registered data set's name.

    A name that is not prepared yet is prepared as array_record where that works without
    TensorFlow.

    Raises:
      DataError: unknown name, no prepared data, another file format, no such split or field.
    """
    import tensorflow_datasets as tfds

    if os.path.isdir(rest):
        directory = os.path.abspath(rest)
        if not os.path.isfile(os.path.join(directory, "dataset_info.json")):
            raise DataError(
                f"{rest} is not a prepared data set (it has no dataset_info.json); name the "
                "folder of its version, for example NAME/1.0.0.",
                path=rest,
            )
    elif ":" in rest:
        raise DataError(
            f"config.data.source='tfds:{rest}' is a community data set, for which TFDS downloads "
            "and executes code; prepare it yourself and name its folder as tfds:DIR.",
            field="config.data.source",
            value=f"tfds:{rest}",
        )
    else:
        directory = str(_prepared(tfds, rest).data_dir)
    rows = _tfds_rows(directory, section.split)
    files = sorted(path for path in Path(directory).glob("*.array_record*") if path.is_file())
    how = f"tfds {section.split} {section.text_field}"
    fingerprint = fingerprint_files(files, Path(directory), how)
    arguments = (directory, section.split)
    return _indexed(f"tfds:{rest}", fingerprint, "tfds", arguments, rows, section, files)


def open_datasets(rest: str, section: DataSection) -> IndexedRows:
    """A data set of the `datasets` package: NAME, OWNER/NAME or OWNER/NAME/CONFIG as `load_dataset`
    takes them, or a folder, of files that it reads or as `save_to_disk` writes one.

    Raises:
      DataError: the package is not installed, nothing can be loaded, or no such split or field.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"config.data.source='datasets:{rest}' needs a package that is not required "
            "otherwise: pip install datasets.",
            field="config.data.source",
            value=f"datasets:{rest}",
        ) from None
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise DataError(
            f"config.data.source='datasets:{rest}': datasets {datasets.__version__} may execute "
            "a script of a data set; install version 4 or newer.",
            field="config.data.source",
            value=f"datasets:{rest}",
        )
    arguments = (rest, section.split)
    rows = _datasets_rows(*arguments)
    state = f"datasets {rest} {section.split} {section.text_field} {len(rows)} {rows._fingerprint}"
    fingerprint = hashlib.sha256(state.encode()).hexdigest()
    return _indexed(f"datasets:{rest}", fingerprint, "datasets", arguments, rows, section)


def _indexed(
    name, fingerprint, opener, arguments, rows, section: DataSection, files=()
) -> IndexedRows:
    count, field = len(rows), section.text_field
    if not count:
        raise DataError(
            f"{name} has no rows in split '{section.split}'; check config.data.split.",
            field="config.data.split",
            value=section.split,
        )
    sampled = sorted({i * count // SAMPLED_ROWS for i in range(SAMPLED_ROWS)})
    sample = rows_at(rows, sampled, name)
    found = (find_value(row, field) for row in sample)
    texts = [text for text in found if text is not None]
    if not texts or not all(isinstance(text, str | bytes) for text in texts):
        raise DataError(
            f"{name} has no text in '{field}' (it has: {list_columns(sample[0])}); set "
            "config.data.text_field.",
            field="config.data.text_field",
            value=field,
        )
    average = max(1, sum(map(len, texts)) // len(sample))
    step = max(1, unit_bytes(average * count) // average)
    return IndexedRows(
        name=name,
        fingerprint=fingerprint,
        opener=opener,
        arguments=arguments,
        text_field=field,
        encoding_errors=section.encoding_errors,
        files=frozenset(files),
        units=tuple(
            RowRange(start, min(start + step, count), (min(start + step, count) - start) * average)
            for start in range(0, count, step)
        ),
    )


def _prepared(tfds, name: str):
    """The builder of a registered data set, prepared."""
    elsewhere = (
        f"prepare it once where TensorFlow is installed (tfds build {name} "
        "--file_format=array_record) and name its folder as tfds:DIR"
    )
    try:
        builder = tfds.builder(name)
        if not builder.is_prepared():
            builder.download_and_prepare(file_format="array_record")
    except tfds.core.DatasetNotFoundError:
        raise DataError(
            f"TensorFlow Datasets knows no '{name}', and it is no folder; check "
            "config.data.source.",
            field="config.data.source",
            value=name,
        ) from None
    except ImportError as error:
        raise DataError(
            f"tfds:{name} needs a missing package ({error}); {elsewhere}.", value=f"tfds:{name}"
        ) from None
    # Builders fail in their own ways: network, checksums, a TensorFlow call without TensorFlow.
    except Exception as error:
        raise DataError(
            f"tfds:{name} could not be prepared here ({_reason(error)}); {elsewhere}.",
            value=f"tfds:{name}",
        ) from error
    return builder


def rows_at(rows, indices: Sequence[int], name: str) -> list[dict]:
    """The rows at `indices` of a data set of either kind. Raises DataError if it is damaged."""
    try:
        return rows.__getitems__(list(indices))
    # The readers of both kinds raise what theirs raise: damaged records, types, missing files.
    except Exception as error:
        raise DataError(
            f"{name} is damaged in rows {min(indices)} to {max(indices)} ({_reason(error)}); "
            "prepare it again.",
            value=name,
        ) from None


def all_rows(rows, name: str, at_once: int = 1_024) -> Iterator[dict]:
    """Every row of a data set, see `rows_at`."""
    for start in range(0, len(rows), at_once):
        yield from rows_at(rows, range(start, min(start + at_once, len(rows))), name)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {shorten(' '.join(str(error).split()))}"


def _tfds_rows(directory: str, split: str):
    return open_prepared(directory, split)[0]


@functools.lru_cache(maxsize=4)
def open_prepared(directory: str, split: str):
    """Rows and features of a split of a folder that TFDS prepared as array_record.

    Raises:
      DataError: another file format, no such split, or damaged files.
    """
    import tensorflow_datasets as tfds

    try:
        _check_features(json.loads(Path(directory, "features.json").read_text()), directory)
        builder = tfds.builder_from_directory(directory)
        splits = list(builder.info.splits)
    except DataError:
        raise
    # Its JSON files are read by several parsers, each with errors of its own.
    except Exception as error:
        raise DataError(
            f"{directory} is damaged: it cannot be read as a prepared data set "
            f"({_reason(error)}); prepare it again.",
            path=directory,
        ) from None
    named = {part.split("[")[0].strip() for part in split.split("+")}
    if not named <= {*splits, "all"}:
        raise DataError(
            f"{directory} has no split '{split}' (it has: {', '.join(splits)}); name one of these.",
            value=split,
            path=directory,
        )
    try:
        return builder.as_data_source(split=split), builder.info.features
    except NotImplementedError:
        raise DataError(
            f"{directory} was not prepared as array_record; run tfds build {builder.name} "
            "--file_format=array_record and name its folder.",
            path=directory,
        ) from None
    except Exception as error:
        raise DataError(
            f"Split '{split}' of {directory} cannot be opened ({_reason(error)}); check "
            "config.data.split, or prepare it again.",
            field="config.data.split",
            value=split,
            path=directory,
        ) from None


def _check_features(features, directory: str) -> None:
    """Refuses classes of features outside of TFDS, which would import any module that a
    features.json names.
    """
    if isinstance(features, list):
        for part in features:
            _check_features(part, directory)
    elif isinstance(features, dict):
        for key, value in features.items():
            is_class = key in ("pythonClassName", "python_class_name", "type")
            if is_class and isinstance(value, str) and not value.startswith(_TFDS):
                raise DataError(
                    f"{directory}/features.json: '{shorten(value)}' is Python outside of "
                    "TensorFlow Datasets, which would be executed; prepare the data set with "
                    "features of TFDS.",
                    path=f"{directory}/features.json",
                )
            _check_features(value, directory)
    elif isinstance(features, str):  # JSON inside of JSON
        try:
            inside = json.loads(features)
        except ValueError:
            return
        _check_features(inside, directory)


@functools.lru_cache(maxsize=4)
def _datasets_rows(name: str, split: str):
    import datasets

    folder = os.path.expanduser(name)
    parts = [folder] if os.path.isdir(folder) else name.split("/")
    configuration = parts.pop() if len(parts) == 3 else None
    try:
        if any(os.path.isfile(os.path.join(folder, file)) for file in SAVED):
            rows = datasets.load_from_disk(folder)
        else:
            rows = datasets.load_dataset("/".join(parts), configuration, split=split)
    # The package raises errors of its own, of the hub's client and of the file system.
    except Exception as error:
        raise DataError(
            f"datasets:{name} could not be loaded ({_reason(error)}); check the "
            "name, config.data.split and the network.",
            value=f"datasets:{name}",
        ) from error
    if isinstance(rows, Mapping):  # several splits in one folder
        if split not in rows:
            names = ", ".join(rows)
            raise DataError(
                f"{folder} has no split '{split}' (it has: {names}); name one of these.",
                value=split,
                path=folder,
            )
        rows = rows[split]
    return rows


OPEN_ROWS = {"tfds": _tfds_rows, "datasets": _datasets_rows}
