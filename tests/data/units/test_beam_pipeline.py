"""Preparing with Apache Beam's direct runner gives the same files as local processes."""

import importlib
import os
import pathlib
import subprocess
import sys

import pytest

from convbert_jax import console
from convbert_jax.data import beam_pipeline, corpus, prepared
from convbert_jax.data.corpus import prepare
from convbert_jax.data.errors import DataError
from convbert_jax.data.units import Work, do_units
from tests.refusals import refused
from tests.running import NO_BEAM

pytest.importorskip("apache_beam", reason=NO_BEAM)

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
# The part of DirectRunner that needs no downloaded program.
RUNNER = "FnApiRunner"
HERE = ()
THREADS = ("--direct_num_workers=3", "--direct_running_mode=multi_threading")
PROCESSES = ("--direct_num_workers=2", "--direct_running_mode=multi_processing")


@pytest.fixture
def runner(monkeypatch):
    """runner(options): a Beam runner whose processes can import the package and the tests."""
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    return lambda options=HERE, name=RUNNER: beam_pipeline.open_runner(name, options)


def times(folder):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.glob("units/*.json"))}


@pytest.mark.parametrize("options", [HERE, THREADS, PROCESSES])
def test_runners_make_the_same_files(kind, store, options, tmp_path, small_units, contents, runner):
    config, local = store
    beam = kind.prepare(config, tmp_path / "beam", runner(options))
    assert contents(local.directory) == contents(tmp_path / "beam")
    assert beam.fingerprint == local.fingerprint
    assert not list((tmp_path / "beam").glob("attempts-*"))
    # Opened without Beam, as in training.
    assert kind.prepare(config, tmp_path / "beam").fingerprint == local.fingerprint


def test_other_runners(config, tmp_path, small_units, contents, bad_work, runner):
    """DirectRunner and PortableRunner.

    Offline, DirectRunner falls back to FnApiRunner. PortableRunner is asynchronous like Flink,
    Spark and Dataflow.
    """
    portable = runner(("--job_endpoint=embed", "--environment_type=LOOPBACK"), "PortableRunner")
    prepare(config, tmp_path / "local")
    for name, opened in (("direct", runner(HERE, "DirectRunner")), ("portable", portable)):
        prepare(config, tmp_path / name, opened)
        assert contents(tmp_path / "local") == contents(tmp_path / name)
    with refused(DataError, "--runner=PortableRunner", "by nothing"):
        do_units(bad_work("fail"), lambda index: None, portable)


def test_finished_units_are_kept(kind, copied, contents, runner, monkeypatch, caplog):
    monkeypatch.setattr(console, "LOG_EVERY", 0)
    monkeypatch.setattr(beam_pipeline, "WATCH_EVERY", 0.001)
    caplog.set_level("INFO", logger="absl")
    config, folder = copied
    before, then = contents(folder), times(folder)
    for lost in ("units/00000.json", "train-00002.array_record"):
        (folder / lost).unlink()
    (folder / "attempts-of-a-killed-start").mkdir()
    kind.prepare(config, folder, runner())
    redone = [path.stem for path, time in times(folder).items() if then[path] != time]
    assert redone == ["00000", "00002"]
    assert contents(folder) == before
    assert not list(folder.glob("attempts-*"))
    assert any(record.args[:2] == (2, RUNNER) for record in caplog.records if record.args)
    assert any(line.startswith("Tokenizing:") for line in caplog.messages)


def test_from_the_command_line(corpus_file, tmp_path, contents, runner):
    """The workdir is relative to the current directory."""
    fields = {"data.source": f"text:{corpus_file}", "data.heldout_fraction": 0.1}
    fields |= {"data.format": "blank_lines", "tokenizer.vocab_size": 300}
    flags = ["--config=tiny", "--mode=prepare", *(f"--config.{k}={v}" for k, v in fields.items())]
    beam = [f"--runner={RUNNER}", f"--runner_options={' '.join(PROCESSES)}"]
    for name, more in (("beam", beam), ("local", ["--config.data.workers=1"])):
        command = [sys.executable, "-m", "convbert_jax.main", *flags, f"--workdir={name}", *more]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert (RUNNER in done.stderr) == (name == "beam")
    assert contents(tmp_path / "beam" / "data") == contents(tmp_path / "local" / "data")


