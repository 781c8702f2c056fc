"""Preparing a corpus and pairs: completeness, resuming, changed configs, damage."""

import contextlib
import json
import multiprocessing
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
import time

import pytest

from convbert_jax import recipes, storage
from convbert_jax.config import UserError, to_dict
from convbert_jax.data import corpus, parallel_text, prepared, shards
from convbert_jax.data.corpus import VERSIONS
from convbert_jax.data.corpus import prepare as prepare_corpus
from convbert_jax.data.errors import DataError
from convbert_jax.data.parallel_text import prepare as prepare_pairs
from convbert_jax.data.readers import text_files
from convbert_jax.data.tokenizer import tokenizer
from convbert_jax.storage import DamagedFileError
from tests.data.kinds import changed
from tests.data.parallel.conftest import pair_config
from tests.refusals import refused

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
ELSEWHERE = "--config.data.directory="


def unfinish(folder) -> None:
    path = folder / "metadata.json"
    content = json.loads(path.read_text())
    names = {"made_from", "tokenizer", "tokenizers", "heldout", "stamps"} & set(content)
    prepared.write_record(path, {name: content[name] for name in names} | {"complete": False})


def times(folder):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.glob("units/*.json"))}


@contextlib.contextmanager
def stopped_at(kind, unit):
    """Simulate Ctrl-C at the start of a unit."""
    module, name = kind.units
    real = getattr(module, name)

    def stop(job, index, *rest):
        if index == unit:
            raise KeyboardInterrupt
        return real(job, index, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, stop)
        try:
            yield
        except KeyboardInterrupt:
            return
    pytest.fail(f"unit {unit} was not begun")


def test_all_text_is_there(kind, store):
    _, prepared = store
    texts = "".join("".join(text) for text in kind.texts).lower()
    expected = {letter: texts.count(letter) for letter in set(texts) - set(" \n")}
    found = kind.letters(prepared)
    assert {letter: found[letter] for letter in expected} == expected
    train, validation = (prepared.splits[name] for name in ("train", "validation"))
    for name, split in prepared.splits.items():
        assert split.rows == len(kind.read(prepared, name)) > 0
    whole = json.loads((prepared.directory / "metadata.json").read_text())
    assert whole["complete"]
    if kind.name == "corpus":
        assert (prepared.length, prepared.layout) == (64, "packed")
        assert train.counts["documents"] + validation.counts["documents"] == len(kind.texts)
        assert 10 <= validation.counts["documents"] <= 55  # 10% of 300
        assert train.counts["tokens"] == sum(map(len, kind.read(prepared, "train")))
        assert train.counts["tokens"] / (train.rows * 64) > 0.85  # short rows, documents and units
        assert whole["bytes"] == sum(len(text.encode()) for text in kind.texts)
        assert whole["unknown"] / whole["characters"] < 0.01
    else:
        assert train.rows + validation.rows == whole["pairs"] == len(kind.texts)
        assert 10 <= validation.rows <= 70
        for name, split in prepared.splits.items():
            sizes = [[len(side) + 1 for side in row] for row in kind.read(prepared, name)]
            assert split.lengths.tolist() == sizes
            tokens = [split.counts[f"{side}_tokens"] for side in ("source", "target")]
            assert tokens == split.lengths.sum(axis=0).tolist()


# --- Resuming ---


def test_workers_change_nothing(kind, store, tmp_path, small_units, contents):
    config, prepared = store
    two = kind.prepare(changed(config, "data.workers", 2), tmp_path / "two")
    assert contents(tmp_path / "two") == contents(prepared.directory)
    assert two.fingerprint == prepared.fingerprint
    assert not multiprocessing.active_children()


def test_a_stopped_preparation_goes_on(kind, store, tmp_path, small_units, contents):
    config, prepared = store
    with stopped_at(kind, 2):
        kind.prepare(config, tmp_path / "stopped")
    done = times(tmp_path / "stopped")
    assert len(done) == 2
    assert not json.loads((tmp_path / "stopped" / "metadata.json").read_text())["complete"]
    assert kind.prepare(config, tmp_path / "stopped").fingerprint == prepared.fingerprint
    assert done.items() <= times(tmp_path / "stopped").items()
    assert contents(tmp_path / "stopped") == contents(prepared.directory)


