"""The section of a labelled data set of one's own: its files, columns and labels."""

import dataclasses

# What --mode=predict reads: by the file's name, a line a row, or a table as the task's files are
INPUT_FORMATS = ("auto", "lines", "tsv", "csv", "jsonl", "json", "conll", "pattern")


@dataclasses.dataclass(frozen=True)
class TaskSection:
    """A labelled data set of one's own, the task "own"; read by data/tasks/own_task.py.

    A split is one file or several with commas between (globs too), `.gz` or not.
    """

    name: str = "own"
    kind: str = "classification"  # classification (one text or two) | regression | tagging
    # names, by index of the logit, SPELLING=NAME where the file spells them otherwise; (): those of
    # the training set, sorted
    labels: tuple[str, ...] = ()
    # the first one selects; (): accuracy, macro_f1 | spearman, pearson | span_f1, accuracy
    metrics: tuple[str, ...] = ()
    folder: str = ""  # that the files are in
    train: str = ""  # files
    validation: str = ""  # "": holds out rows of `train`
    # may lack labels: its predictions are written; -1 is no label, unless training rows have
    # negative labels
    test: str = ""
    heldout_fraction: float = 0.1  # without `validation`; chosen by a hash of the texts
    # auto (by the file's name) | tsv | csv | jsonl | json (FILE#KEY names the list) | conll |
    # parallel (the files of a split are its columns) | pattern; see data/tables/table_files.py
    format: str = "auto"
    columns: tuple[str, ...] = ()  # names, where the first line is not a header
    rest_in_last: bool = False  # tsv: the last column may contain tabs
    pattern: str = ""  # regular expression of a line; its named groups are the columns
    # columns of the one text or the two; tagging: the words, by default the first column of a CoNLL
    # file, FORM of a .conllu file. data.text is the field text of data
    texts: tuple[str, ...] = ("text",)
    # column; tagging: by default the last column of a CoNLL file, UPOS of a .conllu file
    label: str = "label"
    id: str = ""  # column that names a row among predictions; "" numbers the rows
    encoding: str = "utf-8"
    swap_pairs: bool = False  # the two texts have no order, which finetune.swap_pairs makes use of
    scale: float = 1.0  # regression: the network learns the labels divided by this
    # rows that cannot be used (an empty text, another number of columns, no label): error | skip
    bad_rows: str = "error"
