"""The models that `convbert_jax.load` returns: `Model` for encoders, `TextModel` for generation."""

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict

import jax.numpy as jnp
import numpy as np
from absl import logging

from convbert_jax.config import Config, UserError
from convbert_jax.config.training import POOLINGS
from convbert_jax.data import input_rows
from convbert_jax.data.errors import shorten
from convbert_jax.data.input_rows import (
    ArgumentError,
    as_rows,
    as_single_texts,
    as_texts,
    whole_number,
)
from convbert_jax.data.tasks.labelled_text import Encoded, Rows, encode_texts, pad_rows
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.finetuning.scoring import find_spans
from convbert_jax.inference import search, stream
from convbert_jax.inference.generation import Writer, change_decoding, read_mean
from convbert_jax.inference.network import (
    POOLED,
    NetworkOnDevice,
    log_probability,
    predict_masked,
    predict_replaced,
    take,
)
from convbert_jax.inference.predictor import Predictor, QuestionAnswerer, make_predictor
from convbert_jax.inference.texts import Filled, encode_masked, fill_mask, mask_token
from convbert_jax.interop.networks import Network
from convbert_jax.interop.sentence_transformers import VectorConfig
from convbert_jax.interop.sentence_transformers import normalize as normalize_vectors
from convbert_jax.interop.sources import read_tokenizers
from convbert_jax.workdir import Workdir

Text = str | Sequence[str]  # one, or a pair as ("first", "second")
_WORD = re.compile(r"\w+|[^\w\s]")
_AT_ONCE = 4_096  # texts that are tokenized and computed together


class ModelError(UserError):
    """A model cannot be loaded, or does not support the call."""


class Suspect(TypedDict):
    """A token and the probability that a generator replaced it."""

    token: str  # entry of the vocabulary
    start: int  # its first character in the text
    end: int  # exclusive
    probability: float


class Entity(TypedDict):
    """A named entity in a text."""

    text: str
    label: str  # its type, a tag without prefix
    start: int  # its first character in the text
    end: int  # exclusive
    probability: float  # of the least probable of its tags