@pytest.mark.parametrize("options", [HERE, PROCESSES])
def test_a_unit_that_cannot_be_done_is_the_same_error(
    config, change, corpus_file, tmp_path, small_units, monkeypatch, runner, options
):
    monkeypatch.setattr(corpus, "CHECKED_BYTES", 3000)  # stops before the bad text
    model = prepare(config, tmp_path / "model").tokenizer.path
    corpus_file.write_bytes(corpus_file.read_bytes() + b"\n\nbad \xff text\n")
    config = change(config, tokenizer={"path": str(model)})
    with refused(DataError, path=corpus_file) as local:
        prepare(config, tmp_path / "local")
    folder = tmp_path / "beam"
    with refused(DataError) as beam:
        prepare(config, folder, runner(options))
    assert str(beam.value) == str(local.value)
    assert not list(folder.glob("attempts-*"))
    done = times(folder)
    assert done
    prepare(change(config, data={"encoding_errors": "skip"}), folder, runner())
    assert done.items() <= times(folder).items()


BAD = """
import dataclasses, os, pathlib, signal

@dataclasses.dataclass(frozen=True)
class Job:
    directory: pathlib.Path

@dataclasses.dataclass(frozen=True)
class Unit:
    size: int = 1

@dataclasses.dataclass(frozen=True)
class Source:
    units: tuple = (Unit(), Unit())

def die(job, index, source, unit, split):
    os.kill(os.getpid(), signal.SIGKILL)

def fail(job, index, source, unit, split):
    raise ZeroDivisionError("by nothing")
"""


@pytest.fixture
def bad_work(tmp_path, monkeypatch, runner):
    """bad_work("die"): work that kills its process; "fail": work that raises an error."""
    (tmp_path / "bad_units.py").write_text(BAD)
    (tmp_path / "units").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}{os.pathsep}{tmp_path}")
    monkeypatch.delitem(sys.modules, "bad_units", raising=False)
    bad_units = importlib.import_module("bad_units")
    sources = {"train": bad_units.Source()}
    return lambda name: Work(bad_units.Job(tmp_path), sources, getattr(bad_units, name))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # from Beam
def test_faults_of_workers(bad_work, runner):
    with refused(DataError, field="--runner", value=RUNNER):
        do_units(bad_work("die"), lambda index: None, runner(PROCESSES))
    for options in (HERE, PROCESSES):
        with refused(DataError, f"--runner={RUNNER}", "by nothing") as caught:
            do_units(bad_work("fail"), lambda index: None, runner(options))
        assert "\n" not in str(caught.value)


def test_pipelines_that_cannot_end(config, tmp_path, small_units, monkeypatch, runner):
    folder = tmp_path / "prepared"
    monkeypatch.setattr(prepared, "LOCK_PATIENCE", 0.3)
    opened = runner()
    with prepared.lock(folder), refused(DataError, path=folder):
        prepare(config, folder, opened)
    fn_runner = importlib.import_module("apache_beam.runners.portability.fn_api_runner.fn_runner")
    with monkeypatch.context() as patch:
        patch.setattr(fn_runner.RunnerResult, "wait_until_finish", lambda self: "CANCELLED")
        with refused(DataError, "CANCELLED", field="--runner", value=RUNNER):
            prepare(config, folder, runner())
    monkeypatch.setattr(beam_pipeline, "make_attempts", lambda folder: folder / "attempts-none")
    with refused(DataError, "attempts-none"):  # the workers lack the folder
        prepare(config, tmp_path / "other", runner(PROCESSES))


def test_runners_that_cannot_be_used():
    for name, options, mention in (
        ("DirektRunner", (), "DirektRunner"),
        ("os.path", (), "--runner=os.path"),
        ("nowhere.Runner", (), "'nowhere'"),
        ("FnApiRunner", ("--direct_num_workers=many",), "'many'"),
        ("FnApiRunner", ("--direct_running_mode=slow",), "'slow'"),
        ("DataflowRunner", (), "--runner=DataflowRunner"),
    ):
        with refused(DataError, mention) as caught:
            beam_pipeline.open_runner(name, options)
        assert "\n" not in str(caught.value)


def test_beam_is_loaded_only_where_it_is_asked_for():
    code = "import sys, convbert_jax.recipes as r; print('apache_beam' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
