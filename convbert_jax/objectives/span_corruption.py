"""Spans taken out of a row and asked for, on the device with static shapes (Raffel et al. 2020,
§3.1.4 and §3.3; the arithmetic is that of their code's random spans).

Of a row of R tokens round(fraction R) are noise, in round(noise / mean span) spans of random
lengths that add up to it, and what stays is cut at random into as many parts, the first one before
the first span. The source is what stays, each span a sentinel; the target the sentinels, each
followed by its span; both end in [SEP]. Both lengths follow from R alone: rows that are full give
sources and targets that are full, and nothing is padded or dropped. A row is one text here:
documents that are packed in it keep their [CLS] and [SEP], but read each other, as in T5.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int

from convbert_jax.config import Config
from convbert_jax.interfaces.batch import Batch, SequenceBatch
from convbert_jax.interfaces.special_ids import SpecialIds
from convbert_jax.objectives import masking, metrics, written_text


@dataclasses.dataclass(frozen=True)
class SpanCounts:
    """What is taken out of rows of 0 to `length` tokens."""

    length: int
    noise_fraction: float = 0.15
    mean_span: float = 3.0

    def of(self, tokens: int) -> tuple[int, int]:
        """(noise tokens, spans) of a row with so many tokens.

        A row of two or more tokens has at least one of each, and at least as many tokens stay as
        there are spans. Counts are rounded in float32, as in T5's `random_spans_noise_mask`
        (t5/data/preprocessors.py): a half in float64 is often no half there.
        """
        if tokens < 2:
            return 0, 0
        noise = round(np.float32(tokens) * np.float32(self.noise_fraction))
        noise = min(max(noise, 1), tokens - 1)
        spans = max(round(np.float32(noise) / np.float32(self.mean_span)), 1)
        return noise, min(spans, noise, tokens - noise)

    @property
    def spans(self) -> int:
        """Most spans of a row: as many sentinels are needed."""
        return max(self.of(tokens)[1] for tokens in range(self.length + 1))

    @property
    def source(self) -> int:
        """S, tokens of the longest source, that of a full row unless spans are very short."""
        return max(n - self.of(n)[0] + self.of(n)[1] for n in range(self.length + 1)) + 1

    @property
    def target(self) -> int:
        """T, of the longest target."""
        return max(sum(self.of(n)) for n in range(self.length + 1)) + 1


def count_spans(config: Config) -> SpanCounts:
    """What is taken out of the rows of a config."""
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
    """Mean cross-entropy of the spans and their sentinels.

    Args:
      model: as of `written_text.loss`.
      key: draws the spans, and dropout where `train`.
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
    """Rows with spans taken out, as sources of S and targets of T tokens.

    Args:
      key: all randomness comes from it.
      segment_ids: 0 on padding, which is behind the tokens of a row.

    Raises:
      ValueError: the vocabulary has too few sentinels, or rows have another length than `counts`.
    """
    if tokens.shape[1] != counts.length:
        raise ValueError(f"Rows of {tokens.shape[1]} tokens, but counts of {counts.length}.")
    if len(special.sentinels) < counts.spans:
        raise ValueError(
            f"A row of {counts.length} tokens has up to {counts.spans} spans, but the vocabulary "
            f"has {len(special.sentinels)} sentinels; train one with "
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
    # Two places for each token: the sentinel before it, where a span begins, and itself.
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
    """Which tokens are noise, and which of them begin a span."""
    stay_key, noise_key = jax.random.split(masking.divided_key(key))
    staying = _cut(stay_key, real - noise, spans, length)  # [B, L] lengths of parts, 0 behind
    taken = _cut(noise_key, noise, spans, length)
    # Parts in turn: what stays, a span, what stays, a span.
    ends = jnp.cumsum(jnp.stack([staying, taken], axis=2).reshape(len(real), -1), axis=1)
    places = jnp.arange(length)
    part = jax.vmap(lambda e: jnp.searchsorted(e, places, side="right"))(ends)
    is_noise = (part % 2 == 1) & (places < real[:, None])
    before = jnp.pad(is_noise[:, :-1], ((0, 0), (1, 0)))
    return is_noise, is_noise & ~before


def _cut(key, total, parts, length) -> Int[Array, "B P"]:
    """`total` as the sum of `parts` numbers above 0, all ways equally likely; 0 behind them."""
    gap = jnp.arange(length)[None, :]  # between number gap and gap + 1
    noise = jnp.where(gap < total[:, None] - 1, jax.random.uniform(key, (len(total), length)), 2.0)
    rank = jnp.argsort(jnp.argsort(noise, axis=1), axis=1)
    cut = rank < parts[:, None] - 1
    part = jnp.cumsum(jnp.pad(cut[:, :-1], ((0, 0), (1, 0))), axis=1)
    counted = (gap < total[:, None]).astype(jnp.int32)
    return jax.vmap(lambda p, c: jnp.zeros(length, jnp.int32).at[p].add(c))(part, counted)


def _collect(parts, length, special, used) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Values side by side that are kept, in order and closed up, [SEP] behind them; segment ids."""
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