def test_only_missing_units_are_prepared_again(kind, store, copied, contents):
    (config, folder), expected = copied, store[1].fingerprint
    before, then = contents(folder), times(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*kind.units, None)
        assert kind.prepare(config, folder).fingerprint == expected
    (folder / "train-00001.array_record").unlink()
    if kind.name == "pairs":
        (folder / "train-00002.lengths").unlink()
    assert kind.prepare(config, folder).fingerprint == expected
    assert contents(folder) == before
    redone = {path.stem for path, time in times(folder).items() if then[path] != time}
    assert redone == ({"00001", "00002"} if kind.name == "pairs" else {"00001"})


def test_nothing_finished_binds_nothing(kind, copied, tmp_path, contents):
    """A vocabulary without shards, as left by Ctrl-C, is retrained for new settings."""
    config, folder = copied
    unfinish(folder)
    for unit in (folder / "units").iterdir():
        unit.unlink()
    config = changed(changed(config, "tokenizer.vocab_size", 140), kind.heldout_field, 0.2)
    config = changed(config, "tokenizer.kind", "wordpiece")
    made = kind.prepare(config, folder)
    assert made.fingerprint == kind.prepare(config, tmp_path / "fresh").fingerprint
    assert kind.read(made, "train")


# --- Another config ---

OTHERS = {
    "corpus": [
        ("data.length", 32, ("length", 64)),
        ("data.layout", "electra", ("layout", "'packed'")),
        ("data.heldout_fraction", 0.2, ("heldout_fraction", 0.1)),
        ("data.format", "lines", ("train",)),
        ("data.shuffle_documents", True, ("layout", "shuffled")),
        ("tokenizer.vocab_size", 290, ("tokenizer.vocab_size", 300)),
        ("tokenizer.lowercase", False, ("tokenizer.lowercase", True)),
        ("tokenizer.kind", "wordpiece", ("tokenizer.kind", "'sentencepiece'")),
    ],
    "pairs": [
        ("parallel.max_length", 30, ("max_length", 256)),
        ("parallel.max_ratio", 2.0, ("max_ratio", 0.0)),
        ("parallel.sampling", 0.1, ("sampling", 0.0)),
        ("parallel.cut_sources", True, ("cut_sources", None)),
        ("parallel.heldout_fraction", 0.2, ("heldout_fraction", 0.1)),
        ("sequence.shared_vocabulary", False, ("vocabularies", 1, 2)),
        ("tokenizer.vocab_size", 150, ("tokenizer.vocab_size", 160)),
    ],
}


def test_another_config_is_refused(kind, copied, contents):
    config, folder = copied
    for _ in range(2):
        before = contents(folder)
        for path, value, mentions in OTHERS[kind.name]:
            unshown = (("train",), ("layout", "shuffled"), ("vocabularies", 1, 2))
            shown = () if mentions in unshown else (value,)
            with refused(DataError, *mentions, *shown, ELSEWHERE, path=folder) as caught:
                kind.prepare(changed(config, path, value), folder)
        assert contents(folder) == before
        unfinish(folder)
    flag = re.search(rf"{ELSEWHERE}(\S+)\.$", str(caught.value))  # the suggested fix works
    path, value, _ = OTHERS[kind.name][0]
    prints = {kind.prepare(config, folder).fingerprint}
    prints.add(kind.prepare(changed(config, path, value), pathlib.Path(flag[1])).fingerprint)
    path, value, _ = OTHERS[kind.name][4]
    prints.add(kind.prepare(changed(config, path, value), folder.with_name("more")).fingerprint)
    assert len(prints) == 3


def test_units_without_metadata_are_refused(kind, copied, contents):
    config, folder = copied
    (folder / "metadata.json").unlink()
    before = contents(folder)
    with refused(DataError, "metadata.json", path=folder):
        kind.prepare(config, folder)
    assert contents(folder) == before


def test_rows_of_another_version_are_refused(make_config, tmp_path, monkeypatch):
    config, folder = make_config(tmp_path), tmp_path / "prepared"
    prepare_corpus(config, folder)
    monkeypatch.setitem(VERSIONS, "packed", VERSIONS["packed"] + 1)
    with refused(DataError, "version", 1, 2, path=folder):
        prepare_corpus(config, folder)


