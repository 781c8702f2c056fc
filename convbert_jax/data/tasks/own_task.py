"""A task of the user's own, from the fields of `config.task`: files to examples."""

import dataclasses
import functools
import glob
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from convbert_jax.config.own_task import TaskSection
from convbert_jax.data.errors import DataError
from convbert_jax.data.tables.table_files import read_table
from convbert_jax.data.tables.table_formats import FORMATS, BadRows, TableFormat, guess_format
from convbert_jax.data.tasks.labelled_text import (
    DEFAULT_METRICS,
    KINDS,
    Example,
    LabelledTask,
    LabelReader,
    is_unlabelled,
    spell,
)

SPLITS = ("train", "validation", "test")
_HINT = "set config.task.texts and config.task.label, or config.task.columns"


@dataclasses.dataclass(frozen=True)
class _Part:
    """One file of a split, or with format "parallel" the files of its columns."""

    path: Path | tuple[Path, ...]
    key: str  # of format "json"

    @property
    def shown(self) -> Path:
        return self.path if isinstance(self.path, Path) else self.path[-1]


def open_task(section: TaskSection) -> LabelledTask:
    """The task that `section` describes; reads the training file where the labels come from it.

    Raises:
      DataError: a field that cannot be, no file, or what the training file has wrong.
    """
    _check(section)
    files = {split: getattr(section, split) for split in SPLITS}
    parts = {split: _find(section, files[split]) for split in SPLITS if files[split]}
    _refuse_shared_files(parts)
    absent = {
        split: f"{section.name} has no {split} split: config.task.{split} names no file."
        for split in SPLITS
        if split not in parts
    }
    if "train" in parts and not files["validation"] and section.heldout_fraction:
        del absent["validation"]
    labels, spellings = _parse_labels(section.labels)
    if not labels and section.kind != "regression":
        labels = spellings = _find_labels(section, parts)
    metrics = section.metrics or DEFAULT_METRICS[section.kind]
    return LabelledTask(
        name=section.name,
        kind=section.kind,
        texts=len(section.texts),
        labels=labels,
        spellings=spellings,
        metrics=metrics,
        splits=SPLITS,
        reader=functools.partial(_read_split, section, parts, spellings),
        absent=absent,
        columns=section.texts,
        scale=section.scale,
        swap_pairs=section.swap_pairs,
    )


def _check(section: TaskSection) -> None:
    for field, choices in (
        ("kind", KINDS),
        ("format", ("auto", *FORMATS)),
        ("bad_rows", ("error", "skip")),
    ):
        value = getattr(section, field)
        if value not in choices:
            raise DataError(
                f"config.task.{field}='{value}' is unknown; choose one of: {', '.join(choices)}."
            )
    texts = len(section.texts)
    if not 1 <= texts <= (1 if section.kind == "tagging" else 2):
        allowed = "one column of words" if section.kind == "tagging" else "one or two columns"
        raise DataError(f"config.task.texts={','.join(section.texts)} must name {allowed}.")
    if len(set(section.texts)) < texts:
        raise DataError(f"config.task.texts={','.join(section.texts)} names one column twice.")
    if not section.label:
        raise DataError("config.task.label is empty; name the column with the labels.")
    if section.label in section.texts:
        raise DataError(
            f"config.task.label={section.label} is one of config.task.texts, so the text would be "
            "its own label; name another column."
        )
    if section.swap_pairs and texts != 2:
        raise DataError("config.task.swap_pairs needs two columns in config.task.texts.")
    if not 0 <= section.heldout_fraction < 1:
        raise DataError(
            f"config.task.heldout_fraction={section.heldout_fraction} must be from 0 to below 1."
        )
    if section.scale <= 0:
        raise DataError(f"config.task.scale={section.scale} must be greater than 0.")
    if not any((section.train, section.validation, section.test)):
        raise DataError("config.task names no file; set config.task.train, validation or test.")


