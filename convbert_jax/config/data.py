"""Sections of the vocabulary, the corpus and a custom labelled data set.

"Release:" marks fields where the official ConvBERT code does something that a reader of the paper
would not expect; the `paper` variant of each config sets them to the behavior of that code.
"""

import dataclasses
from typing import Annotated, Literal

from convbert_jax.config.fields import (
    AutoBool,
    Changeable,
    ChangeableInPretraining,
    Encoding,
    Fraction,
    FractionBelow1,
    Range,
    RowLength,
)

# Formats of --mode=predict: auto goes by the file's name, lines is one text per line, the others
# are those of the task's files.
INPUT_FORMATS = ("auto", "lines", "tsv", "csv", "jsonl", "json", "conll", "pattern")


@dataclasses.dataclass(frozen=True)
class TokenizerSection:
    """Subword vocabulary: trained on the corpus, or read from `path`."""

    # sentencepiece | wordpiece | bpe (byte-level, restores any text) | pieces (texts are already
    # tokenized, with blanks between pieces)
    kind: Literal["sentencepiece", "wordpiece", "bpe", "pieces"] = "sentencepiece"
    vocab_size: Annotated[int, Range(17, 2**24, note="five ids are special tokens")] = 30_522
    # vocab.txt, tokenizer.json, SentencePiece .model or .pieces; "" trains one. May be moved later
    path: ChangeableInPretraining[str] = ""
    # auto | true | false. auto: as in the file; a trained one lower-cases text unless the corpus is
    # Turkish or Azeri, the model generates text or the kind is bpe, which always keeps case
    lowercase: AutoBool = "auto"
    strip_accents: AutoBool = "auto"  # auto | true | false. auto: as in the file; else false
    # Unicode form of a trained sentencepiece or bpe: nfkc | nfc, which keeps full-width punctuation
    # and "²" | identity | auto: identity for bpe, nfc for models that generate text, else nfkc
    normalization: Literal["auto", "nfkc", "nfc", "identity"] = "auto"
    algorithm: Literal["unigram", "bpe"] = "unigram"  # of SentencePiece: unigram | bpe
    # longer words become [UNK] (wordpiece); transformers: 100
    max_word_chars: Annotated[int, Range(1, 10_000)] = 200
    # of text to train on, sampled evenly from the corpus
    train_megabytes: Annotated[int, Range(1, 1_000_000)] = 30
    # error if a larger fraction of the corpus' characters is [UNK]
    max_unknown_rate: Fraction = 0.02
    # sentinel ids of a trained vocabulary ([SPAN_0], …; T5: 100)
    sentinels: Annotated[int, Range(0, 2**16)] = 0


@dataclasses.dataclass(frozen=True)
class SourceSection:
    """One source of config.data.mixture; format, encoding and so on are those of config.data."""

    name: str = ""  # folder of its rows, and prefix of its metrics, as "medical/loss"
    source: str = ""  # as data.source
    validation_source: str = ""  # as data.validation_source
    weight: Fraction = 0.0  # share of the training rows; 0: only held-out rows are used
    # the source is left out after this number of epochs; 0: never
    epochs: Annotated[float, Range(0.0, 1e6, note="0 is no limit")] = 0.0