def test_a_changed_vocabulary_is_refused(kind, copied, small_units, tmp_path):
    from sentencepiece import sentencepiece_model_pb2

    config, folder = copied
    (model,) = folder.glob("tokenizer.model")
    content = sentencepiece_model_pb2.ModelProto.FromString(model.read_bytes())
    content.pieces[100].score -= 1
    model.write_bytes(content.SerializeToString())
    with refused(DataError, model, path=folder):
        kind.prepare(config, folder)
    # A vocabulary named by the user may move, but not change.
    named, moved = tmp_path / "named.model", tmp_path / "moved.model"
    named.write_bytes(content.SerializeToString())
    config = changed(config, "tokenizer.path", str(named))
    expected = kind.prepare(config, tmp_path / "of_named").fingerprint
    named.rename(moved)
    other = changed(config, "tokenizer.path", str(moved))
    assert kind.prepare(other, tmp_path / "of_named").fingerprint == expected
    content.pieces[100].score -= 1
    named.write_bytes(content.SerializeToString())
    with refused(DataError, named, path=tmp_path / "of_named"):
        kind.prepare(config, tmp_path / "of_named")


# --- Sources that change or disappear ---


@pytest.fixture
def mine(kind, tmp_path, small_units):
    """(config, folder) of data whose sources may be changed."""
    config = kind.config(tmp_path)
    kind.prepare(config, tmp_path / "prepared")
    return config, tmp_path / "prepared"


def test_a_source_that_is_gone_or_moved(kind, mine, tmp_path):
    config, folder = mine
    expected = kind.prepare(config, folder).fingerprint
    section, field = kind.source_field.split(".")
    spec = getattr(getattr(config, section), field)
    for path in spec.partition(":")[2].split(","):
        (tmp_path / "moved").mkdir(exist_ok=True)
        os.rename(path, tmp_path / "moved" / pathlib.Path(path).name)
    assert kind.prepare(config, folder).fingerprint == expected
    absent = spec.partition(":")[0] + ":absent.x,absent.y"
    with refused(DataError, "source", path=folder):
        kind.prepare(changed(config, kind.source_field, absent), folder)
    moved = changed(config, kind.source_field, spec.replace(str(tmp_path), f"{tmp_path}/moved"))
    assert kind.prepare(moved, folder).fingerprint == expected
    shard = folder / "train-00000.array_record"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])  # cannot be recreated without the source
    with refused(DamagedFileError, len(content) - 1, len(content), path=shard):
        kind.prepare(config, folder)
    shard.unlink()
    with refused(DataError, path=shard):
        kind.prepare(config, folder)
    shard.write_bytes(content)
    assert kind.prepare(config, folder).fingerprint == expected
    for path in folder.glob("*00000.lengths"):
        whole = path.read_bytes()
        path.write_bytes(b"\1" + whole[1:])
        with refused(DamagedFileError, path=path):
            kind.prepare(config, folder)
        path.unlink()
        with refused(DataError, path=path):
            kind.prepare(config, folder)
        path.write_bytes(whole)


WRITERS = {
    "text": ("corpus.txt", lambda texts: "\n\n".join(texts)),
    "gzip": ("corpus.jsonl.gz", lambda texts: "".join(f'{{"text": "{t}"}}\n' for t in texts)),
    "parquet": ("corpus.parquet", list),
    "pairs": ("train.aa", lambda texts: "".join(f"{text}\n" for text in texts)),
}


