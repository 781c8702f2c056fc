"""Commands of the package: connect config, models, objectives, data and training.

recipe.py       interface of a recipe: objective, metrics, data, costs, report
replaced_token.py, masked_lm.py, causal_lm.py, span_corruption.py, text_pairs.py,
embedding.py                    one recipe each
tasks.py        table of these recipes; model and loss as a `Task` for the trainer
start.py        initial weights and config of a run
prepared.py     training and held-out data
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

from collections.abc import Collection, Sequence

from etils import epath

from convbert_jax.config import Config
from convbert_jax.recipes import finetuning, pretraining
from convbert_jax.recipes.evaluation import evaluate
from convbert_jax.recipes.finetuning import finetune
from convbert_jax.recipes.inspection import inspect
from convbert_jax.recipes.planning import plan
from convbert_jax.recipes.prediction import predict
from convbert_jax.recipes.pretraining import pretrain
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
    "check_sources",
    "complete",
    "evaluate",
    "finetune",
    "inspect",
    "plan",
    "predict",
    "prepare",
    "pretrain",
    "show",
    "train",
]

_RUNS = {"pretrain": pretraining, "finetune": finetuning}


def train(
    config: Config, folder: epath.PathLike, given: Collection[str] = ()
) -> PretrainingResult | FinetuningResult:
    """Starts or resumes a run of any recipe; see `pretrain` and `finetune`."""
    function = config.spec.function
    return getattr(_RUNS[function], function)(config, folder, given)


def show(config: Config, folder: epath.PathLike, given: Collection[str] = ()) -> str:
    """Returns a summary of a config; starts and writes nothing.

    Args:
      given: see `start.read_start`; files and weights of the config are read.
    """
    return _RUNS[config.spec.function].show(config, folder, given)


def prepare(
    config: Config,
    folder: epath.PathLike,
    given: Collection[str] = (),
    *,
    runner: str | None = None,
    runner_options: Sequence[str] = (),
) -> None:
    """Builds tokenizer and shards for `config` in the workdir `folder` unless they exist.

    Args:
      given: see `start.read_start`.
      runner, runner_options: Apache Beam runner, see `beam_pipeline.open_runner`; None for local
        processes.

    Raises:
      DataError: the runner is not available, or the data cannot be prepared.
    """
    _RUNS[config.spec.function].prepare(
        config, folder, given, runner=runner, runner_options=runner_options
    )


def complete(config: Config, folder: epath.PathLike, given: Collection[str] = ()) -> Config:
    """Returns the config with the sizes of its vocabulary and weights.

    Raises:
      UserError: vocabulary or weights do not exist or do not match the config.
    """
    return _RUNS[config.spec.function].complete(config, folder, given)


def check_sources(config: Config, directory: epath.Path) -> str:
    """Checks that the data exists, without reading all of it, and describes it.

    Args:
      directory: folder of the prepared data.

    Raises:
      UserError: a file does not exist or cannot be read.
    """
    return _RUNS[config.spec.function].check_sources(config, directory)
