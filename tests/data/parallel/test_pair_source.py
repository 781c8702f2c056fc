"""Reading pairs: the same pairs from every format, each once for any unit size."""

import csv
import gzip
import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.config import ParallelSection
from convbert_jax.data import pair_worker
from convbert_jax.data.errors import DataError, Location
from convbert_jax.data.readers import pair_sources, text_files
from convbert_jax.data.readers.pair_sources import open_pairs
from convbert_jax.data.readers.rows import Fault
from tests.data.parallel.conftest import make_pairs, write_files
from tests.data.tfds_sets import prepare_tfds
from tests.refusals import refused

SECTION = ParallelSection()
PAIRS = make_pairs(60, seed=1)
LINE = st.text(st.characters(exclude_characters="\n\r\ufeff", exclude_categories=("Cs",)))
COLUMNS = "config.parallel.columns"


def read(source):
    return [pair for unit in source.units for pair in source.pairs(unit)]


def as_csv(*rows):
    file = io.StringIO()
    csv.writer(file).writerows(rows)
    return file.getvalue()


def as_rows(names, rows=PAIRS):
    """Yield rows as dicts; dotted names become nested dicts."""
    for row in rows:
        found = {}
        for name, value in zip(names, row, strict=False):
            outer, _, inner = name.rpartition(".")
            (found.setdefault(outer, {}) if outer else found)[inner] = value
        yield found


