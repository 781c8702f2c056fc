"""Preparing on Apache Beam's direct runner: the same files as by processes of this machine."""

import importlib
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from convbert_jax import progress
from convbert_jax.config import (
    Config,
    DataSection,
    ParallelSection,
    SequenceSection,
    TokenizerSection,
    to_dict,
)
from convbert_jax.data.corpus import corpus as corpora
from convbert_jax.data.corpus import preparation
from convbert_jax.data.errors import DataError
from convbert_jax.data.parallel import pair_source, parallel_text
from convbert_jax.data.sources import documents as documents_module
from convbert_jax.data.units import beam_pipeline
from convbert_jax.data.units import lock as locks
from convbert_jax.data.units.work import Work, do_units
from tests.data.parallel.conftest import make_pairs, write_files
from tests.running import NO_BEAM

pytest.importorskip("apache_beam", reason=NO_BEAM)

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
# The part of DirectRunner that needs no program from the network.
RUNNER = "FnApiRunner"
HERE = ()
THREADS = ("--direct_num_workers=3", "--direct_running_mode=multi_threading")
PROCESSES = ("--direct_num_workers=2", "--direct_running_mode=multi_processing")


@pytest.fixture
def runner(monkeypatch):
    """runner(options) is one of Beam; processes that it starts find the package and the tests."""
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    return lambda options=HERE: beam_pipeline.open_runner(RUNNER, options)


def in_order(paths):
    return {path: path.stat().st_mtime_ns for path in sorted(paths)}


@pytest.mark.parametrize(
    "options", [HERE, THREADS, PROCESSES], ids=["here", "threads", "processes"]
)
@pytest.mark.parametrize("kind", ["sentencepiece", "wordpiece"])
def test_who_does_it_does_not_matter(
    config, change, tmp_path, small_units, contents, runner, kind, options
):
    config = change(config, tokenizer={"kind": kind}, data={"shuffle_documents": True})
    local = corpora.prepare(config, tmp_path / "local")
    assert len(local.splits["train"].shards) > 3
    beam = corpora.prepare(config, tmp_path / "beam", runner(options))
    assert contents(tmp_path / "local") == contents(tmp_path / "beam")
    assert beam.fingerprint == local.fingerprint
    assert not list((tmp_path / "beam").glob("attempts-*"))
    # As when it is opened by training, without Beam.
    assert corpora.prepare(config, tmp_path / "beam").fingerprint == local.fingerprint


def test_the_direct_runner_by_its_own_name(config, tmp_path, small_units, contents):
    """Which asks for Prism first, and without the network does it itself."""
    corpora.prepare(config, tmp_path / "local")
    corpora.prepare(config, tmp_path / "beam", beam_pipeline.open_runner("DirectRunner"))
    assert contents(tmp_path / "local") == contents(tmp_path / "beam")


JOB_SERVER = ("--job_endpoint=embed", "--environment_type=LOOPBACK")


def test_a_runner_that_is_handed_the_job(config, tmp_path, small_units, contents, bad_work, runner):
    """As Flink, Spark and Dataflow are: it goes on by itself, and is waited for."""
    portable = beam_pipeline.open_runner("PortableRunner", JOB_SERVER)
    corpora.prepare(config, tmp_path / "local")
    corpora.prepare(config, tmp_path / "beam", portable)
    assert contents(tmp_path / "local") == contents(tmp_path / "beam")
    with pytest.raises(DataError, match=r"--runner=PortableRunner failed \(.*by nothing"):
        do_units(bad_work("fail"), lambda index: None, portable)


@pytest.mark.parametrize("options", [HERE, PROCESSES], ids=["here", "processes"])
def test_pairs_of_texts(tmp_path, monkeypatch, contents, runner, options):
    monkeypatch.setattr(documents_module, "UNIT_BYTES", 4_000)
    monkeypatch.setattr(pair_source, "MARK_LINES", 16)
    config = Config(
        tokenizer=TokenizerSection(vocab_size=160, train_megabytes=1),
        data=DataSection(workers=1),
        parallel=ParallelSection(
            source=write_files(tmp_path, make_pairs(400)),
            heldout_fraction=0.1,
            batch_tokens=256,
            shapes=3,
            sampling=0.1,
            target_vocab_size=120,
        ),
        sequence=SequenceSection(shared_vocabulary=False),
    )
    local = parallel_text.prepare(config, tmp_path / "local")
    assert len(local.splits["train"].shards) > 2
    beam = parallel_text.prepare(config, tmp_path / "beam", runner(options))
    assert contents(tmp_path / "local") == contents(tmp_path / "beam")
    assert beam.fingerprint == local.fingerprint


