"""Unfinished runs: resumed, replaced by another run, or damaged."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.finetuning.run_files import Provenance, Unfinished
from convbert_jax.finetuning.task import FinetuningError
from convbert_jax.storage import DamagedFileError
from convbert_jax.training import distributed
from convbert_jax.training.train_step import TrainState
from convbert_jax.workdir import Workdir
from tests.refusals import refused


def state(value: float, step: int = 0) -> TrainState:
    params = {"kernel": jnp.full((3, 4), value)}
    return TrainState(jnp.asarray(step, jnp.int32), params, {"count": jnp.asarray(int(value))})


def places():
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state(0)
    )


@pytest.fixture
def kept(tmp_path):
    """Folder with a run that was stopped after 7 steps."""
    unfinished = Unfinished(Workdir(tmp_path), {"task": "cola", "seeds": [0, 1]}, 5.0)
    unfinished.keep(state(2, step=7))
    unfinished.close()
    return tmp_path


def test_it_goes_on(kept):
    unfinished = Unfinished(Workdir(kept), {"task": "cola", "seeds": [0, 1]}, 5.0)
    found = unfinished.resume(places())
    unfinished.close()
    assert found.step == 7
    np.testing.assert_array_equal(found.params["kernel"], state(2).params["kernel"])


def test_another_run_is_removed(kept):
    run = {"task": "mrpc", "seeds": [0, 1]}
    assert Unfinished(Workdir(kept), run, 5.0).resume(places()) is None
    assert not Workdir(kept).unfinished.path.exists()


def test_a_damaged_record_costs_no_checkpoint(kept):
    record = Workdir(kept).unfinished.unfinished_run
    for content in (b"", b"\xff\xfe", b'{"task": ', b"[" * 100_000):
        record.write_bytes(content)
        with refused(DamagedFileError, record):
            Unfinished(Workdir(kept), {"task": "cola"}, 5.0).resume(places())
        assert (Workdir(kept).unfinished.checkpoints / "7").is_dir()


@pytest.mark.parametrize("seen", [True, False])
def test_the_first_process_decides_what_is_here(kept, monkeypatch, seen):
    """Process 1 follows process 0, even if it sees different files."""
    run = {"task": "cola", "seeds": [0, 1]}
    first = Unfinished(Workdir(kept), run, 5.0)._look()
    nothing = Unfinished(Workdir(kept / "empty"), run, 5.0)._look()
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(distributed, "broadcast_int", lambda value: first if seen else nothing)
    found = Unfinished(Workdir(kept), run, 5.0)
    state = found.resume(places())
    found.close()
    assert (state is not None) == seen
    assert Workdir(kept).unfinished.path.is_dir()


# --- Recorded inputs of a folder ---


WEIGHTS = {"embeddings": {"word": np.ones((3, 4))}, "encoder": {"0": np.zeros(2)}}


def bind(folder, config, task, weights):
    origin = Provenance(Workdir(folder), config, [])
    origin.bind_weights(weights)
    origin.bind_task(task)


@pytest.fixture
def toy(kept, make_config, make_task):
    """Return (bind(**changed fields), task, folder) for a stopped run of the task toy."""
    config = make_config()
    task = make_task(config)
    Workdir(kept).unfinished.unfinished_run.write_text('{"task": "toy"}')

    def begin(weights=WEIGHTS, **fields):
        bind(kept, config, dataclasses.replace(task, **fields), weights)

    return begin, task, kept


def test_a_run_goes_on_with_the_weights_it_began_with(toy):
    begin, _, kept = toy
    begin()
    begin()
    changed = {**WEIGHTS, "encoder": {"0": np.asarray([0, 1e-9])}}
    with refused(FinetuningError, kept, field="config.init_from", path=kept):
        begin(changed)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_run_goes_on_with_the_rows_it_began_with(toy, split):
    begin, task, kept = toy
    begin()
    rows = {"train": task.train, **task.evaluation}[split]
    labels = rows.by_row["label"].copy()
    labels[3] = 1 - labels[3]
    rows = rows.with_columns(label=labels)
    fields = {"train": rows} if split == "train" else {"evaluation": {split: rows}}
    with refused(FinetuningError, "toy", split, path=kept):
        begin(**fields)
    begin()
    begin(name="another", **fields)  # the folder has no run of it


def test_a_run_goes_on_with_the_teacher_it_began_with(toy):
    begin, _, kept = toy
    begin(teacher="one")
    begin(teacher="one")
    with refused(FinetuningError, "toy", "config.finetune.distill_from", path=kept):
        begin(teacher="another")


def test_rows_may_be_mended_until_something_is_trained_on_them(toy):
    begin, task, folder = toy
    Unfinished(Workdir(folder), {}, 5.0).remove()
    begin()
    begin({"embeddings": {}, "encoder": {}}, train=task.evaluation["validation"])
    Workdir(folder).unfinished.checkpoints.joinpath("7").mkdir(parents=True)
    Workdir(folder).unfinished.unfinished_run.write_text('{"task": "toy"}')
    (folder / "began_with.json").write_text('{"weights": null, "tasks": {"toy": []}}')
    with refused(DamagedFileError, folder / "began_with.json"):
        begin()
