"""What a config becomes: the only place that knows models, objectives, data and training together.

start.py        what a run starts with; sequence_start.py: of models that write text
prepared.py     what it learns from
tasks.py        model and loss of each recipe, as the trainer takes them
pretraining.py  all but finetune: one long run
evaluation.py   a checkpoint of it on held-out text, without training
writing/        sets of pairs written and scored, after training and by an evaluation
finetuning.py   finetune: labelled tasks, many short runs
planning/       what such a run would take of TPUs that are not here
reports/        what a run tells at its end: a text, and a page for a browser
prediction.py   what a model that comes out of it says of new text
inspection.py   what the layers of a model do with text, as pictures
results.py      what each of them returns; none of them prints

Read it after `config/`.
"""

from convbert_jax.recipes.evaluation import evaluate
from convbert_jax.recipes.finetuning import finetune
from convbert_jax.recipes.inspection import inspect
from convbert_jax.recipes.planning import plan
from convbert_jax.recipes.prediction import predict
from convbert_jax.recipes.pretraining import prepare, pretrain, show
from convbert_jax.recipes.results import (
    EvaluationResult,
    FinetuningResult,
    InspectionResult,
    PlanResult,
    PredictionResult,
    PretrainingResult,
)
from convbert_jax.recipes.tasks import build_task

__all__ = [
    "EvaluationResult",
    "FinetuningResult",
    "InspectionResult",
    "PlanResult",
    "PredictionResult",
    "PretrainingResult",
    "build_task",
    "evaluate",
    "finetune",
    "inspect",
    "plan",
    "predict",
    "prepare",
    "pretrain",
    "show",
]
