"""Predictions with a fine-tuned model: classification, regression, tagging, question answering."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx

from convbert_jax.config import Config
from convbert_jax.data.errors import DataError
from convbert_jax.data.tasks.labelled_text import Example, LabelledTask, Rows
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


def several_batch_sizes(largest: int, buckets: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns several batch sizes for each length in `buckets`, for `evaluation_batches`.

    They waste less padding on few rows than `choose_batch_sizes`, but more programs are compiled.
    """
    bounds = choose_batch_sizes(largest, largest, buckets)
    return tuple((*(4**i for i in range(5) if 4**i < most), most) for most in bounds)


def explain_out_of_memory(params: Params) -> contextlib.AbstractContextManager[None]:
    """Explains out-of-memory errors inside the block, with advice for predictions."""
    advice = (
        'lower finetune.eval_batch_size in the config.json of the model and remove its "crc32", or '
        "compute on the CPU with JAX_PLATFORMS=cpu"
    )
    return memory.explain_out_of_memory("predicting", advice, lambda: memory.find_state(params))


class _Compiled:
    """A compiled fine-tuned model.

    Attributes:
      outputs: `config.outputs`.
    """

    def __init__(
        self,
        config: Config,
        params: Params,
        tokenizer: Tokenizer,
        forward: Callable[[FinetunedModel, Any], dict[str, jax.Array]],
    ):
        """
        Args:
          forward: (model, batch) -> arrays [B, ...] by name.
        """
        self.outputs, self._config, self._tokenizer = config.outputs, config, tokenizer
        self._told_cut = False  # truncations are logged once, not for every line of a pipe
        graphdef, _ = build(FinetunedModel, config)

        @jax.jit
        def run(params, batch):
            found = forward(nnx.merge(graphdef, params), batch)
            return jax.tree.map(lambda leaf: leaf[None], found)

        self._params = memory.put_on_device(params)
        self._run = lambda batch: run(self._params, batch)

    def _predict_rows(self, rows: Rows) -> dict[str, list[np.ndarray]]:
        """Returns the arrays of `forward` for each row, in order."""
        buckets, largest = fitting.buckets_of(self._config), self._config.finetune.eval_batch_size
        sizes = choose_batch_sizes(len(rows), largest, buckets)
        with explain_out_of_memory(self._params):
            return fitting.predict_rows(self._run, rows, buckets=buckets, batch_size=sizes)


class Predictor(_Compiled):
    """A fine-tuned model for classification, regression or tagging."""

    def __init__(self, config: Config, params: Params, tokenizer: Tokenizer, dtype: jnp.dtype):
        """Compiles the model; `config.outputs.kind` must not be "span"."""
        constants = classification.constants_of(config.outputs, len(config.outputs.labels))

        def forward(model, batch):
            return classification.predict_logits(model, {**batch, **constants}, dtype=dtype)

        super().__init__(config, params, tokenizer, forward)

    def predict(self, examples: Sequence[Example]) -> scoring.Outputs:
        """Returns outputs for `scoring.score`, in the order of the examples."""
        return self._predict(examples)[1]

    def _predict(self, examples: Sequence[Example]) -> tuple[Rows, scoring.Outputs]:
        encoded = classification.encode_examples(
            examples, self.outputs, self._config, self._tokenizer
        )
        # Long sentences are tagged in windows.
        if encoded.truncated and not self._told_cut and self.outputs.kind != "tagging":
            self._told_cut = True
            logging.warning(
                "%s: truncated %d of %d texts to %d tokens. Further truncations are not logged.",
                self.outputs.task,
                encoded.truncated,
                len(examples),
                self._config.finetune.length,
            )
        found = self._predict_rows(encoded.rows)
        words = [len(example.texts[0].split(" ")) for example in examples]
        units = classification.in_label_units(self.outputs, encoded.rows, found, words)
        return encoded.rows, units

    def answer(self, examples: Sequence[Example]) -> list[dict[str, Any]]:
        """Predicts examples; implements `Answer`.

        Returns:
          For each example a dict of `prediction` and, except for regression, `probabilities`. For
          tagging these are lists per word, with None for a word that does not fit into a row.
        """
        if self.outputs.kind == "tagging":
            return self._tag(examples)
        return self._describe(examples)[1]

    def _tag(self, examples: Sequence[Example]) -> list[dict[str, Any]]:
        """Tags sentences of any length; long ones in windows that overlap by half.

        In an overlap, the window that has more words around a word decides.
        """
        sentences = [example.texts[0].split(" ") for example in examples]
        said = [
            {name: [None] * len(words) for name in ("prediction", "probabilities")}
            for words in sentences
        ]
        pending = [(index, 0, 0) for index in range(len(examples))]
        while pending:
            windows = [
                Example(examples[index].id, (" ".join(sentences[index][start:]),), None)
                for index, start, _ in pending
            ]
            rows, found = self._describe(windows)
            counts, windows = classification.words_read(rows), pending
            pending = []
            for (index, start, first), line, read in zip(windows, found, counts, strict=True):
                for name, values in line.items():
                    said[index][name][first : start + read] = values[first - start : read]
                end = start + int(read)
                if end >= len(sentences[index]):
                    continue
                following = max(start + 1, end - read // 2)
                pending.append((index, following, max(following, end - read // 4)))
        return said

    def _describe(self, examples: Sequence[Example]) -> tuple[Rows, list[dict[str, Any]]]:
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
        return rows, [{name: line[name] for name in names if name in line} for line in described]


class QuestionAnswerer(_Compiled):
    """An extractive question answering model; with SQuAD 2.0 it may predict no answer."""

    def __init__(self, config: Config, params: Params, tokenizer: Tokenizer, dtype: jnp.dtype):
        """Compiles the model; `config.outputs.kind` must be "span"."""
        head = config.outputs.head
        second = question_answering.VERSIONS.get(config.outputs.task) == "v2"
        self._threshold = THRESHOLDS[head] if second else None
        spans = functools.partial(question_answering.predict_with(head, config), dtype=dtype)
        super().__init__(config, params, tokenizer, spans)

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
            self._told_cut = True
            logging.warning(
                "%s: truncated %d of %d questions to %d tokens. Further truncations are not "
                "logged.",
                config.outputs.task,
                reading.windows.cut_questions,
                len(questions),
                config.finetune.query_length,
            )
        found = self._predict_rows(reading.rows)
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
