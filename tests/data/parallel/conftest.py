"""Pairs of artificial sentences: the target is the source's words spelled backwards, and more."""

import gzip
import random

import pytest

from convbert_jax.config import (
    Config,
    DataSection,
    ParallelSection,
    SequenceSection,
    TokenizerSection,
)
from convbert_jax.data.parallel_text import prepare


def make_pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    rng = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(200)]
    pairs = []
    for number in range(count):
        chosen = rng.choices(words, k=rng.randint(1, 12))
        more = rng.choices(words, k=rng.randint(0, 3))
        pairs.append((f"{number} " + " ".join(chosen), " ".join(w[::-1] for w in chosen + more)))
    return pairs


def write_files(folder, pairs, compressed=False):
    """Write two files of pairs; return their `parallel:` source."""
    opener, ending = (gzip.open, ".gz") if compressed else (open, "")
    names = []
    for side, name in enumerate(("train.aa", "train.bb")):
        path = folder / (name + ending)
        with opener(path, "wt", encoding="utf-8", newline="\n") as file:
            file.writelines(pair[side] + "\n" for pair in pairs)
        names.append(str(path))
    return f"parallel:{','.join(names)}"


@pytest.fixture(scope="session")
def pairs():
    return make_pairs(400)


def pair_config(source: str, *, shared_vocabulary: bool = True, **fields) -> Config:
    """Return a config with a small vocabulary; `fields` are set in config.parallel."""
    fields = {"heldout_fraction": 0.1, "batch_tokens": 256, "shapes": 3} | fields
    return Config(
        recipe="translation",
        tokenizer=TokenizerSection(vocab_size=160, train_megabytes=1),
        data=DataSection(workers=1),
        parallel=ParallelSection(source=source, **fields),
        sequence=SequenceSection(shared_vocabulary=shared_vocabulary),
    )


@pytest.fixture(scope="session")
def make_config():
    return pair_config


@pytest.fixture(scope="session")
def prepared(pairs, make_config, tmp_path_factory):
    """(config, prepared pairs), for read-only tests."""
    folder = tmp_path_factory.mktemp("pairs")
    config = make_config(write_files(folder, pairs))
    return config, prepare(config, folder / "prepared")
