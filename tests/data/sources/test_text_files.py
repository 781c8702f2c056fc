import gzip
import itertools
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.config import DataSection
from convbert_jax.data.errors import DataError
from convbert_jax.data.sources import documents as documents_module
from convbert_jax.data.sources import text_files, text_formats
from convbert_jax.data.sources.source import open_source


def read(spec, tally=None, **fields) -> list[str]:
    source = open_source(DataSection(source=str(spec), **fields), str(spec))
    return [text for unit in source.units for text in source.documents(unit, tally)]


@pytest.fixture
def small_units(monkeypatch):
    """Units of 2 kB and documents of at most 1 kB."""
    monkeypatch.setattr(documents_module, "UNIT_BYTES", 2_000)
    for module in (documents_module, text_files, text_formats):
        monkeypatch.setattr(module, "LONGEST", 1_000)


def test_blank_lines_separate_documents(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n\none\ntwo\n  \n\nthree\n\n\nfour")
    assert read(f"text:{path}") == ["one\ntwo", "three", "four"]


def test_lines_are_documents_where_no_line_is_blank(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\nthree\n")
    assert read(f"text:{path}") == ["one", "two", "three"]
    assert read(f"text:{path}", format="blank_lines") == ["one\ntwo\nthree"]
    assert read(f"text:{path}", format="file") == ["one\ntwo\nthree"]


def test_windows_line_ends_and_byte_order_mark(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\nthr\xc3\xa9e\r\n")
    assert read(f"text:{path}") == ["one\ntwo", "thrée"]


def test_jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\\n\\ntwo"}\n\n{"text": " "}\n{"text": "three", "id": 3}\n')
    assert read(f"text:{path}") == ["one\n\ntwo", "three"]
    path.write_text('{"body": "one"}\n')
    assert read(f"text:{path}", text_field="body") == ["one"]
    path.write_text('{"text": null}\n{"text": "one"}\n')  # as parquet has it
    assert read(f"text:{path}") == ["one"]


def test_a_nested_column_of_jsonl(tmp_path):
    """A column with a dot in its name comes before a field of another column."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"raw": {"text": "one"}}\n{"raw": null}\n{"raw": {"text": "two"}}\n')
    assert read(f"text:{path}", text_field="raw.text") == ["one", "two"]
    path.write_text('{"raw": {"text": "one"}, "raw.text": "other"}\n')
    assert read(f"text:{path}", text_field="raw.text") == ["other"]
    with pytest.raises(DataError, match=r"'raw' at byte 0"):
        read(f"text:{path}", text_field="raw")
    path.write_text('{"raw": {"text": "one"}}\n')
    with pytest.raises(DataError, match=r"'raw\.body' at byte 0 \(it has: raw\.text\)"):
        read(f"text:{path}", text_field="raw.body")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "one"}', r"no text in 'text' at byte 16 \(it has: body\)"),
        ('{"text": 3}', "no text in 'text' at byte 16 but 3; mend it"),
        ('["text"]', r"\(it has: list\)"),
        ('{"text": "one"', "no JSON object at byte 16"),
        ("not json", "no JSON object at byte 16"),
    ],
)
def test_jsonl_faults_are_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "good"}}\n{line}\n'.replace('"good"', '"ok!"'))
    with pytest.raises(DataError, match=message):
        read(f"text:{path}")


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_list_is_named(tmp_path, indent):
    """It was said to have no text in 'text', as it had: list."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "one"}, {"text": "two"}], indent=indent))
    with pytest.raises(DataError, match=r"a\.json is a JSON list.*jq -c '\.\[\]' a\.json"):
        read(f"text:{path}")


def test_json_escapes_of_half_characters_are_no_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800b"}\n')
    assert read(f"text:{path}") == ["a?b"]


def test_wikiextractor_keeps_the_title_and_drops_the_marks(tmp_path):
    path = tmp_path / "wiki_00"
    path.write_text(
        '<doc id="1" url="u" title="First">\nFirst\n\nSome text.\nMore.\n\n</doc>\nstray\n'
        '<doc id="2" url="u" title="Second">\nSecond\n\nText.\n</doc>\n'
    )
    assert read(f"text:{path}") == ["First\n\nSome text.\nMore.", "Second\n\nText."]


def test_gzip_files_globs_and_folders(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "1.txt").write_text("one\ntwo\n")
    (tmp_path / "a" / "b" / "2.txt.gz").write_bytes(gzip.compress(b"three\n"))
    everything = ["one", "two", "three"]
    assert read(f"text:{tmp_path}/a") == everything
    assert read(f"text:{tmp_path}/**/*.txt*") == everything
    assert read(f"text:{tmp_path}/a/b/*.gz,{tmp_path}/a/*.txt,{tmp_path}/a/1.txt") == everything


def test_links_do_not_repeat_files(tmp_path, caplog):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("one\ntwo\n")
    (folder / "b.txt").symlink_to("a.txt")
    (folder / "all").symlink_to(".")
    (folder / "nowhere").symlink_to("absent")
    assert read(f"text:{folder}") == ["one", "two"]
    assert f"{folder} names 1 files by" in caplog.text
    (tmp_path / "elsewhere").symlink_to(folder)
    assert read(f"text:{tmp_path}/elsewhere/b.txt") == ["one", "two"]


def test_a_name_with_brackets_is_a_name(tmp_path):
    folder = tmp_path / "run [1]"
    folder.mkdir()
    (folder / "a.txt").write_text("one\n\ntwo\n")
    assert read(f"text:{folder}/a.txt") == read(f"text:{folder}") == ["one", "two"]
    (folder / "a, b.txt").write_text("three\n")
    assert read(f"text:{folder}/a, b.txt") == ["three"]


def test_missing_files_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    for pattern in ("*.txt", "absent/file.txt", "empty"):
        with pytest.raises(DataError, match=f"No file matches '{tmp_path}/"):
            open_source(DataSection(), f"text:{tmp_path}/{pattern}".replace("empty", "empty/*"))
    with pytest.raises(DataError, match=r"write text:corpus/a\.txt"):
        open_source(DataSection(), "corpus/a.txt")
    with pytest.raises(DataError, match="choose one of: docstrings, text:"):
        open_source(DataSection(), "wikipedia")


def test_damaged_gzip_file(tmp_path):
    path = tmp_path / "a.txt.gz"
    whole = gzip.compress(b"some text\n" * 1000)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"a\.txt\.gz"):
        read(f"text:{path}", format="lines")


def test_utf16_is_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("some text\n".encode("utf-16"))
    for policy in ("error", "replace"):
        with pytest.raises(DataError, match="UTF-16"):
            read(f"text:{path}", format="lines", encoding_errors=policy)


def test_policies_for_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("good\ncaf\xe9 \xe9\nfine \ufffd\nna\xefve\n".encode("latin-1", "replace"))
    path.write_bytes(path.read_bytes().replace(b"fine ?", "fine \ufffd".encode()))
    with pytest.raises(DataError, match=r"not utf-8 in 3 places, first in line 2 \(byte 8\)"):
        read(f"text:{path}")
    tally = Counter()
    replaced = ["good", "caf\ufffd \ufffd", "fine \ufffd", "na\ufffdve"]
    assert read(f"text:{path}", tally, encoding_errors="replace") == replaced
    assert tally == {"undecodable": 3, "skipped": 0}
    tally = Counter()
    assert read(f"text:{path}", tally, encoding_errors="skip") == ["good", "fine \ufffd"]
    assert tally == {"undecodable": 3, "skipped": 2}


def test_long_documents_are_cut_at_white_space(tmp_path, small_units):
    path = tmp_path / "a.txt"
    text = " ".join(f"word{i}" for i in range(2000))
    path.write_text(text)
    parts = read(f"text:{path}", format="file")
    assert max(map(len, parts)) <= 1_000
    assert " ".join(parts) == text


def test_text_without_any_white_space_is_cut_between_characters(tmp_path, small_units):
    path = tmp_path / "a.txt"
    path.write_text("é漢" * 3000, encoding="utf-8")
    assert "".join(read(f"text:{path}", format="lines")) == "é漢" * 3000


def test_a_long_line_is_no_jsonl(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "LONGEST_JSON", 1_000)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "word " * 500}) + "\n")
    with pytest.raises(DataError, match="line of over 500 bytes at byte 0"):
        read(f"text:{path}")


