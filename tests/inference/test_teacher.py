"""A teacher on several devices: each process computes its own rows on one local device."""

from types import SimpleNamespace

import jax
import numpy as np

from convbert_jax.config import MeshSection, OutputsSection
from convbert_jax.data.tasks.labelled_text import LabelledTask
from convbert_jax.inference.loading import Teacher
from convbert_jax.ops import partitioning
from convbert_jax.training import partitioning as partitioning_lib


def test_its_kernels_leave_all_rows_on_one_device_of_this_process():
    @jax.jit
    def run(rows):
        return partitioning.shard_map_op(
            lambda a: a + 1, [rows], [partitioning.ROWS], partitioning.ROWS
        )

    def predict(examples):
        found = run(np.zeros((len(examples), 2), np.float32))
        assert found.sharding.device_set == {jax.local_devices()[0]}
        return jax.device_get(found)

    labels = ("bad", "good")
    outputs = OutputsSection("own", "classification", "sequence", labels)
    task = LabelledTask(
        name="own",
        kind="classification",
        texts=1,
        labels=labels,
        metrics=(),
        splits=(),
        reader=lambda split: [],
    )
    predictor = SimpleNamespace(outputs=outputs, predict=predict)
    teacher = Teacher("here", predictor, "of its weights").for_task(task)
    with jax.set_mesh(partitioning_lib.make_mesh(MeshSection(data=8))):
        np.testing.assert_array_equal(teacher.logits_of([("the sun",)] * 16), np.ones((16, 2)))
