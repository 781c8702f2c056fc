"""A workdir in a fake bucket."""

import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time

import jax
import pytest

from convbert_jax import storage
from convbert_jax import workdir as workdir_lib
from convbert_jax.config import Config, UserError
from convbert_jax.finetuning import run_files
from convbert_jax.finetuning.run_files import Setting
from convbert_jax.interop import conversion
from convbert_jax.recipes.reports import page as report_page
from convbert_jax.training import metrics_writer
from convbert_jax.workdir import OwnershipError, Workdir, WorkdirError
from tests.buckets import objects, server
from tests.refusals import refused
from tests.training import tiny_run

__all__ = ["objects", "server"]  # the fixtures


@pytest.fixture
def bucket(objects):
    """A workdir in the bucket, and the folder with its objects."""
    return Workdir("gs://bucket/run"), objects / "run"


@pytest.fixture
def short(monkeypatch):
    """Heartbeats every few hundredths of a second; the timeout is unchanged."""
    monkeypatch.setattr(workdir_lib, "HEARTBEAT", 0.02)


@pytest.fixture
def gone_at_once(monkeypatch):
    monkeypatch.setattr(workdir_lib, "HEARTBEAT_TIMEOUT", 0.05)


def test_config(bucket):
    workdir, on_disk = bucket
    with workdir.open(Config()):
        assert (on_disk / ".lock").read_text().startswith("process ")
    assert not (on_disk / ".lock").exists()
    assert workdir.read_config() == Config()
    (on_disk / "checkpoints" / "3").mkdir(parents=True)
    assert not workdir.steps(), "Orbax has not finished it"
    (on_disk / "checkpoints" / "3" / "commit_success.txt").touch()
    assert workdir.steps() == [3]
    other = dataclasses.replace(Config(), seed=5)
    with refused(WorkdirError, 0, 5, field="config.seed", path="gs://bucket/run"):
        workdir.open(other).__enter__()


def test_a_second_run_is_refused_while_the_first_lives(bucket, short):
    workdir, on_disk = bucket
    with workdir.open(Config()):
        with refused(OwnershipError, "UTC", "120 s", field="--workdir", value="gs://bucket/run"):
            Workdir("gs://bucket/run").open(Config()).__enter__()
        workdir.check_owner()
    assert not (on_disk / ".lock").exists()


def test_a_run_that_was_killed_leaves_the_folder_to_the_next(bucket, gone_at_once, caplog):
    workdir, on_disk = bucket
    on_disk.mkdir()
    (on_disk / ".lock").write_text("process 1 on another since noon\n0 0\n")
    with workdir.open(Config()):
        assert "process 1 on another since noon" in caplog.text
        assert "process 1 on another" not in (on_disk / ".lock").read_text()
        workdir.check_owner()


def test_lines_are_sent_after_a_while_and_at_the_end(bucket, monkeypatch):
    workdir, on_disk = bucket
    on_disk.mkdir()
    with contextlib.closing(storage.Lines(workdir.metrics)) as lines:
        lines.append("1")
        lines.append("2")
        assert not (on_disk / "metrics.jsonl").exists()
        monkeypatch.setattr(storage, "_SEND_EVERY", 0.0)
        lines.append("3")
        assert (on_disk / "metrics.jsonl").read_text() == "1\n2\n3\n"
        monkeypatch.setattr(storage, "_SEND_EVERY", 60.0)
        lines.append("4")
    assert (on_disk / "metrics.jsonl").read_text() == "1\n2\n3\n4\n"


LIVES = """
from convbert_jax import workdir
print(workdir._describe_here(), flush=True)
input()
"""


@pytest.fixture
def another():
    """Simulates another process of this machine that owns the folder."""
    command = [sys.executable, "-c", LIVES]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process, process.stdout.readline().strip()
        process.kill()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells")
@pytest.mark.parametrize("waited_for", [True, False])
def test_the_folder_of_a_process_that_was_killed_here_is_free_at_once(
    waited_for, another, bucket, monkeypatch, caplog
):
    workdir, on_disk = bucket
    process, said = another
    monkeypatch.setattr(workdir_lib.time, "sleep", lambda seconds: pytest.fail("it waits"))
    process.kill()
    if waited_for:
        process.wait()
    else:  # its exit status was not collected
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    on_disk.mkdir()
    (on_disk / ".lock").write_text(f"process 1 on this since noon\n0 0\n{said}\n")
    with workdir.open(Config()):
        assert "process 1 on this since noon" in caplog.text
        workdir.check_owner()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells")
