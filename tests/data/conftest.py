"""A small artificial language: enough words for a vocabulary, identical on every machine."""

import dataclasses
import hashlib
import json
import random
import shutil

import pytest

from convbert_jax.config import Config, DataSection, TokenizerSection
from convbert_jax.data.tokenizer.tokenizer import train_tokenizer
from tests.data import kinds
from tests.data.parallel.conftest import make_pairs, pair_config


def make_documents(count: int, seed: int = 0, lines: int = 6) -> list[str]:
    """Return unique documents of short lines, using about 400 words."""
    rng = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u", "an", "er")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(400)]
    result = []
    for number in range(count):
        text = []
        for _ in range(rng.randint(1, lines)):
            line = " ".join(rng.choices(words, k=rng.randint(3, 20)))
            text.append(line.capitalize() + ".")
        result.append(f"Document {number}.\n" + "\n".join(text))
    return result


@pytest.fixture(scope="session")
def documents() -> list[str]:
    return make_documents(300)


@pytest.fixture(scope="session")
def trained(documents, tmp_path_factory):
    """trained(kind=..., **fields): a vocabulary of 300 entries; its folder must not be changed."""
    made = {}

    def train(**fields):
        section = dataclasses.replace(TokenizerSection(vocab_size=300), **fields)
        if section not in made:
            folder = tmp_path_factory.mktemp("vocabulary")
            made[section] = train_tokenizer(documents, section, folder)
        return made[section]

    return train


@pytest.fixture(scope="session")
def make_config(documents):
    """make_config(folder): write `documents` to folder/corpus.txt and return a config for it.

    Documents are separated by blank lines and prepared in this process within a second.
    """

    def make(folder) -> Config:
        path = folder / "corpus.txt"
        path.write_text("\n\n".join(documents) + "\n", encoding="utf-8")
        return Config(
            tokenizer=TokenizerSection(vocab_size=300, train_megabytes=1),
            data=DataSection(
                source=f"text:{path}",
                format="blank_lines",
                heldout_fraction=0.1,
                length=64,
                workers=1,
            ),
        )

    return make


@pytest.fixture
def config(make_config, tmp_path) -> Config:
    return make_config(tmp_path)


@pytest.fixture
def corpus_file(config, tmp_path):
    """The text file that `config` prepares."""
    return tmp_path / "corpus.txt"


@pytest.fixture
def change():
    """change(config, data={...}, tokenizer={...}): `config` with some fields replaced."""

    def changed(config: Config, **sections) -> Config:
        replaced = {
            name: dataclasses.replace(getattr(config, name), **fields)
            for name, fields in sections.items()
        }
        return dataclasses.replace(config, **replaced)

    return changed


@pytest.fixture
def small_units(monkeypatch):
    """Split the test sources into about five units."""
    kinds.small_units(monkeypatch)


@pytest.fixture(scope="session", params=kinds.KINDS)
def kind(request, documents, make_config):
    """A corpus and pairs; see `kinds.py`."""
    if request.param == "corpus":
        return kinds.CorpusKind(documents, make_config)
    return kinds.PairsKind(make_pairs(400), pair_config)


@pytest.fixture(scope="session")
def store(kind, tmp_path_factory):
    """(config, prepared data of several units), for read-only tests."""
    folder = tmp_path_factory.mktemp(kind.name)
    config = kind.config(folder)
    with pytest.MonkeyPatch.context() as patch:
        kinds.small_units(patch)
        return config, kind.prepare(config, folder / "prepared")


@pytest.fixture
def copied(kind, store, tmp_path, small_units):
    """(config, folder) of a copy of `store`, which may be damaged."""
    config, prepared = store
    return config, shutil.copytree(prepared.directory, tmp_path / "copied")


@pytest.fixture
def contents():
    """contents(folder): sha256 of every result file; records are hashed without times."""

    def of_folder(folder) -> dict[str, str]:
        result = {}
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_dir() or name in ("lock", "stamps.json") or path.suffix == ".unfinished":
                continue
            data = path.read_bytes()
            if path.suffix == ".json" and not name.startswith("tokenizer"):
                record = json.loads(data)
                record = {k: v for k, v in record.items() if k not in ("seconds", "crc32")}
                data = json.dumps(record, sort_keys=True).encode()
            result[name] = hashlib.sha256(data).hexdigest()
        return result

    return of_folder
