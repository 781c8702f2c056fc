"""Span corruption on the device with static shapes (Raffel et al. 2020, §3.1.4 and §3.3).

The computation follows T5's random spans. Of a row of R tokens, round(fraction R) are noise, in
round(noise / mean span) spans of random lengths. The remaining tokens are split at random into as
many parts; the first part comes before the first span. The source has the remaining tokens and a
sentinel for each span; the target has each sentinel, followed by its span; both end in [SEP]. Both
lengths depend only on R, so full rows give full sources and targets without padding or truncation.
Packed documents of a row keep their [CLS] and [SEP], but attend to each other, as in T5.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int

from convbert_jax.config import Config
from convbert_jax.interfaces import Batch, SequenceBatch, SpecialIds
from convbert_jax.objectives import masking, metrics, written_text


@dataclasses.dataclass(frozen=True)
class SpanCounts:
    """Number of noise tokens and spans of rows with 0 to `length` tokens."""

    length: int
    noise_fraction: float = 0.15
    mean_span: float = 3.0

    def of(self, tokens: int) -> tuple[int, int]:
        """Return (noise tokens, spans) of a row with `tokens` tokens.

        A row of two or more tokens has at least one of each, and at least as many remaining tokens
        as spans. Counts are rounded in float32, as in T5's `random_spans_noise_mask`
        (t5/data/preprocessors.py), since ties in float64 may not be ties in float32.
        """
        if tokens < 2:
            return 0, 0
        noise = round(np.float32(tokens) * np.float32(self.noise_fraction))
        noise = min(max(noise, 1), tokens - 1)
        spans = max(round(np.float32(noise) / np.float32(self.mean_span)), 1)
        return noise, min(spans, noise, tokens - noise)

    @property
    def spans(self) -> int:
        """Maximum number of spans per row, which is the number of sentinels needed."""
        return max(self.of(tokens)[1] for tokens in range(self.length + 1))

    @property
    def source(self) -> int:
        """S, the length of the longest source: a full row's, unless spans are very short."""
        return max(n - self.of(n)[0] + self.of(n)[1] for n in range(self.length + 1)) + 1

    @property
    def target(self) -> int:
        """T, the length of the longest target."""
        return max(sum(self.of(n)) for n in range(self.length + 1)) + 1


def count_spans(config: Config) -> SpanCounts:
    """Return the span counts for the rows of a config."""
    o = config.objective
    return SpanCounts(config.data.length, o.mask_fraction, o.mean_span)


def loss(
    model: nnx.Module,
    batch: Batch,
    key: Array,
    *,
    train: bool,
    dtype: jnp.dtype,
    config: Config,
    special: SpecialIds,
) -> tuple[Array, metrics.Metrics]:
    """Compute the mean cross-entropy of the spans and their sentinels.

    Args:
      model: As in `written_text.loss`.
      key: Draws the spans and, if `train`, dropout.
    """
    spans_key, dropout_key = jax.random.split(key)
    corrupted = corrupt(
        spans_key, batch["tokens"], batch["segment_ids"], count_spans(config), special
    )
    settings = {"train": train, "dtype": dtype, "config": config, "special": special}
    return written_text.loss(model, corrupted, dropout_key, **settings)


