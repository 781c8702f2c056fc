"""Data sets with random access by row number: TensorFlow Datasets, Hugging Face `datasets`.

TensorFlow is not required: TFDS reads data prepared as array_record without it.
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
from convbert_jax.data.readers.tables import find_value, list_columns
from convbert_jax.data.readers.text_files import clean, decode, fingerprint_files, unit_bytes

ROWS_AT_ONCE = 128
SAMPLED_ROWS = 64  # to estimate the amount of text
_TFDS = "tensorflow_datasets."  # prefix of its class names
SAVED = ("state.json", "dataset_dict.json")  # `save_to_disk` writes one of these


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
    files: frozenset[Path]  # with the rows; empty if only the package knows them
    units: tuple[RowRange, ...]

    def documents(self, unit: RowRange, tally: Counter | None = None) -> Iterator[str]:
        """Yields the texts of the rows of `unit`; null and blank texts are skipped."""
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
                            f"Row {index} of {self.name} is not UTF-8. Set "
                            "config.data.encoding_errors to 'replace' or 'skip'.",
                            field="config.data.encoding_errors",
                            line=index,
                        ) from None
                yield from clean(text or "")


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
            f"config.data.source='tfds:{rest}' is a community data set: TFDS would download and "
            "execute its code. Prepare it yourself and use tfds:DIR.",
            field="config.data.source",
            value=f"tfds:{rest}",
        )
    else:
        directory = str(_prepared(tfds, rest).data_dir)
    rows = _tfds_rows(directory, section.split)
    files = list_files(directory)
    how = f"tfds {section.split} {section.text_field}"
    fingerprint = fingerprint_files(files, Path(directory), how)
    arguments = (directory, section.split)
    return _indexed(f"tfds:{rest}", fingerprint, "tfds", arguments, rows, section, files)


def open_datasets(rest: str, section: DataSection) -> IndexedRows:
    """Opens a data set with the `datasets` package.

    Args:
      rest: NAME, OWNER/NAME or OWNER/NAME/CONFIG for `load_dataset`, or a folder with files that
        it reads or that `save_to_disk` wrote.

    Raises:
      DataError: the package is not installed, loading failed, or unknown split or field.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"config.data.source='datasets:{rest}' needs the optional package datasets. "
            "Run pip install datasets.",
            field="config.data.source",
            value=f"datasets:{rest}",
        ) from None
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise DataError(
            f"config.data.source='datasets:{rest}': datasets {datasets.__version__} may execute "
            "scripts of a data set. Install version 4 or newer.",
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
    average = max(1, sum(map(len, texts)) // len(sample))
    return IndexedRows(
        name=name,
        fingerprint=fingerprint,
        opener=opener,
        arguments=arguments,
        text_field=field,
        encoding_errors=section.encoding_errors,
        files=frozenset(files),
        units=split_rows(count, average),
    )


def split_rows(count: int, average: int) -> tuple[RowRange, ...]:
    """Divides `count` rows of `average` bytes into units."""
    step = max(1, unit_bytes(average * count) // average)
    stops = ((start, min(start + step, count)) for start in range(0, count, step))
    return tuple(RowRange(start, stop, (stop - start) * average) for start, stop in stops)


def check_prepared(directory: str) -> None:
    """Raises DataError unless a folder has the form of a data set that TFDS prepared."""
    if not os.path.isfile(os.path.join(directory, "dataset_info.json")):
        raise DataError(
            f"{directory} is not a prepared data set: it has no dataset_info.json. Use the folder "
            "of a version, for example NAME/1.0.0.",
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
            f"'{name}' is neither a data set of TensorFlow Datasets nor a folder. Check "
            "config.data.source.",
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


def all_rows(rows, name: str, at_once: int = 1_024) -> Iterator[dict]:
    """Yields every row of a data set, see `rows_at`."""
    for start in range(0, len(rows), at_once):
        yield from rows_at(rows, range(start, min(start + at_once, len(rows))), name)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {shorten(' '.join(str(error).split()))}"


def _tfds_rows(directory: str, split: str):
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
        raise DataError(
            f"{directory} is damaged: it cannot be read as a prepared data set "
            f"({_reason(error)}). Prepare it again.",
            path=directory,
        ) from None
    named = {part.split("[")[0].strip() for part in split.split("+")}
    if not named <= {*splits, "all"}:
        raise DataError(
            f"{directory} has no split '{split}'. Choose one of: {', '.join(splits)}.",
            value=split,
            path=directory,
        )
    try:
        return builder.as_data_source(split=split), builder.info.features
    except NotImplementedError:
        raise DataError(
            f"{directory} was not prepared as array_record. Run tfds build {builder.name} "
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
                    f"{directory}/features.json names '{shorten(value)}': code outside of "
                    "TensorFlow Datasets would be executed. Prepare the data set with features "
                    "of TFDS.",
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
            names = ", ".join(rows)
            raise DataError(
                f"{folder} has no split '{split}'. Choose one of: {names}.",
                value=split,
                path=folder,
            )
        rows = rows[split]
    return rows


OPEN_ROWS = {"tfds": _tfds_rows, "datasets": _datasets_rows}
