"""Named entities, or other labels of words, from files in CoNLL format.

    python -m convbert_jax.main --config=configs/ner.py --config.init_from=runs/small \\
        --config.task.train=train.conll --config.task.validation=dev.conll \\
        --config.task.test=test.conll

Tags are IOB1, IOB2 or IOBES. The score is the F1 of whole entities by the rules of conlleval.

german_ler: German court decisions, 19 types of entities (Leitner et al., 2019), read from
--config.task.folder=FOLDER with dev.conll and test.conll (optionally .gz); trained on dev.conll,
because this file is small.
"""

from configs import finetuning

TASKS = {
    "own": {},
    "german_ler": {"train": "dev.conll", "test": "test.conll"},
}


def get_config(variant: str = "own"):
    config, name = finetuning.start("ner", variant, tuple(TASKS))
    config.finetune.tasks = ("own",)
    config.finetune.length = 256  # sentences of news and laws are longer than the usual 128 tokens
    config.task.name = name
    config.task.kind = "tagging"
    config.task.update(TASKS[name])
    return config.lock()
