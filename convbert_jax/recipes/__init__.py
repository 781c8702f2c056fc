"""What a config becomes: the only place that knows models, objectives, data and training together.

pretraining.py  replaced_token and masked_lm: a prepared corpus, one long run
evaluation.py   a checkpoint of it on held-out text, without training
finetuning.py   finetune: labelled tasks, many short runs
prediction.py   what a model that comes out of it says of new text
results.py      what each of them returns; none of them prints

Read it after `config/`.
"""

from convbert_jax.recipes.evaluation import evaluate
from convbert_jax.recipes.finetuning import finetune
from convbert_jax.recipes.prediction import predict
from convbert_jax.recipes.pretraining import build_task, prepare, pretrain
from convbert_jax.recipes.results import (
    EvaluationResult,
    FinetuningResult,
    PredictionResult,
    PretrainingResult,
)

__all__ = [
    "EvaluationResult",
    "FinetuningResult",
    "PredictionResult",
    "PretrainingResult",
    "build_task",
    "evaluate",
    "finetune",
    "predict",
    "prepare",
    "pretrain",
]
