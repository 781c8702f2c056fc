"""Text that is not UTF-8: read with the configured encoding, which errors suggest."""

# ruff: noqa: RUF001
import gzip
import json

import pytest

from convbert_jax.config import ConfigError, DataSection, ParallelSection, from_config_dict
from convbert_jax.config.data import TaskSection
from convbert_jax.data.errors import DataError
from convbert_jax.data.readers import text_files
from convbert_jax.data.readers.encodings import guess_encoding
from convbert_jax.data.readers.pair_sources import open_pairs
from convbert_jax.data.readers.rows import Fault
from convbert_jax.data.readers.sources import open_source
from convbert_jax.data.tasks.own_task import open_task
from tests.refusals import refused

# Two artificial sentences each.
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
JSONL = '{{"text": {0}, "label": "yes"}}\n{{"text": {1}, "label": "yes"}}\n'
FILES = {
    "lines.txt": "{0}\n{1}\n",
    "a.txt.gz": "{0}\n{1}\n",
    "blank_lines.txt": "{0}\n\n{1}",
    "a.jsonl": JSONL,
    "unnamed": JSONL,
    "a.csv": 'text,label\n"{0}",yes\n"{1}",yes\n',
    "a.tsv": "text\tlabel\n{0}\tyes\n{1}\tyes\n",
}


def read(path, **fields) -> list[str]:
    source = open_source(DataSection(**fields), f"text:{path}")
    return [text for unit in source.units for text in source.documents(unit)]


@pytest.mark.parametrize("encoding", TEXTS)
def test_a_file_is_read_by_its_encoding(encoding, tmp_path, monkeypatch):
    first, second = texts = TEXTS[encoding]
    assert guess_encoding("\n".join(texts).encode(encoding)) == encoding
    for name, pattern in FILES.items():
        path = tmp_path / name
        written = (json.dumps(t, ensure_ascii=False) for t in texts) if pattern == JSONL else texts
        data = pattern.format(*written).encode(encoding)
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        assert read(path, encoding=encoding) == list(texts)
        with refused(DataError, f"config.data.encoding={encoding}", path=path):
            read(path)
    section = TaskSection(folder=str(tmp_path), train="a.csv", heldout_fraction=0.0)
    with refused(DataError, encoding, path=path.with_name("a.csv"), line=2):
        open_task(section)

    for name in ("a.aa", "a.bb"):
        (tmp_path / name).write_bytes(f"{first}\n{second}\n".encode(encoding))
    (tmp_path / "pairs.csv").write_bytes(f"source,target\n{first},{second}\n".encode(encoding))
    for spec, pair in (
        (f"parallel:{tmp_path}/a.aa,{tmp_path}/a.bb", (first, first)),
        (f"csv:{tmp_path}/pairs.csv", (first, second)),
    ):
        source = open_pairs(spec, ParallelSection(encoding=encoding))
        assert next(source.pairs(source.units[0]))[1] == pair
        source = open_pairs(spec, ParallelSection())
        _, fault = next(source.pairs(source.units[0]))
        assert isinstance(fault, Fault)
        assert encoding in fault.problem or "csv:" in spec

    monkeypatch.setattr(text_files, "UNIT_BYTES", 2_000)
    monkeypatch.setattr(text_files, "LONGEST", 1_000)
    word = max(first.split(), key=len)
    path.write_bytes(f"{word * 1000}\n{second}\n".encode(encoding) * 3)
    found = read(path, format="lines", encoding=encoding)
    assert "".join(found) == (word * 1000 + second) * 3


def test_little_text_has_some_guess():
    for data in (b"", b"\xff", b"plain", "naïve Ä".encode()):
        guess = guess_encoding(data)
        assert guess == "" or data.decode(guess) is not None


def test_the_first_bad_place_and_the_policies(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("今天天气很好\n孩子们在学校\n".encode("gbk") + b"\xff\n")
    with refused(DataError, "gbk", "line 3", "byte 26", path=path):
        read(path, encoding="gbk")
    fields = {"encoding": "gbk", "format": "lines"}
    assert read(path, **fields, encoding_errors="skip") == ["今天天气很好", "孩子们在学校"]
    assert read(path, **fields, encoding_errors="replace")[2] == "\ufffd"


def test_encodings_that_cannot_be_read_are_refused():
    recipes = {"data": "replaced_token", "parallel": "translation", "task": "finetune"}
    for name, recipe in recipes.items():
        for wrong in ("latin-17", "hex", "utf-16", "cp037"):
            with refused(ConfigError, f"config.{name}.encoding", wrong):
                from_config_dict({"recipe": recipe, name: {"encoding": wrong}})