def corrupt(
    key: Array,
    tokens: Int[Array, "B L"],
    segment_ids: Int[Array, "B L"],
    counts: SpanCounts,
    special: SpecialIds,
) -> SequenceBatch:
    """Split rows into sources of S and targets of T tokens.

    Args:
      key: Draws the spans.
      segment_ids: 0 for padding, which comes after the tokens of a row.

    Raises:
      ValueError: The vocabulary has too few sentinels, or the row length differs from `counts`.
    """
    if tokens.shape[1] != counts.length:
        raise ValueError(f"Rows have {tokens.shape[1]} tokens, but counts expect {counts.length}.")
    if len(special.sentinels) < counts.spans:
        raise ValueError(
            f"Rows of {counts.length} tokens have up to {counts.spans} spans, but the vocabulary "
            f"has only {len(special.sentinels)} sentinels. Train a vocabulary with "
            f"config.tokenizer.sentinels={counts.spans} or more."
        )
    real = (segment_ids != 0).sum(axis=1)
    table = jnp.asarray([counts.of(n) for n in range(counts.length + 1)], jnp.int32)
    noise, spans = table[real].T
    is_noise, begins = _choose_spans(key, real, noise, spans, counts.length)
    is_real = jnp.arange(counts.length) < real[:, None]
    number = jnp.clip(jnp.cumsum(begins, axis=1) - 1, 0)
    sentinel = jnp.asarray((*special.sentinels, special.pad), jnp.int32)[number]

    stays = is_real & (~is_noise | begins)
    source, source_ids = _collect(
        [(jnp.where(begins, sentinel, tokens), stays)], counts.source, special, real > 0
    )
    # Two slots per token: the sentinel before it, if a span begins there, and the token.
    labels, segments = _collect(
        [(sentinel, begins), (tokens, is_noise)], counts.target, special, real > 0
    )
    first = jnp.where(real > 0, special.cls, special.pad)[:, None].astype(jnp.int32)
    read = jnp.concatenate([first, labels[:, :-1]], axis=1)
    return {
        "source": source,
        "source_ids": source_ids,
        "tokens": jnp.where(segments != 0, read, special.pad),
        "segment_ids": segments,
        "labels": labels,
    }


def _choose_spans(key, real, noise, spans, length) -> tuple[Bool[Array, "B L"], Bool[Array, "B L"]]:
    """Return masks of the noise tokens and of the first token of each span."""
    stay_key, noise_key = jax.random.split(masking.divided_key(key))
    staying = _cut(stay_key, real - noise, spans, length)  # [B, L] lengths of parts, then 0
    taken = _cut(noise_key, noise, spans, length)
    # Alternate parts that remain with spans.
    ends = jnp.cumsum(jnp.stack([staying, taken], axis=2).reshape(len(real), -1), axis=1)
    places = jnp.arange(length)
    part = jax.vmap(lambda e: jnp.searchsorted(e, places, side="right"))(ends)
    is_noise = (part % 2 == 1) & (places < real[:, None])
    before = jnp.pad(is_noise[:, :-1], ((0, 0), (1, 0)))
    return is_noise, is_noise & ~before


def _cut(key, total, parts, length) -> Int[Array, "B P"]:
    """Draw `parts` positive numbers that sum to `total`, uniformly; the rest is 0."""
    gap = jnp.arange(length)[None, :]  # between number gap and gap + 1
    noise = jnp.where(gap < total[:, None] - 1, jax.random.uniform(key, (len(total), length)), 2.0)
    rank = jnp.argsort(jnp.argsort(noise, axis=1), axis=1)
    cut = rank < parts[:, None] - 1
    part = jnp.cumsum(jnp.pad(cut[:, :-1], ((0, 0), (1, 0))), axis=1)
    counted = (gap < total[:, None]).astype(jnp.int32)
    return jax.vmap(lambda p, c: jnp.zeros(length, jnp.int32).at[p].add(c))(part, counted)


def _collect(parts, length, special, used) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Pack the kept values in order and append [SEP]; also return segment ids."""
    values = jnp.stack([value for value, _ in parts], axis=2).reshape(len(used), -1)
    kept = jnp.stack([keep for _, keep in parts], axis=2).reshape(len(used), -1)
    place = jnp.where(kept, jnp.cumsum(kept, axis=1) - 1, length)  # beyond the end: dropped
    end = jnp.where(used, kept.sum(axis=1), length)

    def scatter(values, place, end):
        row = jnp.full(length, special.pad, jnp.int32).at[place].set(values, mode="drop")
        return row.at[end].set(special.sep, mode="drop")

    size = jnp.where(used, end + 1, 0)
    rows = jax.vmap(scatter)(values.astype(jnp.int32), place, end)
    return rows, (jnp.arange(length) < size[:, None]).astype(jnp.int32)
