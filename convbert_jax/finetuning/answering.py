"""Answers of a fine-tuned model to new questions, in the form `prediction.predict_stream` wants."""

import jax
import jax.numpy as jnp
from flax import nnx

from convbert_jax.config import Config
from convbert_jax.data.errors import DataError
from convbert_jax.data.squad import Question
from convbert_jax.data.tokenizer import Tokenizer
from convbert_jax.finetuning import fitting, question_answering
from convbert_jax.finetuning.answers import THRESHOLDS
from convbert_jax.finetuning.prediction import Record
from convbert_jax.finetuning.programs import Params
from convbert_jax.models.finetuned import FinetunedModel
from convbert_jax.models.pretraining import build

_READS = '{"question": …, "context": …}'


class QuestionAnswerer:
    """A model for questions on contexts; after SQuAD 2.0 it may say that there is no answer."""

    def __init__(self, config: Config, params: Params, tokenizer: Tokenizer, dtype: jnp.dtype):
        """`config.outputs` is of the kind span."""
        head = config.outputs.head
        self._config = config
        self._tokenizer = tokenizer
        second = question_answering.VERSIONS.get(config.outputs.task) == "v2"
        self._threshold = THRESHOLDS[head] if second else None
        graphdef, _ = build(FinetunedModel, config)
        spans = question_answering.predict_with(head, config)

        @jax.jit
        def run(params, batch):
            found = spans(nnx.merge(graphdef, params), batch, dtype=dtype)
            return jax.tree.map(lambda leaf: leaf[None], found)

        params = jax.device_put(params)
        self._run = lambda batch: run(params, batch)

    def answer(self, records: list[Record]) -> list[Record]:
        """For each record {"question", "context"} the answer as `prediction` ("" if there is none),
        the character of the context where it begins as `start` (-1 if there is none), the
        probability of every candidate, and `null_odds`: higher, the less there seems to be one.

        Raises:
          DataError: a record without a question or a context.
        """
        config = self._config
        questions = [_question(record) for record in records]
        reading = question_answering.read_questions(questions, config, self._tokenizer, None)
        found = fitting.predict_rows(
            self._run,
            reading.rows,
            fitting.buckets_of(config),
            config.finetune.eval_batch_size,
        )[0]
        answered = question_answering.collect(reading, found, config)
        lines = []
        for record, question, answer in zip(records, questions, answered, strict=True):
            text = answer.text(self._threshold)
            lines.append(
                {
                    **({"id": record["id"]} if "id" in record else {}),
                    "texts": [question.text, question.context],
                    "prediction": text,
                    "start": answer.candidates[0].start if text else -1,
                    "probabilities": {c.text: round(c.probability, 6) for c in answer.candidates}
                    or {"": 1.0},
                    "null_odds": round(answer.null_odds, 6),
                }
            )
        return lines


def _question(record: Record) -> Question:
    texts = [record.get("question"), record.get("context")]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise DataError(f"line {record['line']} is not {_READS}, both with some text.")
    return Question(str(record.get("id", f"line {record['line']}")), *texts)
