"""Data sets with random access by row number: TensorFlow Datasets, Hugging Face `datasets`.

TensorFlow is not required: TFDS reads data prepared as array_record without it.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from convbert_jax.config import DataSection
from convbert_jax.data.errors import DataError, shorten
from convbert_jax.data.readers.row_sources import RowSource, Targets, pair_of
from convbert_jax.data.readers.rows import Fault, find_value, list_columns
from convbert_jax.data.readers.text_files import fingerprint_files, unit_bytes

ROWS_AT_ONCE = 128
SAMPLED_ROWS = 64  # to estimate the amount of text
_TFDS = "tensorflow_datasets."  # prefix of its class names
SAVED = ("state.json", "dataset_dict.json")  # `save_to_disk` writes one of these


@dataclasses.dataclass(frozen=True)
class RowRange:
    start: int
    stop: int
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexedRows(RowSource):
    """Rows of a data set; `open_rows(*arguments)` opens it."""

    open_rows: Callable[[str, str], Any]
    arguments: tuple[str, str]
    paths: frozenset[Path]  # with the rows; empty if only the package knows them
    units: tuple[RowRange, ...]

    def files_of(self, unit: RowRange) -> set[Path]:
        """Returns all files, because the rows of a unit may be in any of them."""
        del unit
        return set(self.paths)

    def rows(self, unit: RowRange) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields (row from 1, row). Raises DataError if the data set is damaged."""
        rows = self.open_rows(*self.arguments)
        found = _read(rows, range(unit.start, unit.stop), self.name, ROWS_AT_ONCE)
        yield from enumerate(found, start=unit.start + 1)


def open_tfds(rest: str, section: DataSection) -> IndexedRows:
    """Opens a prepared directory (with `dataset_info.json`) or a registered data set.

    A registered data set that is not prepared yet is prepared as array_record, if this works
    without TensorFlow.

    Raises:
      DataError: unknown name, unprepared data, another file format, unknown split or field.
    """
    import tensorflow_datasets as tfds

    if os.path.isdir(rest):
        directory = os.path.abspath(rest)
        check_prepared(rest)
    elif ":" in rest:
        raise DataError(
            "is a community data set: TFDS would download and execute its code. Prepare it "
            "yourself and use tfds:DIR.",
            field="config.data.source",
            value=f"tfds:{rest}",
        )
    else:
        directory = str(_prepared(tfds, rest).data_dir)
    rows = tfds_rows(directory, section.split)
    how = f"tfds {section.split} {section.text_field}"
    prints = fingerprint_files(list_files(directory), Path(directory), how)
    arguments = (directory, section.split)
    return _documents(f"tfds:{rest}", prints, tfds_rows, arguments, rows, section)


def open_tfds_pairs(rest: str, columns: tuple[str, ...], targets: Targets) -> IndexedRows:
    """Opens DIR or DIR#SPLIT, a prepared directory, as pairs.

    Raises:
      DataError: unprepared or empty data, or the first row has no pair in `columns`.
    """
    directory, _, split = rest.partition("#")
    check_prepared(directory)
    split, name = split or "train", f"tfds:{rest}"
    rows = tfds_rows(directory, split)
    if not len(rows):
        raise DataError(f"{name} has no rows. Use another split or data set.", value=name)
    pair = pair_of(rows_at(rows, [0], name)[0], columns, targets)
    if isinstance(pair, Fault):
        raise DataError(
            f"{name} row 1 {pair.problem}. Set config.parallel.columns.",
            field="config.parallel.columns",
            line=1,
        )
    files = list_files(directory)
    return IndexedRows(
        name=name,
        fingerprint=fingerprint_files(files, Path(directory), f"tfds {split} {','.join(columns)}"),
        columns=columns,
        targets=targets,
        open_rows=tfds_rows,
        arguments=(directory, split),
        paths=frozenset(files),
        units=_split_rows(len(rows), max(1, sum(len(text.encode()) for text in pair[:2]))),
    )


