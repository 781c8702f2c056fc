"""Checkpoints: exact across meshes, never partial, and no silent restart from scratch."""

import errno
import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.config import CheckpointSection, MeshSection
from convbert_jax.training import checkpoints as checkpoints_lib
from convbert_jax.training import partitioning
from convbert_jax.training.checkpoints import CheckpointError, Checkpoints
from convbert_jax.training.train_step import TrainState
from tests.refusals import refused

SECTION = CheckpointSection(best_metric="auc")


def values(seed: int):
    rng = np.random.default_rng(seed)
    kernel = rng.normal(size=(2, 256, 128)).astype(np.float32)
    return {
        "stages": {"0": {"feed_forward": {"intermediate": {"kernel": kernel}}}},
        "head": {"bias": rng.normal(size=(8,)).astype(jnp.bfloat16)},
    }


def make_state(step: int, mesh, seed: int | None = None) -> TrainState:
    """Returns a state with one optimizer moment and a count."""
    params = values(step if seed is None else seed)
    moments = {"mean": jax.tree.map(lambda p: p * 2, params), "count": np.int32(step)}
    state = TrainState(np.int32(step), params, (moments,))
    return jax.device_put(state, partitioning.tree_shardings(state, mesh, partitioning.RULES))


def abstract(mesh) -> TrainState:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), make_state(0, mesh)
    )


def assert_equal(first, second):
    def check(a, b):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    jax.tree.map(check, first, second)


@pytest.fixture(scope="module")
def mesh():
    return partitioning.make_mesh(MeshSection(fsdp=4))


