"""Contrastive learning of text vectors: InfoNCE and CoSENT.

Pairs that belong together, with or without hard negatives, are trained by InfoNCE (van den Oord et
al., 2018, §2.3); pairs with scores by CoSENT, which ranks the similarities of a batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from convbert_jax.config import Config
from convbert_jax.config.training import POOLINGS
from convbert_jax.interfaces import TEXTS_OF_PAIR, SpecialIds, TextPairBatch
from convbert_jax.objectives import metrics
from convbert_jax.objectives.cross_entropy import top1_accuracy

_EXCLUDED = -1e9  # logit of a pair that is not compared


def terms(config: Config) -> dict[str, float]:
    """Return the weighted terms of the evaluation loss."""
    return {"contrastive_loss": 1.0}


def loss(
    model: nnx.Module,
    batch: TextPairBatch,
    key: Array,
    *,
    train: bool,
    dtype: jnp.dtype,
    config: Config,
    special: SpecialIds,
) -> tuple[Array, metrics.Metrics]:
    """Compute the mean loss of the pairs of a batch, and how often pairs are in the right order.

    A pair is compared with the other pairs of the global batch, on all devices of a mesh. The texts
    of a pair have different dropout, so a text may be paired with itself (Gao et al., 2021, §3).

    With config.objective.matryoshka, the loss is the mean of the losses of vectors of the first
    channels and of whole vectors (Kusupati et al., 2022, equation 1 with equal weights).

    Args:
      model: `encode(tokens, segment_ids, dtype, key) -> hidden states [B, L, C]`.
      key: Draws dropout if `train`.
    """
    section = config.objective
    texts = [(batch[name], batch[mask]) for name, mask in TEXTS_OF_PAIR if name in batch]
    keys = jax.random.split(key, len(texts)) if train else [None] * len(texts)
    vectors = [
        text_vectors(
            model, *text, own_key, dtype=dtype, pooling=section.pooling,
            parts=config.train.accumulation,
        )
        for text, own_key in zip(texts, keys, strict=True)
    ]  # fmt: skip
    real = (batch["source_ids"] > 0).any(axis=1)
    negatives = None if "score" in batch else find_negatives([hash_texts(*t) for t in texts], real)

    def measure(size: int):
        first, second, *hard = (normalize(x[:, :size]) for x in vectors)
        if negatives is None:
            logits = (first * second).sum(-1) / section.contrastive_temperature
            return cosent(logits, batch["score"], real)
        logits = [similarities(first, x, section.contrastive_temperature) for x in (second, *hard)]
        losses, correct = pair_losses(logits, negatives)
        return metrics.mean(losses, real), metrics.mean(correct, real)

    sizes = [*section.matryoshka, vectors[0].shape[1]]
    measured = [measure(size) for size in sizes]
    (_, weight), accuracy = measured[-1]
    total = sum(total for (total, _), _ in measured) / len(sizes)
    value = metrics.ratio((total, weight))
    found = {
        "loss": (value, jnp.ones(())),
        "contrastive_loss": (total, weight),
        "contrastive_accuracy": accuracy,
    }
    if negatives is None and not train:
        cosines = (normalize(vectors[0]) * normalize(vectors[1])).sum(-1)
        found["spearman"] = metrics.Ranks(cosines, batch["score"], real)
    return value, found


def text_vectors(
    model: nnx.Module,
    tokens: Int[Array, "B L"],
    segment_ids: Int[Array, "B L"],
    key: Array | None,
    *,
    dtype: jnp.dtype,
    pooling: str,
    parts: int,
) -> Float[Array, "B C"]:
    """Return the vectors of texts.

    Args:
      parts: Parts of the batch that are computed one after the other, and again for the gradient,
        so that the activations of a single part are in memory (gradient caching, Gao et al., 2021,
        arXiv 2101.06983). The result is the same, apart from dropout.
    """

    def compute(rows):
        tokens, segment_ids, key = rows
        hidden = model.encode(tokens, segment_ids, jnp.zeros_like(tokens), dtype=dtype, key=key)
        return pool(hidden, segment_ids, pooling)

    if parts == 1:
        return compute((tokens, segment_ids, key))
    # Part i has rows i, i + parts, i + 2 parts, ..., so every row stays on its device.
    cut = [x.reshape(-1, parts, x.shape[1]).swapaxes(0, 1) for x in (tokens, segment_ids)]
    keys = None if key is None else jax.random.split(key, parts)
    found = jax.lax.map(jax.checkpoint(compute), (*cut, keys))
    return found.swapaxes(0, 1).reshape(len(tokens), -1)


def pool(
    hidden: Float[Array, "B L C"], segment_ids: Int[Array, "B L"], pooling: str
) -> Float[Array, "B D"]:
    """Return float32 vectors of texts: C channels for each part in `POOLINGS`, concatenated."""
    real = (segment_ids > 0)[..., None]
    total = jnp.where(real, hidden.astype(jnp.float32), 0.0).sum(axis=1)
    parts = {
        "cls": hidden[:, 0].astype(jnp.float32),
        "mean": total / jnp.maximum(real.sum(axis=1), 1),
    }
    return jnp.concatenate([parts[name] for name in POOLINGS[pooling]], axis=-1)


def normalize(vectors: Float[Array, "B C"]) -> Float[Array, "B C"]:
    """Return vectors of length 1."""
    return vectors / jnp.sqrt((vectors**2).sum(-1, keepdims=True) + 1e-12)


def similarities(
    first: Float[Array, "B C"], second: Float[Array, "B C"], temperature: float
) -> Float[Array, "B B"]:
    """Return the cosine similarity of each first to each second text, over the temperature.

    Args:
      first, second: Vectors of length 1.
    """
    # TPUs round float32 factors to bfloat16 by default, an error of up to 0.1 in these logits.
    return jnp.matmul(first, second.T, precision=jax.lax.Precision.HIGHEST) / temperature


def hash_texts(tokens: Int[Array, "B L"], segment_ids: Int[Array, "B L"]) -> UInt32[Array, "B 2"]:
    """Return hashes of 64 bits, equal for equal texts, whatever their padding."""
    factors = np.random.default_rng(0).integers(0, 2**32, (tokens.shape[1], 2), np.uint32)
    ids = jnp.where(segment_ids > 0, tokens + 1, 0).astype(jnp.uint32)
    return (ids[..., None] * (factors | 1)).sum(axis=1, dtype=jnp.uint32)


def find_negatives(
    hashes: list[UInt32[Array, "B 2"]], real: Bool[Array, " B"]
) -> list[Bool[Array, "B B"]]:
    """Return for the second texts, then for hard negatives, if text j is a negative of text i.

    False for rows of padding and for texts that may be positive examples of text i: its own second
    text, the text itself, and the second texts of pairs with the same first text. Second texts of
    pairs i and j with equal second texts are left out too, because these logits are also used to
    find first texts.

    Args:
      hashes: Of first texts, second texts and, if there are any, hard negatives.
    """

    def equal(a, b):
        return (a[:, None] == b[None]).all(axis=-1)

    first, second, *hard = hashes
    compared = real[:, None] & real[None]
    same_first = equal(first, first)
    related = same_first | equal(second, second) | equal(first, second)
    found = [~related & compared]
    for texts in hard:
        positive = same_first.astype(jnp.float32) @ equal(second, texts).astype(jnp.float32) > 0
        found.append(~positive & ~equal(first, texts) & compared)
    return found


def pair_losses(
    logits: list[Float[Array, "B B"]], negatives: list[Bool[Array, "B B"]]
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Return the loss of each pair, and 1 if its second text is most similar to the first.

    The loss is symmetric: the mean of the cross-entropies of finding the second text, among second
    texts and hard negatives, and of finding the first (Radford et al., 2021, figure 3).

    Args:
      logits: Similarities of first texts to second texts and, if there are any, hard negatives.
      negatives: See `find_negatives`.
    """
    itself = jnp.eye(len(logits[0]), dtype=bool)
    pairs = jnp.where(negatives[0] | itself, logits[0], _EXCLUDED)
    hard = [jnp.where(n, x, _EXCLUDED) for n, x in zip(negatives[1:], logits[1:], strict=True)]
    ahead = jnp.concatenate([pairs, *hard], axis=1)
    found = (jax.nn.logsumexp(ahead, axis=1) + jax.nn.logsumexp(pairs, axis=0)) / 2
    return found - jnp.diagonal(pairs), top1_accuracy(ahead, jnp.arange(len(pairs)))


def cosent(
    logits: Float[Array, " B"], score: Float[Array, " B"], real: Bool[Array, " B"]
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return (loss, weight) and (comparisons in the right order, comparisons) of scored pairs.

    The loss is log(1 + sum of exp(logit_j - logit_i) over all i, j with score_i > score_j), by
    Su (2022, kexue.fm/archives/8847). Its weight is the number of pairs of the batch.
    """
    higher = (score[:, None] > score[None]) & real[:, None] & real[None]
    differences = logits[None] - logits[:, None]
    wrong = jnp.where(higher, differences, _EXCLUDED).reshape(-1)
    value = jax.nn.logsumexp(jnp.append(wrong, 0.0))
    weight = real.sum().astype(jnp.float32)
    return (value * weight, weight), metrics.mean(differences < 0, higher)
