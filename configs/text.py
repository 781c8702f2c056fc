"""Fine-tuning on labelled text beyond GLUE: your own files, or one of the public sets below, each a
few lines of `config.task` and a pattern to copy.

Reproduces nothing published: no ConvBERT score on these is known. The public files are those of
CONVBERT_DATA (default ../shared/data); another place is --config.task.folder=FOLDER. `paper` after
a comma (`:sick,paper`) is the release's recipe.

    python -m convbert_jax.main --config=configs/text.py:imdb --config.init_from=runs/small
    python -m convbert_jax.main --config=configs/text.py:own --config.init_from=runs/small
    --config.task.train=train.csv --config.task.test=test.csv --config.task.texts=review
    --config.task.label=stars

imdb: film reviews, 2 labels. trec: questions, 6. agnews: news, 4, trained on the 10,001-row sample.
sick: sentence pairs, entailment, 3; sick_relatedness: their likeness, 1 to 5. snli: entailment, 3,
trained on its dev set as train is not there. clinc150: intents, 150 and out of scope. qqp_part:
question pairs, 2, a part of QQP.
"""

import os

from configs import finetuning

_SICK = {
    "folder": "nli/SICK",
    "train": "SICK_train.txt.gz",
    "validation": "SICK_trial.txt.gz",
    "test": "SICK_test_annotated.txt.gz",
    "format": "tsv",
    "texts": ("sentence_A", "sentence_B"),
}
_CLINC = "data_full.json.gz"

TASKS = {
    "own": {},
    "imdb": {
        "folder": "classification/IMDb",
        "train": "train.tsv.gz",
        "test": "test.tsv.gz",
        "columns": ("name", "label", "text"),
        "rest_in_last": True,  # 27 reviews contain a tab
        "labels": ("0=negative", "1=positive"),
        "id": "name",
    },
    "trec": {
        "folder": "classification/TREC",
        "train": "train.txt.gz",
        "test": "test.txt.gz",
        "format": "pattern",
        "pattern": r"(?P<label>\w+):(?P<fine>\w+) (?P<text>.*)",
        "encoding": "iso-8859-1",
        "labels": ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM"),
    },
    "agnews": {
        "folder": "classification/AGNews",
        "train": "dev.tsv.gz",
        "test": "test.tsv.gz",
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
        "folder": "nli/SNLI-devtest",
        "train": "s1.dev.gz,s2.dev.gz,labels.dev.gz",
        "test": "s1.test.gz,s2.test.gz,labels.test.gz",
        "format": "parallel",
        "columns": ("premise", "hypothesis", "label"),
        "texts": ("premise", "hypothesis"),
        "labels": ("contradiction", "entailment", "neutral"),
    },
    "clinc150": {
        "folder": "classification/CLINC150",
        "train": f"{_CLINC}#train,{_CLINC}#oos_train",
        "validation": f"{_CLINC}#val,{_CLINC}#oos_val",
        "test": f"{_CLINC}#test,{_CLINC}#oos_test",
        "columns": ("text", "label"),
    },
    "qqp_part": {
        "folder": "glue/QQP-part",
        "train": "new_dev.tsv.gz",
        "columns": ("id", "qid1", "qid2", "question1", "question2", "label"),
        "texts": ("question1", "question2"),
        "labels": ("0=not_duplicate", "1=duplicate"),
        "metrics": ("accuracy", "f1"),
        "id": "id",
        "bad_rows": "skip",  # line 1 lacks a tab
    },
}


def get_config(variant: str = "own"):
    config, name = finetuning.start("text", variant, tuple(TASKS))
    config.finetune.tasks = ("own",)
    config.task.name = name
    config.task.update(TASKS[name])
    if config.task.folder:
        config.task.folder = os.path.join(finetuning.data_folder(), config.task.folder)
    return config.lock()