@pytest.fixture(scope="module")
def saved(mesh, tmp_path_factory) -> pathlib.Path:
    """Directory with checkpoints of steps 1, 2 and 3; tests copy it before changing it."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    checkpoints = Checkpoints(folder, SECTION)
    for step in (1, 2, 3):
        checkpoints.save(make_state(step, mesh), {"position": step * 10}, {"auc": 0.5})
    checkpoints.close()
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> pathlib.Path:
    return shutil.copytree(saved, tmp_path / "checkpoints")


def restore(folder, mesh):
    checkpoints = Checkpoints(folder, SECTION)
    try:
        return checkpoints.restore(abstract(mesh))
    finally:
        checkpoints.close()


def test_nothing_saved_is_none(tmp_path, mesh):
    assert restore(tmp_path / "new", mesh) is None


def test_eight_devices_to_one_and_back(saved, mesh, tmp_path):
    one = partitioning.make_mesh(MeshSection(), jax.devices()[:1])
    on_one, position = restore(saved, one)
    assert position == {"position": 30}
    assert int(on_one.step) == 3
    assert_equal(on_one, make_state(3, mesh))

    checkpoints = Checkpoints(tmp_path / "again", CheckpointSection())
    checkpoints.save(on_one, position)
    checkpoints.close()
    back, _ = restore(tmp_path / "again", mesh)
    assert_equal(back, make_state(3, mesh))
    kernel = back.params["stages"]["0"]["feed_forward"]["intermediate"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 4


def test_any_mesh_to_any_other(tmp_path):
    """Values are bitwise equal, and arrays have the sharding of the second mesh."""
    for index, (first, second) in enumerate((
        ({"tensor": 4, "data": 2}, {"fsdp": 8}),
        ({"sequence": 2, "fsdp": 4}, {"tensor": 2, "data": 4}),
        ({"fsdp": 2, "tensor": 2, "sequence": 2}, {"data": 8}),
        ({"data": 8}, {"sequence": 2, "tensor": 4}),
    )):  # fmt: skip
        before, after = (
            partitioning.make_mesh(MeshSection(**{"data": 1} | m)) for m in (first, second)
        )
        checkpoints = Checkpoints(tmp_path / str(index), CheckpointSection())
        checkpoints.save(make_state(3, before), {"position": 30}, last=True)
        checkpoints.close()
        found, position = restore(tmp_path / str(index), after)
        assert position == {"position": 30}
        assert_equal(found, make_state(3, before))
        places = jax.tree.map(lambda x: x.sharding, found)
        assert places == jax.tree.map(lambda x: x.sharding, make_state(3, after))
        kernel = found.params["stages"]["0"]["feed_forward"]["intermediate"]["kernel"]
        parts = second.get("fsdp", 1) * second.get("tensor", 1)
        assert kernel.addressable_shards[0].data.size == kernel.size // parts


def test_the_next_step_does_not_disturb_a_save(tmp_path, mesh):
    """The next step donates its state while the checkpoint is being written."""
    state = make_state(1, mesh)
    change = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    checkpoints = Checkpoints(tmp_path, CheckpointSection())
    checkpoints.save(state, {})
    for _ in range(3):
        state = change(state)
    checkpoints.close()
    assert_equal(restore(tmp_path, mesh)[0], make_state(1, mesh))


def test_what_is_kept(tmp_path, mesh):
    """Keeps the newest two, every fourth, and the best."""
    section = CheckpointSection(keep=2, keep_every=4, best_metric="auc", best_mode="max")
    checkpoints = Checkpoints(tmp_path, section)
    scores = {2: 0.7, 3: 0.9, 5: 0.8, 6: float("nan"), 9: 0.6}
    for step in range(1, 10):
        found = {"auc": scores[step]} if step in scores else None
        if found:
            assert checkpoints.is_best(found) == (step in (2, 3))
        checkpoints.save(make_state(step, mesh, seed=0), {}, found)
    checkpoints.close()
    assert checkpoints_lib.list_steps(tmp_path) == [3, 4, 8, 9]
    reopened = Checkpoints(tmp_path, section)
    assert not reopened.is_best({"auc": 0.89})
    assert reopened.is_best({"auc": 0.91})
    reopened.close()
    section = CheckpointSection(keep=1, best_metric="loss", best_mode="min")
    checkpoints = Checkpoints(tmp_path / "min", section)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        checkpoints.save(make_state(step, mesh, seed=0), {}, {"loss": loss})
    checkpoints.close()
    assert checkpoints_lib.list_steps(tmp_path / "min") == [2, 3]


def delete(file):
    file.unlink()


def truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def change_position(file):
    file.write_text(file.read_text().replace("30", "31"))


def test_a_damaged_newest_is_skipped_by_name(saved, mesh, tmp_path, caplog):
    for index, (pattern, damage) in enumerate((
        ("_CHECKPOINT_METADATA", delete),
        ("_CHECKPOINT_METADATA", truncate),
        ("params/_METADATA", delete),
        ("params/d/*", truncate),
        ("params/ocdbt.process_0/d/*", flip),
        ("opt_state/manifest.ocdbt", delete),
        ("opt_state/manifest.ocdbt", flip),
        ("data/data.json", truncate),
        ("data/data.json", change_position),
    )):  # fmt: skip
        folder = shutil.copytree(saved, tmp_path / str(index))
        for file in (folder / "3").glob(pattern):
            damage(file)
        caplog.clear()
        state, position = restore(folder, mesh)
        assert position == {"position": 20}, pattern
        assert_equal(state, make_state(2, mesh))
        assert any(folder / "3" in r.args for r in caplog.records if r.levelname == "WARNING")
        assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "damaged-3"]


def test_the_step_of_a_damaged_one_is_saved_again(folder, mesh):
    delete(folder / "3" / "params" / "_METADATA")
    checkpoints = Checkpoints(folder, SECTION)
    state, position = checkpoints.restore(abstract(mesh))
    assert int(state.step) == 2
    checkpoints.save(make_state(3, mesh, seed=7), position)
    checkpoints.close()
    assert_equal(restore(folder, mesh)[0].params, make_state(7, mesh).params)
    assert (folder / "damaged-3").is_dir()


def test_incomplete_folders_are_skipped_and_damaged_metrics_cost_the_metrics_only(
    folder, mesh, caplog
):
    half = folder / "5.orbax-checkpoint-tmp"
    shutil.copytree(folder / "3" / "params", half / "params")
    (folder / "4").mkdir()
    truncate(folder / "3" / "metrics" / "metrics")
    assert int(restore(folder, mesh)[0].step) == 3
    assert not half.exists()
    for name in ("5.orbax-checkpoint-tmp", "metrics/metrics"):
        assert [r.levelname for r in caplog.records if name in r.getMessage()] == ["WARNING"]


def test_all_damaged_is_an_error_and_changes_nothing(folder, mesh):
    for step in "123":
        delete(folder / step / "opt_state" / "_METADATA")
    before = sorted(folder.rglob("*"))
    with refused(CheckpointError, 3, path=folder):
        restore(folder, mesh)
    assert sorted(folder.rglob("*")) == before


def test_another_model_is_an_error(folder, mesh):
    target = abstract(mesh)
    target.params["head"]["bias"] = jax.ShapeDtypeStruct(
        (9,), jnp.bfloat16, sharding=target.params["head"]["bias"].sharding
    )
    checkpoints = Checkpoints(folder, SECTION)
    with refused(CheckpointError, 3, path=folder):
        checkpoints.restore(target)
    checkpoints.close()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with refused(CheckpointError, "--workdir", path=tmp_path / "file" / "checkpoints"):
        Checkpoints(tmp_path / "file" / "checkpoints", CheckpointSection())


def test_arrays_without_a_model(saved, mesh):
    _, arrays = checkpoints_lib.load_arrays(saved, 2)
    expected = make_state(2, mesh)
    assert json.loads(arrays["data"].tobytes()) == {"position": 20}
    assert set(arrays) == {
        "data",
        "params/stages/0/feed_forward/intermediate/kernel",
        "params/head/bias",
        "opt_state/0/mean/stages/0/feed_forward/intermediate/kernel",
        "opt_state/0/mean/head/bias",
        "opt_state/0/count",
    }
    assert_equal(arrays["params/head/bias"], expected.params["head"]["bias"])
    assert_equal(
        arrays["opt_state/0/mean/stages/0/feed_forward/intermediate/kernel"],
        expected.opt_state[0]["mean"]["stages"]["0"]["feed_forward"]["intermediate"]["kernel"],
    )
    with refused(CheckpointError, [1, 2, 3], path=saved / "9"):
        checkpoints_lib.load_arrays(saved, 9)


def test_parameters_alone(saved, mesh, tmp_path):
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, values(3)))
    for asked, step in ((None, 3), (1, 1)):
        found, params = checkpoints_lib.load_params(saved, shapes, asked)
        assert found == step
        assert_equal(params, values(step))
    shapes["head"]["bias"] = jax.ShapeDtypeStruct((9,), jnp.bfloat16)
    with refused(CheckpointError, "head/bias", "bfloat16[8]", "bfloat16[9]", path=saved / "3"):
        checkpoints_lib.load_params(saved, shapes)
    del shapes["head"]
    with refused(CheckpointError, "head/bias", "bfloat16[8]", path=saved / "3"):
        checkpoints_lib.load_params(saved, shapes)
    with refused(CheckpointError, path=tmp_path):
        checkpoints_lib.load_params(tmp_path, shapes)


def test_without_a_name_the_newest_whole_one_is_read(folder, caplog):
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, values(3)))
    for file in (folder / "3" / "params").glob("ocdbt.process_0/d/*"):
        flip(file)
    before = sorted(folder.rglob("*"))
    step, params = checkpoints_lib.load_params(folder, shapes)
    assert step == 2
    assert_equal(params, values(2))
    assert str(folder / "3") in caplog.text
    with refused(CheckpointError, [1, 2, 3], path=folder / "3"):
        checkpoints_lib.load_params(folder, shapes, 3)
    for file in folder.glob("[12]/params/ocdbt.process_0/d/*"):
        flip(file)
    with refused(CheckpointError, 3, path=folder):
        checkpoints_lib.load_params(folder, shapes)
    assert sorted(folder.rglob("*")) == before, "a reader changes nothing"


def test_a_changed_metric_does_not_make_the_best(folder, caplog):
    file = folder / "3" / "metrics" / "metrics"
    file.write_text(file.read_text().replace("0.5", "0.7"))
    checkpoints = Checkpoints(folder, SECTION)
    assert str(file) in caplog.text
    assert checkpoints.is_best({"auc": 0.6})
    checkpoints.close()


def test_host_and_device_have_the_same_checksum():
    for shape, dtype in (
        ((), np.float32),
        ((0,), jnp.bfloat16),
        ((3, 5, 7), np.int32),
        ((3, 5, 7), np.uint8),
        ((2**20 + 3,), jnp.bfloat16),
        ((2**20 + 3,), np.float32),
        ((2**20 + 3,), np.uint8),
    ):
        array = np.random.default_rng(1).normal(size=shape, scale=50).astype(dtype)
        assert checkpoints_lib.sum_host_bits(array) == int(
            checkpoints_lib.sum_bits(jnp.asarray(array))
        ), dtype


@settings(deadline=None, max_examples=25)
@given(
    index=st.integers(0, 511),
    bit=st.integers(0, 31),
    other=st.integers(0, 511),
)
def test_checksums_see_any_bit_and_any_exchange(index, bit, other):
    array = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    before = int(checkpoints_lib.sum_bits(array))
    flipped = array.copy().view(np.uint32)
    flipped.reshape(-1)[index] ^= np.uint32(1) << np.uint32(bit)
    assert int(checkpoints_lib.sum_bits(flipped.view(np.float32))) != before
    if index != other:
        exchanged = array.copy().reshape(-1)
        exchanged[[index, other]] = exchanged[[other, index]]
        assert int(checkpoints_lib.sum_bits(exchanged.reshape(8, 64))) != before


def test_a_full_disk_is_one_sentence_however_often_it_is_told(tmp_path, mesh, monkeypatch):
    """Orbax raises the thread's error from `wait` and sometimes again from `close`."""
    saver = Checkpoints(tmp_path, SECTION)
    saver.save(make_state(1, mesh), {})

    def fail():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(saver._checkpointer, "wait", fail)
        patch.setattr(saver._checkpointer, "close", fail)
        with refused(CheckpointError, os.strerror(errno.ENOSPC), path=tmp_path):
            saver.close()
    saver.close()
