"""User-defined tasks, configured by `config.task`."""

import dataclasses
import glob
import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from convbert_jax.config.data import TaskSection
from convbert_jax.data.errors import DataError, Location
from convbert_jax.data.readers.rows import (
    FORMATS,
    BadRows,
    TableFormat,
    ending_of,
    guess_format,
    read_table,
)
from convbert_jax.data.tasks.labelled_text import (
    DEFAULT_METRICS,
    KINDS,
    Example,
    LabelledTask,
    LabelReader,
    is_unlabelled,
    spell,
    split_labels,
)

_HINT = "Set config.task.texts and config.task.label, or config.task.columns"


@dataclasses.dataclass(frozen=True)
class Part:
    """One file of a split, or the files of its columns for format "parallel"."""

    path: Path | tuple[Path, ...]
    key: str  # of the list, for format "json"

    @property
    def shown(self) -> Path:
        return self.path if isinstance(self.path, Path) else self.path[-1]


@dataclasses.dataclass(frozen=True)
class Row:
    """A usable row of a file."""

    place: Location
    id: str
    texts: tuple[str, ...]
    label: Any  # as in the file; None if missing


class Reader:
    """Reader of splits that parses the training files once for labels, training and held-out rows.

    Attributes:
      labels: names in the order of the model's outputs; () for regression.
      spellings: how the files spell `labels`.
    """

    def __init__(
        self,
        section: TaskSection,
        parts: Mapping[str, tuple[Part, ...]],
        labels: tuple[str, ...],
        spellings: tuple[str, ...],
    ):
        """Creates a reader; with `labels` of (), it uses the labels of the training rows."""
        self._section, self._parts = section, parts
        self._waiting: dict[str, list[Example]] = {}  # parsed splits, not read yet
        self.labels, self.spellings = labels, spellings
        rows = [] if labels or "train" not in parts else self._parse("train")
        known: Sequence[Any] = spellings or [row.label for row in rows]
        if not labels and section.kind != "regression":
            self.labels = self.spellings = known = _list_labels(section, known)
        # If training rows have negative labels, -1 is an ordinary label.
        self._hides_labels = not any(_as_number(label) < 0 for label in known)
        if rows:
            self._waiting = self._divide(self._label(rows))

    def read(self, split: str) -> list[Example]:
        """Returns the examples of a split in the order of its files."""
        if split not in self._waiting:
            source = split if split in self._parts else "train"
            rows = self._parse(source)
            if source == "test" and self._hides_labels:
                rows = _without_hidden_labels(rows)
            examples = self._label(rows)
            self._waiting |= self._divide(examples) if source == "train" else {split: examples}
        examples = self._waiting.pop(split)
        if not examples:
            raise DataError(
                f"leaves no {split} rows. Change it, or set config.task.validation to a file.",
                field="config.task.heldout_fraction",
                value=self._section.heldout_fraction,
            )
        return examples

    def _divide(self, examples: list[Example]) -> dict[str, list[Example]]:
        """Splits training rows into training rows and held-out validation rows."""
        fraction = self._section.heldout_fraction
        if "validation" in self._parts or not fraction:
            return {"train": examples}
        splits: dict[str, list[Example]] = {"train": [], "validation": []}
        for example in examples:
            # By a hash of the texts, so duplicates of a text are in the same split.
            digest = hashlib.blake2b("\0".join(example.texts).encode(), digest_size=8).digest()
            held_out = int.from_bytes(digest) < fraction * 2**64
            splits["validation" if held_out else "train"].append(example)
        return splits

    def _label(self, rows: Sequence[Row]) -> list[Example]:
        reader = LabelReader(self._section.kind, self.spellings)
        examples = []
        for row in rows:
            try:
                label = None if row.label is None else reader.read(row.label)
            except ValueError as error:
                raise row.place.error(f"{error}.") from None
            examples.append(Example(row.id, row.texts, label))
        return examples

    def _parse(self, split: str) -> list[Row]:
        """Reads the rows of all files of a split; labels are required except for "test"."""
        section, parts, optional = self._section, self._parts[split], split == "test"
        identity = [section.id] if section.id else []
        wanted = [*section.texts, *identity, *([] if optional else [section.label])]
        found: list[Row] = []
        ids: dict[str, Location] = {}  # id -> place of its row
        twice: list[str] = []
        skipped = 0
        for part in parts:
            bad_rows = BadRows(part.shown, section.bad_rows)
            rows = read_table(
                part.path,
                wanted,
                form_of(section, part),
                bad_rows,
                key=part.key,
                optional=section.label if optional else "",
            )
            for line, (*fields, label) in rows:
                if problem := _problem(section, fields, label, optional):
                    bad_rows.report(line, problem)
                    continue
                # Skipped rows are counted, so row numbers match the files.
                number = len(found) + skipped + bad_rows.count
                row_id = spell(fields[len(section.texts)]) if identity else str(number)
                place = Location(part.shown, line)
                if identity and ids.setdefault(row_id, place) != place:
                    twice.append(f"'{row_id}' in {place} and {ids[row_id]}")
                texts = tuple(
                    " ".join(field) if isinstance(field, list) else field.strip()
                    for field in fields[: len(section.texts)]
                )
                known = label if _is_labelled(section, label) else None
                found.append(Row(place, row_id, texts, known))
            skipped += bad_rows.count
        if twice:
            logging.warning(
                "%d rows have a duplicate id (config.task.id=%s): %s%s.",
                len(twice),
                section.id,
                twice[0],
                ", …" if twice[1:] else "",
            )
        if not found:
            raise DataError(
                "has no usable rows. Check config.task.", field="config.task", path=parts[0].shown
            )
        return found