def open_datasets(rest: str, section: DataSection) -> IndexedRows:
    """Opens a data set with the `datasets` package.

    Args:
      rest: NAME, OWNER/NAME or OWNER/NAME/CONFIG for `load_dataset`, or a folder with files that
        it reads or that `save_to_disk` wrote.

    Raises:
      DataError: the package is not installed, loading failed, or unknown split or field.
    """
    spec = f"datasets:{rest}"
    try:
        import datasets
    except ImportError:
        raise DataError(
            "needs the optional package datasets. Run pip install datasets.",
            field="config.data.source",
            value=spec,
        ) from None
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise DataError(
            f"datasets {datasets.__version__} may execute scripts of a data set. Install version 4 "
            "or newer.",
            field="config.data.source",
            value=spec,
        )
    arguments = (rest, section.split)
    rows = _datasets_rows(*arguments)
    state = f"datasets {rest} {section.split} {section.text_field} {len(rows)} {rows._fingerprint}"
    fingerprint = hashlib.sha256(state.encode()).hexdigest()
    return _documents(spec, fingerprint, _datasets_rows, arguments, rows, section)


def _documents(
    name: str, fingerprint: str, open_rows, arguments, rows, section: DataSection
) -> IndexedRows:
    count, field = len(rows), section.text_field
    if not count:
        raise DataError(
            f"{name} has no rows in split '{section.split}'. Check config.data.split.",
            field="config.data.split",
            value=section.split,
        )
    sampled = sorted({i * count // SAMPLED_ROWS for i in range(SAMPLED_ROWS)})
    sample = rows_at(rows, sampled, name)
    found = (find_value(row, field) for row in sample)
    texts = [text for text in found if text is not None]
    if not texts or not all(isinstance(text, str | bytes) for text in texts):
        raise DataError(
            f"{name} has no text in '{field}' (columns: {list_columns(sample[0])}). Set "
            "config.data.text_field.",
            field="config.data.text_field",
            value=field,
        )
    files = list_files(arguments[0]) if open_rows is tfds_rows else ()
    return IndexedRows(
        name=name,
        fingerprint=fingerprint,
        columns=(field,),
        encoding_errors=section.encoding_errors,
        open_rows=open_rows,
        arguments=arguments,
        paths=frozenset(files),
        units=_split_rows(count, max(1, sum(map(len, texts)) // len(sample))),
    )


def _split_rows(count: int, average: int) -> tuple[RowRange, ...]:
    """Divides `count` rows of `average` bytes into units."""
    step = max(1, unit_bytes(average * count) // average)
    stops = ((start, min(start + step, count)) for start in range(0, count, step))
    return tuple(RowRange(start, stop, (stop - start) * average) for start, stop in stops)


def check_prepared(directory: str) -> None:
    """Raises DataError unless a folder has the form of a data set that TFDS prepared."""
    if not os.path.isfile(os.path.join(directory, "dataset_info.json")):
        raise DataError(
            "not a prepared data set: it has no dataset_info.json. Use the folder of a version, "
            "for example NAME/1.0.0.",
            path=directory,
        )


def list_files(directory: str) -> list[Path]:
    """Returns the array_record files of a prepared folder."""
    return sorted(path for path in Path(directory).glob("*.array_record*") if path.is_file())


def _prepared(tfds, name: str):
    """Returns the builder of a registered data set and prepares it if needed."""
    elsewhere = (
        f"Prepare it where TensorFlow is installed (tfds build {name} "
        "--file_format=array_record) and use tfds:DIR"
    )
    try:
        builder = tfds.builder(name)
        if not builder.is_prepared():
            builder.download_and_prepare(file_format="array_record")
    except tfds.core.DatasetNotFoundError:
        raise DataError(
            "is neither a data set of TensorFlow Datasets nor a folder. Use another name.",
            field="config.data.source",
            value=name,
        ) from None
    except ImportError as error:
        raise DataError(
            f"tfds:{name} needs a missing package ({error}). {elsewhere}.", value=f"tfds:{name}"
        ) from None
    # Builders raise any exception: network, checksums, a TensorFlow call without TensorFlow.
    except Exception as error:
        raise DataError(
            f"tfds:{name} could not be prepared ({_reason(error)}). {elsewhere}.",
            value=f"tfds:{name}",
        ) from error
    return builder


def rows_at(rows, indices: Sequence[int], name: str) -> list[dict]:
    """Returns the rows at `indices` of a TFDS or `datasets` data set.

    Raises:
      DataError: the data set is damaged.
    """
    try:
        return rows.__getitems__(list(indices))
    # Both packages raise many types of errors: damaged records, wrong types, missing files.
    except Exception as error:
        raise DataError(
            f"{name} is damaged in rows {min(indices)} to {max(indices)} ({_reason(error)}). "
            "Prepare it again.",
            value=name,
        ) from None


def all_rows(rows, name: str) -> Iterator[dict]:
    """Yields every row of a data set, see `rows_at`."""
    return _read(rows, range(len(rows)), name, 1_024)


def _read(rows, numbers: range, name: str, at_once: int) -> Iterator[dict]:
    for start in range(0, len(numbers), at_once):
        yield from rows_at(rows, numbers[start : start + at_once], name)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {shorten(' '.join(str(error).split()))}"


def tfds_rows(directory: str, split: str):
    """Returns the rows of a split, see `open_prepared`."""
    return open_prepared(directory, split)[0]


@functools.lru_cache(maxsize=4)
def open_prepared(directory: str, split: str):
    """Returns (rows, features) of a split of a folder that TFDS prepared as array_record.

    Raises:
      DataError: another file format, unknown split, or damaged files.
    """
    import tensorflow_datasets as tfds

    try:
        _check_features(json.loads(Path(directory, "features.json").read_text()), directory)
        builder = tfds.builder_from_directory(directory)
        splits = list(builder.info.splits)
    except DataError:
        raise
    # Several parsers with different errors read its JSON files.
    except Exception as error:
        problem = f"damaged: not readable as a prepared data set ({_reason(error)})"
        raise DataError(f"{problem}. Prepare it again.", path=directory) from None
    named = {part.split("[")[0].strip() for part in split.split("+")}
    if not named <= {*splits, "all"}:
        problem = f"no split '{split}'. Choose one of: {', '.join(splits)}."
        raise DataError(problem, value=split, path=directory)
    try:
        return builder.as_data_source(split=split), builder.info.features
    except NotImplementedError:
        raise DataError(
            f"not prepared as array_record. Run tfds build {builder.name} "
            "--file_format=array_record and use its folder.",
            path=directory,
        ) from None
    except Exception as error:
        raise DataError(
            f"Split '{split}' of {directory} cannot be opened ({_reason(error)}). Check "
            "config.data.split or prepare the data set again.",
            field="config.data.split",
            value=split,
            path=directory,
        ) from None


def _check_features(features, directory: str) -> None:
    """Raises DataError for feature classes outside of TFDS, which TFDS would import and run."""
    if isinstance(features, list):
        for part in features:
            _check_features(part, directory)
    elif isinstance(features, dict):
        for key, value in features.items():
            is_class = key in ("pythonClassName", "python_class_name", "type")
            if is_class and isinstance(value, str) and not value.startswith(_TFDS):
                raise DataError(
                    f"names '{shorten(value)}': code outside of TensorFlow Datasets would be "
                    "executed. Prepare the data set with features of TFDS.",
                    path=f"{directory}/features.json",
                )
            _check_features(value, directory)
    elif isinstance(features, str):  # nested JSON
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
    # The package also raises errors of the hub's client and of the file system.
    except Exception as error:
        raise DataError(
            f"datasets:{name} could not be loaded ({_reason(error)}). Check the "
            "name, config.data.split and the network.",
            value=f"datasets:{name}",
        ) from error
    if isinstance(rows, Mapping):  # several splits in one folder
        if split not in rows:
            problem = f"no split '{split}'. Choose one of: {', '.join(rows)}."
            raise DataError(problem, value=split, path=folder)
        rows = rows[split]
    return rows
