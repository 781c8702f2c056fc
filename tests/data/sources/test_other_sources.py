"""Sources besides text files: docstrings, parquet, the hub, TFDS and `datasets`."""

import errno
import gzip
import os
import pickle
import random
import shutil
import sys
import types
from collections import Counter

import pyarrow
import pytest
from pyarrow import parquet

from convbert_jax.config import DataSection
from convbert_jax.data.errors import DataError
from convbert_jax.data.sources import docstrings, indexed_rows
from convbert_jax.data.sources import documents as documents_module
from convbert_jax.data.sources.source import open_source


def read(source, tally=None) -> list[str]:
    return [text for unit in source.units for text in source.documents(unit, tally)]


# --- Docstrings ---


def test_docstrings_are_there_in_a_fixed_order(monkeypatch):
    monkeypatch.setattr(docstrings, "SOURCE_BYTES", 3_000_000)
    monkeypatch.setattr(docstrings, "UNIT_SOURCE_BYTES", 1_000_000)
    source = open_source(DataSection(), "docstrings")
    assert len(source.units) >= 2
    first = read(source)
    assert first == read(pickle.loads(pickle.dumps(source)))
    assert sum(map(len, first)) > 200_000
    assert all(len(text) >= docstrings.SHORTEST // 2 for text in first)
    assert not any(text.startswith(">>>") or "\n>>>" in text for text in first)


def test_docstrings_of_a_module():
    code = b'''
"""Module."""
class A:
    """Class."""
    def f(self):
        "Method."
        return """no docstring"""
x = """none either"""
'''
    assert list(docstrings._docstrings(code)) == ["Module.", "Class.", "Method."]
    assert list(docstrings._docstrings(b'"""Broken."""\ndef (:')) == []


# --- Parquet ---


def write_parquet(path, texts, field="text", row_group_size=10):
    table = pyarrow.table({"id": list(range(len(texts))), field: texts})
    parquet.write_table(table, path, row_group_size=row_group_size)


def test_parquet_by_row_groups(tmp_path, documents, monkeypatch):
    monkeypatch.setattr(documents_module, "UNIT_BYTES", 3_000)
    write_parquet(tmp_path / "a.parquet", documents[:50])
    write_parquet(tmp_path / "b.parquet", [*documents[50:100], None, "  "])
    source = open_source(DataSection(), f"parquet:{tmp_path}/*.parquet")
    assert len(source.units) > 4
    assert read(pickle.loads(pickle.dumps(source))) == documents[:100]


@pytest.mark.parametrize("kind", [
    pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(),
    pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
])  # fmt: skip
def test_parquet_text_of_any_kind(kind, tmp_path):
    """Categories of pandas and views of polars were refused as no text."""
    path = tmp_path / "a.parquet"
    parquet.write_table(
        pyarrow.table({"text": pyarrow.array(["one", None, "two"]).cast(kind)}), path
    )
    assert read(open_source(DataSection(), f"parquet:{path}")) == ["one", "two"]


def test_a_nested_column_of_parquet(tmp_path):
    """A column with a dot in its name comes before a field of another column."""
    path = tmp_path / "a.parquet"
    rows = [{"translation": {"en": "one", "deep": {"er": "1"}}}, {"translation": None}]
    rows += [{"translation": {"en": "two", "deep": None}}]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, path, row_group_size=2)
    spec = f"parquet:{path}"
    assert read(open_source(DataSection(text_field="translation.en"), spec)) == ["one", "two"]
    assert read(open_source(DataSection(text_field="translation.deep.er"), spec)) == ["1"]
    for field in ("translation", "translation.fr", "translation.en.x"):
        with pytest.raises(DataError, match=rf"'{field}'.*\ben\b"):
            open_source(DataSection(text_field=field), spec)
    table = table.append_column("translation.en", pyarrow.array(["a", "b", "c"]))
    parquet.write_table(table, path)
    assert read(open_source(DataSection(text_field="translation.en"), spec)) == ["a", "b", "c"]


def test_parquet_faults_are_named(tmp_path, documents):
    write_parquet(tmp_path / "a.parquet", documents[:5], field="body")
    with pytest.raises(DataError, match=r"no column 'text' \(it has: id, body\)"):
        open_source(DataSection(), f"parquet:{tmp_path}/a.parquet")
    with pytest.raises(DataError, match="is int64, not text"):
        open_source(DataSection(text_field="id"), f"parquet:{tmp_path}/a.parquet")
    (tmp_path / "b.parquet").write_text("no parquet")
    with pytest.raises(DataError, match="is not a parquet file"):
        open_source(DataSection(), f"parquet:{tmp_path}/b.parquet")
    with pytest.raises(DataError, match="No file matches"):
        open_source(DataSection(), f"parquet:{tmp_path}/c.parquet")