@pytest.mark.parametrize("form", WRITERS)
def test_an_edited_source_is_refused(form, make_config, documents, tmp_path, monkeypatch):
    """Compares contents, not only size and time; each start reads a file's ends, here 100 bytes."""
    import gzip

    import pyarrow
    from pyarrow import parquet

    monkeypatch.setattr(text_files, "HEAD", 100)
    texts = [text.replace("\n", " ") for text in documents]
    path = tmp_path / WRITERS[form][0]

    def write(texts):
        content = WRITERS[form][1](texts)
        if form == "parquet":
            table, plain = (
                pyarrow.table({"text": content}),
                {"compression": "none", "write_statistics": False},
            )
            parquet.write_table(table, path, row_group_size=50, use_dictionary=False, **plain)
        elif form == "gzip":
            path.write_bytes(gzip.compress(content.encode(), compresslevel=0, mtime=0))
        else:
            path.write_text(content)

    write(texts)
    config = make_config(tmp_path)
    kind = "parquet" if form == "parquet" else "text"
    config = changed(changed(config, "data.source", f"{kind}:{path}"), "data.format", "auto")
    prepare = prepare_corpus
    if form == "pairs":
        other = tmp_path / "train.bb"
        other.write_text("".join(f"{text}\n" for text in texts))
        config, prepare = pair_config(f"parallel:{path},{other}"), prepare_pairs
    write(texts)
    expected = prepare(config, tmp_path / "prepared").fingerprint
    stat = path.stat()
    first, *middle, last = texts[120].split()
    write([*texts[:120], " ".join([first, *reversed(middle), last]), *texts[121:]])
    assert path.stat().st_size == stat.st_size
    os.utime(path, ns=(0, stat.st_mtime_ns))
    if form != "gzip":  # gzip ends with a checksum
        prepare(config, tmp_path / "prepared")  # not detected
    with refused(DataError, path, ELSEWHERE):
        prepare(config, tmp_path / "prepared", compare=True)
    os.utime(path, ns=(0, stat.st_mtime_ns + 10**9))
    with refused(DataError, path, ELSEWHERE):
        prepare(config, tmp_path / "prepared")
    write(texts)  # equal content with a new time is compared once
    assert prepare(config, tmp_path / "prepared").fingerprint == expected
    monkeypatch.setattr(prepared, "_compare_unit", None)
    monkeypatch.setattr(prepared, "Processes", None)
    assert prepare(config, tmp_path / "prepared").fingerprint == expected


def test_an_edit_between_two_starts_is_refused(kind, tmp_path, small_units, monkeypatch):
    """A stopped preparation does not continue with changed text."""
    monkeypatch.setattr(text_files, "HEAD", 100)
    config = kind.config(tmp_path)
    with stopped_at(kind, 2):
        kind.prepare(config, tmp_path / "prepared")
    texts = list(kind.texts)
    texts[3], texts[4] = texts[4], texts[3]
    kind.write(tmp_path, texts)
    with refused(DataError, ELSEWHERE, field="config.data.directory"):
        kind.prepare(config, tmp_path / "prepared")


def test_mode_prepare_compares_and_names_the_edited_file(
    make_config, tmp_path, documents, monkeypatch
):
    monkeypatch.setattr(text_files, "HEAD", 100)
    folder = tmp_path / "several"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text("\n\n".join(documents[100 * number :][:100]))
    config = changed(make_config(tmp_path), "data.source", f"text:{folder}/*.txt")
    recipes.prepare(config, tmp_path / "run")
    edited = folder / "1.txt"
    stat, text = edited.stat(), edited.read_text()
    edited.write_text(text[:500] + text[500:].replace(" b", " B", 1))
    os.utime(edited, ns=(0, stat.st_mtime_ns))
    with refused(DataError, ELSEWHERE, field="config.data.directory"):
        recipes.prepare(config, tmp_path / "run")
    os.utime(edited)
    with refused(DataError, path=edited) as caught:
        recipes.prepare(config, tmp_path / "run")
    assert "0.txt" not in str(caught.value)
    edited.write_text(text)

    def refuse(path, content):  # another user's shards
        raise DataError(f"{path} could not be written (Permission denied).")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "write_record", refuse)
        recipes.prepare(config, tmp_path / "run")


# --- Unusable text ---


def test_text_that_is_trained_on_is_not_held_out(kind, tmp_path):
    """Otherwise held-out metrics would silently be computed on training text."""
    config = kind.config(tmp_path)
    section, field = kind.source_field.split(".")
    spec = getattr(getattr(config, section), field)
    (tmp_path / "same").mkdir()
    for held in (spec, kind.write(tmp_path / "same", kind.texts)):
        wrong = changed(config, kind.validation_field, held)
        field = f"config.{kind.validation_field}"
        with refused(DataError, f"config.{kind.source_field}", field=field, value=held):
            kind.prepare(wrong, tmp_path / "prepared")
        assert not list((tmp_path / "prepared").glob("*.json"))
    (tmp_path / "held").mkdir()
    right = changed(
        config, kind.validation_field, kind.write(tmp_path / "held", kind.texts[::-1][:7])
    )
    prepared = kind.prepare(right, tmp_path / "prepared")
    held = prepared.splits["validation"]
    assert (held.counts["documents"] if kind.name == "corpus" else held.rows) == 7
    nothing = changed(config, kind.heldout_field, 1e-12)
    if kind.name == "pairs":
        with refused(DataError, field=f"config.{kind.heldout_field}", value=1e-12):
            kind.prepare(nothing, tmp_path / "nothing")


