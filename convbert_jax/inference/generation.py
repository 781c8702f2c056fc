"""Generates texts with a model on the device.

`read_mean` and `change_decoding` read the model and its settings, `make_batches` groups texts of
similar length into a few static shapes, and `Writer` generates.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx
from tqdm import tqdm

from convbert_jax import decoding as methods
from convbert_jax.config import Config, ConfigError, from_config_dict, to_dict
from convbert_jax.config.checks import check_asked
from convbert_jax.config.sequences import DecodingSection
from convbert_jax.data.input_rows import ArgumentError
from convbert_jax.data.samplers import choose_buckets
from convbert_jax.data.tasks.labelled_text import Example
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.inference.predictor import choose_batch_size
from convbert_jax.inference.texts import make_texts
from convbert_jax.interop import matching, sources
from convbert_jax.models import build
from convbert_jax.models.networks import MODELS
from convbert_jax.training import environment, loop, memory
from convbert_jax.training.partitioning import Params
from convbert_jax.workdir import Workdir

_OF_SCORES = ("test_sources", "score_words")  # fields of config.decoding for scoring only


def read_mean(
    workdir: Workdir, config: Config, step: int | None = None
) -> tuple[tuple[int, ...], Params]:
    """Reads the mean of the config.decoding.average newest checkpoints, see `sources.read_mean`.

    If there are fewer checkpoints, logs that and averages all.

    Raises:
      WorkdirError: there is no checkpoint of `step`.
      CheckpointError: a checkpoint is damaged.
    """
    count, step = config.decoding.average, workdir.choose_step(step)
    steps = [there for there in workdir.steps() if step is None or there <= step][-count:]
    if len(steps) < count:
        logging.info(
            "config.decoding.average=%d, but only %d checkpoints exist.", count, len(steps)
        )
        count = len(steps)
    return sources.read_mean(workdir, config, max(1, count), step)


def change_decoding(config: Config, fields: Mapping[str, Any]) -> Config:
    """Replaces fields of config.decoding by name.

    Raises:
      ConfigError: a field does not exist or has no effect, or a value is invalid.
    """
    known = [name for name in to_dict(config)["decoding"] if name not in _OF_SCORES]
    if of_scores := [name for name in fields if name in _OF_SCORES]:
        raise ConfigError(
            "has no effect on generated texts; it is for the scores of --mode=eval.",
            field=f"config.decoding.{of_scores[0]}",
        )
    if unknown := [name for name in fields if name not in known]:
        raise ConfigError(
            f"does not exist. Choose from {', '.join(known)}.",
            field=f"config.decoding.{unknown[0]}",
        )
    changed = {f"decoding.{name}": value for name, value in fields.items()}
    config = from_config_dict(to_dict(matching.replace(config, changed)))
    check_asked(config, changed)
    return config


SHORTEST = 16  # minimum padded length in tokens


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch of texts.

    Attributes:
      places: indices of the texts [B], -1 for padding rows.
      length: padded length in tokens.
    """

    places: np.ndarray
    length: int


