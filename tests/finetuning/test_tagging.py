"""Tagging from files to scores, with a small model that learns which words are names."""

import json

import numpy as np
import pytest

from convbert_jax.config import ConfigError
from convbert_jax.config.data import TaskSection
from convbert_jax.data.tasks import own_task
from convbert_jax.finetuning import classification, run
from convbert_jax.interfaces import TagBatch
from convbert_jax.workdir import Workdir
from tests.batches import check_batch
from tests.refusals import refused

NAMES = {"river": "B-WATER", "fire": "B-OTHER", "moon": "B-OTHER"}
WORDS = ["the", "a", "of", "stone", "light", "under", "over", "small", "great", *NAMES]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Sentences in which the word determines the tag, and a `the` after a name belongs to it."""
    folder = tmp_path_factory.mktemp("tags")
    random = np.random.default_rng(0)
    for name, count in (("train", 160), ("dev", 40)):
        lines = []
        for _ in range(count):
            words = [str(word) for word in random.choice(WORDS, random.integers(2, 9))]
            tags = [NAMES.get(word, "O") for word in words]
            for place in range(1, len(words)):
                if words[place] == "the" and tags[place - 1].startswith("B-"):
                    tags[place] = "I-" + tags[place - 1][2:]
            lines.append(json.dumps({"words": words, "tags": tags}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return own_task.open_task(
        TaskSection(
            name="names",
            kind="tagging",
            folder=str(folder),
            train="train.jsonl",
            validation="dev.jsonl",
            texts=("words",),
            label="tags",
        )
    )


def test_tags_are_learned_and_written(source, make_config, make_programs, vocabulary, tmp_path):
    fields = {"finetune.learning_rates": (1e-2,), "finetune.epochs": (8.0,), "finetune.seeds": 1}
    fields["finetune.buckets"] = ()
    config = make_config(**fields, **{"finetune.save_models": False})
    task = classification.make_task(source, config, vocabulary)
    check_batch(task.train.batch(np.arange(4), 8) | task.constants, TagBatch)
    programs = make_programs(config)
    (result,) = run.finetune(config, Workdir(tmp_path), [lambda: task], programs, vocabulary, None)
    scores = result.chosen_runs[0].scores["validation"]
    assert scores["accuracy"] > 0.9
    assert scores["span_f1"] > 0.8
    place = result.folders[0] / "predictions"
    lines = [json.loads(line) for line in (place / "validation.jsonl").read_text().splitlines()]
    assert len(lines) == 40
    for line in lines:
        assert len(line["words"]) == len(line["prediction"]) == len(line["probabilities"])
    assert (place / "validation-confusion.png").is_file()


def test_a_head_for_texts_is_refused(source, make_config, vocabulary):
    with refused(ConfigError, "head=sequence", "names", "tagging"):
        classification.make_task(source, make_config(finetune__head="sequence"), vocabulary)


def test_words_that_the_vocabulary_has_not_are_told(tmp_path, make_config, vocabulary, caplog):
    """Regression: fine-tuning on a language unknown to the vocabulary gave no warning."""
    for name, words in (("a", ["river"]), ("b", ["\u5ddd", "\u706b"])):
        line = {"words": ["the", "moon", *words], "tags": ["O", "B-X", *"O" * len(words)]}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
    section = TaskSection(
        kind="tagging",
        folder=str(tmp_path),
        train="a.jsonl",
        validation="b.jsonl",
        texts=("words",),
        label="tags",
    )
    classification.make_task(own_task.open_task(section), make_config(), vocabulary)
    assert caplog.text.count("22.2%") == 1  # of the characters in the validation split
    assert "validation" in caplog.text
