"""Docstrings, and data sets from the hub, TFDS and `datasets`."""

import errno
import gzip
import os
import pickle
import random
import shutil
import sys
import types

import pytest

from convbert_jax.config import DataSection
from convbert_jax.data.errors import DataError
from convbert_jax.data.readers import indexed_rows, sources, text_files
from convbert_jax.data.readers.sources import open_source
from tests.data.tfds_sets import prepare_tfds
from tests.refusals import refused

SOURCE = "config.data.source"


def read(spec, **fields) -> list[str]:
    source = open_source(DataSection(**fields), spec)
    return [text for unit in source.units for text in source.documents(unit, None)]


def write_parquet(path, texts):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=10)


# --- Docstrings ---


def test_docstrings_are_there_in_a_fixed_order(monkeypatch):
    monkeypatch.setattr(sources, "SOURCE_BYTES", 1_500_000)
    monkeypatch.setattr(sources, "UNIT_SOURCE_BYTES", 500_000)
    source = open_source(DataSection(), "docstrings")
    assert len(source.units) >= 2
    first = read("docstrings")
    source = pickle.loads(pickle.dumps(source))
    assert first == [text for unit in source.units for text in source.documents(unit, None)]
    assert sum(map(len, first)) > 100_000
    assert all(len(text) >= sources.SHORTEST // 2 for text in first)
    assert not any(text.startswith(">>>") or "\n>>>" in text for text in first)
    code = b'"""Module."""\nclass A:\n    """Class."""\n    def f(self):\n        "Method."\n'
    code += b'        return """no docstring"""\nx = """none either"""\n'
    assert list(sources._docstrings(code)) == ["Module.", "Class.", "Method."]
    assert list(sources._docstrings(b'"""Broken."""\ndef (:')) == []


# --- Hub ---


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The download folder and the list of download arguments.

    An error appended to the list is raised by the next download.
    """
    import huggingface_hub

    calls = []

    def snapshot_download(repository, **arguments):
        if calls and isinstance(calls[-1], Exception):
            raise calls[-1]
        calls.append((repository, arguments))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return tmp_path, calls


def test_hub_files_are_downloaded_and_read(hub, documents):
    folder, calls = hub
    for name, part in (("20231101.en", documents[:20]), ("20231101.de", documents[20:40])):
        (folder / name).mkdir()
        write_parquet(folder / name / "train-0.parquet", part)
    assert read("hub:wikimedia/wikipedia/20231101.en/*.parquet") == documents[:20]
    pattern = "20231101.en/*.parquet"
    assert calls == [("wikimedia/wikipedia", {"repo_type": "dataset", "allow_patterns": pattern})]
    with refused(DataError, "wikimedia/wikipedia", field=SOURCE, value="x/*.parquet"):
        read("hub:wikimedia/wikipedia/x/*.parquet")


def test_hub_files_of_text(hub):
    """Other files of a repository are not read as documents."""
    folder = hub[0] / "data"
    jsonl = b'{"text": "one"}\n{"text": "two"}\n'
    for name, data in {
        "a.txt": b"one\ntwo\n",
        "a.txt.gz": gzip.compress(b"one\ntwo\n"),
        "a.jsonl": jsonl,
        "a.json.gz": gzip.compress(jsonl),
        "a.csv": b"text\none\ntwo\n",
    }.items():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / name).write_bytes(data)
        (folder / "README.md").write_text("No document.\n")
        for pattern in (f"data/{name}", "data/*"):
            assert read(f"hub:owner/name/{pattern}") == ["one", "two"]
        write_parquet(folder / "b.parquet", ["three"])
        with refused(DataError, "b.parquet", name, field=SOURCE, value="hub:owner/name/data/*"):
            read("hub:owner/name/data/*")
        with refused(DataError, field=SOURCE, value="data/**.md*"):
            read("hub:owner/name/data/**.md*")


def test_a_hub_that_cannot_be_read(hub):
    spec = "hub:wikimedia/wikipedia/20231101.en/*.parquet"
    calls = hub[1]
    for error, mention in (
        (ConnectionError("no route to host\nand more"), "ConnectionError"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "HF_HOME"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES)), "HF_HOME"),
        (RuntimeError("IO Error: No space left on device (os error 28)"), "HF_HOME"),
    ):
        calls[:] = [error]
        with refused(DataError, mention, value=spec) as caught:
            read(spec)
        assert ("HF_HOME" in str(caught.value)) == (mention == "HF_HOME")
    for spec, mention in (
        ("hub:wikimedia/wikipedia", "hub:OWNER/NAME/FILE-GLOB"),
        ("hub:allenai/c4/en/*.json.zst", "datasets:allenai/c4"),
    ):
        with refused(DataError, mention, field=SOURCE, value=spec):
            read(spec)


# --- TFDS ---


@pytest.fixture(scope="module")
def tfds_folder(documents, tmp_path_factory):
    import numpy as np
    import tensorflow_datasets as tfds

    rows = [{"text": text, "number": i} for i, text in enumerate(documents)]
    features = {"text": tfds.features.Text(), "number": tfds.features.Scalar(np.int64)}
    splits = {"train": rows[:150], "test": rows[200:]}
    return prepare_tfds(tmp_path_factory.mktemp("tfds"), features, splits)


def test_tfds_directory(tfds_folder, documents, tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "UNIT_BYTES", 4_000)
    spec = f"tfds:{tfds_folder}"
    source = open_source(DataSection(), spec)
    assert len(source.units) > 4
    assert {path.parent.as_posix() for path in source.files} == {str(tfds_folder)}
    assert sorted(read(spec)) == sorted(documents[:150])
    assert sorted(read(spec, split="test")) == sorted(documents[200:])
    assert open_source(DataSection(split="test"), spec).fingerprint != source.fingerprint
    source = pickle.loads(pickle.dumps(source))
    assert read(spec) == [text for unit in source.units for text in source.documents(unit, None)]
    with refused(DataError, "train", "test", path=tfds_folder, value="dev"):
        read(spec, split="dev")
    for field in ("body", "number"):
        with refused(DataError, field="config.data.text_field", value=field):
            read(spec, text_field=field)
    with refused(DataError, "dataset_info.json", path=tmp_path):
        read(f"tfds:{tmp_path}")
    with refused(DataError, field=SOURCE, value="no_such_data_set"):
        read("tfds:no_such_data_set")


@pytest.mark.parametrize("name", ["dataset_info.json", "features.json", "array_record", "parquet"])
def test_damaged_data_sets_are_refused(name, tfds_folder, documents, tmp_path):
    if name == "parquet":
        path = tmp_path / "a.parquet"
        write_parquet(path, documents)
        spec = f"parquet:{path}"
    else:
        folder = shutil.copytree(tfds_folder, tmp_path / "1.0.0")
        (path,) = folder.glob(f"*train*{name}*") if name == "array_record" else [folder / name]
        spec = f"tfds:{folder}"
    content, rng, refusals = path.read_bytes(), random.Random(0), 0
    damages = [b"", b"[]", b"null", b"\xff", b"[" * 50_000]
    damages += [content[: rng.randrange(len(content))] for _ in range(4)]
    for place in (rng.randrange(len(content)) for _ in range(20)):
        damages.append(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
    for damaged in damages:
        path.write_bytes(damaged)
        indexed_rows.open_prepared.cache_clear()
        try:
            read(spec)
        except DataError as error:
            refusals += "\n" not in str(error)
    assert refusals >= 9


def test_tfds_name_that_needs_tensorflow(monkeypatch):
    import tensorflow_datasets as tfds

    class NeedsTensorFlow:
        def is_prepared(self):
            return False

        def download_and_prepare(self, **_):
            raise ModuleNotFoundError("No module named 'tensorflow'")

    monkeypatch.setattr(tfds, "builder", lambda name: NeedsTensorFlow())
    with refused(DataError, "tfds build lm1b --file_format=array_record", value="tfds:lm1b"):
        read("tfds:lm1b")


# --- datasets ---


class Rows(list):
    """The part of `datasets.Dataset` that is used."""

    _fingerprint = "abc"

    def __getitems__(self, indices):
        return [{"text": self[i]} for i in indices]


@pytest.fixture
def datasets(monkeypatch):
    """datasets(**functions) replaces the package, as version 4.1.0."""

    def stand(version="4.1.0", **functions):
        module = types.SimpleNamespace(__version__=version, **functions)
        monkeypatch.setitem(sys.modules, "datasets", module)
        indexed_rows._datasets_rows.cache_clear()

    return stand


def test_datasets_rows(documents, datasets, monkeypatch):
    calls = []
    rows = Rows(documents[:30])
    datasets(load_dataset=lambda *names, **fields: calls.append((names, fields)) or rows)
    assert read("datasets:owner/name/config") == documents[:30]
    assert calls[0] == (("owner/name", "config"), {"split": "train"})
    rows[:] = [None, "one", "", None, "two"]  # null rows are skipped
    assert read("datasets:with-nulls") == ["one", "two"]
    rows[:] = [None, None]
    with refused(DataError, field="config.data.text_field", value="text"):
        read("datasets:with-nulls")
    datasets("3.6.0")  # this version executes scripts
    with refused(DataError, "3.6.0", field=SOURCE, value="datasets:wikitext"):
        read("datasets:wikitext")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refused(DataError, "pip install datasets", field=SOURCE, value="datasets:wikitext"):
        read("datasets:wikitext")


@pytest.mark.parametrize("saved", ["state.json", "dataset_dict.json", ""])
def test_a_folder_of_datasets(saved, tmp_path, datasets, monkeypatch):
    """A local path with two slashes is not a hub name; a folder from save_to_disk is loaded."""
    folder = tmp_path / "my" / "set"
    folder.mkdir(parents=True)
    rows = Rows(["one", "two"])

    def load_dataset(name, configuration, split):
        assert (name, configuration, split, saved) == ("my/set/", None, "train", "")
        return rows

    def load_from_disk(name):
        assert name == "my/set/"
        return {"train": rows} if saved == "dataset_dict.json" else rows

    if saved:
        (folder / saved).write_text("{}")
    datasets(load_dataset=load_dataset, load_from_disk=load_from_disk)
    monkeypatch.chdir(tmp_path)
    assert read("datasets:my/set/") == ["one", "two"]
    if saved == "dataset_dict.json":
        with refused(DataError, "train", value="dev"):
            read("datasets:my/set/", split="dev")