@pytest.mark.parametrize("case", ["alive", "another machine", "another container"])
def test_an_owner_that_may_live_is_waited_for(case, another, bucket, monkeypatch):
    workdir, on_disk = bucket
    process, said = another
    if case != "alive":
        process.kill()
        process.wait()
    text = f"process 1 on this since noon\n0 0\n{said}\n"
    if case == "another machine":
        text = text.replace(socket.gethostname(), "elsewhere")
    elif case == "another container":
        text = text.replace("pid:[", "pid:[1")
    on_disk.mkdir()
    (on_disk / ".lock").write_text(text)
    waits = []
    monkeypatch.setattr(workdir_lib.time, "sleep", waits.append)
    monkeypatch.setattr(workdir_lib, "HEARTBEAT_TIMEOUT", 0.05)
    with workdir.open(Config()):
        assert waits


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells")
@pytest.mark.parametrize("alone", [True, False])
def test_one_of_several_processes_does_not_say_which_it_is(alone, bucket):
    """The other processes may still run when it is gone."""
    workdir, on_disk = bucket
    with workdir.open(Config(), alone=alone):
        said = (on_disk / ".lock").read_text()
    assert (f"process {os.getpid()} begun" in said) == alone


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells")
def test_a_number_that_was_given_again_is_another_process(another):
    _, said = another
    assert not workdir_lib._is_gone_from_here(f"\n\n{said}\n")
    assert workdir_lib._is_gone_from_here(f"\n\n{said}0\n")


def test_a_run_that_ends_while_the_next_one_waits(bucket, monkeypatch):
    workdir, on_disk = bucket
    on_disk.mkdir()
    (on_disk / ".lock").write_text("process 1 on another since noon\n0 0\n")
    monkeypatch.setattr(workdir_lib.time, "sleep", lambda seconds: (on_disk / ".lock").unlink())
    with workdir.open(Config()):
        workdir.check_owner()


def test_the_first_of_two_runs_ends_before_it_saves(bucket, server, gone_at_once):
    """The first run was paused until another start took over."""
    workdir, on_disk = bucket
    second = Workdir("gs://bucket/run")

    class Rows(tiny_run.Rows):
        def __next__(self):
            if self.position == 5:
                stack.enter_context(second.open(Config()))
            return super().__next__()

    with contextlib.ExitStack() as stack:
        stack.enter_context(workdir.open(Config()))
        with refused(OwnershipError, field="--workdir", value="gs://bucket/run"):
            tiny_run.run(workdir.path, workdir=workdir, batches=Rows())
        assert workdir.steps() == [4]
        second.check_owner()
    assert not (on_disk / ".lock").exists()


def test_fine_tuning_ends_before_it_keeps_a_run(bucket):
    workdir, on_disk = bucket
    with workdir.open(Config()):
        (on_disk / ".lock").write_text("process 1 on another since noon\n0 0\n")
        with refused(OwnershipError, "process 1 on another"):
            run_files.Unfinished(workdir, {}, 1.0).keep(None)
    assert (on_disk / ".lock").exists(), "another run owns it"


def test_a_run_whose_successor_has_ended_writes_nothing_over_it(bucket):
    workdir, on_disk = bucket
    with workdir.open(Config()):
        workdir.check_owner()
        (on_disk / ".lock").unlink()
        with refused(OwnershipError, field="--workdir", value="gs://bucket/run"):
            workdir.check_owner()


def test_signs_of_life_are_given_until_the_name_is_anothers(bucket, short):
    workdir, on_disk = bucket
    lock, seen = on_disk / ".lock", set()
    with workdir.open(Config()):
        deadline = time.monotonic() + 60
        while len(seen) < 3 and time.monotonic() < deadline:
            seen.add(lock.read_text())
        assert len(seen) >= 3
        assert len({len(text) for text in seen - {""}}) == 1
        lock.write_text("process 1 on another since noon\n0 0\n")
        (thread,) = [found for found in threading.enumerate() if found.name == "owner"]
        thread.join(60)
        assert not thread.is_alive()
    assert lock.read_text().startswith("process 1 on another")


def test_a_start_that_is_refused_leaves_the_owner(bucket, gone_at_once):
    workdir, on_disk = bucket
    (on_disk / "checkpoints" / "3").mkdir(parents=True)
    (on_disk / "checkpoints" / "3" / "commit_success.txt").touch()
    with workdir.open(Config()):
        (on_disk / ".lock").write_text("process 1 on another")
        with pytest.raises(WorkdirError):
            workdir.open(dataclasses.replace(Config(), seed=5)).__enter__()
        assert (on_disk / ".lock").read_text() == "process 1 on another"
    assert (on_disk / ".lock").exists(), "another run owns it"


