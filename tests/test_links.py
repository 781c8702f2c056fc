"""Untrusted run folders with symbolic links: files outside of them never change."""

import os
import time

import pytest

from convbert_jax import storage
from convbert_jax.config import Config, UserError
from convbert_jax.data.prepared import lock
from convbert_jax.doctor import checks
from convbert_jax.recipes.reports import page as report_page
from convbert_jax.sweeps.table import Folder
from convbert_jax.training.metrics_writer import EventFile
from convbert_jax.workdir import Workdir
from tests.refusals import refused
from tests.training import tiny_run


@pytest.fixture
def outside(tmp_path):
    """A folder that belongs to another user."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "precious").write_text("precious")
    yield folder
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"precious": "precious"}


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


# Temporary names of earlier versions.
GUESSED = ["config.json", "report.html", "metrics.jsonl", "tracker.json", "curves.png"]


def test_links_with_names_of_files_are_replaced_or_not_used(run, outside):
    for name in GUESSED:
        (run / f"{name}.unfinished").symlink_to(outside / "precious")
    (run / "report.html").symlink_to(outside / "precious")
    with Workdir(run).open(Config()):
        assert tiny_run.run(run).step == 12
        assert report_page.write(Workdir(run), lambda: "page")
    assert not (run / "report.html").is_symlink()
    assert (run / "report.html").read_text() == "page"


@pytest.mark.parametrize("target", ["precious", "new"])
def test_a_link_in_place_of_the_lock_is_refused(target, run, outside):
    (run / ".lock").symlink_to(outside / target)
    with refused(UserError, run / ".lock"), Workdir(run).open(Config()):
        pass


@pytest.mark.parametrize("target", ["precious", "new"])
def test_a_link_in_place_of_a_file_that_grows_is_refused(target, run, outside):
    (run / "metrics.jsonl").symlink_to(outside / target)
    with refused(UserError, run / "metrics.jsonl"):
        storage.Lines(Workdir(run).metrics)


@pytest.mark.parametrize("target", ["precious", "new"])
def test_links_in_place_of_other_locks_are_refused(target, run, outside):
    (run / "lock").symlink_to(outside / target)
    with refused(UserError, run / "lock"):
        lock(run).__enter__()
    file = Folder(run).file("variant/seed-1/pretrain", ".lock")
    file.parent.mkdir(parents=True)
    file.symlink_to(outside / target)
    with refused(UserError, file):
        Folder(run).hold("variant/seed-1/pretrain").__enter__()


def test_a_copied_file_replaces_a_link(run, outside):
    (run / "CoLA.tsv").symlink_to(outside / "precious")
    (run / "source").write_text("new")
    storage.copy(run / "source", run / "CoLA.tsv")
    assert (run / "CoLA.tsv").read_text() == "new"


def test_names_of_other_files_cannot_be_guessed(run, monkeypatch):
    """Libraries write these files and follow links."""
    monkeypatch.setattr(time, "time", lambda: 1e9)
    names = set()
    for _ in range(2):
        EventFile(run, purge_step=1).close()
        with checks.probe(run) as path:
            names.add(path.name)
    names |= {path.name for path in run.iterdir()}
    assert len(names) == 4


@pytest.mark.parametrize("where", ["huggingface", "checkpoints", "a/b/c"])
@pytest.mark.parametrize("target", ["", "new folder"])
def test_a_link_to_a_folder_elsewhere_is_refused(where, target, run, outside):
    (run / where).parent.mkdir(parents=True, exist_ok=True)
    (run / where).symlink_to(outside / target)
    with pytest.raises(UserError) as refused, Workdir(run).open(Config()):
        pass
    assert str(run / where) in str(refused.value)
    assert str(outside) in str(refused.value)


def test_links_that_stay_in_the_run_folder_and_a_linked_run_folder_are_fine(run, outside):
    (run / "big").mkdir()
    (run / "checkpoints").symlink_to("big")
    (run / "notes").symlink_to(outside / "precious")
    (run.parent / "linked").symlink_to(run)
    with Workdir(run.parent / "linked").open(Config()):
        pass
    assert (run / "config.json").is_file()


def test_temporary_files_of_a_killed_process_are_removed(run):
    def killed(folder, age):
        folder.mkdir(exist_ok=True, parents=True)
        path = storage.temporary_name(folder / "numbers.json")
        path.touch()
        os.utime(path, (time.time() - age,) * 2)
        return path

    old = [killed(run / folder, age=7200) for folder in ("", "evaluation", "a/b")]
    new = killed(run, age=60)  # another process may be about to rename it
    others = [run / "out.jsonl.unfinished", run / "step-5.unfinished" / "model.safetensors"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, (0, 0))
    with Workdir(run).open(Config()):
        pass
    assert [path.exists() for path in [*old, new, *others]] == [False] * 3 + [True] * 3
    with lock(run):  # no other process prepares data here
        assert not new.exists()
    assert all(path.exists() for path in others)
