"""Pairs out of files: the same whatever the format, each once whatever the units."""

import csv
import gzip
import json

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from convbert_jax.config import ParallelSection
from convbert_jax.data.errors import DataError
from convbert_jax.data.parallel import pair_source, vocabularies
from convbert_jax.data.parallel.pair_source import open_pairs
from convbert_jax.data.sources import documents
from convbert_jax.data.tables.table_formats import Fault
from tests.data.parallel.conftest import make_pairs, write_files

SECTION = ParallelSection()
PAIRS = make_pairs(60, seed=1)
LINE = st.text(st.characters(exclude_characters="\n\r\ufeff", exclude_categories=("Cs",)))


def read(source):
    return [pair for unit in source.units for pair in source.pairs(unit)]


def write_tsv(folder, names=""):
    (folder / "a.tsv").write_text(names + "".join(f"{s}\t{t}\tmore\n" for s, t in PAIRS))
    return f"tsv:{folder / 'a.tsv'}"


def write_jsonl(folder):
    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"source": s, "target": t}) + "\n" for s, t in PAIRS)
    return f"jsonl:{folder / 'a.jsonl.gz'}"


def write_csv(folder, *header):
    with open(folder / "a.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([*filter(None, [header]), *PAIRS])
    return f"csv:{folder / 'a.csv'}"


def write_parquet(folder, nested=False):
    """Three files of several row groups."""
    for number in range(3):
        rows = [{"source": s, "target": t} for s, t in PAIRS[20 * number :][:20]]
        rows = [{"translation": row} for row in rows] if nested else rows
        path = folder / f"{number}.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=6)
    return f"parquet:{folder}/*.parquet"


def write_nested_jsonl(folder):
    with open(folder / "a.jsonl", "w", encoding="utf-8") as file:
        for source, target in PAIRS:
            file.write(json.dumps({"translation": {"de": source, "en": target}}) + "\n")
    return f"jsonl:{folder / 'a.jsonl'}"


NESTED = ("translation.source", "translation.target")
WRITERS = {
    "parallel": (lambda folder: write_files(folder, PAIRS), ()),
    "compressed": (lambda folder: write_files(folder, PAIRS, compressed=True), ()),
    "tsv": (write_tsv, ()),
    "tsv with names": (lambda folder: write_tsv(folder, "de\ten\tx\n"), ("de", "en")),
    "jsonl": (write_jsonl, ()),
    "nested jsonl": (write_nested_jsonl, ("translation.de", "translation.en")),
    "csv": (lambda folder: write_csv(folder, "source", "x.y"), ("source", "x.y")),
    "csv without names": (write_csv, ("0", "1")),
    "parquet": (write_parquet, ()),
    "nested parquet": (lambda folder: write_parquet(folder, nested=True), NESTED),
}
WITH_HEADER = ("tsv with names", "csv")


@pytest.mark.parametrize("unit_bytes", [10, 700, 10**6])
@pytest.mark.parametrize("kind", WRITERS)
def test_every_pair_comes_once_in_order(kind, unit_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "UNIT_BYTES", unit_bytes)
    monkeypatch.setattr(pair_source, "MARK_LINES", 4)
    writer, columns = WRITERS[kind]
    source = open_pairs(writer(tmp_path), ParallelSection(columns=columns))
    found = read(source)
    assert [pair for _, pair in found] == PAIRS
    first = 2 if kind in WITH_HEADER else 1
    assert [number for number, _ in found] == list(range(first, first + len(PAIRS)))
    assert len(source.units) > 1 or unit_bytes > 700 or "csv" in kind
    assert {path.name for path in source.files} == {path.name for path in tmp_path.iterdir()}


@settings(max_examples=25, deadline=None)
@given(pairs=st.lists(st.tuples(LINE, LINE), min_size=1, max_size=12))
def test_lines_end_at_line_feeds_alone(pairs, tmp_path_factory):
    source = write_files(tmp_path_factory.mktemp("lines"), pairs)
    assert [pair for _, pair in read(open_pairs(source, SECTION))] == pairs


def test_a_source_may_be_a_list_of_sentences_and_a_target_is_one_text(tmp_path):
    rows = [
        {"source": ["One.", "Two."], "target": ["Both."]},
        {"source": ["One."], "target": "Only."},
        {"source": [], "target": "None."},
        {"source": ["One.", 2], "target": "Mixed."},
        {"source": "Text.", "target": ["This.", "Or this."]},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [pair for _, pair in read(open_pairs(f"jsonl:{tmp_path / 'a.jsonl'}", SECTION))]
    assert found[:2] == [("One. Two.", "Both."), ("One.", "Only.")]
    assert [isinstance(pair, Fault) for pair in found] == [False, False, True, True, True]
    assert found[4].problem == "has a list of 2 texts in 'target', of which a target is one"


@pytest.mark.parametrize("kind", ["parallel", "tsv", "tsv with names", "jsonl", "jsonl, a list"])
def test_further_references_are_of_all_targets_alone(kind, tmp_path):
    """A blank one is none, whatever the format."""
    rows = [("a", "b", "c"), ("d", "e", " ")]
    columns = {"tsv": ("0", "1", "2"), "tsv with names": ("s", "t", "u")}.get(kind, ())
    path = tmp_path / "a.tsv"
    if kind == "parallel":
        for name, texts in zip("xyz", zip(*rows, strict=True), strict=True):
            (tmp_path / name).write_text("".join(text + "\n" for text in texts))
        spec = f"parallel:{tmp_path}/x,{tmp_path}/y,{tmp_path}/z"
    elif kind.startswith("tsv"):
        header = "s\tt\tu\n" if "names" in kind else ""
        path.write_text(header + "".join("\t".join(row) + "\n" for row in rows))
        spec = f"tsv:{path}"
    else:
        names = ("source", "target", "more")
        dicts = [dict(zip(names, row, strict=True)) for row in rows]
        if kind == "jsonl":
            columns = names
        else:
            dicts = [{"source": s, "target": targets} for s, *targets in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in dicts))
        spec = f"jsonl:{path}"
    section = ParallelSection(columns=columns)
    found = [pair for _, pair in read(open_pairs(spec, section, "all"))]
    assert found == [("a", "b", "c"), ("d", "e")]
    found = [pair for _, pair in read(open_pairs(spec, section, "first"))]
    assert found == [("a", "b"), ("d", "e")]


def test_unequal_line_counts_are_both_named(tmp_path):
    source = write_files(tmp_path, PAIRS)
    (tmp_path / "train.bb").write_text("one\ntwo\n")
    with pytest.raises(DataError, match=r"train\.aa has 60 lines but .*train\.bb has 2 lines"):
        _ = open_pairs(source, SECTION).units


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("train.de,train.en", "write parallel:FILE,FILE"),
        ("parallel:", "write parallel:FILE,FILE"),
        ("parallel:a.de", "names 1 files"),
        ("tsv:a,b", "names 2 files"),
        ("parallel:no.de,no.en", r"no\.de, of the pairs 'parallel:no\.de,no\.en', is no file"),
        ("tfds:nowhere", "no dataset_info.json"),
    ],
)
def test_what_is_no_source_is_one_sentence(spec, says):
    with pytest.raises(DataError, match=says) as error:
        open_pairs(spec, SECTION)
    assert "\n" not in str(error.value)


