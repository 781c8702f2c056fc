"""Fixtures: a very small model, a vocabulary, and toy tasks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.config import Config, MeshSection
from convbert_jax.data.tasks.labelled_text import Example, LabelledTask
from convbert_jax.data.tokenizer.tokenizer import train_tokenizer
from convbert_jax.finetuning import classification
from convbert_jax.finetuning.fitting import Programs
from convbert_jax.interop.matching import replace
from convbert_jax.recipes.finetuning import make_mesh

WORDS = "the a of river stone light under over small great house tree water fire sun moon star"


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
    """WordPiece vocabulary of a few words."""
    section = replace(Config(), {"tokenizer.kind": "wordpiece", "tokenizer.vocab_size": 60})
    return train_tokenizer([WORDS] * 20, section.tokenizer, tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="session")
def make_config(vocabulary):
    """Return make_config(**{"section.field": value}) -> Config of a small model and short runs."""

    def make(**fields) -> Config:
        config = Config(recipe="finetune", mesh=MeshSection(data=1))
        small = {
            "model.layers": 2,
            "model.mixer": "attention",  # compiles in half the time
            "model.hidden_size": 16,
            "model.embedding_size": 16,
            "model.heads": 2,
            "model.ffn_size": 32,
            "model.positions": 32,
            "model.dropout": 0.1,
            "model.attention_dropout": 0.1,
            "tokenizer.kind": "wordpiece",
            "tokenizer.vocab_size": 60,
            "tokenizer.path": str(vocabulary.path),
            "finetune.length": 16,
            "finetune.buckets": (8,),
            "finetune.batch_size": 8,
            "finetune.eval_batch_size": 16,
            "finetune.learning_rates": (3e-3,),
            "finetune.epochs": (1.0,),
            "finetune.seeds": 2,
            "checkpoint.keep": 1,
            "train.compile_cache": "",
        }
        return replace(config, {**small, **{k.replace("__", "."): v for k, v in fields.items()}})

    return make


@pytest.fixture(scope="session")
def make_programs():
    """Return make_programs(config) -> Programs on one device in float32, cached per model."""
    made = {}

    def make(config: Config) -> Programs:
        key = (config.model, config.optimizer, config.finetune.sum_loss)
        if key not in made:
            made[key] = Programs(config, jnp.float32, make_mesh(config, jax.devices()))
        return made[key]

    return make


def make_examples(count: int, labels: int, seed: int, texts: int = 1) -> list[Example]:
    """Make sentences of 1 to 12 words whose first word determines the label."""
    words = np.asarray(WORDS.split())
    random = np.random.default_rng(seed)
    examples = []
    for i in range(count):
        label = int(random.integers(labels))
        drawn = [" ".join(random.choice(words, random.integers(1, 12 // texts))) for _ in "ab"]
        sentences = (f"{words[label]} {drawn[0]}", *drawn[1:texts])
        examples.append(Example(str(i), sentences, label))
    return examples


def make_source(name="toy", labels=2, texts=1, train=37, validation=21, kind="classification"):
    """Make an in-memory LabelledTask with labels in train and validation, not in test."""
    splits = {
        "train": make_examples(train, labels, 1, texts),
        "validation": make_examples(validation, labels, 2, texts),
        "test": [
            dataclasses.replace(example, label=None)
            for example in make_examples(9, labels, 3, texts)
        ],
    }
    metrics = ("accuracy",)
    if kind == "regression":
        metrics = ("pearson",)
        splits = {
            name: [
                dataclasses.replace(e, label=None if e.label is None else 2.5 * e.label)
                for e in examples
            ]
            for name, examples in splits.items()
        }
    return LabelledTask(
        name=name,
        kind=kind,
        texts=texts,
        labels=() if kind == "regression" else tuple(f"label {i}" for i in range(labels)),
        metrics=metrics,
        splits=tuple(splits),
        reader=splits.__getitem__,
        scale=5.0 if kind == "regression" else 1.0,
    )


@pytest.fixture(scope="session")
def make_task(vocabulary):
    """Return make_task(config, **arguments of make_source) -> FinetuneTask."""

    def make(config: Config, **fields):
        return classification.make_task(make_source(**fields), config, vocabulary)

    return make
