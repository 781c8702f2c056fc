"""The head on [CLS] and the mean of all tokens, which an encoder of convolutions alone needs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.config import ConfigError
from convbert_jax.config.sections import StageSection
from convbert_jax.data.tasks.labelled_text import Example, LabelledTask
from convbert_jax.finetuning import run
from convbert_jax.finetuning.tasks import classification
from convbert_jax.models.finetuned import FinetunedModel
from convbert_jax.workdir import Workdir

CONVOLUTION = {"model.mixer": "light", "model.kernel_size": 3, "model.positions": 32}
ANSWERS = ("fire", "water")


@pytest.fixture(scope="module")
def source():
    """Texts of twelve words, the last of which is the label."""
    random = np.random.default_rng(0)

    def examples(count):
        labels = random.integers(0, 2, count)
        words = [" ".join(random.choice(("the", "a", "of", "stone"), 11)) for _ in labels]
        return [
            Example(str(number), (f"{text} {ANSWERS[label]}",), int(label))
            for number, (text, label) in enumerate(zip(words, labels, strict=True))
        ]

    parts = {"train": examples(160), "validation": examples(40)}
    return LabelledTask(
        name="last",
        kind="classification",
        texts=1,
        labels=ANSWERS,
        metrics=("accuracy",),
        splits=tuple(parts),
        reader=parts.__getitem__,
    )


@pytest.mark.parametrize(("head", "learns"), [("auto", True), ("sequence", False)])
def test_convolutions_see_the_end_of_a_text_by_its_mean(
    head, learns, source, make_config, make_programs, vocabulary, tmp_path, caplog
):
    """Two layers of three taps show [CLS] two tokens."""
    fields = {
        "finetune.head": head,
        "finetune.learning_rates": (1e-2,),
        "finetune.epochs": (10.0,),
        "finetune.seeds": 1,
        "finetune.length": 32,
        "finetune.buckets": (),
        "finetune.save_models": False,
    }
    config = make_config(**CONVOLUTION, **fields)
    with caplog.at_level("INFO"):
        task = classification.make_task(source, config, vocabulary)
    assert task.outputs.head == {"auto": "first_and_mean"}.get(head, head)
    assert ("no layer of this encoder reads the whole row" in caplog.text) == learns
    assert ("--config.finetune.head=first_and_mean" in caplog.text) != learns
    programs = make_programs(config)
    (result,) = run.finetune(config, Workdir(tmp_path), [lambda: task], programs, vocabulary, None)
    accuracy = result.chosen_runs[0].scores["validation"]["accuracy"]
    assert (accuracy > 0.9) == learns
    assert (accuracy < 0.8) != learns


@pytest.mark.parametrize(
    ("mixer", "whole"),
    [
        *(("attention", True), ("bottleneck", True), ("mixed", True)),
        *(("span_dynamic", False), ("dynamic", False), ("light", False), ("dilated", False)),
        ("separable", False),
    ],
)
def test_attention_alone_reads_the_whole_row(mixer, whole, make_config):
    assert make_config(model__mixer=mixer).encoder.reads_whole_row == whole


def test_one_layer_of_attention_is_enough(make_config):
    stages = (StageSection(layers=1, mixer="light"), StageSection(layers=1, mixer="attention"))
    assert make_config(model__stages=stages).encoder.reads_whole_row


@pytest.fixture(scope="module")
def model(make_config):
    config = make_config(**CONVOLUTION)
    outputs = dataclasses.replace(config.outputs, head="first_and_mean", labels=("a", "b"))
    return FinetunedModel(dataclasses.replace(config, outputs=outputs), nnx.Rngs(0))


def test_padding_is_not_in_the_mean(model):
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 5, 50)
    types = jnp.zeros_like(tokens)
    alone = model.classify(tokens, jnp.ones_like(tokens), types)

    def padded(array, value):
        return jnp.pad(array, ((0, 0), (0, 5)), constant_values=value)

    ones = jnp.ones_like(tokens)
    beside = model.classify(padded(tokens, 7), padded(ones, 0), padded(types, 0))
    np.testing.assert_allclose(beside, alone, atol=1e-6)
    hidden = model.encode(tokens, ones, types)
    both = jnp.concatenate([hidden[:, 0], hidden.mean(1)], -1)
    np.testing.assert_allclose(model.head(both[:, None]), alone, atol=1e-6)


def test_an_empty_row_is_finite(model):
    """The last batch of an epoch is filled up with such rows."""
    nothing = jnp.zeros((1, 6), jnp.int32)
    assert np.isfinite(model.classify(nothing, nothing, nothing)).all()


def test_tags_have_no_mean(make_config, source, vocabulary):
    tagging = dataclasses.replace(source, kind="tagging")
    config = make_config(finetune__head="first_and_mean")
    with pytest.raises(ConfigError, match="head=first_and_mean is not for the task last"):
        classification.make_task(tagging, config, vocabulary)
