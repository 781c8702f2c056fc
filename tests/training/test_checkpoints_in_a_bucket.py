"""Checkpoints in a bucket, on a local server that TensorStore treats as Google Cloud Storage."""

import json
import shutil
import threading
import time

import pytest

from convbert_jax.training import checkpoints
from convbert_jax.workdir import Workdir
from tests.buckets import objects, server
from tests.refusals import refused
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
    """The bucket is copied as if the process had ended while writing one of its objects."""
    cut = tmp_path / "cut"

    def look(method, name):
        if method == "POST" and name.endswith(last):
            shutil.copytree(server.folder, cut)

    server.fault = look
    tiny_run.run(workdir.path)
    whole = checkpoints.load_arrays(workdir.checkpoints, 12)[1]
    server.fault = lambda method, name: None
    shutil.rmtree(server.folder)
    cut.rename(server.folder)
    assert workdir.steps() == [4]
    assert tiny_run.run(workdir.path).step == 12
    assert any(8 in r.args or "8" in r.args for r in caplog.records), caplog.text
    assert workdir.steps() == [4, 8, 12]
    assert_same(checkpoints.load_arrays(workdir.checkpoints, 12)[1], whole)


def test_a_damaged_one_is_passed_over_and_its_step_saved_again(workdir, server, caplog):
    tiny_run.run(workdir.path)
    whole = checkpoints.load_arrays(workdir.checkpoints, 12)[1]
    for part in (server.folder / "run" / "checkpoints" / "12" / "params").glob("**/d/*"):
        part.write_bytes(part.read_bytes()[:-9])
    assert tiny_run.run(workdir.path).step == 12
    assert "gs://bucket/run/checkpoints/12 " in caplog.text
    assert workdir.steps() == [4, 8, 12]
    assert_same(checkpoints.load_arrays(workdir.checkpoints, 12)[1], whole)
    tiny_run.run(workdir.path)
    assert (workdir.checkpoints / "damaged-12" / "params").is_dir(), "nothing of it is deleted"


def test_metrics_that_are_damaged_are_taken_away(workdir, server, caplog):
    config = tiny_run.make_config(8, checkpoint={"best_metric": "error", "best_mode": "min"})
    tiny_run.run(workdir.path, config)
    (server.folder / "run" / "checkpoints" / "8" / "metrics" / "metrics").write_text("{")
    assert tiny_run.run(workdir.path, config).step == 8
    assert "gs://bucket/run/checkpoints/8/metrics/metrics" in caplog.text


def test_metrics_are_sent_before_each_checkpoint(workdir, server):
    metrics, sent = server.folder / "run" / "metrics.jsonl", {}

    def look(method, name):
        if method == "POST" and "/checkpoints/" in name:
            step = int(name.partition("/checkpoints/")[2].partition("/")[0])
            if step not in sent:
                lines = metrics.read_text().splitlines()
                sent[step] = {json.loads(line)["step"] for line in lines}

    server.fault = look
    tiny_run.run(workdir.path, tiny_run.make_config(12, train={"log_every": 1}))
    assert sent == {last: set(range(1, last + 1)) for last in (4, 8, 12)}


def test_a_save_that_the_bucket_refuses_costs_that_one(workdir, server, caplog):
    server.fault = lambda method, name: 403 if method == "POST" and "/4/" in name else None
    assert tiny_run.run(workdir.path).step == 12
    assert "step 4 " in caplog.text
    assert workdir.steps() == [8, 12]


def test_a_bucket_that_always_refuses_ends_the_run_in_a_sentence(workdir, server):
    tiny_run.run(workdir.path, tiny_run.make_config(4))
    server.fault = lambda method, name: 403 if method == "POST" else None
    place = "gs://bucket/run/checkpoints"
    with refused(checkpoints.CheckpointError, "step 16", "Forbidden", "step 4", path=place):
        tiny_run.run(workdir.path, tiny_run.make_config(24))
    server.fault = lambda method, name: None
    assert tiny_run.run(workdir.path, tiny_run.make_config(8)).step == 8


def test_a_bucket_that_cannot_be_read_now_keeps_its_newest(workdir, server):
    tiny_run.run(workdir.path)
    server.fault = lambda method, name: 403 if method == "GET" and "/12/" in name else None
    with refused(checkpoints.StorageError, "gs://bucket/run/checkpoints/12"):
        tiny_run.run(workdir.path, tiny_run.make_config(16))
    server.fault = lambda method, name: None
    assert workdir.steps() == [4, 8, 12]


def test_a_slow_save_stops_no_step_and_is_whole_at_the_end(workdir, server):
    """Writing of step 4 is delayed until batch 7 is drawn; the last save, step 8, is slow too."""
    drawn = threading.Event()

    def slow(method, name):
        if method == "POST" and "/4/" in name:
            assert drawn.wait(60), "no step was made beside the save"
        if method == "POST" and "/8/" in name:
            time.sleep(0.1)

    class Rows(tiny_run.Rows):
        def __next__(self):
            if self.position == 6:
                assert workdir.steps() == []
                drawn.set()
            return super().__next__()

    server.fault = slow
    assert tiny_run.run(workdir.path, tiny_run.make_config(8), batches=Rows()).step == 8
    assert workdir.steps() == [4, 8]