def _list(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def _find(section: TaskSection, value: str) -> tuple[_Part, ...]:
    """The files of a split, in the order of the field."""
    found = []
    for name in _list(value):
        name, _, key = name.partition("#")
        folder, name = os.path.expanduser(section.folder), os.path.expanduser(name)
        pattern = os.path.join(folder, name)
        paths = [pattern]
        if glob.has_magic(name) and not os.path.isfile(pattern):
            paths = sorted(glob.glob(os.path.join(glob.escape(folder), name)))
        if paths == [pattern] and not os.path.isfile(pattern):
            paths = [f"{pattern}.gz"]  # the same table, packed
        if not paths or not all(map(os.path.isfile, paths)):
            raise DataError(_nothing_there(section, pattern))
        found += [_Part(Path(path), key) for path in paths]
    if section.format == "parallel":
        return (_Part(tuple(part.path for part in found), ""),)
    return tuple(found)


def _refuse_shared_files(parts: Mapping[str, tuple[_Part, ...]]) -> None:
    """Raises DataError where rows to score on are trained on too, as a glob easily has it."""
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
                f"config.task.{split} reads {shared[0][0]}, which config.task.train trains on; "
                "name files that are not among those."
            )


def _nothing_there(section: TaskSection, pattern: str) -> str:
    if section.folder or os.path.isabs(pattern):
        return f"There is no file {pattern}; check config.task.folder and its splits."
    named = [part for split in SPLITS for part in _list(getattr(section, split))]
    names = ", ".join(dict.fromkeys(name.partition("#")[0] for name in named))
    return (
        f"There is no file {pattern} in the current folder; name the folder of {names} (or .gz) "
        "with --config.task.folder=FOLDER."
    )


