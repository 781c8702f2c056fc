"""Preparing in parallel, killed, on a full disk, twice at once, in bounded memory."""

import json
import multiprocessing
import os
import pathlib
import resource
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from convbert_jax.config import Config, to_dict
from convbert_jax.data.corpus import preparation
from convbert_jax.data.corpus.corpus import prepare
from convbert_jax.data.errors import DataError
from convbert_jax.data.sources import documents as documents_module
from convbert_jax.data.units import lock as locks

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]


SCRIPT = """
    import json, os, pathlib, signal, sys
    from convbert_jax.config import from_config_dict
    from convbert_jax.data.corpus import corpus, unit_worker
    from convbert_jax.data.sources import documents

    def main():
        documents.UNIT_BYTES = 12_000
        config = from_config_dict(json.loads(sys.argv[1]))
        folder = pathlib.Path(sys.argv[2])
        kill_at = int(sys.argv[3])
        write_record = unit_worker.write_record

        def killing(path, content):  # after the shards are there, before the record is
            if path.parent.name == "units" and content["unit"] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            write_record(path, content)

        unit_worker.write_record = killing
        corpus.prepare(config, folder)

    if __name__ == "__main__":
        main()
"""

# In kilobytes. The high-water mark of ru_maxrss would include that of the process forked from, here
# pytest's own, so the parent asks for that of its own address space.
PRINT_PEAKS = """
    if __name__ == "__main__":
        import re, resource
        own = re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]
        print(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def start(config: Config, folder, tmp_path, kill_at=-1) -> subprocess.Popen:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    arguments = [json.dumps(to_dict(config)), str(folder), str(kill_at)]
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.PIPE,
    )


def test_number_of_workers_does_not_matter(config, change, tmp_path, small_units, contents):
    one = prepare(config, tmp_path / "one")
    two = prepare(change(config, data={"workers": 2}), tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert one.fingerprint == two.fingerprint
    assert not multiprocessing.active_children()


UNGUARDED = """
import json, pathlib, sys
with open("started", "a") as file:
    file.write("once ")
from convbert_jax.config import from_config_dict
from convbert_jax.data.corpus.corpus import prepare
from convbert_jax.data.sources import documents
documents.UNIT_BYTES = 12_000
prepare(from_config_dict(json.loads(sys.argv[1])), pathlib.Path("prepared"))
print(__file__, __spec__)
"""


def test_workers_do_not_run_the_script_of_the_user(config, change, tmp_path, small_units, contents):
    """One without `if __name__ == "__main__":`, as a notebook's lines saved to a file are."""
    (tmp_path / "script.py").write_text(UNGUARDED)
    done = subprocess.run(
        [sys.executable, "script.py", json.dumps(to_dict(change(config, data={"workers": 2})))],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "started").read_text() == "once "
    assert done.stdout.split() == [str(tmp_path / "script.py"), "None"]  # as it was before
    prepare(config, tmp_path / "one")
    assert contents(tmp_path / "prepared") == contents(tmp_path / "one")


def test_an_error_in_a_worker_is_one_sentence_and_keeps_what_is_done(
    config, change, corpus_file, tmp_path, small_units, monkeypatch
):
    monkeypatch.setattr(preparation, "CHECKED_BYTES", 3000)  # stops before the bad text
    model = prepare(config, tmp_path / "model").tokenizer.path
    text = corpus_file.read_bytes()
    corpus_file.write_bytes(text + b"\n\nbad \xff text\n")
    config = change(config, data={"workers": 2}, tokenizer={"path": str(model)})
    with pytest.raises(DataError, match=r"corpus\.txt is not utf-8 in 1 places, first in line"):
        prepare(config, tmp_path / "prepared")
    done = len(list((tmp_path / "prepared" / "units").glob("*.json")))
    assert done >= 1
    # What was finished holds under any policy, since it has no undecodable text.
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "prepared" / "units").glob("*.json")}
    skipping = change(config, data={"encoding_errors": "skip"})
    corpus = prepare(skipping, tmp_path / "prepared")
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())
    assert sum(split.documents for split in corpus.splits.values()) == 300
    replacing = change(config, data={"encoding_errors": "replace"})
    with pytest.raises(DataError, match="prepared with encoding_errors='skip'"):
        prepare(replacing, tmp_path / "prepared")
    other = prepare(replacing, tmp_path / "replaced")
    assert sum(split.documents for split in other.splits.values()) == 301
    assert other.fingerprint != corpus.fingerprint


