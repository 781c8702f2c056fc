"""The section of a custom labelled data set: its files, columns and labels."""

import dataclasses

# Formats of --mode=predict: auto goes by the file's name, lines is one text per line, the others
# are those of the task's files.
INPUT_FORMATS = ("auto", "lines", "tsv", "csv", "jsonl", "json", "conll", "pattern")


@dataclasses.dataclass(frozen=True)
class TaskSection:
    """A custom labelled data set, the task "own"; read by data/tasks/own_task.py.

    A split is a comma-separated list of files or globs, optionally with gzip compression (`.gz`).
    """

    name: str = "own"
    kind: str = "classification"  # classification (one text or two) | regression | tagging
    # names, by index of the logit; SPELLING=NAME if the file uses another spelling; (): the labels
    # of the training set, sorted
    labels: tuple[str, ...] = ()
    # the first selects the best run; (): accuracy, macro_f1 | spearman, pearson | span_f1, accuracy
    metrics: tuple[str, ...] = ()
    folder: str = ""  # of the files
    train: str = ""  # files
    validation: str = ""  # files; "" holds out rows of `train`
    # files; labels are optional, predictions are written; -1 means no label, unless training rows
    # have negative labels
    test: str = ""
    heldout_fraction: float = 0.1  # without `validation`; selected by a hash of the texts
    # auto (by the file's name) | tsv | csv | jsonl | json (FILE#KEY names the list) | conll |
    # parallel (the files of a split are its columns) | pattern; see data/readers/tables.py
    format: str = "auto"
    columns: tuple[str, ...] = ()  # names, if the first line is not a header
    rest_in_last: bool = False  # tsv: the last column may contain tabs
    pattern: str = ""  # regular expression of a line; its named groups are the columns
    # one or two text columns; tagging: the words, by default the first column of a CoNLL file, FORM
    # of a .conllu file. data.text is the field text of data
    texts: tuple[str, ...] = ("text",)
    # column; tagging: by default the last column of a CoNLL file, UPOS of a .conllu file
    label: str = "label"
    id: str = ""  # column with the id of a row in the predictions; "" numbers the rows
    encoding: str = "utf-8"
    swap_pairs: bool = False  # the two texts have no order; finetune.swap_pairs trains on both
    scale: float = 1.0  # regression: the training targets are the labels divided by this
    # invalid rows (empty text, wrong number of columns, no label): error | skip
    bad_rows: str = "error"