def test_shards_lie_with_the_run_or_where_it_is_said(bucket, tmp_path):
    workdir, _ = bucket
    assert str(workdir.data(Config())) == "gs://bucket/run/data"

    def at(directory):
        section = dataclasses.replace(Config().data, directory=directory)
        return workdir.data(dataclasses.replace(Config(), data=section))

    assert at(str(tmp_path)) == tmp_path
    assert str(at("gs://bucket/data")) == "gs://bucket/data"


def test_a_file_is_whole_or_what_it_was(bucket):
    workdir, on_disk = bucket
    storage.write_json(workdir.config, {"a": 1})

    def fail():
        with storage.replacing(workdir.config) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert storage.read_json(workdir.config, remedy="") == {"a": 1}
    assert [path.name for path in on_disk.iterdir()] == ["config.json"]


def test_an_export_that_fails_leaves_the_one_before(bucket):
    _, on_disk = bucket
    output = storage.to_path("gs://bucket/run/export")
    conversion.replace_folder(output, lambda f: (f / "weights").write_text("old"), source="")

    def write(folder):
        (folder / "weights").write_text("new")
        raise ValueError("no proof")

    with pytest.raises(ValueError, match="no proof"):
        conversion.replace_folder(output, write, source="")
    assert (on_disk / "export" / "weights").read_text() == "old"
    conversion.replace_folder(output, lambda f: (f / "others").write_text("new"), source="")
    assert not (on_disk / "export" / "weights").exists()


def test_results_of_fine_tuning(bucket):
    workdir, on_disk = bucket
    run = run_files.RunResult("toy", Setting(1e-3, 1.0), 0, 5, 0.1, {"dev": {"f1": 0.5}}, 1.0, 2.0)
    for seed in (0, 1):
        run_files.append_result(workdir, dataclasses.replace(run, seed=seed))
    (on_disk / "results.jsonl").open("a").write('{"task": "to')
    assert [found.seed for found in run_files.read_results(workdir)] == [0, 1]
    assert (on_disk / "results.jsonl").read_text().endswith("}\n")


def test_the_page_of_a_run(bucket):
    workdir, on_disk = bucket
    for page in ("<p>first", "<p>\u2713"):
        assert report_page.write(workdir, lambda page=page: page)
    assert (on_disk / "report.html").read_text(encoding="utf-8") == "<p>\u2713"


def write_a_trace(folder):
    """Writes files like the profiler, which tests do not start (see conftest.py)."""
    place = pathlib.Path(folder, "plugins", "profile", "now")
    place.mkdir(parents=True)
    (place / "host.xplane.pb").write_bytes(b"trace")


def test_a_whole_run(bucket, server, tmp_path, monkeypatch):
    workdir, on_disk = bucket
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax.profiler, "start_trace", write_a_trace)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    config = tiny_run.make_config(6, train={"profile_start": 2, "profile_steps": 1})
    result = tiny_run.run(workdir.path, config)
    assert result.step == 6
    assert len(list(on_disk.glob("events.out.tfevents.*"))) == 1
    lines = [json.loads(line) for line in (on_disk / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["split"]) for line in lines][-1] == (6, "validation")
    assert metrics_writer.read_metrics(workdir.metrics)[-1]["error"] == result.evaluation["error"]
    assert all(path.stat().st_size > 100 for path in on_disk.glob("events.out.tfevents.*"))
    assert list((on_disk / "profile").rglob("*.xplane.pb"))
    assert tiny_run.run(workdir.path, tiny_run.make_config(8)).step == 8
    assert workdir.steps() == [4, 6, 8]
    assert any("checkpoints/8/params" in name for name in server.written)
    assert [path.name for path in tmp_path.iterdir()] == ["objects"], "nothing outside the bucket"
    steps = [line["step"] for line in metrics_writer.read_metrics(workdir.metrics)]
    assert steps == [2, 4, 4, 6, 6, 8, 8]


@pytest.mark.parametrize(
    ("name", "mentions"),
    [
        ("http://host/run", "gs://"),
        ("s3://bucket/run", "gs://"),
        ("gs://bucket/run", "pip install no_such"),
    ],
)
def test_a_bucket_that_nothing_talks_to(name, mentions, monkeypatch):
    monkeypatch.setattr(storage, "_BUCKETS", dict.fromkeys(storage._BUCKETS, "no_such"))
    monkeypatch.setattr(storage.importlib.util, "find_spec", lambda name: None)
    with refused(UserError, name, mentions):
        Workdir(name)


def test_a_path_from_the_root(bucket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert storage.absolute(pathlib.Path("run")) == tmp_path / "run"
    assert storage.absolute(bucket[0].path) == bucket[0].path