def test_no_text(kind, tmp_path):
    config = kind.config(tmp_path)
    for texts in ([], ["", " \n\t\n"] if kind.name == "corpus" else [("", "")] * 3):
        kind.write(tmp_path, texts)
        with pytest.raises(DataError) as caught:
            kind.prepare(config, tmp_path / "prepared")
        assert str(tmp_path) in str(caught.value)
    empty = changed(config, kind.source_field, "")
    with refused(DataError):
        kind.prepare(empty, tmp_path / "prepared")


# --- Folders ---


def test_a_folder_that_cannot_be_written(kind, store, tmp_path, monkeypatch, small_units, contents):
    """A file size limit simulates a full disk, failing in the same call."""
    config, prepared = store
    (tmp_path / "file").write_text("")
    with refused(DataError, field="config.data.directory", path=tmp_path / "file" / "prepared"):
        kind.prepare(config, tmp_path / "file" / "prepared")
    folder = tmp_path / "prepared"
    finish, left = shards.ShardWriter.finish, [4]

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

    monkeypatch.setattr(shards.ShardWriter, "finish", finish_with_little_space)
    with refused(DataError, "array_record", field="config.data.directory"):
        kind.prepare(config, folder)
    monkeypatch.setattr(shards.ShardWriter, "finish", finish)
    assert len(times(folder)) == 2
    kind.prepare(config, folder)
    assert contents(folder) == contents(prepared.directory)


def test_a_lock_gives_up_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "LOCK_PATIENCE", 0.3)
    with (
        prepared.lock(tmp_path),
        refused(DataError, path=tmp_path, field="config.data.directory"),
        prepared.lock(tmp_path),
    ):
        pass
    with prepared.lock(tmp_path):
        pass


# --- Processes ---

