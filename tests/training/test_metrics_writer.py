"""Reports: no hang on a full disk, and clear errors for damaged files."""

import contextlib
import errno
import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time

import pytest
from tensorboardX.proto.event_pb2 import Event

from convbert_jax.storage import DamagedFileError
from convbert_jax.training import checkpoints, metrics_writer
from convbert_jax.workdir import Workdir
from tests.conftest import REPOSITORY
from tests.refusals import refused
from tests.training.test_processes import finish, start, wait_for_line
from tests.training.tiny_run import linear_task, make_config, run


def read_events(folder) -> list[Event]:
    """Reads all events of a folder in order of file names, without checking checksums."""
    events = []
    for file in sorted(folder.glob("events.out.tfevents.*")):
        content = file.read_bytes()
        while content:
            (length,) = struct.unpack("Q", content[:8])
            events.append(Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return events


def reporter(folder, step=0):
    return metrics_writer.Reporter(Workdir(folder), linear_task(), steps=9, step=step)


def test_tensorboard_sees_what_the_lines_say(tmp_path):
    run(tmp_path, make_config(4))
    run(tmp_path, make_config(8))
    events = read_events(tmp_path)
    assert [e.step for e in events if e.HasField("session_log")] == [1, 5]
    errors = {
        e.step: e.summary.value[0].simple_value
        for e in events
        if e.summary.value and e.summary.value[0].tag == "validation/error"
    }
    lines = metrics_writer.read_metrics(tmp_path / "metrics.jsonl")
    expected = {line["step"]: line["error"] for line in lines if line["split"] == "validation"}
    assert errors == pytest.approx(expected)


def test_two_files_of_one_second_are_two(tmp_path, monkeypatch):
    for step in (1, 2):
        monkeypatch.setattr(time, "time", lambda now=1_700_000_000 + step / 1000: now)
        metrics_writer.EventFile(tmp_path, purge_step=step).close()
    events = read_events(tmp_path)
    assert [e.step for e in events if e.HasField("session_log")] == [1, 2]


def test_a_start_loads_no_pytorch():
    """tensorboardX imports an installed PyTorch, which takes two seconds."""
    pytest.importorskip("torch")
    code = "import sys, convbert_jax.training.metrics_writer; print('torch' in sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", f"{code}; import torch; print(torch.ones(1).item())"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout == "False\n1.0\n"  # still importable later


def test_nothing_is_written_by_a_thread(tmp_path, monkeypatch):
    """A writer thread could die unnoticed, from a full disk or a clock that moves back."""
    before = threading.enumerate()
    with reporter(tmp_path) as report:
        new = [type(t).__module__ for t in threading.enumerate() if t not in before]
        assert [name for name in new if not name.startswith("tqdm")] == []
        report.train(1, {"loss": 1.0}, 0.1)
        earlier = time.time() - 30 * 86400
        monkeypatch.setattr(time, "time", lambda: earlier)
        for step in range(2, 40):
            report.train(step, {"loss": 1.0}, 0.1)
    steps = [e.step for e in read_events(tmp_path) if e.summary.value]
    assert sorted(set(steps)) == list(range(1, 40))


@pytest.mark.parametrize(("number", "flush_seconds"), [(1, -1), (2, 1e9), (3, -1)])
def test_a_writer_that_fails_is_an_error(tmp_path, monkeypatch, number, flush_seconds):
    """Flushing /dev/full raises ENOSPC."""
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    monkeypatch.setattr(metrics_writer, "_FLUSH_SECONDS", flush_seconds)
    with (
        refused(metrics_writer.ReportError, os.strerror(errno.ENOSPC), path=tmp_path),
        reporter(tmp_path) as report,
    ):
        for step in range(1, 5):
            if step == number:
                full = os.open("/dev/full", os.O_WRONLY)
                os.dup2(full, report._board._file._writer.fileno())
                os.close(full)
            report.train(step, {"loss": 1.0}, 0.1)
    lines = metrics_writer.read_metrics(tmp_path / "metrics.jsonl")
    last = 4 if flush_seconds > 0 else number
    assert [line["step"] for line in lines] == list(range(1, last + 1))


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 1500])
def test_a_file_that_may_not_grow_ends_the_run(tmp_path, limit):
    """The limit is reached by the events, the metrics lines or a checkpoint."""
    whole = tmp_path / "whole"
    code, text = finish(start(whole, "--steps=7"))
    assert code == 0, text
    code, text = finish(start(whole, "--steps=5000", f"--file-bytes={limit}"))
    assert code == 1, text
    assert "Traceback" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert str(whole) in line
    code, text = finish(start(whole, "--steps=12"))
    assert code == 0, text
    assert [
        line["step"]
        for line in metrics_writer.read_metrics(whole / "metrics.jsonl")
        if line["split"] == "train"
    ] == list(range(1, 13))