def _parse_labels(values: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names and spellings of "0=negative", "1=positive"."""
    pairs = [item.partition("=") for item in values]
    spellings = tuple(spelling.strip() for spelling, _, _ in pairs)
    names = tuple((name or spelling).strip() for spelling, _, name in pairs)
    for each in (spellings, names):
        twice = sorted({value for value in each if each.count(value) > 1})
        if twice:
            raise DataError(f"config.task.labels has '{twice[0]}' twice.")
    return names, spellings


def _find_labels(section: TaskSection, parts: Mapping[str, tuple[_Part, ...]]) -> tuple[str, ...]:
    """All labels of the training file, sorted."""
    if "train" not in parts:
        raise DataError(
            "config.task.labels is empty and there is no config.task.train to take them from; "
            "name the labels."
        )
    found = set()
    for part in parts["train"]:
        bad_rows = BadRows(part.shown, section.bad_rows, quiet=True)
        wanted = (*section.texts, section.label)
        rows = read_table(part.path, wanted, _form(section, part), bad_rows, key=part.key)
        for line, (*texts, label) in rows:
            if problem := _problem(section, texts, label, optional=False):
                bad_rows.report(line, problem)
            else:
                found.update(map(spell, label if section.kind == "tagging" else (label,)))
    labels = tuple(sorted(found))
    if len(labels) < 2:
        raise DataError(
            f"The training rows of {section.name} have {len(labels)} label in column "
            f"'{section.label}', which leaves nothing to learn; check config.task.label."
        )
    shown = ", ".join(labels[:8]) + (", …" if labels[8:] else "")
    logging.info("%s: %d labels from the training rows: %s.", section.name, len(labels), shown)
    return labels


def _form(section: TaskSection, part: _Part) -> TableFormat:
    return TableFormat(
        format=guess_format(part.shown) if section.format == "auto" else section.format,
        columns=section.columns,
        rest_in_last=section.rest_in_last,
        pattern=section.pattern,
        encoding=section.encoding,
        hint=_HINT,
    )


def _read_split(
    section: TaskSection,
    parts: Mapping[str, tuple[_Part, ...]],
    spellings: tuple[str, ...],
    split: str,
) -> list[Example]:
    holds_out = "validation" not in parts and section.heldout_fraction > 0
    if split == "test" or not holds_out:
        return _read_parts(section, parts[split], spellings, optional=split == "test")
    examples = _read_parts(section, parts["train"], spellings, optional=False)
    wanted = split == "validation"
    chosen = [e for e in examples if _is_held_out(e, section.heldout_fraction) == wanted]
    if not chosen:
        raise DataError(
            f"config.task.heldout_fraction={section.heldout_fraction} leaves no {split} rows of "
            f"{len(examples)}; change it, or name a file."
        )
    return chosen


def _is_held_out(example: Example, fraction: float) -> bool:
    """By a hash of the texts, so that a text that stands there twice is on one side only."""
    digest = hashlib.blake2b("\0".join(example.texts).encode(), digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64


def _read_parts(
    section: TaskSection, parts: tuple[_Part, ...], spellings: tuple[str, ...], *, optional: bool
) -> list[Example]:
    """Examples of all files of a split.

    Args:
      optional: labels may be absent.
    """
    reader = LabelReader(section.kind, spellings)
    identity = [section.id] if section.id else []
    wanted = [*section.texts, *identity, *([] if optional else [section.label])]
    examples: list[Example] = []
    ids: dict[str, str] = {}  # id -> where its row is
    twice: list[str] = []
    skipped = 0
    for part in parts:
        bad_rows = BadRows(part.shown, section.bad_rows)
        rows = read_table(
            part.path,
            wanted,
            _form(section, part),
            bad_rows,
            key=part.key,
            optional=section.label if optional else "",
        )
        for line, values in rows:
            *fields, label = values
            problem = _problem(section, fields, label, optional)
            if problem:
                bad_rows.report(line, problem)
                continue
            try:
                read = None if is_unlabelled(label) else reader.read(label)
            except ValueError as error:
                raise DataError(f"{part.shown} line {line} {error}.") from None
            # A row has the number that it has in the files, whatever is left out before it.
            number = len(examples) + skipped + bad_rows.count
            row_id = spell(fields[len(section.texts)]) if identity else str(number)
            place = f"{part.shown} line {line}"
            if identity and ids.setdefault(row_id, place) != place:
                twice.append(f"'{row_id}' in {place} is that of {ids[row_id]}")
            found = tuple(_text(field) for field in fields[: len(section.texts)])
            examples.append(Example(row_id, found, read))
        skipped += bad_rows.count
    if twice:
        logging.warning(
            "%d rows have an id (config.task.id=%s) that another row has: %s%s.",
            len(twice),
            section.id,
            twice[0],
            ", …" if twice[1:] else "",
        )
    if not examples:
        raise DataError(f"{parts[0].shown} has no usable rows; check config.task.")
    return examples


def _text(value) -> str:
    return " ".join(value) if isinstance(value, list) else value.strip()


def describe_problem(kind: str, names: Sequence[str], values: Sequence[Any]) -> str:
    """What is wrong with the texts of a row, to follow "FILE line N"; "" where nothing is.

    Args:
      names: of the columns that have `values`; of tagging one, with a list of words.
    """
    for name, value in zip(names, values, strict=True):
        if kind == "tagging":
            if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
                return f"has no list of words in '{name}'"
            if not value:
                return f"has no words in '{name}'"
            broken = [word for word in value if not word or word.split() != [word]]
            if broken:
                return f"has the word {broken[0]!r} in '{name}', which is empty or has a blank"
        elif not isinstance(value, str):
            return f"has {type(value).__name__} instead of text in '{name}'"
        elif not value.strip():
            return f"has an empty text in '{name}'"
    return ""


def _problem(section: TaskSection, fields, label, optional: bool) -> str:
    """As `describe_problem`, of a whole row."""
    problem = describe_problem(section.kind, section.texts, fields[: len(section.texts)])
    if problem:
        return problem
    if is_unlabelled(label):
        return "" if optional else f"has no label in '{section.label}'"
    if section.kind != "tagging" and isinstance(label, list | dict):
        return f"has a {type(label).__name__} in '{section.label}', where one label is wanted"
    if section.kind == "tagging":
        if not isinstance(label, list):
            return f"has no list of tags in '{section.label}'"
        if len(label) != len(fields[0]):
            return f"has {len(label)} tags for {len(fields[0])} words"
    return ""
