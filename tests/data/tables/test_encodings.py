"""Text that is not UTF-8: read by the encoding that the config names, which errors suggest."""

# ruff: noqa: RUF001

import csv
import gzip
import io
import json

import pytest

from convbert_jax.config import ConfigError, DataSection, ParallelSection, from_config_dict
from convbert_jax.config.own_task import TaskSection
from convbert_jax.data.errors import DataError
from convbert_jax.data.parallel.pair_source import open_pairs
from convbert_jax.data.sources import documents as documents_module
from convbert_jax.data.sources import text_files, text_formats
from convbert_jax.data.sources.source import open_source
from convbert_jax.data.tables.encodings import guess_encoding
from convbert_jax.data.tables.table_formats import Fault
from convbert_jax.data.tasks.own_task import open_task

# Two made-up sentences each.
TEXTS = {
    "cp1252": ("Die Äpfel in Köln sind schön.", "Le café est fermé cet été."),
    "cp1250": ("Kůň příliš žlutý běží přes řeku.", "Źrebię śpi a łąka pachnie."),
    "iso-8859-2": ("Kůň příliš žlutý běží přes řeku.", "Tři šťastné žáby."),
    "cp1254": ("Şu güzel çocuk ağacın altında.", "İstanbul'da yağmur yağıyor."),
    "cp1251": ("Мама читала газету у окна.", "Папа варил суп."),
    "koi8-r": ("Мама читала газету у окна.", "Папа варил суп."),
    "cp1253": ("Η μικρή αλεπού τρέχει στο δάσος.", "Το σπίτι είναι μεγάλο."),
    "cp1255": ("הילד הולך לבית הספר בבוקר.", "השמש זורחת היום."),
    "cp1256": ("يذهب الولد إلى المدرسة في الصباح.", "الشمس مشرقة اليوم."),
    "cp874": ("เด็กไปโรงเรียนตอนเช้า", "วันนี้อากาศดีมาก"),
    "gbk": ("今天天气很好，我们去公园散步。", "孩子们在学校里读书。"),
    "big5": ("今天天氣很好，我們去公園散步。", "孩子們在學校裡讀書。"),
    "shift_jis": ("今日は天気がいいので公園へ行きます。", "カメラを買いました。"),
    "euc_jp": ("今日は天気がいいので公園へ行きます。", "カメラを買いました。"),
    "euc_kr": ("오늘은 날씨가 좋아서 공원에 갑니다.", "아이들이 학교에서 책을 읽습니다."),
}


@pytest.fixture(params=TEXTS)
def encoding(request):
    return request.param


def as_csv(texts) -> str:
    file = io.StringIO()
    csv.writer(file).writerows([("text", "label"), *((text, "yes") for text in texts)])
    return file.getvalue()


def as_jsonl(texts) -> str:
    return "".join(
        json.dumps({"text": t, "label": "yes"}, ensure_ascii=False) + "\n" for t in texts
    )


FILES = {
    "lines.txt": lambda texts: "".join(f"{text}\n" for text in texts),
    "a.txt.gz": lambda texts: "".join(f"{text}\n" for text in texts),
    "blank_lines.txt": lambda texts: "\n\n".join(texts),
    "a.jsonl": as_jsonl,
    "unnamed": as_jsonl,
    "a.csv": as_csv,
    "a.tsv": lambda texts: "text\tlabel\n" + "".join(f"{text}\tyes\n" for text in texts),
}


def read(path, **fields) -> list[str]:
    source = open_source(DataSection(**fields), f"text:{path}")
    return [text for unit in source.units for text in source.documents(unit)]


def test_the_encoding_of_a_text_is_guessed(encoding):
    assert guess_encoding("\n".join(TEXTS[encoding]).encode(encoding)) == encoding


@pytest.mark.parametrize("data", [b"", b"\xff", b"plain", "naïve Ä".encode()])
def test_little_text_has_some_guess(data):
    guess = guess_encoding(data)
    assert guess == "" or data.decode(guess) is not None


@pytest.mark.parametrize("name", FILES)
def test_a_corpus_is_read_by_its_encoding(encoding, name, tmp_path):
    texts, path = list(TEXTS[encoding]), tmp_path / name
    data = FILES[name](texts).encode(encoding)
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert read(path, encoding=encoding) == texts
    with pytest.raises(DataError) as error:
        read(path)
    assert str(path) in str(error.value)
    assert f"config.data.encoding={encoding}" in str(error.value)


def test_units_and_long_lines_are_cut_between_characters(encoding, tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "UNIT_BYTES", 2_000)
    for module in (documents_module, text_files, text_formats):
        monkeypatch.setattr(module, "LONGEST", 1_000)
    path = tmp_path / "a.txt"
    word = max(TEXTS[encoding][0].split(), key=len)
    path.write_bytes(f"{word * 1000}\n{TEXTS[encoding][1]}\n".encode(encoding) * 3)
    found = read(path, format="lines", encoding=encoding)
    assert "".join(found) == (word * 1000 + TEXTS[encoding][1]) * 3


def test_the_first_bad_place_and_the_policies(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("今天天气很好\n孩子们在学校\n".encode("gbk") + b"\xff\n")
    with pytest.raises(DataError, match=r"not gbk in 1 places, first in line 3 \(byte 26\)"):
        read(path, encoding="gbk")
    fields = {"encoding": "gbk", "format": "lines"}
    assert read(path, **fields, encoding_errors="skip") == ["今天天气很好", "孩子们在学校"]
    assert read(path, **fields, encoding_errors="replace")[2] == "\ufffd"


def test_pairs_are_read_by_their_encoding(encoding, tmp_path):
    first, second = TEXTS[encoding]
    for name in ("a.aa", "a.bb"):
        (tmp_path / name).write_bytes(f"{first}\n{second}\n".encode(encoding))
    (tmp_path / "a.csv").write_bytes(f"source,target\n{first},{second}\n".encode(encoding))
    for spec in (f"parallel:{tmp_path}/a.aa,{tmp_path}/a.bb", f"csv:{tmp_path}/a.csv"):
        source = open_pairs(spec, ParallelSection(encoding=encoding))
        found = [pair for _, pair in source.pairs(source.units[0])]
        assert found[0] == (first, second if "csv" in spec else first)
        source = open_pairs(spec, ParallelSection())
        _, fault = next(source.pairs(source.units[0]))
        assert isinstance(fault, Fault)
    source = open_pairs(f"parallel:{tmp_path}/a.aa,{tmp_path}/a.bb", ParallelSection())
    assert encoding in next(source.pairs(source.units[0]))[1].problem


def test_fine_tuning_names_the_likely_encoding(encoding, tmp_path):
    (tmp_path / "a.csv").write_bytes(as_csv(TEXTS[encoding]).encode(encoding))
    section = TaskSection(folder=str(tmp_path), train="a.csv", heldout_fraction=0.0)
    with pytest.raises(DataError, match=rf"line 2 .*{encoding}"):
        open_task(section)


@pytest.mark.parametrize("name", ["data", "parallel", "task"])
@pytest.mark.parametrize("unreadable", ["latin-17", "hex", "utf-16", "cp037"])
def test_encodings_that_cannot_be_read_are_refused(name, unreadable):
    recipe = {"data": "replaced_token", "parallel": "translation", "task": "finetune"}[name]
    with pytest.raises(ConfigError, match=rf"config\.{name}\.encoding='{unreadable}'"):
        from_config_dict({"recipe": recipe, name: {"encoding": unreadable}})