def _list_labels(section: TaskSection, values: Sequence[Any]) -> tuple[str, ...]:
    """Returns the sorted labels of the training rows."""
    if not section.train:
        problem = "config.task.labels and config.task.train are empty, so the labels are unknown."
        raise DataError(f"{problem} Set config.task.labels.", field="config.task.labels")
    split = {"tagging": list, "multilabel": split_labels}.get(section.kind, lambda value: [value])
    labels = tuple(sorted({spell(label) for value in values for label in split(value)}))
    if len(labels) < 2:
        raise DataError(
            f"The training rows of {section.name} need at least 2 labels but have {len(labels)} in "
            f"column '{section.label}'. Check config.task.label.",
            field="config.task.label",
            value=section.label,
        )
    shown = ", ".join(labels[:8]) + (", …" if labels[8:] else "")
    logging.info("%s: %d labels in the training rows: %s.", section.name, len(labels), shown)
    return labels


def _without_hidden_labels(rows: Sequence[Row]) -> list[Row]:
    """Removes the label -1, which published test sets use for hidden labels."""
    shown = [
        dataclasses.replace(row, label=None) if _is_minus_one(row.label) else row for row in rows
    ]
    hidden = sum(row.label is None for row in shown) - sum(row.label is None for row in rows)
    if hidden:
        logging.info(
            "%d of %d test rows have the label -1, which means no label; the first: %s.",
            hidden,
            len(rows),
            next(row.place for row in rows if _is_minus_one(row.label)),
        )
    return shown


def _is_minus_one(label: Any) -> bool:
    tags = label if isinstance(label, list) else [label]
    return bool(tags) and all(_as_number(tag) == -1 for tag in tags)


def _as_number(label: Any) -> float:
    try:
        return float(label)
    except (TypeError, ValueError):
        return math.nan


def form_of(section: TaskSection, part: Part) -> TableFormat:
    """Returns the format of a file, from the section or from the file's suffix."""
    return TableFormat(
        format=guess_format(part.shown) if section.format == "auto" else section.format,
        columns=section.columns,
        rest_in_last=section.rest_in_last,
        pattern=section.pattern,
        encoding=section.encoding,
        hint=_HINT,
    )