def test_finished_units_are_kept_whoever_did_them(config, tmp_path, small_units, contents, runner):
    folder = tmp_path / "prepared"
    corpora.prepare(config, folder)
    before, times = contents(folder), in_order(folder.glob("units/*.json"))
    for lost in ("units/00000.json", "units/00002.json", "train-00003.array_record"):
        (folder / lost).unlink()
    (folder / "attempts-of-a-killed-start").mkdir()
    corpora.prepare(config, folder, runner())
    again = in_order(folder.glob("units/*.json"))
    assert [path.name for path in times if again[path] != times[path]] == [
        "00000.json",
        "00002.json",
        "00003.json",
    ]
    assert contents(folder) == before
    assert not list(folder.glob("attempts-*"))


SCRIPT = """
import json, pathlib, sys
from convbert_jax.config import from_config_dict
from convbert_jax.data.corpus.corpus import prepare
from convbert_jax.data.sources import documents
from convbert_jax.data.units.beam_pipeline import open_runner
documents.UNIT_BYTES = 12_000
config, folder, runner, *options = sys.argv[1:]
prepare(from_config_dict(json.loads(config)), pathlib.Path(folder), open_runner(runner, options))
"""


def test_killed_and_resumed_is_the_same(config, tmp_path, small_units, contents, runner):
    """The process that submitted is killed; its workers end, and a start after it does the rest."""
    corpora.prepare(config, tmp_path / "whole")
    folder, script = tmp_path / "killed", tmp_path / "script.py"
    script.write_text(SCRIPT)
    arguments = [json.dumps(to_dict(config)), str(folder), RUNNER, *PROCESSES]
    process = subprocess.Popen([sys.executable, str(script), *arguments])
    deadline = time.monotonic() + 120
    while not list(folder.glob("units/*.json")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.wait(timeout=60)
    (old,) = folder.glob("attempts-*")
    opened = runner(PROCESSES)
    corpora.prepare(config, folder, opened)
    assert not old.exists()
    assert contents(folder) == contents(tmp_path / "whole")


def test_from_the_command_line(config, corpus_file, tmp_path, contents, runner):
    """A workdir that is named relative to where the command is given."""
    fields = {"data.source": f"text:{corpus_file}", "data.heldout_fraction": 0.1}
    fields |= {"data.format": "blank_lines", "tokenizer.vocab_size": 300}
    flags = ["--config=tiny", "--mode=prepare", *(f"--config.{k}={v}" for k, v in fields.items())]
    beam = [f"--runner={RUNNER}", f"--runner_options={' '.join(PROCESSES)}"]
    for name, more in (("beam", beam), ("local", ["--config.data.workers=1"])):
        done = subprocess.run(
            [sys.executable, "-m", "convbert_jax.main", *flags, f"--workdir={name}", *more],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert ("1 units go to FnApiRunner" in done.stderr) == (name == "beam")
    assert contents(tmp_path / "beam" / "data") == contents(tmp_path / "local" / "data")


@pytest.mark.parametrize("options", [HERE, PROCESSES], ids=["here", "processes"])
def test_a_unit_that_cannot_be_done_is_the_same_sentence(
    config, change, corpus_file, tmp_path, small_units, monkeypatch, runner, options
):
    monkeypatch.setattr(preparation, "CHECKED_BYTES", 3000)  # stops before the bad text
    model = corpora.prepare(config, tmp_path / "model").tokenizer.path
    corpus_file.write_bytes(corpus_file.read_bytes() + b"\n\nbad \xff text\n")
    config = change(config, tokenizer={"path": str(model)})
    with pytest.raises(DataError, match="not utf-8 in 1 places") as local:
        corpora.prepare(config, tmp_path / "local")
    folder = tmp_path / "beam"
    with pytest.raises(DataError) as beam:
        corpora.prepare(config, folder, runner(options))
    assert str(beam.value) == str(local.value)
    assert not list(folder.glob("attempts-*"))
    done = in_order(folder.glob("units/*.json"))
    assert done
    skipping = change(config, data={"encoding_errors": "skip"})
    corpora.prepare(skipping, folder, runner())
    assert done.items() <= in_order(folder.glob("units/*.json")).items()


def test_a_folder_that_is_being_prepared_is_waited_for(config, tmp_path, monkeypatch, runner):
    monkeypatch.setattr(locks, "LOCK_PATIENCE", 0.3)
    opened = runner()
    with (
        locks.lock(tmp_path / "prepared"),
        pytest.raises(DataError, match="in use by another process"),
    ):
        corpora.prepare(config, tmp_path / "prepared", opened)


def test_progress_is_logged(config, tmp_path, small_units, monkeypatch, caplog, runner):
    monkeypatch.setattr(progress, "LOG_EVERY", 0)
    monkeypatch.setattr(beam_pipeline, "WATCH_EVERY", 0.001)
    with caplog.at_level("INFO", logger="absl"):
        corpora.prepare(config, tmp_path / "prepared", runner())
    said = [record.getMessage() for record in caplog.records]
    assert any("units go to FnApiRunner of Apache Beam" in line for line in said)
    assert any("s left." in line for line in said if line.startswith("Tokenizing:"))


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
    """bad_work("die"): what kills its process, or has a fault of its own."""
    (tmp_path / "bad_units.py").write_text(BAD)
    (tmp_path / "units").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}{os.pathsep}{tmp_path}")
    monkeypatch.delitem(sys.modules, "bad_units", raising=False)
    bad_units = importlib.import_module("bad_units")
    sources = {"train": bad_units.Source()}
    return lambda name: Work(bad_units.Job(tmp_path), sources, getattr(bad_units, name))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # Beam's own
def test_a_worker_that_is_killed_ends_it_in_a_sentence(bad_work, runner):
    with pytest.raises(DataError, match=r"A worker of --runner=FnApiRunner was killed"):
        do_units(bad_work("die"), lambda index: None, runner(PROCESSES))


@pytest.mark.parametrize("options", [HERE, PROCESSES], ids=["here", "processes"])
def test_a_fault_of_ours_is_told_too(bad_work, runner, options):
    with pytest.raises(DataError, match=r"--runner=FnApiRunner failed \(.*by nothing") as error:
        do_units(bad_work("fail"), lambda index: None, runner(options))
    assert "\n" not in str(error.value)


def test_a_pipeline_that_somebody_cancels_is_told(
    config, tmp_path, small_units, monkeypatch, runner
):
    fn_runner = importlib.import_module("apache_beam.runners.portability.fn_api_runner.fn_runner")
    monkeypatch.setattr(fn_runner.RunnerResult, "wait_until_finish", lambda self: "CANCELLED")
    with pytest.raises(DataError, match="FnApiRunner ended as CANCELLED; start again"):
        corpora.prepare(config, tmp_path / "prepared", runner())


def test_workers_without_the_folder_say_so(config, tmp_path, small_units, monkeypatch, runner):
    monkeypatch.setattr(beam_pipeline, "make_attempts", lambda folder: folder / "attempts-none")
    with pytest.raises(DataError, match=r"^\S*attempts-none is not there on .* they share\.$"):
        corpora.prepare(config, tmp_path / "prepared", runner(PROCESSES))


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("DirektRunner", (), "Unexpected pipeline runner: DirektRunner"),
        ("os.path", (), "--runner=os.path cannot be used"),
        ("nowhere.Runner", (), "No module named 'nowhere'"),
        ("FnApiRunner", ("--direct_num_workers=many",), "invalid int value: 'many'"),
        ("FnApiRunner", ("--direct_running_mode=slow",), "invalid choice: 'slow'"),
        ("DataflowRunner", (), "--runner=DataflowRunner cannot be used"),
    ],
)
def test_a_runner_that_cannot_be_used_is_one_sentence(name, options, says):
    with pytest.raises(DataError) as error:
        beam_pipeline.open_runner(name, options)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_beam_is_loaded_only_where_it_is_asked_for():
    code = "import sys, convbert_jax.recipes as r; print('apache_beam' in sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert said.stdout == "False\n"
