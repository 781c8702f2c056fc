"""SQuAD: extractive question answering; 1.1 (`v1`), or 2.0 (`v2`) with unanswerable questions.

Published for dev after 1M steps, EM / F1 of 1.1 and 2.0 (ConvBERT table 4): small 77.1 / 84.1 and
68.7 / 70.5, base 84.7 / 90.9 and 80.6 / 83.1. `v1,paper` and `v2,paper` are the recipe of the
official code: its head predicts the end from the start, and all rows have 512 tokens.

    python -m convbert_jax.main --config=configs/squad.py:v1 --config.init_from=runs/small \\
        --config.finetune.data=FOLDER

FOLDER contains train-v1.1.json and dev-v1.1.json (optionally .gz;
https://rajpurkar.github.io/SQuAD-explorer/), or is tfds:DIR, a prepared squad or squad_v2.
Pre-training at length 128 leaves later positions untrained: train enough epochs, or use shorter
rows with --config.finetune.length=128 --config.finetune.stride=48.
"""

from configs import finetuning

TASKS = ("v1", "v2")


def get_config(variant: str = "v1"):
    config, task = finetuning.start("squad", variant, TASKS)
    config.finetune.tasks = (f"squad_{task}",)
    config.finetune.length = 384
    config.finetune.buckets = (128, 192, 256)
    if config.variant == "paper":
        config.finetune.length = 512
        config.finetune.buckets = ()
        config.finetune.head = "span_beam"
    return config.lock()