def describe_problem(kind: str, names: Sequence[str], values: Sequence[Any]) -> str:
    """Describes the first problem with the texts of a row.

    Args:
      names: columns of `values`; for tagging, one column with a list of words.

    Returns:
      A predicate for "FILE line N", or "" if the texts are valid.
    """
    for name, value in zip(names, values, strict=True):
        if kind == "tagging":
            if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
                return f"has no list of words in '{name}'"
            if not value:
                return f"has no words in '{name}'"
            broken = [word for word in value if not word or word.split() != [word]]
            if broken:
                return f"has the word {broken[0]!r} in '{name}', which is empty or contains a space"
        elif not isinstance(value, str):
            return f"has {type(value).__name__} instead of text in '{name}'"
        elif not value.strip():
            return f"has an empty text in '{name}'"
    return ""


def _problem(section: TaskSection, fields, label, optional: bool) -> str:
    """Like `describe_problem`, for a whole row."""
    if problem := describe_problem(section.kind, section.texts, fields[: len(section.texts)]):
        return problem
    if not _is_labelled(section, label):
        return "" if optional else f"has no label in '{section.label}'"
    if section.kind == "tagging" and not isinstance(label, list):
        return f"has no list of tags in '{section.label}'"
    if section.kind == "tagging" and len(label) != len(fields[0]):
        return f"has {len(label)} tags for {len(fields[0])} words"
    if section.kind == "multilabel" and not isinstance(label, list | str):
        return f"has {type(label).__name__} instead of a list of labels in '{section.label}'"
    if section.kind in ("classification", "regression") and isinstance(label, list | dict):
        return f"has a {type(label).__name__} instead of one label in '{section.label}'"
    return ""


def _is_labelled(section: TaskSection, label: Any) -> bool:
    """Returns whether a row has a label; a multilabel row may have an empty list or cell."""
    if section.kind == "multilabel" and isinstance(label, list | str):
        return True
    return not is_unlabelled(label)


SPLITS = ("train", "validation", "test")


def open_task(section: TaskSection) -> LabelledTask:
    """Opens the task of `section`; reads the training files if they determine the labels.

    Raises:
      DataError: invalid field, missing file, or an error in the training files.
    """
    for field, value, problem in _faults(section):
        raise DataError(problem, field=f"config.task.{field}", value=value)
    parts = {split: _find(section, split) for split in SPLITS if getattr(section, split)}
    if not parts:
        raise DataError(
            "config.task has no files. Set config.task.train, validation or test.",
            field="config.task",
        )
    _refuse_shared_files(parts)
    absent = {
        split: f"{section.name} has no {split} split: config.task.{split} is empty."
        for split in SPLITS
        if split not in parts
    }
    if "train" in parts and "validation" not in parts and section.heldout_fraction:
        del absent["validation"]
    section = _with_columns(section, next(iter(parts.values()))[0])
    reader = Reader(section, parts, *_parse_labels(section.labels))
    metrics = section.metrics or DEFAULT_METRICS[section.kind]
    return LabelledTask(
        name=section.name,
        kind=section.kind,
        texts=len(section.texts),
        labels=reader.labels,
        spellings=reader.spellings,
        metrics=metrics,
        splits=SPLITS,
        reader=reader.read,
        absent=absent,
        columns=section.texts,
        scale=section.scale,
        swap_pairs=section.swap_pairs,
    )


def _with_columns(section: TaskSection, part: Part) -> TaskSection:
    """Sets the default columns of words and tags for CoNLL files.

    They are the first and the last column, or FORM and UPOS in CoNLL-U, which has ten columns.
    """
    if section.kind != "tagging" or section.columns or form_of(section, part).format != "conll":
        return section
    words, tags = ("1", "3") if ending_of(part.shown) == ".conllu" else ("0", "-1")
    default = TaskSection()
    return dataclasses.replace(
        section,
        texts=(words,) if section.texts == default.texts else section.texts,
        label=tags if section.label == default.label else section.label,
    )


