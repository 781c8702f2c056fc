"""Commands of the package: connect config, models, objectives, data and training.

start.py        initial weights and config of a run
prepared.py     training and held-out data
tasks.py        model and loss of each recipe, as a `Task` for the trainer
pretraining.py  long runs: every recipe except finetune
evaluation.py   evaluation of checkpoints on held-out text
scoring.py      generation and scoring of pair sets, after training and in evaluations
finetuning.py   finetune: many short runs on labeled tasks
planning.py     memory and time of a run on devices that are not attached
plan_search.py  largest batch; other meshes, microbatches and config.model.remat
reports/        text and HTML report at the end of a run
prediction.py   predictions of a trained model for new text
inspection.py   plots of attention maps and convolution filters
results.py      return values; no recipe prints

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