class Model:
    """Weights and tokenizer; created by `convbert_jax.load`.

    Attributes:
      path: path of the source.
      config: config of the run; for other sources the fields that are known.
      step: number of training steps, 0 if unknown.
      tokenizer: converts texts to token ids and back.
      networks: "main", the encoder, and "generator" if present, on the host.
      length: maximum tokens of a row, including [CLS] and [SEP]; longer texts are truncated. For a
        run the length of its training rows, for a sentence-transformers folder its max_seq_length,
        else the positions of the model.
      vectors: how `encode` computes vectors by default.
    """

    def __init__(
        self,
        path: str,
        config: Config,
        networks: Mapping[str, Network],
        tokenizer: Tokenizer,
        *,
        step: int,
        length: int,
        dtype: jnp.dtype,
        finetuned_params: Any = None,
        vectors: VectorConfig | None = None,
    ):
        """
        Args:
          dtype: dtype of the computation; results are float32.
          finetuned_params: parameters for `config` of a fine-tuned model.
          vectors: None for a model that was not trained to give vectors.
        """
        self.path, self.config, self.networks = path, config, networks
        self.tokenizer, self.step, self.length = tokenizer, step, length
        self.vectors = vectors or VectorConfig()
        self._dtype = dtype
        self._finetuned_params = finetuned_params
        self._on_device: dict[str, NetworkOnDevice] = {}

    def __repr__(self) -> str:
        main = self.networks["main"]
        heads = [name for name in _HEADS if any(n.has(name) for n in self.networks.values())]
        return (
            f"<Model {self.path}: {main.family}, {main.encoder.depth} layers of "
            f"{main.encoder.hidden_size}, {', '.join(heads) or 'no heads'}>"
        )

    @property
    def abilities(self) -> tuple[str, ...]:
        """Methods that the heads support: `fill_mask`, `replaced` or `predict`."""
        if self._finetuned_params is not None:
            return ("predict",)
        fills = any(self._has(name, "mlm_head") for name in self.networks)
        suspects = self._has("main", "rtd_head")
        return ("fill_mask",) * fills + ("replaced",) * suspects

    @property
    def mask_token(self) -> str:
        """Mask token in the texts of `fill_mask`."""
        return mask_token(self.tokenizer)

    def tokenize(
        self, texts: Text | Sequence[Text], *, length: int | None = None
    ) -> list[list[str]] | list[str]:
        """Returns the tokens that `encode` reads: a list of vocabulary entries for each text.

        Arguments and errors: see `encode`.

        >>> model.tokenize("A text.")[0]
        '[CLS]'
        """
        length = self._check_length(length)
        examples, single = as_texts(texts)
        if not examples:
            return []
        rows = self._encode_texts(examples, length)
        tokens = rows.by_token["tokens"]
        found = [
            self.tokenizer.pieces(ids[:n]) for ids, n in zip(tokens, rows.lengths, strict=True)
        ]
        return found[0] if single else found

    def encode(
        self,
        texts: Text | Sequence[Text],
        *,
        pooling: Literal["mean", "cls", "first_and_mean", "none"] | None = None,
        normalize: bool | None = None,
        prompt: str = "",
        length: int | None = None,
        batch_size: int = 64,
    ) -> np.ndarray | list[np.ndarray]:
        """Returns hidden states of the last layer of the encoder (discriminator) as float32.

        The result for a text does not depend on other texts of its batch, except for rounding. The
        defaults are `self.vectors`: the settings of a sentence-transformers folder; config.pooling
        and normalization for a run of config.recipe=embedding; else the mean without normalization.

        Args:
          texts: texts, or pairs of texts as tuples; a single string is one text.
          pooling: "mean" over all tokens including [CLS] and [SEP]; "cls" for the first token,
            which a fine-tuned head reads; "first_and_mean" for both, one after the other; "none"
            for all tokens of `tokenize`.
          normalize: whether to divide each vector by its L2 norm. The default is False for
            pooling="none".
          prompt: name of a prompt in `self.vectors.prompts`, whose text is put before each text.
          length: maximum tokens of a row, default `self.length`; longer texts are truncated and
            their number is logged.
          batch_size: maximum rows of a batch.

        Returns:
          [N, C], [N, 2 C] with "first_and_mean"; with "none" a list of [tokens, C]; for a single
          string its array.

        Raises:
          ModelError: `pooling` or `prompt` is unknown.
          ArgumentError: `texts`, `length` or `batch_size` is invalid.

        >>> model.encode(["a text", "another", ("two", "texts")]).shape
        (3, 32)
        >>> model.encode("a text", pooling="none").shape == (len(model.tokenize("a text")), 32)
        True
        """
        pooling = self.vectors.pooling if pooling is None else pooling
        if not isinstance(pooling, str) or pooling not in POOLED:
            raise ModelError(
                f"is unknown. Choose from {', '.join(POOLED)}.",
                field="pooling",
                value=pooling,
            )
        if normalize is None:
            normalize = self.vectors.normalize and pooling != "none"
        length = self._check_length(length)
        batch_size = whole_number("batch_size", batch_size, 1)
        examples, single = as_texts(texts)
        if start := self._prompt(prompt):
            examples = [(start + first, *rest) for first, *rest in examples]
        found: list[np.ndarray] = []
        for chunk in _chunks(examples):
            rows = self._encode_texts(chunk, length)
            network = self.network("main")
            vectors = network.apply(rows, POOLED[pooling], batch_size=batch_size)["vectors"]
            if pooling == "none":
                # a view would keep the padding of its whole batch in memory
                vectors = [v[:n].copy() for v, n in zip(vectors, rows.lengths, strict=True)]
            found += map(normalize_vectors, vectors) if normalize else list(vectors)
        if single:
            return found[0]
        if pooling == "none":
            return found
        width = len(POOLINGS[pooling]) * self.networks["main"].encoder.hidden_size
        return np.stack(found) if found else np.zeros((0, width), np.float32)

    def encode_queries(self, texts: str | Sequence[str], *, batch_size: int = 64) -> np.ndarray:
        """Returns vectors of queries: `encode` with the prompt "query", if the model has it.

        Arguments, shapes and errors: see `encode`.
        """
        return self._encode_role(texts, ("query",), batch_size)

    def encode_documents(self, texts: str | Sequence[str], *, batch_size: int = 64) -> np.ndarray:
        """Returns vectors of documents: `encode` with the prompt "document", or "passage", if any.

        Arguments, shapes and errors: see `encode`.
        """
        return self._encode_role(texts, ("document", "passage"), batch_size)

    def _encode_role(self, texts, roles: tuple[str, ...], batch_size: int) -> np.ndarray:
        prompt = next((role for role in roles if role in self.vectors.prompts), "")
        return self.encode(texts, prompt=prompt, batch_size=batch_size)

    def index(
        self, texts: Sequence[str], *, batch_size: int = 64, approximate: bool = False
    ) -> search.Index:
        """Computes the vectors of documents for a search; see `search.Index`.

        Args:
          batch_size: see `encode`.
          approximate: build a graph of near neighbors with usearch. A search then compares a query
            with a small part of the vectors, and may miss a similar text.

        Raises:
          ArgumentError: `texts` are not single texts.
          SearchError: `approximate` without the package usearch.

        >>> model.index(["a text", "another"])
        <Index of 2 texts, 32 channels>
        """
        texts, _ = as_single_texts(texts)
        if approximate:
            search.import_usearch()  # a missing package is an error before hours of encoding
        vectors = self.encode_documents(texts, batch_size=batch_size)
        return search.Index(texts, vectors, self.encode_queries, approximate=approximate)

    def load_index(self, folder: str | os.PathLike, *, approximate: bool = False) -> search.Index:
        """Reads an index that `search.Index.save` wrote.

        Args:
          approximate: see `index`. The graph is built again, from the vectors in the folder.

        Raises:
          SearchError: there is no index, it was made by another model, or usearch is missing.
          DamagedFileError: a file is damaged.
        """
        encode = (self.encode_documents, self.encode_queries)
        return search.load(folder, *encode, approximate=approximate)

    def fill_mask(
        self,
        texts: str | Sequence[str],
        *,
        top_k: int = 5,
        length: int | None = None,
        batch_size: int = 64,
    ) -> list:
        """Predicts masked tokens with the generator or a masked language model.

        Args:
          top_k: number of predictions for each mask.
          length, batch_size: see `encode`.

        Returns:
          For a text with one mask the `top_k` most probable tokens in decreasing order; for a text
          with several masks a list with one such list for each mask, predicted jointly in one pass.
          For several texts a list of these.

        Raises:
          ModelError: the model has no masked language head, or a text has no [MASK] within `length`
            tokens.

        >>> best, *_ = model.fill_mask("Paris is the [MASK] of France.")
        >>> sorted(best)
        ['score', 'sequence', 'token', 'token_str']
        """
        name = next((n for n in ("generator", "main") if self._has(n, "mlm_head")), None)
        if name is None:
            raise ModelError(
                f"{self.path} has no head for masked words (no generator). Load a pre-training "
                "run, or a folder that was exported with its generator.",
                path=self.path,
            )
        entries = self.tokenizer.vocab_size
        top_k = whole_number("top_k", top_k, 1, entries, "entries of the vocabulary")
        length = self._check_length(length)
        batch_size = whole_number("batch_size", batch_size, 1)
        examples, single = as_single_texts(texts)
        results: list = []
        for chunk in _chunks(examples):
            results += self._fill_chunk(chunk, self.network(name), top_k, length, batch_size)
        return results[0] if single else results

    def _fill_chunk(self, texts, network: NetworkOnDevice, top_k, length, batch_size) -> list:
        pieces = self._cut([encode_masked(self.tokenizer, text) for text in texts], length)
        rows = pad_rows(pieces, length, pad=self.tokenizer.special.pad)
        holes = [np.flatnonzero(np.equal(ids, self.tokenizer.special.mask)) for ids in pieces]
        self._check_holes(texts, holes, length)
        # Powers of two: each width is compiled.
        width = 1 << max((len(h) - 1).bit_length() for h in holes)
        places = np.zeros((len(texts), width), np.int32)
        for row, found in zip(places, holes, strict=True):
            row[: len(found)] = found
        option = (top_k, self.tokenizer.vocab_size)
        best = network.apply(
            rows.with_columns(places=places), predict_masked, option, batch_size=batch_size
        )
        results = []
        for number, (text, found) in enumerate(zip(texts, holes, strict=True)):
            scores, tokens = best["scores"][number], best["tokens"][number]
            each = [self._describe(text, h, scores[h], tokens[h]) for h in range(len(found))]
            results.append(each[0] if len(each) == 1 else each)
        return results

    def replaced(
        self, texts: str | Sequence[str], *, length: int | None = None, batch_size: int = 64
    ) -> list:
        """Returns the discriminator's probability for each token that it was replaced.

        Args:
          length, batch_size: see `encode`.

        Returns:
          For one text its tokens in order, truncated to `length`; for several texts a list of
          these.

        Raises:
          ModelError: the model has no discriminator.

        >>> tokens = model.replaced("The old port lies in Lamu.")
        >>> worst = max(tokens, key=lambda token: token["probability"])
        >>> sorted(worst)
        ['end', 'probability', 'start', 'token']
        """
        if not self._has("main", "rtd_head"):
            raise ModelError(
                f"{self.path} has no head for replaced tokens (no discriminator). Load a run of "
                "config.recipe=replaced_token, or its export.",
                path=self.path,
            )
        length = self._check_length(length)
        batch_size = whole_number("batch_size", batch_size, 1)
        examples, single = as_single_texts(texts)
        results: list[list[Suspect]] = []
        for chunk in _chunks(examples):
            encoded = self.tokenizer.encode_with_offsets(chunk)
            pieces = self._cut([ids for ids, _ in encoded], length)
            rows = pad_rows(pieces, length, pad=self.tokenizer.special.pad)
            network = self.network("main")
            found = network.apply(rows, predict_replaced, batch_size=batch_size)
            for number, (ids, places) in enumerate(encoded):
                count = int(rows.lengths[number]) - 2
                scores = found["probability"][number][1 : 1 + count]
                tokens = zip(self.tokenizer.pieces(ids[:count]), places, scores, strict=False)
                results.append([Suspect(token=t, start=int(p[0]), end=int(p[1]),
                                        probability=float(s)) for t, p, s in tokens])  # fmt: skip
        return results[0] if single else results

    def log_likelihood(
        self,
        texts: str | Sequence[str],
        *,
        by: Literal["masked_words", "replaced_tokens"] | None = None,
        length: int | None = None,
        batch_size: int = 64,
    ) -> float | np.ndarray:
        """Returns how probable texts are, as the sum over their tokens, in nats.

        Args:
          by: "masked_words": log probability of each token if it alone is masked, by the generator
            or a masked language model (pseudo-log-likelihood, Salazar et al., 2020, equation 3);
            "replaced_tokens": log probability of the discriminator that a token is original, a
            single pass. Default: the first that the model has.
          length, batch_size: see `encode`.

        Returns:
          [N]; a number for a single string.

        Raises:
          ModelError: the model has no head for it.
          ArgumentError: `texts` are not single texts.
        """
        by = by or next(iter(self.likelihoods), "masked_words")
        if by not in self.likelihoods:
            raise ModelError(
                f"is not possible with {self.path}; its heads allow: "
                f"{', '.join(self.likelihoods) or 'none'}.",
                field="by",
                value=by,
            )
        length = self._check_length(length)
        batch_size = whole_number("batch_size", batch_size, 1)
        examples, single = as_texts(texts)
        measure = {"masked_words": self._score_masked, "replaced_tokens": self._score_replaced}[by]
        found = [np.zeros(0)]
        for chunk in _chunks(examples):
            found.append(measure(self._encode_texts(chunk, length), batch_size))
        values = np.concatenate(found)
        return float(values[0]) if single else values

    @property
    def likelihoods(self) -> tuple[str, ...]:
        """Values of `by` in `log_likelihood` that the heads support."""
        masked = any(self._has(name, "mlm_head") for name in self.networks)
        replaced = self._has("main", "rtd_head")
        return ("masked_words",) * masked + ("replaced_tokens",) * replaced

    def _score_masked(self, rows: Rows, batch_size: int) -> np.ndarray:
        name = next(n for n in ("generator", "main") if self._has(n, "mlm_head"))
        # one row for each token of each text, without [CLS] and [SEP]
        texts = np.repeat(np.arange(len(rows)), rows.lengths - 2)
        starts = np.cumsum([0, *(rows.lengths[:-1] - 2)])
        places = np.arange(len(texts)) - starts[texts] + 1
        masked = take(rows, texts)
        tokens = masked.by_token["tokens"]
        each = np.arange(len(texts))
        targets = tokens[each, places].copy()
        tokens[each, places] = self.tokenizer.special.mask
        masked = masked.with_columns(place=places.astype(np.int32), target=targets)
        found = self.network(name).apply(
            masked, log_probability, self.tokenizer.vocab_size, batch_size=batch_size
        )
        values = np.asarray(found["value"]) if len(texts) else np.zeros(0)
        return np.bincount(texts, weights=values, minlength=len(rows))

    def _score_replaced(self, rows: Rows, batch_size: int) -> np.ndarray:
        found = self.network("main").apply(rows, predict_replaced, batch_size=batch_size)
        return np.asarray(
            [
                np.log1p(-np.minimum(values[1 : n - 1], 1 - 1e-7).astype(np.float64)).sum()
                for values, n in zip(found["probability"], rows.lengths, strict=True)
            ]
        )

    def predict(self, rows: Any) -> list[dict[str, Any]] | dict[str, Any]:
        """Predicts rows with a fine-tuned model; returns the records that `--mode=predict` writes.

        Args:
          rows: a list of texts, of pairs of texts, of (question, context) pairs for question
            answering, of lists of words for tagging, or of dicts with the columns of the training
            data; other columns are copied to the result. A single string is one text, a single
            dict one row.

        Returns:
          For each row a dict of "prediction", "probabilities" and other keys of its kind of task,
          or "error" for a row that cannot be predicted, as an empty text. For a single row its
          dict.

        Raises:
          ModelError: the model is not fine-tuned.

        >>> finetuned = convbert_jax.load("runs/task/own/seed-0")
        >>> sorted(finetuned.predict(["good text", "bad text"])[0])
        ['id', 'prediction', 'probabilities', 'texts']
        """
        predictor, reads = self._predictor
        single = isinstance(rows, str | Mapping)
        found: list[dict[str, Any]] = []
        read = (
            input_rows.from_value(value, number, reads)
            for number, value in enumerate([rows] if single else as_rows("rows", rows))
        )
        for chunk in stream.in_full(read):
            found += stream.answer_rows(chunk, predictor.answer, reads)
        return found[0] if single else found

    @property
    def reranks(self) -> bool:
        """Whether the model was fine-tuned on pairs of texts with a number or two labels."""
        outputs = self.config.outputs
        two = outputs.kind == "classification" and len(outputs.labels) == 2
        scores = two or outputs.kind == "regression"
        return self._finetuned_params is not None and outputs.texts == 2 and scores

    def rerank(self, query: str, documents: Sequence[str]) -> list[search.Hit]:
        """Sorts documents by a model that was fine-tuned on pairs of query and document.

        Returns:
          The documents with their score, the highest first: the number of a regression, or the
          probability of the second label.

        Raises:
          ModelError: the model does not read pairs, or has neither a number nor two labels.
          ArgumentError: `documents` are not texts, or a text is empty.
        """
        if not self.reranks:
            raise ModelError(
                f"{self.path} cannot rerank. Fine-tune an encoder on pairs of texts with a number "
                "or two labels.",
                path=self.path,
            )
        outputs = self.config.outputs
        documents, _ = as_single_texts(documents)
        records = self.predict([(query, document) for document in documents])
        for number, record in enumerate(records):
            if "error" in record:
                raise ArgumentError("or the query is empty.", field=f"documents[{number}]")
        values = [
            record["probabilities"][outputs.labels[1]]
            if outputs.kind == "classification"
            else record["prediction"]
            for record in records
        ]
        order = np.argsort([-value for value in values], kind="stable").tolist()
        return [search.Hit(place, documents[place], values[place]) for place in order]

    def entities(self, texts: str | Sequence[str]) -> list[Entity] | list[list[Entity]]:
        """Finds named entities with a model that was fine-tuned for tagging.

        Words are sequences of letters and digits; each other character except blanks is a word of
        its own. Texts may be longer than `length`: they are tagged in windows.

        Returns:
          The entities of a single text in order, or a list of these for each text. [] for a text
          without words.

        Raises:
          ModelError: the model does not tag words.
          ArgumentError: `texts` are not single texts.
        """
        if self.config.outputs.kind != "tagging" or self._finetuned_params is None:
            raise ModelError(
                f"{self.path} does not tag words. Fine-tune an encoder with configs/ner.py.",
                path=self.path,
            )
        texts, single = as_single_texts(texts)
        words = [list(_WORD.finditer(text)) for text in texts]
        found: list[list[Entity]] = [[] for _ in texts]
        places = [place for place, of_text in enumerate(words) if of_text]
        records = self.predict([[word[0] for word in words[place]] for place in places])
        for place, record in zip(places, records, strict=True):
            for label, first, end in find_spans(record["prediction"]):
                start, stop = words[place][first].start(), words[place][end - 1].end()
                probability = min(record["probabilities"][first:end])
                found[place].append(
                    Entity(text=texts[place][start:stop], label=label, start=start, end=stop,
                           probability=probability)
                )  # fmt: skip
        return found[0] if single else found

    @functools.cached_property
    def _predictor(self) -> tuple[Predictor | QuestionAnswerer, input_rows.ModelInput]:
        if self._finetuned_params is None:
            raise ModelError(
                f"{self.path} has no head for labels. Fine-tune it first "
                f"(convbert_jax.finetune with init_from={self.path}).",
                path=self.path,
            )
        predictor = make_predictor(self.config, self._finetuned_params, self.tokenizer, self._dtype)
        return predictor, input_rows.describe_model_input(self.config)

    def _has(self, name: str, head: str) -> bool:
        return name in self.networks and self.networks[name].has(head)

    def network(self, name: str) -> NetworkOnDevice:
        """Returns one of `networks` on the device, compiled on first use."""
        if name not in self._on_device:
            self._on_device[name] = NetworkOnDevice(self.networks[name], self._dtype)
        return self._on_device[name]

    def _prompt(self, name: str) -> str:
        """Returns the text of a prompt; "" names the default prompt, or none."""
        prompts, name = self.vectors.prompts, name or self.vectors.default_prompt
        if name and (not isinstance(name, str) or name not in prompts):
            raise ModelError(
                f"is not a prompt of {self.path}; it has {', '.join(prompts) or 'none'}.",
                field="prompt",
                value=name,
            )
        return prompts.get(name, "")

    def _check_length(self, length: int | None) -> int:
        positions = self.networks["main"].embeddings.positions
        length = self.length if length is None else length
        return whole_number("length", length, 4, positions, "positions of the model")

    def _encode_texts(self, texts: Sequence[tuple[str, ...]], length: int) -> Rows:
        encoded = self.to_rows(texts, length)
        self._tell_cut(encoded.truncated, len(texts), length)
        return encoded.rows

    def to_rows(self, texts: Sequence[tuple[str, ...]], length: int) -> Encoded:
        """Encodes tuples of one or two texts as rows of at most `length` tokens, in order."""
        types = self.networks["main"].embeddings.types
        parts, places = [], []
        for count in (1, 2):
            of_kind = [place for place, text in enumerate(texts) if len(text) == count]
            if of_kind:
                chosen = [texts[place] for place in of_kind]
                parts.append(encode_texts(self.tokenizer, chosen, length=length, types=types))
                places += of_kind
        order = np.argsort(places)
        joined = [part.rows for part in parts]
        by_token = {
            name: np.concatenate([rows.by_token[name] for rows in joined])[order]
            for name in ("tokens", "type_ids")
        }
        rows = Rows(np.concatenate([rows.lengths for rows in joined])[order], by_token)
        return Encoded(rows, sum(part.truncated for part in parts))

    def _cut(self, texts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
        special = self.tokenizer.special
        self._tell_cut(sum(len(ids) > length - 2 for ids in texts), len(texts), length)
        return [[special.cls, *ids[: length - 2], special.sep] for ids in texts]

    def _tell_cut(self, count: int, of: int, length: int) -> None:
        if count:
            logging.warning(
                "%s: truncated %d of %d texts to %d tokens.", self.path, count, of, length
            )

    def _check_holes(self, texts: Sequence[str], holes: Sequence[np.ndarray], length: int) -> None:
        mask = self.mask_token
        for text, found in zip(texts, holes, strict=True):
            if len(found) < max(1, text.count(mask)):
                where = f"within its first {length} tokens" if mask in text else "in it"
                missing = "a" if mask not in text else "every"
                raise ModelError(
                    f"{shorten(text, 60)!r} does not have {missing} {mask} {where}. Write one "
                    "for each token to predict."
                )

    def _describe(self, text: str, hole: int, scores, tokens) -> list[Filled]:
        return [
            Filled(
                score=float(score),
                token=int(token),
                token_str=self.tokenizer.decode([token]) or self.tokenizer.entries[token],
                sequence=fill_mask(self.tokenizer, text, hole, int(token)),
            )
            for score, token in zip(scores, tokens, strict=True)
        ]


_HEADS = ("mlm_head", "rtd_head", "pair_head", "sequence_head", "token_head", "span_head")


def _chunks(texts: Sequence) -> Iterator[Sequence]:
    for start in range(0, len(texts), _AT_ONCE):
        yield texts[start : start + _AT_ONCE]


class TextModel:
    """A generative model with its tokenizers.

    Attributes:
      path: folder of the run.
      config: config of the run.
      step: number of training steps.
      tokenizers: source and target tokenizer.
    """

    def __init__(self, path: str, config: Config, step: int | None, *, dtype: jnp.dtype):
        """
        Args:
          step: step of the checkpoint, None for the newest.
          dtype: dtype of the computation; scores are float32.

        Raises:
          UserError: the run cannot be read.
        """
        workdir = Workdir(path)
        self.path, self.config = path, config
        self.tokenizers: tuple[Tokenizer, Tokenizer] = read_tokenizers(workdir, config)
        (*_, self.step), params = read_mean(workdir, config, step)
        self._writer = Writer(config, params, self.tokenizers, dtype)

    def __repr__(self) -> str:
        return f"<TextModel {self.path}: {self.config.recipe}, step {self.step}>"

    @property
    def abilities(self) -> tuple[str, ...]:
        """Supported methods: `write`; `translate` and `summarize` are the same, by recipe."""
        return ("write",)

    def translate(self, texts: str | Sequence[str], **decoding: Any) -> Any:
        """Translates texts.

        Args:
          texts: texts in the source language; a single string is one text.
          decoding: fields of config.decoding to change, as `beam=8`, `method="greedy"` or
            `n_best=4`.

        Returns:
          A list with the translation of each text. With n_best > 1 each item is a list of at most
          n_best (text, score) in decreasing order; score = log probability /
          tokens^length_penalty. For a single string its item.

        Raises:
          ModelError: the run is not a translation model.
          ArgumentError: `texts` is not texts, or a text is empty or too long.
          ConfigError: the decoding fields are invalid.

        >>> translator = convbert_jax.load("runs/pairs")
        >>> len(translator.translate(["a text", "another"]))
        2
        >>> best, *_ = translator.translate("a text", beam=3, n_best=2)
        >>> best.score <= 0
        True
        """
        return self._write("translation", "translate", texts, decoding)

    def summarize(self, texts: str | Sequence[str], **decoding: Any) -> Any:
        """Summarizes texts; arguments, results and errors: see `translate`."""
        return self._write("summarization", "summarize", texts, decoding)

    def write(self, texts: str | Sequence[str], **decoding: Any) -> Any:
        """Generates texts with a model of any recipe.

        text_to_text returns outputs, causal_lm the prompts with their continuation, and
        span_corruption the texts with every [MASK] filled. Arguments, results and errors: see
        `translate`; a prompt may be empty.
        """
        return self._write(self.config.recipe, "write", texts, decoding)

    @property
    def likelihoods(self) -> tuple[str, ...]:
        """Like `Model.likelihoods`: a language model predicts each token from the earlier ones."""
        return ("next_tokens",) if self.config.recipe == "causal_lm" else ()

    def log_likelihood(
        self, texts: str | Sequence[str], *, by: Literal["next_tokens"] | None = None
    ) -> float | np.ndarray:
        """Returns the log probability of texts under a language model, in nats.

        Returns:
          [N]; a number for a single string. It includes the first token but not the end.

        Raises:
          ModelError: the model is not a language model.
          ArgumentError: `texts` are not single texts, or one has no tokens or is too long.
        """
        if (by or "next_tokens") not in self.likelihoods:
            raise ModelError(
                f"{self.path} has no likelihood {by or 'of texts'}; language models "
                "(config.recipe=causal_lm) have next_tokens.",
                path=self.path,
            )
        given, single = as_single_texts(texts)
        values = self._writer.log_likelihood(given)
        return float(values[0]) if single else values

    def encode(self, *_: Any, **__: Any) -> None:
        """Raises ModelError: only encoders have embeddings."""
        raise ModelError(
            f"{self.path} is a generative model (config.recipe='{self.config.recipe}') without "
            "embeddings of texts. Load a run of an encoder.",
            path=self.path,
        )

    def _write(self, recipe: str, name: str, texts, fields: dict[str, Any]) -> Any:
        own = {"translation": "translate", "summarization": "summarize"}
        if self.config.recipe != recipe:
            fitting = own.get(self.config.recipe, "write")
            raise ModelError(
                f"{self.path} is a run of config.recipe='{self.config.recipe}'. Call "
                f"{fitting}() instead of {name}().",
                path=self.path,
            )
        if "average" in fields:
            raise ModelError(
                f"average={fields['average']} must be set when the model is loaded: "
                f"convbert_jax.load({self.path!r}, average={fields['average']})."
            )
        given, single = as_single_texts(texts)
        decoding = change_decoding(self.config, fields).decoding
        answers = self._writer.write(given, decoding)
        for number, answer in enumerate(answers):
            if answer.problem:
                raise ArgumentError(f"texts[{number}] {answer.problem}.")
        several = decoding.n_best > 1
        found = [list(a.texts) if several else a.texts[0].text for a in answers]
        return found[0] if single else found