def _faults(section: TaskSection) -> Iterator[tuple[str, Any, str]]:
    """Yields (field, value, problem) of invalid fields."""
    for field, choices in (
        ("kind", KINDS),
        ("format", ("auto", *FORMATS)),
        ("bad_rows", ("error", "skip")),
    ):
        if (value := getattr(section, field)) not in choices:
            yield field, value, f"is unknown. Choose one of: {', '.join(choices)}."
    count, named = len(section.texts), ",".join(section.texts)
    if not 1 <= count <= (1 if section.kind == "tagging" else 2):
        allowed = "one column of words" if section.kind == "tagging" else "one or two columns"
        yield "texts", named, f"must name {allowed}."
    if len(set(section.texts)) < count:
        yield "texts", named, "contains a column twice."
    if not section.label:
        yield "label", "", "is empty. Set it to the column with the labels."
    if section.label in section.texts:
        problem = "is also in config.task.texts. Use another column for the labels."
        yield "label", section.label, problem
    if section.swap_pairs and count != 2:
        yield "swap_pairs", True, "needs two columns in config.task.texts."
    if not 0 <= section.heldout_fraction < 1:
        yield "heldout_fraction", section.heldout_fraction, "must be at least 0 and below 1."
    if section.scale <= 0:
        yield "scale", section.scale, "must be greater than 0."


def _find(section: TaskSection, split: str) -> tuple[Part, ...]:
    """Returns the files of a split in the order of its config field."""
    found = []
    for name, key in _names(section, split):
        folder, name = os.path.expanduser(section.folder), os.path.expanduser(name)
        pattern = os.path.join(folder, name)
        paths = [pattern]
        if glob.has_magic(name) and not os.path.isfile(pattern):
            paths = sorted(glob.glob(os.path.join(glob.escape(folder), name)))
        if paths == [pattern] and not os.path.isfile(pattern):
            paths = [f"{pattern}.gz"]
        if not paths or not all(map(os.path.isfile, paths)):
            problem = f"File {pattern} does not exist. Check config.task.folder and its splits."
            if not section.folder and not os.path.isabs(pattern):
                names = dict.fromkeys(name for each in SPLITS for name, _ in _names(section, each))
                problem = (
                    f"File {pattern} does not exist in the current folder. Set "
                    f"--config.task.folder=FOLDER to the folder with {', '.join(names)} (or .gz)."
                )
            raise DataError(problem, field="config.task.folder", path=pattern)
        found += [Part(Path(path), key) for path in paths]
    if section.format == "parallel":
        return (Part(tuple(part.path for part in found), ""),)
    return tuple(found)


def _names(section: TaskSection, split: str) -> list[tuple[str, str]]:
    """Returns (file or glob, key) of each file that the config names for a split."""
    parts = (part.strip().partition("#") for part in getattr(section, split).split(","))
    return [(name, key) for name, _, key in parts if name or key]


def _refuse_shared_files(parts: Mapping[str, tuple[Part, ...]]) -> None:
    """Raises DataError if validation or test files are also training files, e.g. by a glob."""
    found = {
        split: {
            (os.path.realpath(path), part.key)
            for part in of_split
            for path in (part.path if isinstance(part.path, tuple) else (part.path,))
        }
        for split, of_split in parts.items()
    }
    for split in ("validation", "test"):
        if shared := sorted(found.get("train", set()) & found.get(split, set())):
            raise DataError(
                f"config.task.{split} reads {shared[0][0]}, which is also in config.task.train. "
                "Use other files.",
                field=f"config.task.{split}",
                path=shared[0][0],
            )


def _parse_labels(values: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Parses labels such as "0=negative", "1=positive" into (names, spellings)."""
    pairs = [item.partition("=") for item in values]
    spellings = tuple(spelling.strip() for spelling, _, _ in pairs)
    names = tuple((name or spelling).strip() for spelling, _, name in pairs)
    for each in (spellings, names):
        twice = sorted({value for value in each if each.count(value) > 1})
        if twice:
            problem = f"config.task.labels has '{twice[0]}' twice."
            raise DataError(problem, field="config.task.labels", value=twice[0])
    return names, spellings