def make_batches(
    lengths: Sequence[int], longest: int, batch_tokens: int, *, exact: bool = False
) -> Iterator[Batch]:
    """Yields batches of texts of similar length, the shortest first; each text occurs once.

    Padded lengths are powers of two and `longest`. Each length has up to three numbers of rows, see
    `choose_batch_size`.

    Args:
      lengths: tokens of each text.
      longest: maximum tokens of a text.
      batch_tokens: maximum of rows x length, unless a single text is longer.
      exact: batch only texts of equal length without padding, for a model that reads padding.
    """
    lengths = np.asarray(lengths)
    buckets = np.unique(lengths)
    if not exact:
        powers = [SHORTEST << i for i in range(longest.bit_length())]
        buckets = np.asarray(choose_buckets(powers, longest))
    of = np.searchsorted(buckets, lengths)
    for number, bucket in enumerate(map(int, buckets)):
        members = np.flatnonzero(of == number)
        members = members[np.argsort(lengths[members], kind="stable")]
        rows = choose_batch_size(len(members), max(1, batch_tokens // bucket))
        for start in range(0, len(members), rows):
            part = members[start : start + rows]
            filler = np.full(rows - len(part), -1)
            yield Batch(np.concatenate([part, filler]), bucket)


def max_output_length(tokens: int, decoding: DecodingSection) -> int:
    """Returns the maximum output length for a source of `tokens` tokens.

    As in fairseq, `tokens` includes the source's end token; the result excludes the output's.
    """
    return int(decoding.length_ratio * tokens + decoding.length_extra)


_LESS_MEMORY = "lower config.decoding.batch_tokens or config.decoding.beam"


class Written(NamedTuple):
    """A generated text.

    Attributes:
      score: log probability / tokens^config.decoding.length_penalty. The end token is counted.
        Special tokens that stand for no text are never generated.
    """

    text: str
    score: float


class Answer(NamedTuple):
    """Generated texts for one input.

    Attributes:
      texts: the best first; () if there is a problem.
      problem: reason why there is no text, as the rest of a sentence that begins with "line N".
      cut: whether the input was truncated.
    """

    texts: tuple[Written, ...] = ()
    problem: str = ""
    cut: bool = False


class _Method(NamedTuple):
    """Static settings of a compiled program.

    Attributes:
      copies: parallel hypotheses per source: beam size or number of samples.
      alpha: config.decoding.length_penalty.
    """

    name: str
    copies: int
    alpha: float
    temperature: float
    top_k: int
    top_p: float


class Writer:
    """Generates texts with the settings of config.decoding.

    The output for a text does not depend on the rest of its batch or on padding, except for
    rounding.
    """

    def __init__(
        self,
        config: Config,
        params: Params,
        tokenizers: tuple[Tokenizer, Tokenizer],
        dtype: jnp.dtype,
    ):
        """
        Args:
          config: config of a generative recipe.
          params: unsharded, on the host or on the first device.
          tokenizers: source and target tokenizer.
          dtype: dtype of the computation; scores are float32.
        """
        self.config, self.texts = config, make_texts(config, *tokenizers)
        self._exact = not self.texts.goes_on and config.encoder_decoder.encoder.reads_padding
        self._params = memory.put_on_device(params)
        graphdef, _ = build(MODELS[config.recipe], config)
        special, goes_on = self.texts.target.special, self.texts.goes_on
        never = self.texts.barred
        seed = config.seed

        def run(params, batch, method, length):
            model, source = nnx.merge(graphdef, params), batch["source"]
            rows, copies = len(source), method.copies
            room = {"copies": copies, "length": length, "dtype": dtype}
            if goes_on:
                prompt, first = source, source.shape[1] - batch["lengths"]
                state, read = model.start(prompt, first, **room)
            else:
                prompt, first = jnp.full((rows, 1), special.cls), None
                inside = jnp.arange(source.shape[1]) < batch["lengths"][:, None]
                state, read = model.start(source, inside.astype(jnp.int32), **room)

            def step(tokens, state, place):
                return model.step(tokens, state, place, read, dtype)

            options = {
                "length": length,
                "end": special.sep,
                "pad": special.pad,
                "limits": batch["limits"],
                "never": never,
            }
            if method.name == "beam":
                return methods.search(
                    step, state, prompt, first, beam=copies, alpha=method.alpha, **options
                )
            if method.name == "greedy":
                found = methods.greedy(step, state, prompt, first, **options)
            else:
                # threefry gives the same samples for a row on any device
                key = jax.random.key(seed, impl="threefry2x32")
                keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(batch["numbers"])
                keys = jax.vmap(lambda key: jax.random.split(key, copies))(keys).reshape(-1)
                options["limits"] = jnp.repeat(options["limits"], copies)
                prompt = jnp.repeat(prompt, copies, axis=0)
                first = None if first is None else jnp.repeat(first, copies)
                cuts = {"top_k": method.top_k, "top_p": method.top_p}
                found = methods.sample(
                    step, state, prompt, first, keys=keys, temperature=method.temperature,
                    **cuts, **options,
                )  # fmt: skip
            begun = prompt.shape[1] - (0 if first is None else first)
            scores = found.scores / jnp.maximum(found.lengths - begun, 1) ** method.alpha
            texts = methods.Hypotheses(found.tokens, found.lengths, scores)
            texts = jax.tree.map(lambda x: x.reshape(rows, copies, *x.shape[1:]), texts)
            best = jnp.argsort(-texts.scores, axis=1)
            return jax.vmap(lambda of_row, best: jax.tree.map(lambda x: x[best], of_row))(
                texts, best
            )

        self._run = jax.jit(run, static_argnames=("method", "length"))

        @jax.jit
        def score(params, tokens, lengths):
            inside = jnp.arange(tokens.shape[1]) < lengths[:, None]
            logits = nnx.merge(graphdef, params)(tokens, inside.astype(jnp.int32), dtype=dtype)
            following = tokens[:, 1:, None]
            own = jnp.take_along_axis(logits[:, :-1], following, axis=2)[..., 0]
            values = own - jax.nn.logsumexp(logits[:, :-1], axis=2)
            return jnp.where(inside[:, 1:], values, 0.0).sum(axis=1)

        self._score = score

    @property
    def programs(self) -> int:
        """Number of compiled programs: one per shape and method."""
        return environment.count_compiled(self._run)

    def write(
        self,
        texts: Sequence[str],
        decoding: DecodingSection | None = None,
        *,
        numbers: Sequence[int] | None = None,
        title: str = "",
    ) -> list[Answer]:
        """Generates outputs for texts, in order.

        Args:
          decoding: default config.decoding.
          numbers: numbers of the texts, which seed their samples; default 0, 1, ...
          title: title of a progress bar; "" for no bar.
        """
        decoding = decoding or self.config.decoding
        encoded = self.texts.encode(texts)
        good = [place for place, text in enumerate(encoded) if not text.problem]
        read = [encoded[place].ids for place in good]
        if cut := sum(text.cut for text in encoded):
            most, field = self.texts.longest
            logging.info(
                "Truncated %d of %d texts to %d tokens (%s).", cut, len(texts), most, field
            )
        numbers = np.arange(len(texts)) if numbers is None else np.asarray(numbers)
        answers = [Answer(problem=text.problem, cut=text.cut) for text in encoded]
        dealt = list(
            make_batches(
                list(map(len, read)), self.texts.longest[0], decoding.batch_tokens,
                exact=self._exact,
            )
        )  # fmt: skip
        running = (self._start(batch, read, numbers[good], decoding) for batch in dealt)
        found = zip(dealt, loop.fetch_outputs(running, ahead=1), strict=True)
        hidden = None if title else True
        explained = memory.explain_out_of_memory(
            f"generating texts for up to {decoding.batch_tokens} tokens at once", _LESS_MEMORY,
            lambda: memory.find_state(self._params),
        )  # fmt: skip
        bar = tqdm(desc=title, total=len(good), unit="text", leave=False, disable=hidden)
        with explained, bar:
            for batch, hypotheses in found:
                used = np.flatnonzero(batch.places >= 0)
                for row in used:
                    place = batch.places[row]
                    of_row = jax.tree.map(lambda leaf, row=row: leaf[row], hypotheses)
                    answer = self._spell(read[place], of_row, decoding.n_best)
                    answers[good[place]] = answer._replace(cut=encoded[good[place]].cut)
                bar.update(len(used))
        return answers

    def log_likelihood(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the log probability of each text after [CLS] under a language model, in nats [N].

        The probability of the end of a text is not part of it.

        Raises:
          ArgumentError: a text has no tokens or is too long.
        """
        rows = []
        for number, text in enumerate(self.texts.encode(texts)):
            if text.problem or len(text.ids) < 2:
                problem = text.problem or "has no tokens"
                raise ArgumentError(f"{problem}.", field=f"texts[{number}]")
            rows.append(text.ids)
        found = np.zeros(len(rows), np.float64)
        budget = self.config.decoding.batch_tokens
        for batch in make_batches(
            list(map(len, rows)), self.texts.longest[0], budget, exact=self._exact
        ):
            tokens = np.full((len(batch.places), batch.length), self.texts.source.special.pad)
            lengths = np.zeros(len(batch.places), np.int32)
            used = np.flatnonzero(batch.places >= 0)
            for row in used:
                ids = rows[batch.places[row]]
                tokens[row, : len(ids)], lengths[row] = ids, len(ids)
            values = self._score(self._params, tokens.astype(np.int32), lengths)
            found[batch.places[used]] = np.asarray(values)[used]
        return found

    def answer(self, examples: Sequence[Example]) -> list[dict[str, Any]]:
        """Implements `predictor.Answer`.

        Returns:
          For each example a dict of `prediction` and `score`, with config.decoding.n_best > 1 also
          all texts as `n_best`; or only `problem`.
        """
        lines = []
        numbers = [int(example.id) for example in examples]
        for answer in self.write([e.texts[0] for e in examples], numbers=numbers):
            if answer.problem:
                lines.append({"problem": answer.problem})
                continue
            said = [
                {"prediction": written.text, "score": round(written.score, 6)}
                for written in answer.texts
            ]
            more = {"n_best": said} if self.config.decoding.n_best > 1 else {}
            lines.append(said[0] | more)
        return lines

    def _start(self, batch: Batch, read, numbers, decoding: DecodingSection):
        """Dispatches a batch; padding rows end after one token."""
        rows = len(batch.places)
        source = np.full((rows, batch.length), self.texts.source.special.pad, np.int32)
        lengths, limits = np.ones(rows, np.int32), np.full(rows, 2, np.int32)
        drawn = np.zeros(rows, np.int32)
        filler = -1 if self.texts.goes_on else 0
        source[:, filler] = self.texts.source.special.cls
        for row, place in enumerate(batch.places):
            if place < 0:
                continue
            ids = read[place]
            # Prompts are right-aligned so that all continuations begin at the same position.
            own = slice(-len(ids), None) if self.texts.goes_on else slice(len(ids))
            source[row, own], lengths[row] = ids, len(ids)
            begun = len(ids) if self.texts.goes_on else 1
            limits[row] = begun + max_output_length(len(ids), decoding) + 1
            drawn[row] = numbers[place]
        begun = batch.length if self.texts.goes_on else 1
        length = begun + max_output_length(batch.length, decoding) + 1
        if self.config.model.position_embedding == "learned":
            limits = np.minimum(limits, self.config.model.positions)
            if not self.texts.goes_on:
                length = min(length, self.config.model.positions)
        copies = {"beam": decoding.beam, "greedy": 1, "sample": decoding.n_best}[decoding.method]
        method = _Method(
            decoding.method, copies, decoding.length_penalty, decoding.temperature,
            decoding.top_k, decoding.top_p,
        )  # fmt: skip
        batch = {"source": source, "lengths": lengths, "limits": limits, "numbers": drawn}
        return self._run(self._params, batch, method=method, length=length)

    def _spell(self, read: list[int], found: methods.Hypotheses, n_best: int) -> Answer:
        begun = len(read) if self.texts.goes_on else 1
        texts = []
        for tokens, length, score in list(zip(*found, strict=True))[:n_best]:
            if length and np.isfinite(score):
                written = [int(token) for token in tokens[begun : length - 1]]
                texts.append(Written(self.texts.decode(read, written), float(score)))
        if not texts:
            return Answer(problem="cannot be predicted: the model returned NaN")
        return Answer(tuple(texts))
