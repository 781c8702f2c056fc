"""User-defined tasks, configured by `config.task`."""

import dataclasses
import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from convbert_jax.config.own_task import TaskSection
from convbert_jax.data.errors import DataError
from convbert_jax.data.tables.table_formats import FORMATS, ending_of
from convbert_jax.data.tasks.labelled_text import DEFAULT_METRICS, KINDS, LabelledTask
from convbert_jax.data.tasks.own_rows import Part, Reader, form_of

SPLITS = ("train", "validation", "test")


def open_task(section: TaskSection) -> LabelledTask:
    """Opens the task of `section`; reads the training files if they determine the labels.

    Raises:
      DataError: invalid field, missing file, or an error in the training files.
    """
    _check(section)
    files = {split: getattr(section, split) for split in SPLITS}
    parts = {split: _find(section, files[split]) for split in SPLITS if files[split]}
    _refuse_shared_files(parts)
    absent = {
        split: f"{section.name} has no {split} split: config.task.{split} is empty."
        for split in SPLITS
        if split not in parts
    }
    if "train" in parts and not files["validation"] and section.heldout_fraction:
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


def _check(section: TaskSection) -> None:
    for field, choices in (
        ("kind", KINDS),
        ("format", ("auto", *FORMATS)),
        ("bad_rows", ("error", "skip")),
    ):
        value = getattr(section, field)
        if value not in choices:
            raise DataError(
                f"config.task.{field}='{value}' is unknown. Choose one of: {', '.join(choices)}.",
                field=f"config.task.{field}",
                value=value,
            )
    texts = len(section.texts)
    if not 1 <= texts <= (1 if section.kind == "tagging" else 2):
        allowed = "one column of words" if section.kind == "tagging" else "one or two columns"
        raise DataError(
            f"config.task.texts={','.join(section.texts)} must name {allowed}.",
            field="config.task.texts",
            value=",".join(section.texts),
        )
    if len(set(section.texts)) < texts:
        raise DataError(
            f"config.task.texts={','.join(section.texts)} contains a column twice.",
            field="config.task.texts",
            value=",".join(section.texts),
        )
    if not section.label:
        raise DataError(
            "config.task.label is empty. Set it to the column with the labels.",
            field="config.task.label",
        )
    if section.label in section.texts:
        raise DataError(
            f"config.task.label={section.label} is also in config.task.texts. Use another column "
            "for the labels.",
            field="config.task.label",
            value=section.label,
        )
    if section.swap_pairs and texts != 2:
        raise DataError(
            "config.task.swap_pairs needs two columns in config.task.texts.",
            field="config.task.swap_pairs",
        )
    if not 0 <= section.heldout_fraction < 1:
        raise DataError(
            f"config.task.heldout_fraction={section.heldout_fraction} must be at least 0 and below "
            "1.",
            field="config.task.heldout_fraction",
            value=section.heldout_fraction,
        )
    if section.scale <= 0:
        raise DataError(
            f"config.task.scale={section.scale} must be greater than 0.",
            field="config.task.scale",
            value=section.scale,
        )
    if not any((section.train, section.validation, section.test)):
        raise DataError(
            "config.task has no files. Set config.task.train, validation or test.",
            field="config.task",
        )


def _list(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def _find(section: TaskSection, value: str) -> tuple[Part, ...]:
    """Returns the files of a split in the order of its config field."""
    found = []
    for name in _list(value):
        name, _, key = name.partition("#")
        folder, name = os.path.expanduser(section.folder), os.path.expanduser(name)
        pattern = os.path.join(folder, name)
        paths = [pattern]
        if glob.has_magic(name) and not os.path.isfile(pattern):
            paths = sorted(glob.glob(os.path.join(glob.escape(folder), name)))
        if paths == [pattern] and not os.path.isfile(pattern):
            paths = [f"{pattern}.gz"]
        if not paths or not all(map(os.path.isfile, paths)):
            raise DataError(
                _nothing_there(section, pattern), field="config.task.folder", path=pattern
            )
        found += [Part(Path(path), key) for path in paths]
    if section.format == "parallel":
        return (Part(tuple(part.path for part in found), ""),)
    return tuple(found)


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


def _nothing_there(section: TaskSection, pattern: str) -> str:
    if section.folder or os.path.isabs(pattern):
        return f"File {pattern} does not exist. Check config.task.folder and its splits."
    named = [part for split in SPLITS for part in _list(getattr(section, split))]
    names = ", ".join(dict.fromkeys(name.partition("#")[0] for name in named))
    return (
        f"File {pattern} does not exist in the current folder. Set --config.task.folder=FOLDER to "
        f"the folder with {names} (or .gz)."
    )


def _parse_labels(values: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Parses labels such as "0=negative", "1=positive" into (names, spellings)."""
    pairs = [item.partition("=") for item in values]
    spellings = tuple(spelling.strip() for spelling, _, _ in pairs)
    names = tuple((name or spelling).strip() for spelling, _, name in pairs)
    for each in (spellings, names):
        twice = sorted({value for value in each if each.count(value) > 1})
        if twice:
            raise DataError(
                f"config.task.labels has '{twice[0]}' twice.",
                field="config.task.labels",
                value=twice[0],
            )
    return names, spellings
