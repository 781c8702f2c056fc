"""Functions of the model that answer the routes, and the warm-up of their programs."""

import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from convbert_jax.data.input_rows import ArgumentError
from convbert_jax.data.samplers import choose_buckets
from convbert_jax.inference.model import Model, TextModel
from convbert_jax.inference.network import POOLED, find_buckets
from convbert_jax.inference.predictor import choose_batch_sizes, several_batch_sizes
from convbert_jax.serve.batching import MAX_BATCH, BatchFunction

TOP_K = 8  # predictions for each mask
# Route -> condition that a model without the route does not meet
REQUIREMENTS = {
    "/v1/embeddings": "an encoder",
    "/rerank": "a fine-tuned model of pairs of texts with a number or two labels",
    "/predict": "a fine-tuned model",
    "/entities": "a model that is fine-tuned for tagging",
    "/fill-mask": "an encoder with a head for masked words (a generator)",
    "/replaced": "an encoder with a head for replaced tokens (a discriminator)",
    "/write": "a generative model",
}
_PREDICTED = ("prediction", "probabilities", "start", "null_odds")  # of a record of Model.predict


def make_functions(model: Model | TextModel) -> dict[str, BatchFunction]:
    """Returns the function of each route that the model supports."""
    if isinstance(model, TextModel):
        return {"/write": model.write}
    functions: dict[str, BatchFunction] = {"/v1/embeddings": functools.partial(_embed, model)}
    if "fill_mask" in model.abilities:
        functions["/fill-mask"] = functools.partial(_fill, model)
    if "replaced" in model.abilities:
        functions["/replaced"] = model.replaced
    if "predict" in model.abilities:
        outputs = model.config.outputs
        functions["/predict"] = functools.partial(_predict, model)
        if outputs.kind == "tagging":
            functions["/entities"] = model.entities
        if model.reranks:
            functions["/rerank"] = functools.partial(_score_pairs, model)
    return functions


def _embed(model: Model, texts: Sequence[str]) -> list[tuple[np.ndarray, int]]:
    """Returns (vector [C] with the model's pooling and default prompt, tokens) of each text."""
    start = model.vectors.prompts.get(model.vectors.default_prompt, "")
    rows = model.to_rows([(start + text,) for text in texts], model.length).rows
    found = model.network("main").apply(
        rows, POOLED[model.vectors.pooling], batch_size=MAX_BATCH, several_sizes=True
    )["vectors"]
    return list(zip(found, rows.lengths.tolist(), strict=True))


def _fill(model: Model, texts: Sequence[str]) -> list[list[list[dict[str, Any]]]]:
    """Returns the predictions for each mask of each text."""
    found = model.fill_mask(list(texts), top_k=min(TOP_K, model.tokenizer.vocab_size))
    return [masks if isinstance(masks[0], list) else [masks] for masks in found]


def _predict(model: Model, rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the prediction of each row; `error` instead for a row that cannot be predicted."""
    answers = []
    for record in model.predict(list(rows)):
        if "error" in record:
            answers.append({"error": re.sub(r"^line \d+ ", "", record["error"])})
        else:
            answers.append({name: record[name] for name in _PREDICTED if name in record})
    return answers


def _score_pairs(model: Model, pairs: Sequence[tuple[str, str]]) -> list[Any]:
    """Returns the predicted number or the probability of the second label of each pair."""
    positive = model.config.outputs.labels[-1]
    return [
        answer
        if "error" in answer
        else answer.get("probabilities", {}).get(positive, answer["prediction"])
        for answer in _predict(model, pairs)
    ]


def warm_up(
    model: Model | TextModel, functions: Mapping[str, BatchFunction]
) -> Iterator[Callable[[], Any]]:
    """Yields functions that compile the programs of all batch shapes, and logs their number."""
    started, count = time.monotonic(), 0
    for route, function in functions.items():
        if route in ("/entities", "/rerank"):  # they use the programs of /predict
            continue
        for items in _make_batches(model, route):
            yield functools.partial(function, items)
            count += 1
    logging.info("Compiled %d programs in %.0f s.", count, time.monotonic() - started)


def _make_batches(model: Model | TextModel, route: str) -> Iterator[list[Any]]:
    """Yields a batch for each shape: one text of each bucket length, repeated."""
    if isinstance(model, TextModel):
        yield [" ".join(_find_words(model.tokenizers[0], 8))]
        return
    outputs = model.config.outputs
    pair = route == "/predict" and outputs.texts == 2
    for length, sizes in _find_shapes(model, route):
        words = _find_words(model.tokenizer, length - 3 if pair else length - 2)
        item: Any = " ".join(words)
        if route == "/fill-mask":
            item = " ".join([model.mask_token, *words[1:]])
        elif pair:
            item = (words[0], " ".join(words[1:]) or words[0])
        elif route == "/predict" and outputs.kind == "tagging":
            item = words
        for size in sizes:
            yield [item] * size


def _find_shapes(model: Model, route: str) -> Iterator[tuple[int, set[int]]]:
    """Yields each bucket length, and for each batch size a number of rows that has it."""
    buckets = find_buckets(model.length)
    if route == "/v1/embeddings":
        yield from zip(buckets, map(set, several_batch_sizes(MAX_BATCH, buckets)), strict=True)
        return
    largest = MAX_BATCH
    if route == "/predict":
        settings = model.config.finetune
        buckets = choose_buckets(settings.buckets, settings.length)
        largest = settings.eval_batch_size
    for length in buckets:
        counts = {
            choose_batch_sizes(count, largest, (length,)): count for count in (MAX_BATCH, 2, 1)
        }
        yield length, {*counts.values()}


def _find_words(tokenizer, count: int) -> list[str]:
    """Returns one word `count` times; it is one token of the vocabulary."""
    for entry in tokenizer.entries:
        word = entry.strip("\u2581\u0120")  # marks of a word's begin (SentencePiece, BPE)
        if word.isalpha() and len(tokenizer.encode([" ".join([word] * 3)])[0]) == 3:
            return [word] * count
    raise ArgumentError("The vocabulary has no word of one token.")
