"""Documents in text, jsonl, table and parquet files, and the locations in errors."""

import gzip
import itertools
import json
import pickle
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.config import DataSection
from convbert_jax.data.errors import DataError
from convbert_jax.data.readers import text_files
from convbert_jax.data.readers.sources import open_source
from tests.refusals import refused


def read(spec, tally=None, **fields) -> list[str]:
    source = open_source(DataSection(source=str(spec), **fields), str(spec))
    return [text for unit in source.units for text in source.documents(unit, tally)]


def write(folder, files):
    """Write {name: content}; a list is written to parquet, as texts or rows."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            import pyarrow
            from pyarrow import parquet

            rows = [row if isinstance(row, dict) else {"text": row} for row in content]
            parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=10)
        else:
            data = content if isinstance(content, bytes) else content.encode()
            path.write_bytes(packed(data) if name.endswith(".gz") else data)
    return f"{'parquet' if name.endswith('.parquet') else 'text'}:{folder}/**/*.*"


def packed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


@pytest.fixture
def small_units(monkeypatch):
    """Use units of 2 kB and documents of at most 1 kB."""
    monkeypatch.setattr(text_files, "UNIT_BYTES", 2_000)
    monkeypatch.setattr(text_files, "LONGEST", 1_000)


JSONL = '{"text": "one"}\n{"text": "two"}\n'
NESTED = '{"raw": {"text": "one"}}\n{"raw": null}\n{"raw": {"text": "two"}}\n'
DOTTED = '{"raw": {"text": "one"}, "raw.text": "other"}\n'
EN = [{"tr": {"en": "one", "deep": {"er": "1"}}}, {"tr": None}, {"tr": {"en": "two", "deep": None}}]
TABLE = 'id,text,label\n1,"A first, with a comma.",pos\n2,"Two\n\nparagraphs.",neg\n\n3,,pos\n'
CELLS = ["A first, with a comma.", "Two\n\nparagraphs."]
WIKI = (
    '<doc id="1" url="u" title="First">\nFirst\n\nSome text.\nMore.\n\n</doc>\nstray\n'
    '<doc id="2" url="u" title="Second">\nSecond\n\nText.\n</doc>\n'
)


@pytest.mark.parametrize(("files", "fields", "texts"), [
    ({"a.txt": "\n\none\ntwo\n  \n\nthree\n\n\nfour"}, {}, ["one\ntwo", "three", "four"]),
    ({"a.txt": "one\ntwo\nthree\n"}, {}, ["one", "two", "three"]),
    ({"a.txt": "one\ntwo\n"}, {"format": "blank_lines"}, ["one\ntwo"]),
    ({"a.txt": "one\n\ntwo\n"}, {"format": "file"}, ["one\n\ntwo"]),
    ({"a.txt": b"\xef\xbb\xbfone\r\ntwo\r\n\r\nthr\xc3\xa9e\r\n"}, {}, ["one\ntwo", "thrée"]),
    ({"a.txt": "{x} is a set.\n{y} too.\n"}, {}, ["{x} is a set.", "{y} too."]),
    ({"a/1.txt": "one\ntwo\n", "a/b/2.txt.gz": "three\n"}, {}, ["one", "two", "three"]),
    ({"run [1]/a, b.txt": "one\n\ntwo\n"}, {}, ["one", "two"]),
    ({"a.txt": "a line\nand its end\n", "b.txt": "one\n\ntwo\n"}, {},
     ["a line\nand its end", "one", "two"]),
    ({"_SUCCESS.": "", "part-0.txt": JSONL}, {}, ["one", "two"]),
    ({"a.jsonl": '{"text": "one\\n\\ntwo"}\n\n{"text": " "}\n{"text": "three", "id": 3}\n'}, {},
     ["one\n\ntwo", "three"]),
    ({"a.jsonl": '{"text": null}\n{"body": "one", "text": "two"}\n'}, {}, ["two"]),
    ({"a.jsonl": '{"body": "one"}\n'}, {"text_field": "body"}, ["one"]),
    ({"a.jsonl": '{"text": "a\\ud800b"}\n'}, {}, ["a?b"]),
    ({"a.jsonl": NESTED}, {"text_field": "raw.text"}, ["one", "two"]),
    ({"a.jsonl": DOTTED}, {"text_field": "raw.text"}, ["other"]),
    ({"wiki.00": WIKI}, {}, ["First\n\nSome text.\nMore.", "Second\n\nText."]),
    ({"b.csv": TABLE}, {}, CELLS),
    ({"b.csv.gz": TABLE}, {}, CELLS),
    ({"b.csv": TABLE}, {"text_field": "label"}, ["pos", "neg", "pos"]),
    ({"b.csv": 'id\n"1"\n'}, {"format": "lines"}, ["id", '"1"']),
    ({"d.tsv": 'text\tid\r\nA "quoted" line\t1\r\nAnother\t2\r\n'}, {},
     ['A "quoted" line', "Another"]),
    ({"a.parquet": ["one", None, "two", "  "], "b.parquet": ["three"]}, {},
     ["one", "two", "three"]),
    ({"a.parquet": EN}, {"text_field": "tr.en"}, ["one", "two"]),
    ({"a.parquet": EN}, {"text_field": "tr.deep.er"}, ["1"]),
    ({"a.parquet": [row | {"tr.en": "x"} for row in EN]}, {"text_field": "tr.en"}, ["x"] * 3),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) and value else "")  # fmt: skip
def test_documents(files, fields, texts, tmp_path):
    assert read(write(tmp_path, files), **fields) == texts


FIRST = '{"text": "ok!"}\n'  # 16 bytes
FIELD, FORMAT = "config.data.text_field", "config.data.format"


@pytest.mark.parametrize(("files", "fields", "parts", "mentions"), [
    ({"a.jsonl": FIRST + '{"body": "one"}\n'}, {}, {"field": FIELD, "value": "text"}, [16, "body"]),
    ({"a.jsonl": FIRST + '{"text": 3}\n'}, {}, {"field": FIELD, "value": "text"}, [16, 3]),
    ({"a.jsonl": FIRST + '["text"]\n'}, {}, {"field": FIELD}, [16, "list"]),
    ({"a.jsonl": FIRST + '{"text": "one"\n'}, {}, {"field": FORMAT}, [16]),
    ({"a.jsonl": FIRST + "[" * 100_000 + "\n"}, {}, {"field": FORMAT}, [16]),
    ({"a.jsonl": FIRST + "not json\n"}, {}, {"field": FORMAT}, [16]),
    ({"a.jsonl": NESTED}, {"text_field": "raw"}, {"field": FIELD, "value": "raw"}, [0]),
    ({"a.jsonl": NESTED}, {"text_field": "raw.body"}, {"value": "raw.body"},
     ["raw.text"]),
    ({"a.json": '[{"text": "one"}, {"text": "two"}]'}, {}, {}, ["jq -c '.[]' a.json"]),
    ({"a.json": '[\n {"text": "one"}\n]'}, {}, {}, ["jq -c '.[]' a.json"]),
    ({"a.jsonl": json.dumps({"text": "word " * 500})}, {}, {"field": FORMAT}, [500, 0]),
    ({"a.csv": "id,review\n1,x\n"}, {}, {"value": "text"}, ["id, review", FIELD]),
    ({"a.csv.gz": "id,review\n1,x\n"}, {}, {"value": "text"}, ["id, review", FIELD]),
    ({"a.tsv": "id\treview\n1\tx\n"}, {}, {"value": "text"}, ["id, review", FIELD]),
    ({"a.csv": "text,label\nfine,1\none,too,many\n"}, {}, {"line": 3}, [3, 2]),
    ({"a.csv": "text,label\n"}, {}, {}, []),
    ({"a.csv": b"text,label\nfine,1\nbad \xff one,2\n"}, {}, {},
     [1, "line 3", "config.data.encoding_errors"]),
    ({"a.txt": "some text\n".encode("utf-16")}, {"encoding_errors": "replace"}, {}, ["UTF-16"]),
    ({"a.parquet": b"PAR1"}, {}, {}, ["parquet:"]),
    ({"a.txt": packed(b"one")}, {}, {}, [".gz"]),
    ({"a.zip": b"PK\x03\x04"}, {}, {}, ["zip"]),
    ({"a.zst": b"\x28\xb5\x2f\xfd"}, {}, {}, ["zstd"]),
    ({"a.txt": "hello world".encode("utf-16-le")}, {}, {}, ["UTF-16"]),
    ({"a.txt.gz": "hello world".encode("utf-16-le")}, {}, {}, ["UTF-16"]),
    ({"a.txt.gz": "hello world".encode("utf-16")}, {}, {}, ["UTF-16"]),
    ({"a.txt.gz": packed(b"one")}, {}, {}, ["gzip"]),
    ({"a.parquet": [{"id": 1, "body": "x"}]}, {}, {"field": FIELD, "value": "text"}, ["id, body"]),
    ({"a.parquet": [{"id": 1, "body": "x"}]}, {"text_field": "id"}, {"value": "id"}, ["int64"]),
    ({"a.parquet": EN}, {"text_field": "tr"}, {"value": "tr"}, []),
    ({"a.parquet": EN}, {"text_field": "tr.fr"}, {"value": "tr.fr"}, ["tr.en"]),
    ({"a.parquet": EN}, {"text_field": "tr.en.x"}, {"value": "tr.en.x"}, ["tr.en"]),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) and value else "")  # fmt: skip
def test_faults(files, fields, parts, mentions, tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "LONGEST_JSON", 1_000)
    write(tmp_path, {"b": "one\n\ntwo\n"} | files)
    (name,) = files
    kind = "parquet" if isinstance(files[name], list) else "text"
    with refused(DataError, *mentions, path=tmp_path / name, **parts) as caught:
        read(f"{kind}:{tmp_path / name}", **fields)
    assert "\n" not in str(caught.value)


def test_formats_are_not_mixed(tmp_path):
    """The format must not be chosen by the first file only, which would drop the others."""
    for number, files in enumerate((
        {"README.md": "# Mine\n\ntext\n", "a.jsonl": JSONL},
        {"AA": "<doc id=1>\nT\n</doc>\n", "novel.txt": "a\n\nb\n"},
        {"a.JSONL": JSONL, "b.txt": "one\ntwo\n"},
        {"a.txt": "one\n\ntwo\n", "b.csv": TABLE},
        {"a.tsv": TABLE, "b.csv": TABLE},
    )):  # fmt: skip
        folder = tmp_path / str(number)
        write(folder, files)
        spec = f"text:{folder}"
        with refused(
            DataError, *files, "config.data.format", field="config.data.source", value=spec
        ):
            read(spec)
        assert open_source(DataSection(format="file"), spec).format == "file"


def test_globs_links_and_missing_files(tmp_path, caplog):
    folder = tmp_path / "corpus"
    write(folder, {"a.txt": "one\ntwo\n"})
    assert read(f"text:{folder}/*.txt,{folder}/a.txt, {folder}") == ["one", "two"]
    assert not caplog.records
    (folder / "b.txt").symlink_to("a.txt")
    (folder / "all").symlink_to(".")
    (folder / "nowhere").symlink_to("absent")
    assert read(f"text:{folder}") == ["one", "two"]
    (record,) = caplog.records
    assert record.args[:2] == (str(folder), 1)
    (tmp_path / "elsewhere").symlink_to(folder)
    assert read(f"text:{tmp_path}/elsewhere/b.txt") == ["one", "two"]
    (tmp_path / "empty").mkdir()
    for kind, name in (("text", "*.txt"), ("text", "absent/file.txt"), ("text", "empty"),
                       ("parquet", "c.parquet")):  # fmt: skip
        with refused(DataError, field="config.data.source", value=f"{tmp_path}/{name}"):
            read(f"{kind}:{tmp_path}/{name}")
    for spec, mention in (("corpus/a.txt", "text:corpus/a.txt"), ("wikipedia", "docstrings")):
        with refused(DataError, mention, value=spec):
            read(spec)


def test_damaged_gzip_file(tmp_path):
    path = tmp_path / "a.txt.gz"
    whole = gzip.compress(b"some text\n" * 1000)
    path.write_bytes(whole[: len(whole) // 2])
    for fields in ({"format": "lines"}, {}):
        with refused(DataError, path=path):
            read(f"text:{path}", **fields)


def test_policies_for_text_that_is_not_utf8(tmp_path):
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "a.txt"
    path.write_bytes(b"good\ncaf\xe9 \xe9\n" + "fine \ufffd\n".encode() + b"na\xefve\n")
    with refused(DataError, "utf-8", 3, "line 2", "byte 8", path=path):
        read(f"text:{path}")
    replaced = ["good", "caf\ufffd \ufffd", "fine \ufffd", "na\ufffdve"]
    for policy, texts, skipped in (
        ("replace", replaced, 0),
        ("skip", ["good", "fine \ufffd"], 2),
    ):
        tally = Counter()
        assert read(f"text:{path}", tally, encoding_errors=policy) == texts
        assert tally == {"undecodable": 3, "skipped": skipped}
    column = pyarrow.array([b"good", b"caf\xe9"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    write(tmp_path, {"a.csv": b"text,label\ngood,1\ncaf\xe9,2\n"})
    for spec in (f"parquet:{tmp_path}/a.parquet", f"text:{tmp_path}/a.csv"):
        with refused(DataError, "config.data.encoding_errors", path=spec.partition(":")[2]):
            read(spec)
        tally = Counter()
        assert read(spec, tally, encoding_errors="skip") == ["good"]
        assert tally["undecodable"] == 1
        assert read(spec, encoding_errors="replace") == ["good", "caf\ufffd"]


def test_parquet_text_of_any_kind(tmp_path):
    """Includes dictionary-encoded text (pandas categories) and string views (polars)."""
    import pyarrow
    from pyarrow import parquet

    text = pyarrow.array(["one", None, "two"])
    for number, kind in enumerate((
        *(pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    )):  # fmt: skip
        path = tmp_path / f"{number}.parquet"
        parquet.write_table(pyarrow.table({"text": text.cast(kind)}), path)
        assert read(f"parquet:{path}") == ["one", "two"]


# --- Units ---


def test_long_documents_are_cut_at_white_space_or_between_characters(tmp_path, small_units):
    text = " ".join(f"word{i}" for i in range(2000))
    parts = read(write(tmp_path, {"a.txt": text}), format="file")
    assert max(map(len, parts)) <= 1_000
    assert " ".join(parts) == text
    spec = write(tmp_path, {"a.txt": "é漢" * 3000})
    assert "".join(read(spec, format="lines")) == "é漢" * 3000


FORMATS = {
    "lines": "{}\n",
    "blank_lines": "{}\nsecond\n\n",
    "jsonl": '{{"text": "{}"}}\n',
    "wikiextractor": '<doc id="1">\n{}\n\nparagraph\n</doc>\n',
}


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=15)
@given(sizes=st.lists(st.integers(1, 900), min_size=1, max_size=40), seed=st.integers(0, 99))
def test_units_cut_a_file_between_documents(tmp_path_factory, name, sizes, seed):
    """For any unit size, the units together give the same documents as one unit."""
    path = tmp_path_factory.mktemp("units") / "a.txt"
    texts = [f"é{i} " + "x" * size for i, size in enumerate(sizes)]
    path.write_text("".join(map(FORMATS[name].format, texts)), encoding="utf-8")
    whole = read(f"text:{path}", format=name)
    assert len(whole) == len(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "UNIT_BYTES", 100 + 37 * seed)
        source = open_source(DataSection(format=name), f"text:{path}")
        parts = [list(source.documents(unit)) for unit in source.units]
    assert [text for part in parts for text in part] == whole
    assert all(parts)
    covered = [(p.start, p.stop) for unit in source.units for p in unit.parts]
    assert covered[0][0] == 0
    assert covered[-1][1] == path.stat().st_size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(covered))


def test_units_of_many_and_of_large_files(tmp_path, documents, small_units, monkeypatch):
    files = {f"{i:03d}.txt": f"document {i} " + "x" * 150 for i in range(100)}
    source = open_source(DataSection(format="file"), write(tmp_path / "many", files))
    assert 5 <= len(source.units) <= 12  # small files share a unit
    texts = [text for unit in source.units for text in source.documents(unit)]
    assert [text.split()[1] for text in texts] == [str(i) for i in range(100)]
    files = {"a.parquet": documents[:50], "b.parquet": documents[50:100]}
    source = open_source(DataSection(), write(tmp_path / "rows", files))
    assert len(source.units) > 4  # one unit per group of row groups
    copy = pickle.loads(pickle.dumps(source))
    texts = [text for unit in copy.units for text in copy.documents(unit)]
    assert texts == documents[:100]
    monkeypatch.setattr(text_files, "UNIT_BYTES", 10)
    monkeypatch.setattr(text_files, "MOST_UNITS", 7)
    spec = write(tmp_path / "large", {"a.txt": "some words\n" * 1000})
    assert len(open_source(DataSection(format="lines"), spec).units) <= 7


def test_fingerprint_is_of_the_content(tmp_path):
    def fingerprint(folder, **fields):
        return open_source(DataSection(**fields), f"text:{tmp_path}/{folder}").fingerprint

    for folder in ("a", "b"):
        write(tmp_path / folder, {"x.txt": "one\n", "sub/y.txt": "two\n" * 100_000})
    first = fingerprint("a")
    assert first == fingerprint("b")
    assert first != fingerprint("a", format="file")
    write(tmp_path, {"b/sub/y.txt": "two\n" * 99_999 + "too\n"})
    assert first != fingerprint("b")
    (tmp_path / "a" / "x.txt").rename(tmp_path / "a" / "z.txt")
    assert first != fingerprint("a")


def test_real_wikipedia(real_data):
    texts = read(f"text:{real_data}/pretrain/enwiki-2015/valid/*.gz")
    assert len(texts) == 242
    assert not any("<doc" in text or "</doc>" in text for text in texts)
