"""Scores a model on tasks of MTEB (Muennighoff et al., 2023), with the package mteb."""

from pathlib import Path
from typing import Any

import mteb
import numpy as np

from convbert_jax.config import UserError
from convbert_jax.inference.model import Model
from convbert_jax.inference.search import normalize


class TaskError(UserError):
    """A task does not exist, is not for texts, or its data cannot be read."""


class Encoder:
    """A model as mteb's `EncoderProtocol`, which defines the names of methods and arguments."""

    def __init__(self, model: Model):
        self.model = model
        # mteb expects OWNER/NAME, and names the folder of the results after both
        name = "/".join(Path(model.path).resolve().parts[-2:])
        fields = {"name": name, "revision": str(model.step)}
        self.mteb_model_meta = mteb.models.ModelMeta.create_empty(fields)

    def encode(self, inputs, *, prompt_type: str | None = None, **_: Any) -> np.ndarray:
        """Returns the vectors [N, C] of the texts in batches of mteb."""
        texts = [text for batch in inputs for text in batch["text"]]
        if prompt_type == "query":
            return self.model.encode_queries(texts)
        if prompt_type == "document":
            return self.model.encode_documents(texts)
        return self.model.encode(texts)

    def similarity(self, embeddings1, embeddings2) -> np.ndarray:
        """Returns the cosines [N, M] of vectors [N, C] and [M, C]."""
        return normalize(np.asarray(embeddings1)) @ normalize(np.asarray(embeddings2)).T

    def similarity_pairwise(self, embeddings1, embeddings2) -> np.ndarray:
        """Returns the cosines [N] of vectors [N, C] and [N, C]."""
        first, second = (normalize(np.asarray(each)) for each in (embeddings1, embeddings2))
        return (first * second).sum(axis=-1)


def get_task(name: str) -> mteb.AbsTask:
    """Returns a task by its name.

    Raises:
      TaskError: it does not exist, or has images, sound or videos.
    """
    try:
        task = mteb.get_task(name)
    except KeyError as error:
        found = error.args[0].removeprefix("KeyError: ")
        raise TaskError(f"is no task of mteb: {found}", field="--tasks", value=name) from None
    if set(task.metadata.modalities) != {"text"}:
        kinds = ", ".join(task.metadata.modalities)
        raise TaskError(f"has {kinds}. Use a task for texts.", field="--tasks", value=name)
    return task


def score_task(model: Model, task: mteb.AbsTask, output: Path) -> float:
    """Scores a model on a task, and writes all metrics of the task to a folder.

    Args:
      output: folder for result files of mteb: results/MODEL/STEP/TASK.json.

    Returns:
      The main score of the task, as nDCG@10 for retrieval; the mean over its languages.

    Raises:
      TaskError: the data of the task cannot be downloaded or read.
    """
    try:
        for part in getattr(task, "tasks", [task]):
            part.load_data()
    except Exception as error:  # of any kind: from datasets, the hub, or code of the task
        raise TaskError(
            f"cannot be loaded ({type(error).__name__}: {error}). Check the network connection.",
            field="--tasks",
            value=task.metadata.name,
        ) from error
    result = mteb.evaluate(
        Encoder(model),
        task,
        cache=mteb.ResultCache(output),
        overwrite_strategy="always",  # the results may be of other weights in the same folder
        co2_tracker=False,
    )
    return float(result.task_results[0].get_score())
