"""Predictions of a fine-tuned model for new text."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from flax import nnx

from convbert_jax.config import Config
from convbert_jax.data.tasks.encoding import Encoded, Rows
from convbert_jax.data.tasks.labelled_text import Example, LabelledTask
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.finetuning import fitting
from convbert_jax.finetuning.predictions import files as prediction_files
from convbert_jax.finetuning.scores import scoring
from convbert_jax.finetuning.tasks import classification
from convbert_jax.machine.limits import available_threads
from convbert_jax.models.build import build
from convbert_jax.models.finetuned import FinetunedModel
from convbert_jax.ops import dispatch
from convbert_jax.training import memory
from convbert_jax.training.task import Params

# What a model says of texts: for each example a dict with "prediction" and more, or with "problem"
# alone: why it says nothing, to follow "line N"
Answer = Callable[[Sequence[Example]], list[dict[str, Any]]]
_FEW = 16  # rows of a batch for a few
# Tokens of a batch on a CPU, for each of its threads. A token of `small` costs 230 us in batches of
# 1,024 and 390 us in 32 rows of 512, whose hidden states the caches do not hold.
_TOKENS_PER_THREAD = 512


def choose_batch_size(count: int, largest: int) -> int:
    """Rows of a batch for `count` rows: 1, a few or `largest`, each compiled once for a length, so
    that one line does not wait for the computation of many that are not there.
    """
    if count <= 1:
        return 1
    return min(_FEW, largest) if 2 * count <= largest else largest


def choose_batch_sizes(count: int, largest: int, buckets: Sequence[int]) -> tuple[int, ...]:
    """Rows of a batch of each length in `buckets`, as `choose_batch_size`; on a CPU fewer of the
    long ones.
    """
    size = choose_batch_size(count, largest)
    if dispatch.platform() != "cpu":
        return (size,) * len(buckets)
    tokens = _TOKENS_PER_THREAD * available_threads()
    return tuple(max(1, min(size, tokens // length)) for length in buckets)


def explain_out_of_memory(params: Params) -> contextlib.AbstractContextManager[None]:
    """Context in which a fine-tuned model, with its parameters on the device, predicts."""
    advice = (
        'lower finetune.eval_batch_size in the config.json of the model and remove its "crc32", or '
        "compute on the CPU with JAX_PLATFORMS=cpu"
    )
    return memory.explain_out_of_memory("predicting", advice, lambda: memory.find_state(params))


class Predictor:
    """A fine-tuned model for texts."""

    def __init__(self, config: Config, params: Params, tokenizer: Tokenizer, dtype: jnp.dtype):
        """`config.outputs` says what the model is for; its kind is not span."""
        self.outputs = config.outputs
        self._config = config
        self._tokenizer = tokenizer
        self._told_cut = False
        graphdef, _ = build(FinetunedModel, config)
        constants = classification.constants_of(self.outputs, len(self.outputs.labels))

        @jax.jit
        def run(params, batch):
            model = nnx.merge(graphdef, params)
            found = classification.predict_logits(model, {**batch, **constants}, dtype=dtype)
            return jax.tree.map(lambda leaf: leaf[None], found)

        self._params = memory.put_on_device(params)
        self._run = lambda batch: run(self._params, batch)

    def predict(self, examples: Sequence[Example]) -> scoring.Outputs:
        """Outputs as `scoring.score` takes them, in the order of the examples."""
        return self._predict(examples)[1]

    def _predict(self, examples: Sequence[Example]) -> tuple[Rows, scoring.Outputs]:
        encoded = classification.encode_examples(
            examples, self.outputs, self._config, self._tokenizer
        )
        rows = encoded.rows
        if encoded.truncated and not self._told_cut:  # not again for every line of a pipe
            self._told_cut = True
            self._tell_cut(encoded, examples)
        buckets = fitting.buckets_of(self._config)
        largest = self._config.finetune.eval_batch_size
        with explain_out_of_memory(self._params):
            found = fitting.predict_rows(
                self._run,
                rows,
                buckets=buckets,
                batch_size=choose_batch_sizes(len(rows), largest, buckets),
            )
        words = [len(example.texts[0].split(" ")) for example in examples]
        return rows, classification.in_label_units(self.outputs, rows, found, words)

    def _tell_cut(self, encoded: Encoded, examples: Sequence[Example]) -> None:
        task, length = self.outputs.task, self._config.finetune.length
        if self.outputs.kind != "tagging":
            logging.warning(
                "%s: %d of %d texts are cut to %d tokens; of later ones no more is said.",
                task,
                encoded.truncated,
                len(examples),
                length,
            )
            return
        for example, read in zip(examples, classification.words_read(encoded.rows), strict=True):
            words = len(example.texts[0].split(" "))
            if read < words:
                logging.warning(
                    "%s: %d of the %d words of row %s lie beyond the %d tokens that are read; "
                    "their prediction and probability are null, and of other rows no more is said.",
                    task,
                    words - read,
                    words,
                    example.id,
                    length,
                )
                return

    def answer(self, examples: Sequence[Example]) -> list[dict[str, Any]]:
        """For each example its `prediction` and, but for a number, `probabilities`; of tagging
        lists, with None for words that have no place in the row.
        """
        outputs = self.outputs
        regression = outputs.kind == "regression"
        task = LabelledTask(
            name=outputs.task,
            kind=outputs.kind,
            texts=outputs.texts,
            labels=() if regression else outputs.labels,
            metrics=(),
            splits=(),
            reader=lambda split: [],
        )
        rows, found = self._predict(examples)
        described = prediction_files.describe_examples(task, examples, found)
        names = ("prediction", "probabilities")
        said = [{name: line[name] for name in names if name in line} for line in described]
        if outputs.kind == "tagging":
            for line, read in zip(said, classification.words_read(rows), strict=True):
                for values in line.values():
                    values[read:] = [None] * (len(values) - read)
        return said
