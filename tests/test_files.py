"""The package's files: any content gives a value or a one-sentence error."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax import storage
from tests.refusals import refused

REMEDY = "put a copy back"


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=200) | st.text(max_size=80).map(str.encode))
def test_any_bytes_are_a_value_or_one_line(content):
    message = "one line"
    try:
        storage.parse_json(content)
    except ValueError as error:
        message = str(error)
    assert message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not JSON"),
        (b'{"a": ', "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b"1" * 10_000, "Exceeds the limit"),
        (b'"\\ud800"', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
    ],
    ids=["empty", "cut", "encoding", "lists", "objects", "digits", "surrogate", "surrogate key"],
)
def test_damage_is_named(content, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        storage.parse_json(content)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(storage.DamagedFileError) as raised:
        storage.read_json(tmp_path / "config.json", remedy=REMEDY)
    assert str(raised.value).startswith(str(tmp_path / "config.json"))
    assert str(raised.value).endswith(f"; {REMEDY}.")


def test_text_of_other_scripts_is_read():
    assert storage.parse_json('{"a": "\\u4e2d\\ud83d\\ude00"}') == {"a": "中😀"}
    assert storage.parse_json(b"\xef\xbb\xbf[1]") == [1]


@pytest.mark.parametrize("content", ["[]", "5", "null", "{}", '{"rows": "3"}', '{"rows": null}'])
def test_missing_and_wrong_fields(content, tmp_path):
    path = tmp_path / "unit.json"
    path.write_text(content)
    with pytest.raises(storage.DamagedFileError):
        storage.read_json(path, remedy=REMEDY, fields={"rows": int})
    path.write_text(f'{{"counts": {content}}}')
    with refused(storage.DamagedFileError, "counts", path=path):
        storage.read_json(path, remedy=REMEDY, fields={"counts": {"rows": int}})


def test_absent_files_and_folders(tmp_path):
    with pytest.raises(FileNotFoundError):
        storage.read_json(tmp_path / "absent.json", remedy=REMEDY)
    with refused(storage.DamagedFileError, path=tmp_path):
        storage.read_json(tmp_path, remedy=REMEDY)


def test_lines(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"seed": 1}\n{"seed": 2}\n{"see')
    assert storage.read_json_lines(path, remedy=REMEDY, fields={"seed": int}) == [
        {"seed": 1},
        {"seed": 2},
    ]
    path.write_text('{"seed": 1}\n{"see\n{"seed": 2}\n')
    with refused(storage.DamagedFileError, "line 2", path=path):
        storage.read_json_lines(path, remedy=REMEDY, fields={"seed": int})


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    storage.write_json(path, {"text": "中"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"text": "中"}

    def interrupted():
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), storage.replacing(path) as file:
        file.writelines(interrupted())
    assert json.loads(path.read_text(encoding="utf-8")) == {"text": "中"}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_what_was_written_may_be_kept(tmp_path):
    path = tmp_path / "a"
    for text in ("", "x", "y"):
        with contextlib.suppress(KeyError), storage.replacing(path, "a", keep=True) as file:
            file.write(text)
            raise KeyError
        assert not path.exists()
        assert storage.unfinished_name(path).exists() == bool(text)
    with storage.replacing(path, "a", keep=True) as file:
        file.write("z")
    assert path.read_text() == "xyz"
    assert not storage.unfinished_name(path).exists()
