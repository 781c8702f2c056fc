"""Fine-tuning on other labelled text: your own files, or one of the public data sets below, each
described by a few lines of `config.task` that can serve as a template.

There are no published ConvBERT scores for these. Public data sets are read from
--config.task.folder=FOLDER, which contains the files named below (optionally .gz). `paper` after a
comma (`:sick,paper`) is the recipe of the official code.

    python -m convbert_jax.main --config=configs/text.py:sick --config.init_from=runs/small \\
        --config.task.folder=FOLDER
    python -m convbert_jax.main --config=configs/text.py:own --config.init_from=runs/small \\
        --config.task.train=train.csv --config.task.test=test.csv --config.task.texts=review \\
        --config.task.label=stars

imdb: film reviews, 2 labels, one table per split. trec: questions, 6 labels (train_5500.label and
TREC_10.label renamed to train.txt and test.txt). agnews: news, 4 labels, trained on a sample of
10,001 rows. sick: sentence pairs, entailment, 3 labels, from SICK.zip; sick_relatedness: their
similarity, 1 to 5. snli: entailment, 3 labels, trained on its dev set, one file per column.
clinc150: intents, 150 labels and out of scope, from data_full.json of clinc/oos-eval. qqp_part:
question pairs, 2 labels, a part of QQP. boolq, cb, superglue_rte: tasks of SuperGLUE, each from its
own folder of super.gluebenchmark.com; their test files have no labels, and predictions are written.
"""

from configs import finetuning

_SICK = {
    "train": "SICK_train.txt",
    "validation": "SICK_trial.txt",
    "test": "SICK_test_annotated.txt",
    "format": "tsv",
    "texts": ("sentence_A", "sentence_B"),
}
_CLINC = "data_full.json"
_SUPERGLUE = {
    "train": "train.jsonl",
    "validation": "val.jsonl",
    "test": "test.jsonl",
    "texts": ("premise", "hypothesis"),
    "id": "idx",
}

TASKS = {
    "own": {},
    "imdb": {
        "train": "train.tsv",
        "test": "test.tsv",
        "columns": ("name", "label", "text"),
        "rest_in_last": True,  # 27 reviews contain a tab
        "labels": ("0=negative", "1=positive"),
        "id": "name",
    },
    "trec": {
        "train": "train.txt",
        "test": "test.txt",
        "format": "pattern",
        "pattern": r"(?P<label>\w+):(?P<fine>\w+) (?P<text>.*)",
        "encoding": "iso-8859-1",
        "labels": ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM"),
    },
    "agnews": {
        "train": "dev.tsv",
        "test": "test.tsv",
        "columns": ("text", "label"),
        "labels": ("World", "Sports", "Business", "Sci/Tech"),
    },
    "sick": {
        **_SICK,
        "label": "entailment_judgment",
        "labels": ("CONTRADICTION", "ENTAILMENT", "NEUTRAL"),
    },
    "sick_relatedness": {
        **_SICK,
        "kind": "regression",
        "label": "relatedness_score",
        "metrics": ("spearman", "pearson"),
        "scale": 5.0,
        "swap_pairs": True,
    },
    "snli": {
        "train": "s1.dev,s2.dev,labels.dev",
        "test": "s1.test,s2.test,labels.test",
        "format": "parallel",
        "columns": ("premise", "hypothesis", "label"),
        "texts": ("premise", "hypothesis"),
        "labels": ("contradiction", "entailment", "neutral"),
    },
    "clinc150": {
        "train": f"{_CLINC}#train,{_CLINC}#oos_train",
        "validation": f"{_CLINC}#val,{_CLINC}#oos_val",
        "test": f"{_CLINC}#test,{_CLINC}#oos_test",
        "columns": ("text", "label"),
    },
    "qqp_part": {
        "train": "new_dev.tsv",
        "columns": ("id", "qid1", "qid2", "question1", "question2", "label"),
        "texts": ("question1", "question2"),
        "labels": ("0=not_duplicate", "1=duplicate"),
        "metrics": ("accuracy", "f1"),
        "id": "id",
        "bad_rows": "skip",  # line 1 lacks a tab
    },
    "boolq": {**_SUPERGLUE, "texts": ("question", "passage"), "labels": ("false", "true")},
    "cb": {
        **_SUPERGLUE,
        "labels": ("entailment", "contradiction", "neutral"),
        "metrics": ("accuracy", "macro_f1"),
    },
    "superglue_rte": {**_SUPERGLUE, "labels": ("entailment", "not_entailment")},
}


def get_config(variant: str = "own"):
    config, name = finetuning.start("text", variant, tuple(TASKS))
    config.finetune.tasks = ("own",)
    config.task.name = name
    config.task.update(TASKS[name])
    return config.lock()
