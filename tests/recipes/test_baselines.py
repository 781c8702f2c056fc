"""BERT with sentence pairs: training, exact resuming, and exporting and reading back."""

import dataclasses
import random
import shutil

import jax
import numpy as np
import pytest

from convbert_jax import recipes
from convbert_jax.interop import conversion, huggingface, sources
from convbert_jax.interop.matching import replace
from convbert_jax.interop.networks import abstract_params, join
from convbert_jax.workdir import Workdir

STEPS = 120
KINDS = ("bcdfgh", "klmnpr")  # first letters of words


def write_documents(folder, kinds_of, count=1_200) -> str:
    """Write documents of four-word sentences; `kinds_of(document)` gives each sentence's kind."""
    rng = random.Random(0)
    words = [[a + b for a in letters for b in "aeiou"] for letters in KINDS]
    documents = [
        " ".join(f"{' '.join(rng.choices(words[kind], k=4))}." for kind in kinds_of(number))
        for number in range(count)
    ]
    file = folder / "text.txt"
    file.write_text("\n\n".join(documents))
    return f"text:{file}"


@pytest.fixture(scope="module")
def make_toy_config(pretraining_config):
    def make(source: str, pairs: str, steps: int = STEPS):
        fields = {
            "objective.sentence_pairs": pairs,
            "data.source": source,
            "data.layout": "pairs",
            "tokenizer.kind": "wordpiece",
            "tokenizer.vocab_size": 80,
            "model.initializer_range": 0.1,  # at this width 0.02 stays on a plateau for many steps
            "model.dropout": 0.0,
            "model.attention_dropout": 0.0,
            "optimizer.learning_rate": 3e-3,
            "optimizer.warmup_steps": 20,
            "train.steps": steps,
            "train.batch_size": 32,
            "train.log_every": steps,
            "train.eval_every": steps,
            "train.eval_rows": 0,
            "checkpoint.every": steps // 2,
        }
        config = dataclasses.replace(pretraining_config, recipe="masked_lm")
        return replace(config, fields)

    return make


@pytest.fixture(scope="module")
def config(make_toy_config, tmp_path_factory):
    """Two sentences per document, the first of one kind and the second of the other."""
    text = write_documents(tmp_path_factory.mktemp("toy"), lambda number: (0, 1))
    return make_toy_config(text, "order")


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    return recipes.pretrain(config, tmp_path_factory.mktemp("order") / "run")


def test_the_order_of_sentences_is_learned(trained):
    assert trained.evaluation["pair_accuracy"] > 0.95
    total = trained.evaluation["mlm_loss"] + trained.evaluation["pair_loss"]
    assert trained.evaluation["loss"] == pytest.approx(total, rel=1e-6)
    assert f"{trained.evaluation['pair_accuracy']:.1%}" in trained.report


@pytest.mark.slow
def test_texts_of_another_document_are_learned(make_toy_config, tmp_path):
    """One kind per document: at best 3 of 4, since half of the negatives look positive."""
    text = write_documents(tmp_path, lambda number: (number % 2,) * 6)
    run = recipes.pretrain(make_toy_config(text, "next", 400), tmp_path / "run")
    assert 0.65 < run.evaluation["pair_accuracy"] < 0.85


@pytest.mark.slow
def test_resuming_is_exact(trained, config, tmp_path):
    shutil.copytree(trained.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / str(STEPS))  # as if killed before saving it
    again = recipes.pretrain(config, tmp_path / "run")
    assert again.step == trained.step == STEPS
    (_, expected), (_, params) = (
        sources.read_params(Workdir(run.folder), config) for run in (trained, again)
    )
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_an_export_is_read_back(trained, config, tmp_path):
    folder = conversion.export(trained.folder, output=tmp_path / "bert")
    read = huggingface.read_folder(folder)
    assert '"BertForPreTraining"' in (folder / "config.json").read_text()
    _, expected = sources.read_params(Workdir(trained.folder), config)
    params, report = join(config, read.networks)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert not report.initialized
    # A model without sentence pairs has no pair head.
    fields = {"objective.sentence_pairs": "none", "data.layout": "packed"}
    _, report = join(replace(config, fields), read.networks)
    heads = {
        f"main:pair_head/{d}/{leaf}" for d in ("dense", "output") for leaf in ("bias", "kernel")
    }
    assert set(report.ignored) == heads
    alone = abstract_params(replace(config, fields))
    assert set(abstract_params(config)) - set(alone) == {"pair_head"}