def test_a_column_that_is_not_there(tmp_path):
    source = write_tsv(tmp_path, "de\ten\tx\n")
    with pytest.raises(DataError, match=r"no column 'fr'.*de, en, x"):
        open_pairs(source, ParallelSection(columns=("de", "fr")))


@pytest.mark.parametrize("kind", ["csv", "parquet", "nested parquet"])
def test_the_columns_of_a_table_are_named_where_one_is_not_there(kind, tmp_path):
    spec = WRITERS[kind][0](tmp_path)
    known = r"source, x\.y" if kind == "csv" else r"\w.*source, .*target"
    with pytest.raises(DataError, match=rf"'fr' \(.*{known}"):
        open_pairs(spec, ParallelSection(columns=("source" if kind == "csv" else "fr", "fr")))


def test_cells_of_csv_may_hold_commas_quotes_and_line_ends(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'source,target\n"a, ""b""\nc",d\nonly one\nx,\xe9\ne,f\n')
    source = open_pairs(f"csv:{path}", SECTION)
    (two, pair), (four, short), (five, bad), (six, last) = read(source)
    assert [two, four, five, six] == [2, 4, 5, 6]
    assert (pair, last) == (('a, "b"\nc', "d"), ("e", "f"))
    assert isinstance(short, Fault)
    assert isinstance(bad, Fault)
    assert str(source.place(4)) == f"{path} line 4"


def test_rows_of_parquet_are_numbered_through_all_files(tmp_path):
    source = open_pairs(write_parquet(tmp_path), SECTION)
    assert str(source.place(1)) == f"{tmp_path}/0.parquet row 1"
    assert str(source.place(20)) == f"{tmp_path}/0.parquet row 20"
    assert str(source.place(47)) == f"{tmp_path}/2.parquet row 7"


