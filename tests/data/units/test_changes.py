"""A source that is edited after it was prepared is noticed, whatever its size and time say."""

import dataclasses
import gzip
import os

import pyarrow
import pytest
from pyarrow import parquet

from convbert_jax import recipes
from convbert_jax.config import (
    Config,
    DataSection,
    ParallelSection,
    SequenceSection,
    TokenizerSection,
)
from convbert_jax.data.corpus import corpus
from convbert_jax.data.errors import DataError
from convbert_jax.data.parallel import parallel_text
from convbert_jax.data.sources import documents as documents_module
from convbert_jax.data.units import changes


def make_texts() -> list[str]:
    """Of some 260 kB, so that the middle is beyond the ends of a file that every start reads."""
    words = [f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in "lmnrst"]
    return [
        " ".join(words[(7 * i + i * j + j * j) % len(words)] for j in range(40)) + f" {i}."
        for i in range(1_600)
    ]


TEXTS = make_texts()


def write_text(folder, texts) -> str:
    path = folder / "corpus.txt"
    path.write_text("\n\n".join(texts), encoding="utf-8")
    return f"text:{path}"


def write_gzip(folder, texts) -> str:
    path = folder / "corpus.jsonl.gz"
    lines = "".join(f'{{"text": "{text}"}}\n' for text in texts)
    path.write_bytes(gzip.compress(lines.encode(), compresslevel=0, mtime=0))  # of equal size
    return f"text:{path}"


def write_parquet(folder, texts) -> str:
    path = folder / "corpus.parquet"
    table = pyarrow.table({"text": texts})
    parquet.write_table(table, path, row_group_size=400, compression="none", use_dictionary=False)
    return f"parquet:{path}"


def write_pairs(folder, texts) -> str:
    for name in ("train.aa", "train.bb"):
        (folder / name).write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return f"parallel:{folder}/train.aa,{folder}/train.bb"


WRITERS = {"text": write_text, "gzip": write_gzip, "parquet": write_parquet, "pairs": write_pairs}


@pytest.fixture(params=WRITERS)
def kind(request):
    return request.param


@pytest.fixture
def config(kind, tmp_path) -> Config:
    source = WRITERS[kind](tmp_path, TEXTS)
    data = DataSection(heldout_fraction=0.1, length=64, workers=1)
    parallel = ParallelSection(heldout_fraction=0.1)
    if kind == "pairs":
        parallel = dataclasses.replace(parallel, source=source)
    else:
        data = dataclasses.replace(data, source=source)
    return Config(
        tokenizer=TokenizerSection(vocab_size=200, train_megabytes=1),
        data=data,
        parallel=parallel,
        sequence=SequenceSection(shared_vocabulary=True),
    )


@pytest.fixture
def prepare(kind):
    return (parallel_text if kind == "pairs" else corpus).prepare


@pytest.fixture
def edit(kind, tmp_path):
    """edit(keep_times) reorders a text in the middle and returns the name of a changed file."""

    def edit(*, keep_times: bool) -> str:
        before = {path: path.stat() for path in tmp_path.iterdir() if path.is_file()}
        texts, middle = list(TEXTS), len(TEXTS) // 2
        first, *words, last = texts[middle].split()
        texts[middle] = " ".join([first, *reversed(words), last])
        WRITERS[kind](tmp_path, texts)
        for path, stat in before.items():
            assert path.stat().st_size == stat.st_size
            moved = stat.st_mtime_ns + (0 if keep_times else 10**9)
            os.utime(path, ns=(stat.st_atime_ns, moved))
        return min(path.name for path in before)

    return edit


def test_an_edit_of_equal_size_is_refused_at_the_start(config, prepare, edit, tmp_path):
    prepare(config, tmp_path / "prepared")
    name = edit(keep_times=False)
    with pytest.raises(DataError, match=name):
        prepare(config, tmp_path / "prepared")


def test_an_edit_that_keeps_the_time_is_refused_on_request(config, prepare, edit, tmp_path):
    prepare(config, tmp_path / "prepared")
    name = edit(keep_times=True)
    with pytest.raises(DataError, match=name):
        prepare(config, tmp_path / "prepared", compare=True)


@pytest.mark.parametrize("kind", ["text"], indirect=True)
def test_mode_prepare_requests_the_comparison(config, kind, edit, tmp_path):
    recipes.prepare(config, tmp_path / "run")
    name = edit(keep_times=True)
    with pytest.raises(DataError, match=name):
        recipes.prepare(config, tmp_path / "run")


def test_equal_content_of_another_time_is_compared_once(
    config, prepare, kind, tmp_path, monkeypatch
):
    expected = prepare(config, tmp_path / "prepared").fingerprint
    for path in tmp_path.iterdir():
        os.utime(path, ns=(0, 0))
    assert prepare(config, tmp_path / "prepared").fingerprint == expected
    monkeypatch.setattr(changes, "_compare_unit", None)
    monkeypatch.setattr(changes, "Processes", None)
    assert prepare(config, tmp_path / "prepared").fingerprint == expected


@pytest.mark.parametrize("kind", ["text"], indirect=True)
def test_shards_of_somebody_else_are_used(config, prepare, kind, tmp_path, monkeypatch):
    """Stamps that cannot be written do not end the run."""
    expected = prepare(config, tmp_path / "prepared").fingerprint

    def refuse(path, content):
        raise DataError(f"{path} could not be written (Permission denied).")

    monkeypatch.setattr(changes, "write_record", refuse)
    assert prepare(config, tmp_path / "prepared", compare=True).fingerprint == expected


@pytest.mark.parametrize("kind", ["text", "pairs"], indirect=True)
def test_units_that_were_finished_before_the_edit_are_refused(
    config, prepare, kind, edit, tmp_path, monkeypatch
):
    """A killed preparation does not go on with the rest of another text."""
    monkeypatch.setattr(documents_module, "UNIT_BYTES", 170_000)
    module = {"text": corpus.preparation, "pairs": parallel_text}[kind]
    name = {"text": "process_unit", "pairs": "process_pairs"}[kind]
    real = getattr(module, name)

    def killed(job, index, *arguments):
        if index == 1:
            raise KeyboardInterrupt
        return real(job, index, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(config, tmp_path / "prepared")
    edit(keep_times=False)
    with pytest.raises(DataError, match="differs"):
        prepare(config, tmp_path / "prepared")


@pytest.mark.parametrize("kind", ["text"], indirect=True)
def test_only_the_edited_of_several_files_is_named(config, prepare, kind, tmp_path):
    folder = tmp_path / "several"
    folder.mkdir()
    for number in range(4):
        (folder / f"part-{number}.txt").write_text("\n\n".join(TEXTS[400 * number :][:400]))
    data = dataclasses.replace(config.data, source=f"text:{folder}/*.txt", format="blank_lines")
    config = dataclasses.replace(config, data=data)
    prepare(config, tmp_path / "prepared")
    edited = folder / "part-2.txt"
    edited.write_text(edited.read_text().replace("b", "B", 1))
    with pytest.raises(DataError) as refused:
        prepare(config, tmp_path / "prepared")
    assert "part-2.txt" in str(refused.value)
    assert "part-1.txt" not in str(refused.value)
