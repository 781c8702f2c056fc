"""Predictions with a fine-tuned model: classification, regression, tagging, question answering."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from flax import nnx

from convbert_jax.config import Config
from convbert_jax.data.errors import DataError
from convbert_jax.data.tasks.labelled_text import Encoded, Example, LabelledTask, Rows
from convbert_jax.data.tasks.squad import Question
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.finetuning import classification, fitting, question_answering, scoring
from convbert_jax.finetuning import predictions as prediction_files
from convbert_jax.finetuning.question_answering import THRESHOLDS
from convbert_jax.machine import available_threads
from convbert_jax.models import build
from convbert_jax.models.networks import FinetunedModel
from convbert_jax.ops import dispatch
from convbert_jax.training import memory
from convbert_jax.training.partitioning import Params

# Examples -> a dict per example with "prediction" and more, or only "problem": the reason why there
# is no prediction, as the rest of a sentence that begins with "line N".
Answer = Callable[[Sequence[Example]], list[dict[str, Any]]]
_FEW = 16  # batch size for few rows
# Tokens of a batch per CPU thread: hidden states of larger batches do not fit into the caches.
_TOKENS_PER_THREAD = 512


def choose_batch_size(count: int, largest: int) -> int:
    """Returns a batch size for `count` rows: 1, _FEW or `largest`.

    Three sizes are compiled for each length, so that a single row is not padded to a full batch.
    """
    if count <= 1:
        return 1
    return min(_FEW, largest) if 2 * count <= largest else largest


def choose_batch_sizes(count: int, largest: int, buckets: Sequence[int]) -> tuple[int, ...]:
    """Returns the batch size for each length in `buckets`; on a CPU smaller for long rows."""
    size = choose_batch_size(count, largest)
    if dispatch.platform() != "cpu":
        return (size,) * len(buckets)
    tokens = _TOKENS_PER_THREAD * available_threads()
    return tuple(max(1, min(size, tokens // length)) for length in buckets)


def explain_out_of_memory(params: Params) -> contextlib.AbstractContextManager[None]:
    """Explains out-of-memory errors inside the block, with advice for predictions."""
    advice = (
        'lower finetune.eval_batch_size in the config.json of the model and remove its "crc32", or '
        "compute on the CPU with JAX_PLATFORMS=cpu"
    )
    return memory.explain_out_of_memory("predicting", advice, lambda: memory.find_state(params))


class Predictor:
    """A fine-tuned model for classification, regression or tagging."""

    def __init__(self, config: Config, params: Params, tokenizer: Tokenizer, dtype: jnp.dtype):
        """Compiles the model; `config.outputs.kind` must not be "span"."""
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
        """Returns outputs for `scoring.score`, in the order of the examples."""
        return self._predict(examples)[1]

    def _predict(self, examples: Sequence[Example]) -> tuple[Rows, scoring.Outputs]:
        encoded = classification.encode_examples(
            examples, self.outputs, self._config, self._tokenizer
        )
        rows = encoded.rows
        if encoded.truncated and not self._told_cut:  # log once, not for every line of a pipe
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
                "%s: truncated %d of %d texts to %d tokens. Further truncations are not logged.",
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
                    "%s: %d of %d words of row %s are beyond the limit of %d tokens; their "
                    "prediction and probability are null. Further truncations are not logged.",
                    task,
                    words - read,
                    words,
                    example.id,
                    length,
                )
                return

    def answer(self, examples: Sequence[Example]) -> list[dict[str, Any]]:
        """Predicts examples; implements `Answer`.

        Returns:
          For each example a dict of `prediction` and, except for regression, `probabilities`. For
          tagging these are lists per word, with None for truncated words.
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


class QuestionAnswerer:
    """An extractive question answering model; with SQuAD 2.0 it may predict no answer."""

    def __init__(self, config: Config, params: Params, tokenizer: Tokenizer, dtype: jnp.dtype):
        """Compiles the model; `config.outputs.kind` must be "span"."""
        head = config.outputs.head
        self._config = config
        self._tokenizer = tokenizer
        self._told_cut = False
        second = question_answering.VERSIONS.get(config.outputs.task) == "v2"
        self._threshold = THRESHOLDS[head] if second else None
        graphdef, _ = build(FinetunedModel, config)
        spans = question_answering.predict_with(head, config)

        @jax.jit
        def run(params, batch):
            found = spans(nnx.merge(graphdef, params), batch, dtype=dtype)
            return jax.tree.map(lambda leaf: leaf[None], found)

        self._params = memory.put_on_device(params)
        self._run = lambda batch: run(self._params, batch)

    def answer(self, examples: Sequence[Example]) -> list[dict[str, Any]]:
        """Answers (question, context) pairs.

        Returns:
          For each pair a dict of `prediction` (the answer, "" for none), `start` (its first
          character in the context, -1 for none), `probabilities` (by candidate) and `null_odds`
          (higher: an answer is less likely). If one of the texts has no tokens, only `problem`.
        """
        try:
            return self._answer(examples)
        except DataError:
            problems = [self._find_problem(example) for example in examples]
            if not any(problems):
                raise
        good = [e for e, problem in zip(examples, problems, strict=True) if not problem]
        said = iter(self._answer(good) if good else ())
        return [{"problem": problem} if problem else next(said) for problem in problems]

    def _find_problem(self, example: Example) -> str:
        parts = zip(("question", "context"), self._tokenizer.encode(example.texts), strict=True)
        return next((f"has a {name} without tokens" for name, ids in parts if not ids), "")

    def _answer(self, examples: Sequence[Example]) -> list[dict[str, Any]]:
        config = self._config
        questions = [Question(example.id, *example.texts) for example in examples]
        reading = question_answering.read_questions(questions, config, self._tokenizer, None)
        if reading.windows.cut_questions and not self._told_cut:
            self._told_cut = True  # log once, not for every line of a pipe
            logging.warning(
                "%s: truncated %d of %d questions to %d tokens. Further truncations are not "
                "logged.",
                config.outputs.task,
                reading.windows.cut_questions,
                len(questions),
                config.finetune.query_length,
            )
        buckets, largest = fitting.buckets_of(config), config.finetune.eval_batch_size
        with explain_out_of_memory(self._params):
            found = fitting.predict_rows(
                self._run,
                reading.rows,
                buckets=buckets,
                batch_size=choose_batch_sizes(len(reading.rows), largest, buckets),
            )
        lines = []
        for answer in question_answering.collect(reading, found, config):
            text = answer.text(self._threshold)
            lines.append(
                {
                    "prediction": text,
                    "start": answer.candidates[0].start if text else -1,
                    "probabilities": {c.text: round(c.probability, 6) for c in answer.candidates}
                    or {"": 1.0},
                    "null_odds": round(answer.null_odds, 6),
                }
            )
        return lines


def make_predictor(
    config: Config, params: Params, tokenizer: Tokenizer, dtype: jnp.dtype
) -> Predictor | QuestionAnswerer:
    """Returns the predictor for the kind of `config.outputs`."""
    kind = QuestionAnswerer if config.outputs.kind == "span" else Predictor
    return kind(config, params, tokenizer, dtype)