def test_parquet_rows_without_text_are_faults(tmp_path):
    targets = [["one", "two"], None, ["three"]]
    table = pyarrow.table({"source": ["a", "b", "c"], "target": targets})
    parquet.write_table(table, tmp_path / "a.parquet")
    spec = f"parquet:{tmp_path}/a.parquet"
    found = [pair for _, pair in read(open_pairs(spec, SECTION, "all"))]
    assert found[::2] == [("a", "one", "two"), ("c", "three")]
    assert isinstance(found[1], Fault)
    parquet.write_table(pyarrow.table({"source": ["a"], "target": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"'target'.*int64"):
        open_pairs(spec, SECTION)


def test_bad_lines_are_faults_in_their_place(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"source": "a", "target": "b"}\nno json\n[]\n{"source": "a"}\n\xff\n'
        b'{"target": "d", "source": "c"}'
    )
    found = read(open_pairs(f"jsonl:{path}", SECTION))
    assert [pair for _, pair in found if not isinstance(pair, Fault)] == [("a", "b"), ("c", "d")]
    problems = [pair.problem for _, pair in found if isinstance(pair, Fault)]
    assert len(found) == 6
    for problem, says in zip(problems, ("JSON", "object", "'target'", "utf-8"), strict=True):
        assert says in problem
    (tmp_path / "a.tsv").write_text("a\tb\nonly one\n")
    (_, pair), (_, fault) = read(open_pairs(f"tsv:{tmp_path / 'a.tsv'}", SECTION))
    assert pair == ("a", "b")
    assert "has 1 columns" in fault.problem


def test_a_fault_names_the_file_that_it_is_in(tmp_path):
    source = write_files(tmp_path, PAIRS[:2])
    (tmp_path / "train.bb").write_bytes(b"one\nl\xe0\n")
    source = open_pairs(source, SECTION)
    _, (number, fault) = read(source)
    assert (number, fault.file) == (2, 1)
    assert str(source.place(number, fault.file)) == f"{tmp_path / 'train.bb'} line 2"
    assert str(source.place(number)) == f"{tmp_path / 'train.aa'} line 2"
    table = open_pairs(write_tsv(tmp_path), SECTION)
    assert str(table.place(3, 1)) == str(table.place(3)) == f"{tmp_path / 'a.tsv'} line 3"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_files_that_are_no_text_are_refused(encoding, tmp_path):
    """Half of the lines of such a file are valid UTF-8, with zeros between the letters."""
    (tmp_path / "a.en").write_bytes("one word\nand two\n".encode(encoding))
    (tmp_path / "a.de").write_text("ein Wort\nund zwei\n")
    with pytest.raises(DataError, match=r"a\.en is .*UTF-16"):
        open_pairs(f"parallel:{tmp_path}/a.en,{tmp_path}/a.de", ParallelSection())


def test_what_is_wrong_with_all_lines_is_told(tmp_path, make_config):
    (tmp_path / "a.tsv").write_text("one\tein\ntwo\tzwei\n")
    config = make_config(f"jsonl:{tmp_path}/a.tsv")
    source = open_pairs(config.parallel.source, config.parallel)
    with pytest.raises(DataError, match=r"to make a vocabulary of .*tsv line 1 is not JSON"):
        vocabularies.make(config, tmp_path, source)


def test_a_cut_gzip_file_is_one_sentence(tmp_path):
    source = write_files(tmp_path, PAIRS, compressed=True)
    whole = (tmp_path / "train.bb.gz").read_bytes()
    (tmp_path / "train.bb.gz").write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"train\.bb\.gz is a damaged gzip file"):
        _ = open_pairs(source, SECTION).units


def test_the_fingerprint_is_of_the_content(tmp_path):
    prints = set()
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        prints.add(open_pairs(write_files(tmp_path / name, PAIRS), SECTION).fingerprint)
    assert len(prints) == 1
    spec = write_files(tmp_path, PAIRS[::-1])
    prints.add(open_pairs(spec, SECTION).fingerprint)
    a, b = spec.removeprefix("parallel:").split(",")
    prints.add(open_pairs(f"parallel:{b},{a}", SECTION).fingerprint)
    assert len(prints) == 3


def test_rows_of_tfds(tmp_path):
    import tensorflow_datasets as tfds

    class SmallPairs(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.Translation(languages=("de", "en"))
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, download_manager):
            return {"train": self._generate_examples(PAIRS)}

        def _generate_examples(self, pairs):
            for i, (source, target) in enumerate(pairs):
                yield i, {"de": source, "en": target}

    builder = SmallPairs(data_dir=str(tmp_path), file_format="array_record")
    builder.download_and_prepare()
    section = ParallelSection(columns=("de", "en"))
    source = open_pairs(f"tfds:{builder.data_dir}", section)
    assert sorted(pair for _, pair in read(source)) == sorted(PAIRS)
    assert str(source.place(3)).endswith(" row 3")
    with pytest.raises(DataError, match=r"row 1 has no text in 'source'"):
        open_pairs(f"tfds:{builder.data_dir}", SECTION)
    with pytest.raises(DataError, match="no split 'dev'"):
        open_pairs(f"tfds:{builder.data_dir}#dev", section)
