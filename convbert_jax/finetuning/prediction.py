"""Predictions of a fine-tuned model for new text, in a stream: from lines to lines."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TextIO

import jax
import jax.numpy as jnp
from absl import logging
from flax import nnx
from tqdm import tqdm

from convbert_jax.config import Config
from convbert_jax.data.errors import DataError
from convbert_jax.data.labelled_text import Example, LabelledTask
from convbert_jax.data.tokenizer import Tokenizer
from convbert_jax.finetuning import classification, fitting, prediction_files, scoring
from convbert_jax.finetuning.programs import Params
from convbert_jax.models.finetuned import FinetunedModel
from convbert_jax.models.pretraining import build

AT_ONCE = 1_024  # lines that are read, predicted and written together

Record = dict  # one line: {"text": …}, {"texts": [first, second]}, {"words": […]}, and an "id"
Answer = Callable[[list[Record]], list[Record]]


class Predictor:
    """A fine-tuned model for texts."""

    def __init__(self, config: Config, params: Params, tokenizer: Tokenizer, dtype: jnp.dtype):
        """`config.outputs` says what the model is for; its kind is not span."""
        self.outputs = config.outputs
        self._config = config
        self._tokenizer = tokenizer
        graphdef, _ = build(FinetunedModel, config)
        constants = classification.constants_of(self.outputs, len(self.outputs.labels))

        @jax.jit
        def run(params, batch):
            model = nnx.merge(graphdef, params)
            found = classification.predict_logits(model, {**batch, **constants}, dtype=dtype)
            return jax.tree.map(lambda leaf: leaf[None], found)

        params = jax.device_put(params)
        self._run = lambda batch: run(params, batch)

    def predict(self, examples: Sequence[Example]) -> scoring.Outputs:
        """Outputs as `scoring.score` takes them, in the order of the examples."""
        rows = classification.encode_examples(
            examples, self.outputs, self._config, self._tokenizer, "texts"
        )
        found = fitting.predict_rows(
            self._run,
            rows,
            fitting.buckets_of(self._config),
            self._config.finetune.eval_batch_size,
        )[0]
        words = [len(example.texts[0].split(" ")) for example in examples]
        return classification.in_label_units(self.outputs, rows, found, words)

    def answer(self, records: list[Record]) -> list[Record]:
        """Each record with its prediction and probabilities."""
        outputs = self.outputs
        examples = [
            Example(str(record.get("id", "")), _texts_of(record, outputs), None)
            for record in records
        ]
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
        found = self.predict(examples)
        described = prediction_files.describe_examples(task, examples, found)
        return [
            {name: value for name, value in line.items() if name != "label" and value != ""}
            for line in described
        ]


def predict_stream(
    lines: Iterable[str], answer: Answer, output: TextIO, *, kind: str, texts: int, tsv: bool
) -> int:
    """Reads lines, writes one for each, in their order, a thousand at a time.

    Args:
      lines: JSON objects, or plain texts with a tab between two of them and blanks between words.
      answer: records -> records with their predictions.
      kind: of the task.
      texts: of an example.
      tsv: writes `prediction`, the highest probability and the texts; else JSON lines.

    Returns:
      number of lines.

    Raises:
      DataError: a line that is not what the model reads; what was written stays.
    """
    records = (
        _parse(line.rstrip("\r\n"), number, kind, texts)
        for number, line in enumerate(lines, start=1)
    )
    count = 0
    with tqdm(desc="predicting", unit="line", leave=False, disable=None) as bar:
        for chunk in _chunks(records):
            for line in answer(chunk):
                output.write(
                    (_to_tsv(line) if tsv else json.dumps(line, ensure_ascii=False)) + "\n"
                )
            output.flush()
            count += len(chunk)
            bar.update(len(chunk))
    logging.info("Predicted %d lines.", count)
    return count


def _chunks(records: Iterator[Record]) -> Iterator[list[Record]]:
    while chunk := list(itertools.islice(records, AT_ONCE)):
        yield chunk


def _parse(line: str, number: int, kind: str, texts: int) -> Record:
    if line.lstrip().startswith("{"):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"line {number} is not JSON: {error}.") from None
        return {"line": number, **record}
    if kind == "span":
        raise DataError(
            f'line {number} is not JSON; this model reads {{"question": …, "context": …}} a line.'
        )
    if kind == "tagging":
        return {"line": number, "words": line.split()}
    return {"line": number, "texts": line.split("\t") if texts == 2 else [line]}


def _texts_of(record: Record, outputs) -> tuple[str, ...]:
    place = f"line {record['line']}"
    if outputs.kind == "tagging":
        words = record.get("words", str(record.get("text", "")).split())
        found = (" ".join(map(str, words)),)
        wanted = 'a text or {"words": […]}'
    else:
        found = tuple(record["texts"]) if "texts" in record else (record.get("text"),)
        wanted = 'a text or {"text": …}'
        if outputs.texts == 2:
            wanted = 'two texts with a tab between them or {"texts": [first, second]}'
    if len(found) != (1 if outputs.kind == "tagging" else outputs.texts):
        raise DataError(f"{place} has {len(found)} texts; this model reads {wanted} a line.")
    if not all(isinstance(text, str) and text.strip() for text in found):
        raise DataError(f"{place} has an empty text; this model reads {wanted} a line.")
    return found


def _to_tsv(line: Record) -> str:
    probabilities = line.get("probabilities")
    highest = max(probabilities.values()) if isinstance(probabilities, dict) else ""
    prediction = line["prediction"]
    if isinstance(prediction, list):
        prediction = " ".join(prediction)
    texts = line.get("texts") or [" ".join(line.get("words", ()))]
    return "\t".join(map(str, (prediction, highest, *texts)))