def test_killed_and_resumed_is_the_same(config, tmp_path, small_units, contents):
    expected = prepare(config, tmp_path / "whole")
    process = start(config, tmp_path / "killed", tmp_path, kill_at=2)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    units = tmp_path / "killed" / "units"
    done = {path: path.stat().st_mtime_ns for path in units.glob("*.json")}
    assert len(done) == 2
    assert not json.loads((tmp_path / "killed" / "metadata.json").read_text())["complete"]
    resumed = prepare(config, tmp_path / "killed")
    assert all(path.stat().st_mtime_ns == time for path, time in done.items())
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert resumed.fingerprint == expected.fingerprint


def test_workers_die_with_their_parent(config, change, tmp_path, documents, contents):
    """Killed at any moment; no worker goes on writing, and the rest is done afterwards."""
    config = change(config, data={"workers": 2})
    folder = tmp_path / "killed"
    process = start(config, folder, tmp_path)
    deadline = time.monotonic() + 60
    while not list(folder.glob("units/*.json")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    workers = children.read_text().split() if children.exists() else []
    process.kill()
    process.communicate(timeout=60)
    while any(pathlib.Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "UNIT_BYTES", 12_000)
        corpus = prepare(config, folder)
        prepare(config, tmp_path / "whole")
    assert sum(split.documents for split in corpus.splits.values()) == len(documents)
    assert contents(folder) == contents(tmp_path / "whole")


def test_two_processes_prepare_once(config, tmp_path, small_units, contents):
    folder = tmp_path / "prepared"
    processes = [start(config, folder, tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    prepare(config, tmp_path / "alone")
    assert contents(folder) == contents(tmp_path / "alone")


def test_lock_gives_up_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "LOCK_PATIENCE", 0.3)
    with (
        locks.lock(tmp_path),
        pytest.raises(DataError, match="in use by another process"),
        locks.lock(tmp_path),
    ):
        pass
    with locks.lock(tmp_path):
        pass


def test_full_disk_is_one_sentence_and_keeps_what_is_done(
    config, change, tmp_path, monkeypatch, small_units, contents
):
    """A limit on the size of files stands in for a full disk: writing fails in the same call."""
    from convbert_jax.data.corpus import rows

    folder = tmp_path / "prepared"
    finish, left = rows.ShardWriter.finish, [4]

    def finish_with_little_space(self):
        left[0] -= 1
        if left[0] >= 0:
            return finish(self)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            return finish(self)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)

    monkeypatch.setattr(rows.ShardWriter, "finish", finish_with_little_space)
    with pytest.raises(DataError, match=r"array_record could not be written \(.*free some space"):
        prepare(config, folder)
    monkeypatch.setattr(rows.ShardWriter, "finish", finish)
    assert len(list((folder / "units").glob("*.json"))) == 2
    prepare(config, folder)
    prepare(config, tmp_path / "whole")
    assert contents(folder) == contents(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("shuffle_documents", [False, True])
def test_memory_stays_bounded(config, change, documents, tmp_path, shuffle_documents):
    """Three documents of 50 MB, by two workers: every process stays below 400 MB."""
    block = " ".join(documents).replace("\n", " ") + " "
    for number in range(3):
        (tmp_path / f"corpus{number}.txt").write_text(block * (50_000_000 // len(block)))
    source = f"text:{tmp_path}/corpus?.txt"
    config = change(
        config,
        data={
            "source": source,
            "workers": 2,
            "format": "file",
            "shuffle_documents": shuffle_documents,
        },
        tokenizer={"train_megabytes": 2},
    )
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(SCRIPT).replace("12_000", "16_000_000") + textwrap.dedent(PRINT_PEAKS)
    )
    result = subprocess.run(
        [sys.executable, str(script), json.dumps(to_dict(config)), str(tmp_path / "p"), "-1"],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        check=True,
        timeout=600,
        stdout=subprocess.PIPE,
        text=True,
    )
    parent, worker = map(int, result.stdout.split())
    assert 20_000 < parent < 400_000
    assert 20_000 < worker < 400_000