FORMATS = {
    "lines": lambda texts: "".join(f"{text}\n" for text in texts),
    "blank_lines": lambda texts: "".join(f"{text}\nsecond\n\n" for text in texts),
    "jsonl": lambda texts: "".join(json.dumps({"text": text}) + "\n" for text in texts),
    "wikiextractor": lambda texts: "".join(
        f'<doc id="1">\n{text}\n\nparagraph\n</doc>\n' for text in texts
    ),
}


@pytest.mark.parametrize("name", list(FORMATS))
@settings(deadline=None, max_examples=15)
@given(sizes=st.lists(st.integers(1, 900), min_size=1, max_size=40), seed=st.integers(0, 99))
def test_units_cut_a_file_between_documents(tmp_path_factory, name, sizes, seed):
    """Whatever the unit size, the units together give what one unit gives."""
    path = tmp_path_factory.mktemp("units") / "a.txt"
    texts = [f"é{i} " + "x" * size for i, size in enumerate(sizes)]
    path.write_text(FORMATS[name](texts), encoding="utf-8")
    whole = read(f"text:{path}", format=name)
    assert len(whole) == len(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "UNIT_BYTES", 100 + 37 * seed)
        source = open_source(DataSection(format=name), f"text:{path}")
        parts = [list(source.documents(unit)) for unit in source.units]
    assert [text for part in parts for text in part] == whole
    assert all(parts)
    covered = [(p.start, p.stop) for unit in source.units for p in unit.parts]
    assert covered[0][0] == 0
    assert covered[-1][1] == path.stat().st_size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(covered))


