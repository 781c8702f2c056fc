"""fairseq's dictionaries: ids, text and back, and what is none."""

import pathlib
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convbert_jax.config import UserError
from convbert_jax.interop.fairseq.dictionaries import SPECIAL_IDS, Dictionary, read_dictionary

WORDS = st.lists(
    st.text(st.characters(codec="utf-8", exclude_categories=("Z", "C")), min_size=1), unique=True
)


def write(text: str | bytes) -> pathlib.Path:
    path = pathlib.Path(tempfile.mkdtemp()) / "dict.en.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_ids_begin_behind_the_special_ones():
    found = read_dictionary(write("the 9\nlow@@ 5\ner 2\n"), 7)
    assert found.entries == ("<s>", "<pad>", "</s>", "<unk>", "the", "low@@", "er")
    assert found.encode("the low@@ er  lowest </s>") == [4, 5, 6, 3, 3, 2]
    assert found.decode([2, 4, 5, 6, 3, 2, 4]) == "the lower <unk>"
    assert found.decode([2, 5, 2, 1, 1]) == "low"
    assert found.decode([2, 2, 1]) == ""
    ids = SPECIAL_IDS
    assert (ids.pad, ids.cls, ids.sep, ids.unknown) == (1, 2, 2, 3)
    assert found.entries[ids.cls] == "</s>"


def test_a_later_line_may_overwrite():
    found = read_dictionary(write("a 3\nb 2\na 1 #fairseq:overwrite\n"), 7)
    assert found.entries[4:] == ("a", "b", "a")
    assert found.encode("a b") == [6, 5, 2]


def test_made_up_words_fill_a_table():
    assert read_dictionary(write("a 1\nmadeupword0000 0\n"), 8).entries[4:] == (
        "a", "madeupword0000", "madeupword0001", "madeupword0002",
    )  # fmt: skip
    for rows in (4, 7, 9, 15):
        with pytest.raises(UserError, match="another model"):
            read_dictionary(write("a 1\nb 1\n"), rows)


@given(WORDS, st.sampled_from(["\n", "\r\n"]))
def test_what_is_written_is_read(words, end):
    words = [word for word in words if word not in ("<s>", "<pad>", "</s>", "<unk>")]
    text = "".join(f"{word} {i}{end}" for i, word in enumerate(words))
    found = read_dictionary(write(text), 4 + len(words))
    assert found == Dictionary(("<s>", "<pad>", "</s>", "<unk>", *words))
    assert found.encode(" ".join(words)) == [*range(4, 4 + len(words)), 2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\n", "line 1: 'a'"),
        ("a 1\n\nb 1\n", "line 2: ''"),
        ("a 1\nb x\n", "line 2: 'b x'"),
        ("a 1.5\n", "'a 1.5'"),
        (" 1\n", "' 1'"),
        ("a 1\na 2\n", "'a' is there before"),
        ("<unk> 1\n", "'<unk>' is there before"),
        (b"\xff 1\n", "not UTF-8"),
        (("x" * 100_000) + "\n", "…"),
    ],
)
def test_what_is_none_is_refused(text, words):
    path = write(text)
    with pytest.raises(UserError) as found:
        read_dictionary(path, 6)
    assert words in str(found.value)
    assert str(path) in str(found.value)
    assert "\n" not in str(found.value)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(content):
    path = write(content)
    try:
        entries, refused = read_dictionary(path, 8).entries, ""
    except UserError as error:
        entries, refused = (), str(error)
    assert "\n" not in refused
    assert bool(refused) == (len(entries) != 8)