SCRIPT = """
import json, pathlib, sys
with open("started", "a") as file:
    file.write("once ")
from convbert_jax.config import from_config_dict
from convbert_jax.data.corpus import prepare
from convbert_jax.data.readers import text_files
text_files.UNIT_BYTES = 9_000
prepare(from_config_dict(json.loads(sys.argv[1])), pathlib.Path(sys.argv[2]))
print(__file__, __spec__)
"""
# In kilobytes. ru_maxrss would include the peak of pytest, which forks the parent, so the parent
# reads VmHWM.
PRINT_PEAKS = """
import re, resource
own = re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]
print(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def start(config, folder, tmp_path, script=SCRIPT) -> subprocess.Popen:
    """Run a script without `if __name__ == "__main__":`, like the saved cells of a notebook."""
    (tmp_path / "script.py").write_text(script)
    return subprocess.Popen(
        [sys.executable, "script.py", json.dumps(to_dict(config)), str(folder)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_prepare_once(config, tmp_path, small_units, contents):
    folder = tmp_path / "prepared"
    processes = [start(config, folder, tmp_path) for _ in range(2)]
    for process in processes:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert output.split() == [str(tmp_path / "script.py"), "None"]  # restored after preparing
    prepare_corpus(config, tmp_path / "alone")
    assert contents(folder) == contents(tmp_path / "alone")


def test_workers_die_with_their_parent(config, change, tmp_path, small_units, contents):
    """After a kill, no worker keeps writing, and the next start completes the work."""
    folder = tmp_path / "killed"
    process = start(change(config, data={"workers": 2}), folder, tmp_path)
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
    assert workers
    assert (tmp_path / "started").read_text() == "once "  # workers do not run the user's script
    prepare_corpus(config, folder)
    prepare_corpus(config, tmp_path / "whole")
    assert contents(folder) == contents(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("shuffle_documents", [False, True])
def test_memory_stays_bounded(config, change, documents, tmp_path, shuffle_documents):
    """Two workers prepare three 50 MB documents; every process stays below 400 MB."""
    block = " ".join(documents).replace("\n", " ") + " "
    for number in range(3):
        (tmp_path / f"corpus{number}.txt").write_text(block * (50_000_000 // len(block)))
    fields = {"source": f"text:{tmp_path}/corpus?.txt", "workers": 2, "format": "file"}
    fields["shuffle_documents"] = shuffle_documents
    config = change(config, data=fields, tokenizer={"train_megabytes": 2})
    script = SCRIPT.replace("9_000", "16_000_000") + PRINT_PEAKS
    process = start(config, tmp_path / "prepared", tmp_path, script)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    parent, worker = map(int, output.splitlines()[-1].split())
    assert 20_000 < parent < 400_000
    assert 20_000 < worker < 400_000


# --- Damaged records: an error with a fix, never a wrong value ---

STORED = ["metadata.json", "unfinished metadata.json", "units/00001.json"]
STORED += ["tokenizer_settings.json", "tokenizer.model"]


def damages(content: bytes, seed: int):
    """Yield damaged variants of `content`, deterministic for a seed."""
    rng = random.Random(seed)
    yield from (b"", b"[]", b"5", b"null", b"{}", b'"text"', b"\xff\xfe{}", b"\x00" * len(content))
    yield from (b"[" * 50_000, b'{"a":' * 50_000, b"9" * 10_000, b'{"complete": "\\ud800"}')
    for _ in range(4):
        yield content[: rng.randrange(len(content))]
    for _ in range(8):
        changed = bytearray(content)
        changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        yield bytes(changed)
    yield content + content


def retyped(value):
    """Yield variants of `value` with one nested item removed or of another type."""
    for other in ([], {}, "text", None, 1.5, -(10**30)):
        if type(other) is not type(value):
            yield other
    if isinstance(value, dict):
        for name in value:
            yield {key: item for key, item in value.items() if key != name}
            for other in retyped(value[name]):
                yield value | {name: other}
    elif isinstance(value, list) and value:
        for other in retyped(value[0]):
            yield [other, *value[1:]]


@pytest.mark.parametrize("name", STORED, ids=lambda name: name.replace(" ", "-"))
def test_damaged_records(name, kind, store, copied):
    """Also without a checksum, as in older folders."""
    config, folder = copied
    expected = kind.read(store[1], "validation")
    path = folder / name.removeprefix("unfinished ")
    if name.startswith(("unfinished", "units")):
        unfinish(folder)
    content, whole = path.read_bytes(), (folder / "metadata.json").read_bytes()

    def attempt(damaged: bytes) -> bool:
        (folder / "metadata.json").write_bytes(whole)
        path.write_bytes(damaged)
        try:
            assert kind.read(kind.prepare(config, folder), "validation") == expected
            return True
        except UserError as error:
            message = str(error)
        assert message.endswith(".")
        assert "\n" not in message
        assert len(message) < 900
        return False

    accepted = sum(map(attempt, damages(content, seed=len(path.name))))
    assert accepted <= 2  # a bit outside the values, as in white space
    if path.suffix == ".json" and kind.name == "corpus":  # pairs always had checksums
        record = json.loads(content)
        record.pop("crc32", None)
        for other in retyped(record):
            attempt(json.dumps(other).encode())
    path.write_bytes(content)
    (folder / "metadata.json").write_bytes(whole)
    assert attempt(content)


def test_fields_that_are_checked_are_those_that_are_written(kind, store):
    """Current folders are never refused because of a missing field."""
    module, unit = corpus, corpus.RECORD_FIELDS
    if kind.name == "pairs":
        module, unit = parallel_text, parallel_text.RECORD_FIELDS
    for name, fields in (
        ("metadata.json", module.METADATA_FIELDS | module.SUMMARY_FIELDS),
        ("units/00000.json", unit),
        ("tokenizer_settings.json", tokenizer.SETTINGS_FIELDS),
    ):
        path = store[1].directory / name
        assert set(fields) <= set(storage.read_json(path, remedy="", fields=fields))
        assert "crc32" in json.loads(path.read_text())
