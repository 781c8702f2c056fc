"""Question answering with a fine-tuned model; implements `predictor.Answer`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from flax import nnx

from convbert_jax.config import Config
from convbert_jax.data.errors import DataError
from convbert_jax.data.tasks.labelled_text import Example
from convbert_jax.data.tasks.squad import Question
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.finetuning import fitting
from convbert_jax.finetuning.predictions.answers import THRESHOLDS
from convbert_jax.finetuning.tasks import question_answering
from convbert_jax.inference.predictor import choose_batch_sizes, explain_out_of_memory
from convbert_jax.models.build import build
from convbert_jax.models.finetuned import FinetunedModel
from convbert_jax.training import memory
from convbert_jax.training.task import Params


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
