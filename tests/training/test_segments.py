"""Runs of several segments: exact resume inside and at the edge of each, and kept checkpoints."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from convbert_jax.training import checkpoints, loop, partitioning
from convbert_jax.workdir import Workdir
from tests.training.test_loop import assert_same_checkpoint, read_curves
from tests.training.tiny_run import Rows, evaluation, linear_task, make_config

ENDS = (3, 5, 9)


class Half(Rows):
    """Batches with half the rows, other in each segment."""

    def __init__(self, seed: int):
        super().__init__()
        self._seed = seed

    def __next__(self):
        rows = super().__next__()
        return {name: value[: len(value) // 2] + self._seed for name, value in rows.items()}

    def get_state(self):
        return {"position": self.position, "seed": self._seed}

    def set_state(self, state):
        assert state["seed"] == self._seed
        super().set_state(state)


def run(folder, steps: int = ENDS[-1], **changes):
    """Trains three segments: other rows, then other noise, then the first task again."""
    first, second = linear_task(), dataclasses.replace(linear_task(noise=0.5), tokens_per_step=10)
    streams = (Rows, lambda: Half(1), lambda: Half(2))
    segments = [
        loop.Segment(end=end, task=task, batches=stream, evaluation=evaluation)
        for end, task, stream in zip(ENDS, (first, second, first), streams, strict=True)
    ]
    config = make_config(ENDS[-1], **{"checkpoint": {"every": 1, "keep": 20}, **changes})
    return loop.train(
        segments, config, workdir=Workdir(folder), mesh=partitioning.make_mesh(config.mesh)
    )


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("segments")
    return folder, run(folder)


def test_each_segment_has_its_own_task_and_batches(straight):
    folder, result = straight
    assert result.step == ENDS[-1]
    curves = read_curves(folder)
    assert [step for split, step in curves if split == "validation"] == [3, 4, 5, 8, 9]
    tokens = {step: line["tokens"] for (split, step), line in curves.items() if split == "train"}
    assert tokens == {2: 128, 3: 192, 4: 202, 5: 212, 6: 276, 8: 404, 9: 468}


@pytest.mark.parametrize("step", range(1, ENDS[-1]))
def test_resuming_is_exact_inside_and_at_the_edges(straight, tmp_path, step):
    folder, _ = straight
    shutil.copytree(folder, tmp_path / "run")
    for later in range(step + 1, ENDS[-1] + 1):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / str(later))
    run(tmp_path / "run")
    for later in range(step + 1, ENDS[-1] + 1):
        assert_same_checkpoint(folder, tmp_path / "run", later)
    assert read_curves(tmp_path / "run") == read_curves(folder)


def test_the_checkpoint_of_each_end_is_kept(tmp_path):
    run(tmp_path, checkpoint={"every": 1, "keep": 1})
    assert checkpoints.list_steps(tmp_path / "checkpoints") == list(ENDS)


def test_a_rollback_returns_to_an_earlier_segment_only_by_its_checkpoint(tmp_path):
    """A bad step at the begin of a segment skips batches of that segment."""

    class Bad(Half):
        def __next__(self):
            rows = super().__next__()
            if self.position == 1:
                rows["x"] = np.full_like(rows["x"], np.nan)
            return rows

    task = linear_task()
    segments = [
        loop.Segment(end=3, task=task, batches=Rows, evaluation=evaluation),
        loop.Segment(end=6, task=task, batches=lambda: Bad(1), evaluation=evaluation),
    ]
    config = make_config(6, train={"rollbacks": 1})
    mesh = partitioning.make_mesh(config.mesh)
    result = loop.train(segments, config, workdir=Workdir(tmp_path), mesh=mesh)
    assert result.step == 6
    assert np.isfinite(jax.device_get(result.state.params["dense"]["kernel"])).all()