def write(folder, kind, content):
    """Write one text file, or three parquet files with row groups; return their source."""
    if kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        rows = list(content)
        step = -(-len(rows) // 3)
        for number, first in enumerate(range(0, len(rows), step)):
            table = pyarrow.Table.from_pylist(rows[first : first + step])
            parquet.write_table(table, folder / f"{number}.parquet", row_group_size=6)
        return f"parquet:{folder}/*.parquet"
    text = content if isinstance(content, str) else "".join(json.dumps(r) + "\n" for r in content)
    path = folder / f"a.{kind}.gz"
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    return f"{kind}:{path}"


NESTED = ("tr.de", "tr.en")
TSV = "".join(f"{s}\t{t}\tmore\n" for s, t in PAIRS)
# kind: source, columns, number of the first pair
SOURCES = {
    "parallel": (lambda folder: write_files(folder, PAIRS), (), 1),
    "compressed": (lambda folder: write_files(folder, PAIRS, compressed=True), (), 1),
    "tsv": (lambda folder: write(folder, "tsv", TSV), (), 1),
    "tsv with names": (lambda folder: write(folder, "tsv", "s\tt\tx\n" + TSV), ("s", "t"), 2),
    "jsonl": (lambda folder: write(folder, "jsonl", as_rows(("source", "target"))), (), 1),
    "nested jsonl": (lambda folder: write(folder, "jsonl", as_rows(NESTED)), NESTED, 1),
    "csv": (lambda folder: write(folder, "csv", as_csv(("s", "x.y"), *PAIRS)), ("s", "x.y"), 2),
    "csv without names": (lambda folder: write(folder, "csv", as_csv(*PAIRS)), ("0", "1"), 1),
    "parquet": (lambda folder: write(folder, "parquet", as_rows(("source", "target"))), (), 1),
    "nested parquet": (lambda folder: write(folder, "parquet", as_rows(NESTED)), NESTED, 1),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_pair_comes_once_in_order(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(pair_sources, "MARK_LINES", 4)
    make, columns, first = SOURCES[kind]
    spec, section = make(tmp_path), ParallelSection(columns=columns)
    for unit_bytes in (10, 700, 10**6):
        monkeypatch.setattr(text_files, "UNIT_BYTES", unit_bytes)
        source = open_pairs(spec, section)
        found = read(source)
        assert [pair for _, pair in found] == PAIRS
        assert [number for number, _ in found] == list(range(first, first + len(PAIRS)))
        assert len(source.units) > 1 or unit_bytes > 700 or "csv" in kind
        assert {path.name for path in source.files} == {path.name for path in tmp_path.iterdir()}
    if kind == "parquet":  # rows are numbered across all files
        for number, place in ((1, ("0", 1)), (20, ("0", 20)), (47, ("2", 7))):
            path = tmp_path / f"{place[0]}.parquet"
            assert source.place(number) == Location(path, place[1], "row")
            assert str(source.place(number)) == f"{path} row {place[1]}"
    if columns and not columns[0].isdecimal() and "jsonl" not in kind:
        with refused(DataError, field=COLUMNS, value="fr"):
            open_pairs(spec, ParallelSection(columns=(columns[0], "fr")))


@settings(max_examples=25)
@given(pairs=st.lists(st.tuples(LINE, LINE), min_size=1, max_size=12))
def test_lines_end_at_line_feeds_alone(pairs, tmp_path_factory):
    source = write_files(tmp_path_factory.mktemp("lines"), pairs)
    assert [pair for _, pair in read(open_pairs(source, SECTION))] == pairs


NAMES = ("source", "target", "more")
THREE = [("a", "b", "c"), ("d", "e", " ")]


@pytest.mark.parametrize("kind", ["parallel", "tsv", "tsv with names", "jsonl", "list", "parquet"])
def test_further_references_are_of_all_targets_alone(kind, tmp_path):
    """A blank reference is omitted in every format."""
    tsv = "".join("\t".join(row) + "\n" for row in THREE)
    lists = [{"source": s, "target": targets} for s, *targets in THREE]
    spec, columns = {
        "tsv": lambda: (write(tmp_path, "tsv", tsv), ("0", "1", "2")),
        "tsv with names": lambda: (write(tmp_path, "tsv", "s\tt\tu\n" + tsv), ("s", "t", "u")),
        "jsonl": lambda: (write(tmp_path, "jsonl", as_rows(NAMES, THREE)), NAMES),
        "list": lambda: (write(tmp_path, "jsonl", lists), ()),
        "parquet": lambda: (write(tmp_path, "parquet", lists), ()),
        "parallel": lambda: (f"parallel:{tmp_path}/x,{tmp_path}/y,{tmp_path}/z", ()),
    }[kind]()
    if kind == "parallel":
        for name, texts in zip("xyz", zip(*THREE, strict=True), strict=True):
            (tmp_path / name).write_text("".join(text + "\n" for text in texts))
        with refused(DataError, field="config.parallel.validation_source", value=spec):
            open_pairs(spec, SECTION)
    section = ParallelSection(columns=columns)
    found = [pair for _, pair in read(open_pairs(spec, section, "all"))]
    assert found == [("a", "b", "c"), ("d", "e")]
    first = [pair for _, pair in read(open_pairs(spec, section, "first"))]
    assert first == [("a", "b"), ("d", "e")]


# Rows for each source kind: a valid pair, or names that the error mentions.
@pytest.mark.parametrize(("kind", "content", "rows"), [
    ("csv", b'source,target\n"a, ""b""\nc",d\nonly one\nx,\xe9\ne,f\n',
     {2: ('a, "b"\nc', "d"), 4: ["1", "2"], 5: ["utf-8"], 6: ("e", "f")}),
    ("jsonl", b'{"source": "a", "target": "b"}\nno json\n[]\n{"source": "a"}\n\xff\n'
     b'{"target": "d", "source": "c"}',
     {1: ("a", "b"), 2: ["JSON"], 3: ["object"], 4: ["'target'"], 5: ["utf-8"], 6: ("c", "d")}),
    ("jsonl", b'{"source": ["One.", "Two."], "target": ["Both."]}\n{"source": [], "target": "x"}\n'
     b'{"source": ["One.", 2], "target": "x"}\n{"source": "x", "target": ["This.", "Or this."]}\n',
     {1: ("One. Two.", "Both."), 2: ["'source'"], 3: ["'source'"], 4: ["2", "'target'"]}),
    ("tsv", b"a\tb\nonly one\n", {1: ("a", "b"), 2: ["1", "2"]}),
], ids=range(4))  # fmt: skip
def test_faults_are_in_the_place_of_their_rows(kind, content, rows, tmp_path):
    path = tmp_path / f"a.{kind}"
    path.write_bytes(content)
    source = open_pairs(f"{kind}:{path}", SECTION)
    found = dict(read(source))
    assert list(found) == list(rows)
    for number, expected in rows.items():
        if isinstance(expected, tuple):
            assert found[number] == expected
            continue
        assert isinstance(found[number], Fault)
        assert all(mention in found[number].problem for mention in expected)
        for text in (0, 1):
            assert source.place(number, text) == Location(path, number)


def test_a_fault_names_the_file_that_it_is_in(tmp_path):
    spec = write_files(tmp_path, PAIRS[:2])
    (tmp_path / "train.bb").write_bytes(b"one\nl\xe0\n")
    source = open_pairs(spec, SECTION)
    _, (number, fault) = read(source)
    assert (number, fault.file) == (2, 1)
    assert source.place(number, fault.file) == Location(tmp_path / "train.bb", 2)
    assert source.place(number) == Location(tmp_path / "train.aa", 2)


def test_parquet_rows_without_text_are_faults(tmp_path):
    rows = [{"source": "a", "target": "b"}, {"source": "c", "target": None}]
    spec = write(tmp_path, "parquet", rows * 3)
    (_, pair), (_, fault), *_ = read(open_pairs(spec, SECTION))
    assert pair == ("a", "b")
    assert isinstance(fault, Fault)
    spec = write(tmp_path, "parquet", [{"source": "a", "target": 1}])
    with refused(DataError, "int64", field=COLUMNS, value="target"):
        open_pairs(spec, SECTION)


def test_sources_that_cannot_be_read(tmp_path, make_config):
    for spec in ("train.de,train.en", "parallel:", "parallel:a.de", "tsv:a,b"):
        with refused(DataError, value=spec) as caught:
            open_pairs(spec, SECTION)
        assert "\n" not in str(caught.value)
    with refused(DataError, path="no.de"):
        open_pairs("parallel:no.de,no.en", SECTION)
    with refused(DataError, "dataset_info.json", path="nowhere"):
        open_pairs("tfds:nowhere", SECTION)
    spec = write_files(tmp_path, PAIRS)
    other = tmp_path / "train.bb"
    other.write_text("one\ntwo\n")
    with refused(DataError, 60, other, 2, path=tmp_path / "train.aa"):
        _ = open_pairs(spec, SECTION).units
    for encoding in ("utf-16", "utf-16-le"):
        # Half of the lines are valid UTF-8, with NUL bytes between the letters.
        other.write_bytes("one word\nand two\n".encode(encoding))
        with refused(DataError, "UTF-16", path=other):
            open_pairs(spec, SECTION)
    for path in (tmp_path / "train.aa", other):
        path.write_text("")
    with refused(DataError, spec, path=tmp_path / "train.aa"):
        _ = open_pairs(spec, SECTION).units
    spec = write_files(tmp_path, PAIRS, compressed=True)
    path = tmp_path / "train.bb.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with refused(DataError, path=path):
        _ = open_pairs(spec, SECTION).units
    (tmp_path / "a.tsv").write_text("one\tein\ntwo\tzwei\n")
    config = make_config(f"jsonl:{tmp_path}/a.tsv")  # every line is invalid
    source = open_pairs(config.parallel.source, config.parallel)
    with refused(DataError, "tsv line 1", "JSON", field="config.parallel.source"):
        pair_worker.make(config, tmp_path, source)


def test_the_fingerprint_is_of_the_content(tmp_path):
    prints = []
    for name, pairs in (("here", PAIRS), ("there", PAIRS), ("other", PAIRS[::-1])):
        (tmp_path / name).mkdir()
        spec = write_files(tmp_path / name, pairs)
        prints.append(open_pairs(spec, SECTION).fingerprint)
    a, b = spec.removeprefix("parallel:").split(",")
    prints.append(open_pairs(f"parallel:{b},{a}", SECTION).fingerprint)
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_rows_of_tfds(tmp_path):
    import tensorflow_datasets as tfds

    features = tfds.features.Translation(languages=("de", "en"))
    rows = [{"de": source, "en": target} for source, target in PAIRS]
    spec = f"tfds:{prepare_tfds(tmp_path, features, {'train': rows})}"
    section = ParallelSection(columns=("de", "en"))
    source = open_pairs(spec, section)
    assert sorted(pair for _, pair in read(source)) == sorted(PAIRS)
    assert source.place(3) == Location(spec, 3, "row")
    with refused(DataError, "'source'", field=COLUMNS, line=1):
        open_pairs(spec, SECTION)
    with refused(DataError, value="dev"):
        open_pairs(f"{spec}#dev", section)
