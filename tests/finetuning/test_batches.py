"""What fine-tuning on texts gives to losses is what `interfaces.batch` says."""

import numpy as np
import pytest

from convbert_jax.finetuning.tasks import classification
from convbert_jax.interfaces.batch import TextBatch
from tests.batches import check_batch
from tests.finetuning.conftest import make_source

INDEX = np.asarray([2, 0, -1])


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_texts(kind, make_config, vocabulary):
    task = classification.make_task(make_source(kind=kind), make_config(), vocabulary)
    assert task.evaluation.keys() == {"validation", "test"}
    for rows in (task.train, *task.evaluation.values()):
        check_batch(rows.batch(INDEX, 16) | task.constants, TextBatch)


def test_texts_with_a_teacher(make_config, vocabulary):
    def teach(texts):
        return np.zeros((len(texts), 2), np.float64)

    teacher = classification.Teacher(teach, "of its weights")
    task = classification.make_task(make_source(), make_config(), vocabulary, teacher=teacher)
    batch = task.train.batch(INDEX, 16) | task.constants
    check_batch(batch, TextBatch)
    assert {"teacher", "temperature", "teacher_weight"} < batch.keys()
