"""What a config becomes: the only place that knows models, objectives, data and training together.

pretraining.py  replaced_token and masked_lm: a prepared corpus, one long run
evaluation.py   a checkpoint of it on held-out text, without training
finetuning.py   finetune: labelled tasks, many short runs
finetuned.py    what comes out of it: models that predict and teach
prediction.py   what they say of new text
devices.py      what both run on

Read it after `config/`.
"""

from convbert_jax.recipes.evaluation import evaluate
from convbert_jax.recipes.finetuning import finetune
from convbert_jax.recipes.prediction import predict
from convbert_jax.recipes.pretraining import build_task, prepare, pretrain

__all__ = ["build_task", "evaluate", "finetune", "predict", "prepare", "pretrain"]