@dataclasses.dataclass(frozen=True)
class DataSection:
    """The corpus, and how it is converted to rows of `length` tokens."""

    # docstrings | text:GLOB | tfds:NAME or tfds:DIR | parquet:GLOB | hub:OWNER/NAME/FILE-GLOB
    # (parquet, text or jsonl files) | datasets:NAME[/CONFIG] or datasets:DIR
    source: str = "docstrings"
    # Several sources instead of one, as JSON: '[{"name": "medical", "source": "text:med/*.txt",
    # "weight": 0.9}, {"name": "web", "source": "text:web/*.txt", "weight": 0.1, "epochs": 4}]'.
    # weight: share of the training rows; all add up to 1. epochs: the source is left out after this
    # number of epochs, and the others take its share (default 0: never). validation_source: as
    # below
    mixture: tuple[SourceSection, ...] = ()
    # of text files: auto | blank_lines | lines | jsonl | wikiextractor | file (one document per
    # file) | csv | tsv (with a header)
    format: Literal[
        "auto", "blank_lines", "lines", "jsonl", "wikiextractor", "file", "csv", "tsv"
    ] = "auto"
    # column of csv, tsv, jsonl, parquet, TFDS and datasets; raw.text is the field text of raw
    text_field: str = "text"
    split: str = "train"  # of TFDS and datasets
    # separate corpus for evaluation; "" holds out documents of `source`
    validation_source: str = ""
    heldout_fraction: FractionBelow1 = 0.01  # of the documents, selected by a hash of their text
    length: RowLength = 128
    # packed (documents fill rows, separated by segment ids) | electra (example builder of the
    # official code) | pairs (two texts of whole sentences, for objective.sentence_pairs)
    layout: Literal["packed", "electra", "pairs"] = "packed"
    # Release: two conditions of the example builder are inverted, so that most examples have one
    # segment and some an empty first one. Only with layout="electra".
    release_builder_bug: bool = False
    # Release: documents are shuffled before they are packed into rows. False: rows follow the order
    # of the corpus.
    shuffle_documents: bool = False
    # Release: rows are distributed round-robin over 1000 files; the files are repeated, shuffled
    # and read four at a time through a shuffle buffer of 100 rows. False: each epoch is a random
    # permutation of all rows.
    release_shuffle: bool = False
    encoding: Encoding = "utf-8"  # of text, csv, tsv and jsonl files, e.g. cp1252 or gbk
    # bytes that cannot be decoded: error | replace | skip (leave the document out)
    encoding_errors: Literal["error", "replace", "skip"] = "error"
    # folder of prepared shards, also in a bucket (gs://); "" is WORKDIR/data. Runs may share it
    directory: Changeable[str] = ""
    # local folder that shards of a bucket are copied to, on each machine; it is never cleaned up
    cache: Changeable[str] = "~/.cache/convbert_jax/shards"
    # processes that tokenize; 0 is one per core
    workers: Changeable[Annotated[int, Range(0, 1_024, note="0 is one per core")]] = 0
    prefetch: Changeable[Annotated[int, Range(1, 10_000)]] = 8  # batches read ahead

    @property
    def specs(self) -> tuple[str, ...]:
        """All sources: of training, then of validation."""
        sections = self.mixture or (self,)
        found = [s.source for s in sections] + [s.validation_source for s in sections]
        return tuple(filter(None, found))


@dataclasses.dataclass(frozen=True)
class TaskSection:
    """A custom labelled data set, the task "own"; read by data/tasks/own_task.py.

    A split is a comma-separated list of files or globs, optionally with gzip compression (`.gz`).
    """

    name: str = "own"
    # classification (one text or two) | multilabel (any number of labels) | regression | tagging
    kind: str = "classification"
    # names, by index of the logit; SPELLING=NAME if the file uses another spelling; (): the labels
    # of the training set, sorted
    labels: tuple[str, ...] = ()
    # the first selects the best run; (): accuracy, macro_f1 | multilabel: micro_f1, macro_f1 |
    # spearman, pearson | span_f1, accuracy
    metrics: tuple[str, ...] = ()
    folder: str = ""  # of the files
    train: str = ""  # files
    validation: str = ""  # files; "" holds out rows of `train`
    # files; labels are optional, predictions are written; -1 means no label, unless training rows
    # have negative labels
    test: str = ""
    heldout_fraction: FractionBelow1 = 0.1  # without `validation`; selected by a hash of the texts
    # auto (by the file's name) | tsv | csv | jsonl | json (FILE#KEY names the list) | conll |
    # parallel (the files of a split are its columns) | pattern; see data/readers/rows.py
    format: str = "auto"
    columns: tuple[str, ...] = ()  # names, if the first line is not a header
    rest_in_last: bool = False  # tsv: the last column may contain tabs
    pattern: str = ""  # regular expression of a line; its named groups are the columns
    # one or two text columns; tagging: the words, by default the first column of a CoNLL file, FORM
    # of a .conllu file. data.text is the field text of data
    texts: tuple[str, ...] = ("text",)
    # column; multilabel: a list, or labels separated by |; tagging: by default the last column of a
    # CoNLL file, UPOS of a .conllu file
    label: str = "label"
    id: str = ""  # column with the id of a row in the predictions; "" numbers the rows
    encoding: Encoding = "utf-8"
    swap_pairs: bool = False  # the two texts have no order; finetune.swap_pairs trains on both
    # regression: the training targets are the labels divided by this
    scale: Annotated[float, Range(1e-6, 1e9)] = 1.0
    # invalid rows (empty text, wrong number of columns, no label): error | skip
    bad_rows: str = "error"
