"""GLUE: one task or all, from pre-trained weights; median and spread of five seeds, compared with
published scores.

The variant is a task, cola, sst-2, mrpc, sts-b, qqp, mnli, qnli, rte, wnli, or all; `paper` after a
comma (`:cola,paper`) is the recipe of the official code. Published for ConvBERT-small after 1M
steps: test mean 78.9, for base 84.9 (ConvBERT table 3).

    python -m convbert_jax.main --config=configs/glue.py:all --config.init_from=runs/small \\
        --config.finetune.data=FOLDER

FOLDER contains the official download (https://gluebenchmark.com/tasks), one folder per task:
CoLA/train.tsv, CoLA/dev.tsv, CoLA/test.tsv, … (optionally .gz), or is tfds:DIR, prepared by
TensorFlow Datasets.
"""

from configs import finetuning

TASKS = ("cola", "sst-2", "mrpc", "sts-b", "qqp", "mnli", "qnli", "rte", "wnli")


def get_config(variant: str = "all"):
    config, task = finetuning.start("glue", variant, ("all", *TASKS))
    config.finetune.tasks = TASKS if task == "all" else (task,)
    return config.lock()
