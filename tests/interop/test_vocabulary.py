"""Copies of the vocabularies in a run folder."""

import dataclasses
import shutil
import types

import pytest

from convbert_jax.config import OutputsSection, UserError
from convbert_jax.finetuning.run import save_model
from convbert_jax.inference.loading import read_finetuned
from convbert_jax.interop.sources import (
    keep_vocabularies,
    read_tokenizer,
    read_tokenizers,
)
from convbert_jax.recipes import prepared
from convbert_jax.storage import DamagedFileError
from convbert_jax.workdir import Workdir, WorkdirError
from tests.data.parallel import conftest as pairs
from tests.interop.conftest import make_config, random_params
from tests.refusals import refused


@pytest.fixture
def translation(tmp_path):
    source = pairs.write_files(tmp_path, pairs.make_pairs(200))
    made = pairs.make_config.__wrapped__()(source, shared_vocabulary=False)
    return dataclasses.replace(made, recipe="translation")


def test_of_two_texts(translation, tmp_path):
    workdir = Workdir(tmp_path / "run")
    text = prepared.prepare(translation, workdir.data(translation))
    keep_vocabularies(workdir, translation, text.vocabularies)
    shutil.rmtree(workdir.data(translation))
    found = read_tokenizers(workdir, translation)
    assert [t.fingerprint for t in found] == [t.fingerprint for t in text.vocabularies]
    assert found[0].fingerprint != found[1].fingerprint
    one, other = (workdir.vocabulary / side / "tokenizer.model" for side in ("source", "target"))
    swapped = one.read_bytes(), other.read_bytes()
    for path, content in zip((other, one), swapped, strict=True):
        path.write_bytes(content)
    with refused(UserError, path=one):
        read_tokenizers(workdir, translation)


def test_of_a_run_that_began_before_there_were_copies(make_run):
    folder, config = make_run()
    assert not (folder / "vocabulary").exists()
    tokenizer, section = read_tokenizer(Workdir(folder), config)
    assert section.path == str(tokenizer.path)
    assert tokenizer.path.parent == folder / "data"


def test_old_ones_are_no_more(make_run):
    folder, config = make_run()
    workdir = Workdir(folder)
    tokenizer, _ = read_tokenizer(workdir, config)
    workdir.vocabulary.mkdir()
    (workdir.vocabulary / "vocab.txt").write_text("of another start")
    keep_vocabularies(workdir, config, [tokenizer])
    assert {path.name for path in workdir.vocabulary.iterdir()} == {
        tokenizer.path.name,
        "fingerprints.json",
    }
    assert read_tokenizer(workdir, config)[0].path.parent == workdir.vocabulary


def test_a_damaged_note_is_named(make_run):
    folder, config = make_run()
    workdir = Workdir(folder)
    keep_vocabularies(workdir, config, [read_tokenizer(workdir, config)[0]])
    (workdir.vocabulary / "fingerprints.json").write_text("[]")
    with refused(DamagedFileError, workdir.vocabulary / "fingerprints.json"):
        read_tokenizer(workdir, config)


def test_a_folder_that_cannot_be_written_is_a_sentence(make_run, monkeypatch):
    folder, config = make_run()
    workdir = Workdir(folder)
    tokenizer, _ = read_tokenizer(workdir, config)

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("convbert_jax.storage.write_json", full)
    with refused(WorkdirError, folder):
        keep_vocabularies(workdir, config, [tokenizer])


def test_of_a_fine_tuned_model(make_run, tmp_path):
    """A flipped bit in the copy is detected."""
    folder, config = make_run(layers=1)
    outputs = OutputsSection(task="t", kind="classification", head="sequence", labels=("a", "b"))
    model = dataclasses.replace(make_config(recipe="finetune", layers=1), outputs=outputs)
    task = types.SimpleNamespace(name="t", outputs=outputs)
    tokenizer, _ = read_tokenizer(Workdir(folder), config)
    place = tmp_path / "seed-0"
    save_model(Workdir(place), model, task, tokenizer, random_params(model, seed=4), 4, 0)
    _, _, found = read_finetuned(str(place))
    assert found.path.parent == place / "vocabulary"
    damaged = bytearray(found.path.read_bytes())
    word = max((e for e in found.entries if "[" not in e and "<" not in e), key=len).encode()
    damaged[damaged.index(word) + len(word) - 1] ^= 1
    found.path.write_bytes(damaged)
    with refused(UserError, path=found.path):
        read_finetuned(str(place))
