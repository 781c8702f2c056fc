"""Checkpoints in a bucket, on a server that TensorStore takes for Google's."""

import shutil

import pytest

from convbert_jax.training.checkpoints import reading
from convbert_jax.workdir import Workdir
from tests.buckets import objects, server
from tests.training import tiny_run

__all__ = ["objects", "server"]  # the fixtures


@pytest.fixture
def workdir(server):
    return Workdir("gs://bucket/run")


def assert_same(first, second):
    assert first.keys() == second.keys()
    assert [name for name in first if first[name].tobytes() != second[name].tobytes()] == []


@pytest.mark.parametrize("last", ["8/params/_sharding", "8/opt_state/manifest.ocdbt"])
def test_killed_in_a_save_it_goes_on_to_the_same_bits(workdir, server, caplog, tmp_path, last):
    """The bucket as it is when the process ends while it writes one of its objects."""
    cut = tmp_path / "cut"

    def look(method, name):
        if method == "POST" and name.endswith(last):
            shutil.copytree(server.folder, cut)

    server.fault = look
    tiny_run.run(workdir.path)
    whole = reading.load_arrays(workdir.checkpoints, 12)[1]
    server.fault = lambda method, name: None
    shutil.rmtree(server.folder)
    cut.rename(server.folder)
    assert workdir.steps() == [4]
    assert tiny_run.run(workdir.path).step == 12
    assert "Checkpoint 8 was never finished; it is removed." in caplog.text
    assert workdir.steps() == [4, 8, 12]
    assert_same(reading.load_arrays(workdir.checkpoints, 12)[1], whole)


def test_a_damaged_one_is_passed_over_and_its_step_saved_again(workdir, server, caplog):
    tiny_run.run(workdir.path)
    whole = reading.load_arrays(workdir.checkpoints, 12)[1]
    for part in (server.folder / "run" / "checkpoints" / "12" / "params").glob("**/d/*"):
        part.write_bytes(part.read_bytes()[:-9])
    assert tiny_run.run(workdir.path).step == 12
    assert "gs://bucket/run/checkpoints/12 is damaged" in caplog.text
    assert workdir.steps() == [4, 8, 12]
    assert_same(reading.load_arrays(workdir.checkpoints, 12)[1], whole)


def test_metrics_that_are_damaged_are_taken_away(workdir, server, caplog):
    config = tiny_run.make_config(8, checkpoint={"best_metric": "error", "best_mode": "min"})
    tiny_run.run(workdir.path, config)
    (server.folder / "run" / "checkpoints" / "8" / "metrics" / "metrics").write_text("{")
    assert tiny_run.run(workdir.path, config).step == 8
    assert "gs://bucket/run/checkpoints/8/metrics/metrics is damaged" in caplog.text