@pytest.fixture
def small_disk(tmp_path):
    """File system of 3 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount, "-t", "tmpfs", "-o", "size=3m", "none", str(folder)]
    if not mount or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here, that needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder) -> None:
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (4096, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass


@pytest.mark.parametrize(
    "moment",
    ["steps", *(pytest.param(m, marks=pytest.mark.slow) for m in ("start", "long after", "stop"))],
)
def test_a_full_disk_never_hangs(small_disk, moment):
    """The disk fills up at four moments, and the run resumes after each.

    The moments: before the first line, between two saves, while TensorBoard's buffer fills, and
    during a requested stop.
    """
    workdir = small_disk / "run"
    code, text = finish(start(workdir, "--steps=6"))
    assert code == 0, text
    if moment == "start":
        fill(small_disk)
    every = () if moment == "steps" else ("--save-every=100000",)
    process = start(workdir, "--steps=100000", "--seconds=0.01", *every)
    if moment != "start":
        wait_for_line(workdir, 100 if moment == "long after" else 12, process)
        fill(small_disk)
    if moment == "stop":
        process.send_signal(signal.SIGTERM)
    code, text = finish(process)
    assert code == 1, text
    assert "Traceback" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert str(workdir) in line
    (small_disk / "filler").unlink()
    last = checkpoints.list_steps(workdir / "checkpoints")[-1]
    code, text = finish(start(workdir, f"--steps={last + 3}"))
    assert code == 0, text
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").open()]
    assert lines[-1]["step"] == last + 3


def test_the_last_numbers(tmp_path):
    file = tmp_path / "metrics.jsonl"
    assert metrics_writer.last_of(metrics_writer.read_metrics(file), "train") == {}
    file.write_text('{"step": 1, "split": "train", "loss": null}\n{"step": 2, "sp')
    (value,) = metrics_writer.last_of(metrics_writer.read_metrics(file), "train").values()
    assert math.isnan(value)


def test_counts_have_three_digits():
    spelled = {999: "999", 1000: "1k", 999_499: "999k", 999_999: "1M", 999_999_999: "1G"}
    assert {count: metrics_writer._format_count(count) for count in spelled} == spelled


DAMAGED = [
    *(b"\xff\xfe\n", b"[]\n", b"{\n", b'{"step": "1"}\n', b"[" * 9999),
    b'{"step": 1, "sqlit": "train"}\n',
    b'{"step": true, "split": "train"}\n',
    b'{"step": 1, "split": "train", "loss": "low"}\n',
    b'{"step": 1, "split": "train", "loss": [1.0]}\n',
]


def test_damaged_lines_are_removed_when_a_run_resumes(tmp_path, caplog):
    file = tmp_path / "metrics.jsonl"
    first, second = (f'{{"step": {n}, "split": "train"}}\n'.encode() for n in (1, 2))
    for damage in DAMAGED:
        caplog.clear()
        file.write_bytes(first + damage.rstrip() + b"\n" + second + b'{"step": 3, "sp')
        with refused(DamagedFileError, file, "line 2"):
            metrics_writer.read_metrics(file)
        assert [line["step"] for line in metrics_writer.read_undamaged(file)] == [1, 2]
        metrics_writer.drop_later_lines(file, 2)
        assert file.read_bytes() == first + second
        assert [r.levelname for r in caplog.records] == ["WARNING"] * 2