def test_small_files_share_a_unit(tmp_path, small_units):
    for i in range(100):
        (tmp_path / f"{i:03d}.txt").write_text(f"document {i} " + "x" * 150)
    source = open_source(DataSection(format="file"), f"text:{tmp_path}")
    assert 5 <= len(source.units) <= 12
    texts = [text for unit in source.units for text in source.documents(unit)]
    assert [text.split()[1] for text in texts] == [str(i) for i in range(100)]


def test_units_grow_so_that_they_stay_few(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "UNIT_BYTES", 10)
    monkeypatch.setattr(documents_module, "MOST_UNITS", 7)
    path = tmp_path / "a.txt"
    path.write_text("some words\n" * 1000)
    assert len(open_source(DataSection(format="lines"), f"text:{path}").units) <= 7


def test_fingerprint_is_of_the_content(tmp_path):
    def fingerprint(folder, **fields):
        return open_source(DataSection(**fields), f"text:{tmp_path}/{folder}").fingerprint

    for folder in ("a", "b"):
        (tmp_path / folder / "sub").mkdir(parents=True)
        (tmp_path / folder / "x.txt").write_text("one\n")
        (tmp_path / folder / "sub" / "y.txt").write_text("two\n" * 100_000)
    first = fingerprint("a")
    assert first == fingerprint("b")
    assert first != fingerprint("a", format="file")
    (tmp_path / "b" / "sub" / "y.txt").write_text("two\n" * 99_999 + "too\n")
    assert first != fingerprint("b")
    (tmp_path / "a" / "x.txt").rename(tmp_path / "a" / "z.txt")
    assert first != fingerprint("a")


def test_real_wikipedia(real_data):
    spec = f"text:{real_data}/pretrain/enwiki-2015/valid/*.gz"
    texts = read(spec)
    assert len(texts) == 242
    assert not any("<doc" in text or "</doc>" in text for text in texts)


# --- Tables ---

TABLE = 'id,text,label\n1,"A first, with a comma.",pos\n2,"Two\n\nparagraphs.",neg\n\n3,,pos\n'


def test_one_column_of_a_table_is_the_text(tmp_path):
    path = tmp_path / "b.csv"
    path.write_text(TABLE)
    assert read(f"text:{path}") == ["A first, with a comma.", "Two\n\nparagraphs."]
    assert read(f"text:{path}", text_field="label") == ["pos", "neg", "pos"]
    assert read(f"text:{path}", format="lines")[1] == '1,"A first, with a comma.",pos'
    packed = tmp_path / "c.csv.gz"
    packed.write_bytes(gzip.compress(TABLE.encode()))
    assert len(read(f"text:{tmp_path}")) == 4
    tabs = tmp_path / "d.tsv"
    tabs.write_text('text\tid\r\nA "quoted" line\t1\r\nAnother\t2\r\n')
    assert read(f"text:{tabs}") == ['A "quoted" line', "Another"]


@pytest.mark.parametrize("name", ["b.csv", "b.tsv", "b.csv.gz"])
def test_a_table_without_the_column_is_refused_when_it_is_opened(tmp_path, name):
    path = tmp_path / name
    text = TABLE.replace("text", "review")
    if ".csv" not in name:
        text = text.replace(",", "\t").replace('"', "").replace("\n\n", " ")
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    with pytest.raises(
        DataError, match=r"no column 'text' \(it has: id, review, label\); set conf"
    ):
        open_source(DataSection(), f"text:{path}")