def test_parquet_text_that_is_not_utf8(tmp_path):
    column = pyarrow.array([b"good", b"caf\xe9"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    spec = f"parquet:{tmp_path}/a.parquet"
    with pytest.raises(DataError, match="not UTF-8 in row group 0"):
        read(open_source(DataSection(), spec))
    tally = Counter()
    assert read(open_source(DataSection(encoding_errors="skip"), spec), tally) == ["good"]
    assert tally == {"undecodable": 1, "skipped": 1}


# --- Hub ---


def test_hub_files_are_downloaded_and_read(tmp_path, documents, monkeypatch):
    import huggingface_hub

    (tmp_path / "20231101.en").mkdir()
    (tmp_path / "20231101.de").mkdir()
    write_parquet(tmp_path / "20231101.en" / "train-0.parquet", documents[:20])
    write_parquet(tmp_path / "20231101.de" / "train-0.parquet", documents[20:40])
    calls = []

    def snapshot_download(repository, **arguments):
        calls.append((repository, arguments))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    source = open_source(DataSection(), "hub:wikimedia/wikipedia/20231101.en/*.parquet")
    assert read(source) == documents[:20]
    pattern = "20231101.en/*.parquet"
    assert calls == [("wikimedia/wikipedia", {"repo_type": "dataset", "allow_patterns": pattern})]
    with pytest.raises(DataError, match=r"No file of wikimedia/wikipedia.* matches 'x/"):
        open_source(DataSection(), "hub:wikimedia/wikipedia/x/*.parquet")


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.json.gz", "a.csv"])
def test_hub_files_of_text(name, tmp_path, monkeypatch):
    """The other files of a repository are not documents."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    text = {"jsonl": '{"text": "one"}\n{"text": "two"}\n', "csv": "text\none\ntwo\n"}
    text = text.get("jsonl" if "json" in name else name[-3:], "one\ntwo\n")
    data = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_bytes(data)
    (tmp_path / "data" / "README.md").write_text("No document.\n")
    for pattern in (f"data/{name}", "data/*"):
        assert read(open_source(DataSection(), f"hub:owner/name/{pattern}")) == ["one", "two"]
    write_parquet(tmp_path / "data" / "b.parquet", ["three"])
    with pytest.raises(DataError, match=rf"b\.parquet.*{name}"):
        open_source(DataSection(), "hub:owner/name/data/*")
    with pytest.raises(DataError, match=r"'data/\*\*\.md\*'"):
        open_source(DataSection(), "hub:owner/name/data/**.md*")


def test_hub_without_network(monkeypatch):
    import huggingface_hub

    def no_network(*_, **__):
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    with pytest.raises(DataError, match=r"could not be downloaded \(ConnectionError\).*network"):
        open_source(DataSection(), "hub:wikimedia/wikipedia/20231101.en/*.parquet")
    with pytest.raises(DataError, match="hub:OWNER/NAME/FILE-GLOB"):
        open_source(DataSection(), "hub:wikimedia/wikipedia")
    with pytest.raises(DataError, match=r"allenai/c4/en/\*\.json\.zst"):
        open_source(DataSection(), "hub:allenai/c4/en/*.json.zst")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        PermissionError(errno.EACCES, os.strerror(errno.EACCES)),
        RuntimeError("File reconstruction error: IO Error: No space left on device (os error 28)"),
    ],
)
def test_a_hub_cache_that_cannot_be_written(error, monkeypatch):
    """The default corpus has tens of GB, and the cache is in the home folder."""
    import huggingface_hub

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    says = r"could not be kept in .* \((No space|Permission).*HF_HOME"
    with pytest.raises(DataError, match=says):
        open_source(DataSection(), "hub:wikimedia/wikipedia/20231101.en/*.parquet")


# --- TFDS ---


@pytest.fixture(scope="module")
def tfds_folder(documents, tmp_path_factory):
    """A data set of our own, prepared as array_record without TensorFlow."""
    import numpy as np
    import tensorflow_datasets as tfds

    class SmallCorpus(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {"text": tfds.features.Text(), "number": tfds.features.Scalar(np.int64)}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, download_manager):
            return {"train": self._generate_examples(0), "test": self._generate_examples(200)}

        def _generate_examples(self, start):
            for i, text in enumerate(documents[start : start + 150]):
                yield i, {"text": text, "number": i}

    builder = SmallCorpus(data_dir=str(tmp_path_factory.mktemp("tfds")), file_format="array_record")
    builder.download_and_prepare()
    return builder.data_dir


def test_tfds_directory(tfds_folder, documents, monkeypatch):
    monkeypatch.setattr(documents_module, "UNIT_BYTES", 4_000)
    source = open_source(DataSection(), f"tfds:{tfds_folder}")
    assert len(source.units) > 4
    assert sorted(read(pickle.loads(pickle.dumps(source)))) == sorted(documents[:150])
    test = open_source(DataSection(split="test"), f"tfds:{tfds_folder}")
    assert sorted(read(test)) == sorted(documents[200:350])
    assert test.fingerprint != source.fingerprint
    assert {path.parent.as_posix() for path in source.files} == {str(tfds_folder)}


def test_tfds_faults_are_named(tfds_folder, tmp_path):
    with pytest.raises(DataError, match=r"no split 'dev' \(it has: "):
        open_source(DataSection(split="dev"), f"tfds:{tfds_folder}")
    for field in ("body", "number"):
        with pytest.raises(DataError, match=f"no text in '{field}'"):
            open_source(DataSection(text_field=field), f"tfds:{tfds_folder}")
    with pytest.raises(DataError, match=r"no dataset_info\.json"):
        open_source(DataSection(), f"tfds:{tmp_path}")
    with pytest.raises(DataError, match="knows no 'no_such_data_set'"):
        open_source(DataSection(), "tfds:no_such_data_set")


@pytest.mark.parametrize("name", ["dataset_info.json", "features.json", "array_record", "parquet"])
def test_damaged_data_sets_are_one_sentence(name, tfds_folder, documents, tmp_path):
    if name == "parquet":
        path = tmp_path / "a.parquet"
        write_parquet(path, documents)
        spec = f"parquet:{path}"
    else:
        folder = shutil.copytree(tfds_folder, tmp_path / "1.0.0")
        (path,) = folder.glob(f"*train*{name}*") if name == "array_record" else [folder / name]
        spec = f"tfds:{folder}"
    content, rng, refused = path.read_bytes(), random.Random(0), 0
    damages = [b"", b"[]", b"null", b"\xff", b"[" * 50_000]
    damages += [content[: rng.randrange(len(content))] for _ in range(4)]
    for place in (rng.randrange(len(content)) for _ in range(20)):
        damages.append(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
    for damaged in damages:
        path.write_bytes(damaged)
        indexed_rows.open_prepared.cache_clear()
        try:
            read(open_source(DataSection(), spec))
        except DataError as error:
            refused += "\n" not in str(error)
    assert refused >= 9


def test_tfds_name_that_needs_tensorflow(monkeypatch):
    import tensorflow_datasets as tfds

    class NeedsTensorFlow:
        def is_prepared(self):
            return False

        def download_and_prepare(self, **_):
            raise ModuleNotFoundError("No module named 'tensorflow'")

    monkeypatch.setattr(tfds, "builder", lambda name: NeedsTensorFlow())
    command = r"tfds build lm1b --file_format=array_record\) and name its folder"
    with pytest.raises(DataError, match=command):
        open_source(DataSection(), "tfds:lm1b")


# --- datasets ---


def test_datasets_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pip install datasets"):
        open_source(DataSection(), "datasets:wikitext")


def test_a_version_of_datasets_that_executes_scripts_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(__version__="3.6.0"))
    with pytest.raises(DataError, match=r"3\.6\.0"):
        open_source(DataSection(), "datasets:wikitext")


def test_datasets_rows(documents, monkeypatch):
    class Rows:
        _fingerprint = "abc"

        def __len__(self):
            return 30

        def __getitems__(self, indices):
            return [{"text": documents[i]} for i in indices]

    calls = []

    def load_dataset(*arguments, **fields):
        calls.append((arguments, fields))
        return Rows()

    module = types.SimpleNamespace(__version__="4.1.0", load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", module)
    source = open_source(DataSection(split="train"), "datasets:owner/name/config")
    assert read(source) == documents[:30]
    assert calls[0] == (("owner/name", "config"), {"split": "train"})


class Rows(list):
    """As much of `datasets.Dataset` as is used."""

    _fingerprint = "abc"

    def __getitems__(self, indices):
        return [{"text": self[i]} for i in indices]


def test_null_rows_of_datasets_are_left_out(monkeypatch):
    """One among the rows that tell the size ended in a traceback, a first one in a refusal."""
    rows = Rows([None, "one", "", None, "two"])
    module = types.SimpleNamespace(__version__="4.1.0", load_dataset=lambda *arguments, split: rows)
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert read(open_source(DataSection(), "datasets:with-nulls")) == ["one", "two"]
    rows[:] = [None, None]
    with pytest.raises(DataError, match="no text in 'text'"):
        open_source(DataSection(), "datasets:with-nulls")


@pytest.mark.parametrize("saved", ["state.json", "dataset_dict.json", ""])
def test_a_folder_of_datasets(saved, tmp_path, monkeypatch):
    """A path with two slashes was taken for OWNER/NAME/CONFIG, one of save_to_disk for files."""
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
    module = types.SimpleNamespace(
        __version__="4.1.0", load_dataset=load_dataset, load_from_disk=load_from_disk
    )
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.chdir(tmp_path)
    indexed_rows._datasets_rows.cache_clear()
    assert read(open_source(DataSection(), "datasets:my/set/")) == ["one", "two"]
    if saved == "dataset_dict.json":
        with pytest.raises(DataError, match=r"no split 'dev' \(it has: train\)"):
            open_source(DataSection(split="dev"), "datasets:my/set/")