def test_tables_and_texts_are_not_mixed(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.csv").write_text(TABLE)
    with pytest.raises(DataError, match=r"formats \(a\.txt: blank_lines, b\.csv: csv\)"):
        open_source(DataSection(), f"text:{tmp_path}")
    assert read(f"text:{tmp_path}/a.txt") == ["one", "two"]
    (tmp_path / "a.txt").rename(tmp_path / "a.tsv")
    with pytest.raises(DataError, match=r"formats \(a\.tsv: tsv, b\.csv: csv\)"):
        open_source(DataSection(), f"text:{tmp_path}")


JSONL = '{"text": "one"}\n{"text": "two"}\n'


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"README.md": "# Mine\n\ntext\n", "a.jsonl": JSONL}, "README.md: blank_lines, a.jsonl: j"),
        ({"AA": "<doc id=1>\nT\n</doc>\n", "novel.txt": "a\n\nb\n"}, "AA: wikiextractor, novel.t"),
        ({"a.JSONL": JSONL, "b.txt": "one\ntwo\n"}, "a.JSONL: jsonl, b.txt: lines"),
    ],
)
def test_formats_are_not_mixed(tmp_path, files, says):
    """The first file alone once decided: a wiki dump lost all the others, without a word."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=f"several formats .{says}"):
        open_source(DataSection(), f"text:{tmp_path}")
    assert open_source(DataSection(format="file"), f"text:{tmp_path}").format == "file"


def test_empty_files_have_no_format_and_jsonl_is_known_by_its_content(tmp_path):
    (tmp_path / "_SUCCESS").write_text("")
    (tmp_path / "part-0.txt").write_text(JSONL)
    assert read(f"text:{tmp_path}") == ["one", "two"]
    (tmp_path / "part-0.txt").write_text("{x} is a set.\n{y} too.\n")
    assert read(f"text:{tmp_path}") == ["{x} is a set.", "{y} too."]


def test_of_files_with_and_without_blank_lines_the_former_decide(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("a line\nand its end\n")
    (tmp_path / "b.txt").write_text("one\n\ntwo\n")
    assert read(f"text:{tmp_path}") == ["a line\nand its end", "one", "two"]
    assert "b.txt has blank lines between its texts and a.txt has none" in caplog.text


def test_faults_of_tables(tmp_path):
    path = tmp_path / "b.csv"
    path.write_text("text,label\nfine,1\none,too,many\n")
    with pytest.raises(DataError, match=r"b\.csv line 3 has 3 columns instead of 2"):
        read(f"text:{path}")
    path.write_text("text,label\n")
    with pytest.raises(DataError, match="has no rows"):
        read(f"text:{path}")
    path.write_bytes(b"text,label\nfine,1\nbad \xff one,2\n")
    with pytest.raises(DataError, match=r"not utf-8 in 1 places, first in line 3.*encoding_errors"):
        read(f"text:{path}")
    tally = Counter()
    assert read(f"text:{path}", tally, encoding_errors="replace") == ["fine", "bad \ufffd one"]
    assert read(f"text:{path}", encoding_errors="skip") == ["fine"]
    assert tally["undecodable"] == 1


def test_deep_json_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n' + "[" * 100_000 + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl has no JSON object at byte 16"):
        read(f"text:{path}")


def packed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


@pytest.mark.parametrize(
    ("name", "head", "advice"),
    [
        ("a.parquet", b"PAR1", "is a parquet file and no text; name it as parquet:"),
        (
            "a.txt",
            packed(b"one"),
            "is a gzip file and no text; give it a name that ends in",
        ),
        ("a.zip", b"PK\x03\x04", "is a zip file and no text; unpack it"),
        ("a.zst", b"\x28\xb5\x2f\xfd", "is a zstd file"),
        ("a.txt", "hello world".encode("utf-16-le"), "is no text, or UTF-16 without its mark"),
        ("a.txt.gz", packed("hello world".encode("utf-16-le")), "is no text, or UTF-16 without"),
        ("a.txt.gz", packed("hello world".encode("utf-16")), "is UTF-16, not UTF-8"),
        ("a.txt.gz", packed(packed(b"one")), "is a gzip file and no text; unpack it"),
    ],
)
def test_files_that_are_no_text_are_refused(tmp_path, name, head, advice):
    (tmp_path / "0.txt").write_text("one\n\ntwo\n")
    (tmp_path / name).write_bytes(head)
    with pytest.raises(DataError, match=advice):
        open_source(DataSection(encoding_errors="replace"), f"text:{tmp_path}")
