"""Masking and sampling of replacement tokens, on the device with static shapes.

Results depend only on the key, not on the platform or mesh; there are no parameters. Axes: B batch,
L length, M mask slots, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from convbert_jax.config import ObjectiveSection
from convbert_jax.interfaces import SpecialIds
from convbert_jax.objectives.cross_entropy import BLOCK, add_up_blocks, add_up_marked, weigh


class Masked(NamedTuple):
    """A batch with masked tokens."""

    tokens: Int[Array, "B L"]  # model input
    positions: Int[Array, "B M"]  # of the chosen tokens; 0 in unused slots
    labels: Int[Array, "B M"]  # original tokens at these positions
    weights: Float[Array, "B M"]  # 1 in used slots, 0 in unused slots


def divided_key(key: Array) -> Array:
    """Derive a threefry key, whose random numbers the compiler can partition over devices.

    TPUs use RBG keys, with which every device would draw the numbers of the whole batch. The
    derived key draws the same numbers as on CPUs and GPUs, given the same seed and splits.
    """
    # An RBG key consists of two threefry keys, which are split and folded separately.
    return jax.random.wrap_key_data(jax.random.key_data(key)[..., :2], impl="threefry2x32")


def count_predictions(
    segment_ids: Int[Array, "B L"], fraction: float, most: int
) -> Int[Array, " B"]:
    """Return max(1, min(most, round(fraction * real tokens))) per row, rounding half to even.

    [CLS] and [SEP] count as real tokens, as in the official code (run_pretraining.py /
    pretrain_helpers.py).
    """
    real = (segment_ids != 0).sum(axis=1)
    return jnp.clip(jnp.round(fraction * real.astype(jnp.float32)).astype(jnp.int32), 1, most)


def choose_positions(
    key: Array,
    candidates: Bool[Array, "B L"],
    counts: Int[Array, " B"],
    slots: int,
    *,
    with_replacement: bool,
) -> tuple[Int[Array, "B M"], Float[Array, "B M"]]:
    """Draw `counts` of the candidate positions of each row, uniformly.

    Args:
      candidates: Positions that may be chosen.
      counts: Number to draw per row, at most `slots`; rows with fewer candidates draw fewer.
      slots: M, the static number of slots.
      with_replacement: Whether a position may be drawn twice, as in the official code.

    Returns:
      Positions (0 in unused slots) and weights (1 in used slots).
    """
    available = candidates.sum(axis=1)
    if with_replacement:
        rank = jnp.cumsum(candidates, axis=1)  # 1 for the first candidate
        uniform = jax.random.uniform(key, (candidates.shape[0], slots))
        drawn = jnp.floor(uniform * available[:, None]).astype(jnp.int32) + 1
        positions = (rank[:, None, :] < drawn[:, :, None]).sum(axis=-1)
        used = (jnp.arange(slots) < counts[:, None]) & (available[:, None] > 0)
    else:
        noise = jax.random.uniform(key, candidates.shape)
        _, positions = jax.lax.top_k(jnp.where(candidates, noise, -1.0), min(slots, noise.shape[1]))
        positions = jnp.pad(positions, ((0, 0), (0, slots - positions.shape[1])))
        used = jnp.arange(slots) < jnp.minimum(counts, available)[:, None]
    return jnp.where(used, positions, 0).astype(jnp.int32), used.astype(jnp.float32)


def gather(tokens: Int[Array, "B L"], positions: Int[Array, "B M"]) -> Int[Array, "B M"]:
    """Return the tokens at `positions`."""
    return jnp.take_along_axis(tokens, positions, axis=1)


def put(
    tokens: Int[Array, "B L"],
    positions: Int[Array, "B M"],
    values: Int[Array, "B M"],
    used: Bool[Array, "B M"],
    *,
    average_duplicates: bool = False,
) -> Int[Array, "B L"]:
    """Write `values` at `positions` where `used`.

    A position used twice gets the value of its first slot. With `average_duplicates` it gets the
    floored mean of its values, like scatter_update in the official code, which makes an arbitrary
    token of two sampled ids.
    """
    length = tokens.shape[1]
    if not average_duplicates:
        slot = jnp.arange(positions.shape[1])
        earlier = (slot[None, :] < slot[:, None]) & used[:, None, :]
        used = used & ~(earlier & (positions[:, :, None] == positions[:, None, :])).any(axis=-1)
    # One-hot sums instead of a scatter, which needs atomic updates on accelerators; the cost is
    # M * L integers per row.
    chosen = (positions[:, :, None] == jnp.arange(length)) & used[:, :, None]
    count = chosen.sum(axis=1)
    total = (chosen * values[:, :, None]).sum(axis=1)
    return jnp.where(count > 0, total // jnp.maximum(count, 1), tokens)


def mask(
    key: Array,
    tokens: Int[Array, "B L"],
    segment_ids: Int[Array, "B L"],
    *,
    objective: ObjectiveSection,
    special: SpecialIds,
    vocab_size: int,
    most: int,
    slots: int,
) -> Masked:
    """Mask a fraction of the real tokens; [CLS], [SEP] and [MASK] are never chosen.

    Of the chosen tokens, `mask_token_fraction` become [MASK], `random_token_fraction` a random
    token, and the rest stay unchanged (ELECTRA and ConvBERT: 85 / 0 / 15 %, BERT: 80 / 10 / 10 %).

    Args:
      most: Maximum number of positions per row.
      slots: M, which is `most` rounded up for the hardware.
    """
    position_key, branch_key, token_key = jax.random.split(divided_key(key), 3)
    candidates = segment_ids != 0
    for special_id in special.never_hidden:
        candidates &= tokens != special_id
    counts = count_predictions(segment_ids, objective.mask_fraction, most)
    positions, weights = choose_positions(
        position_key,
        candidates,
        counts,
        slots,
        with_replacement=objective.sample_with_replacement,
    )
    labels = gather(tokens, positions)
    branch = jax.random.uniform(branch_key, positions.shape)
    masked = branch < objective.mask_token_fraction
    values = jnp.where(masked, special.mask, labels)
    changed = masked
    if objective.random_token_fraction > 0:
        random_ids = jax.random.randint(token_key, positions.shape, 0, vocab_size)
        swapped = ~masked & (
            branch < objective.mask_token_fraction + objective.random_token_fraction
        )
        values, changed = jnp.where(swapped, random_ids, values), masked | swapped
    tokens = put(tokens, positions, values, changed & (weights > 0))
    return Masked(tokens, positions, labels, weights)


def sample_tokens(
    key: Array,
    logits: Float[Array, "B M V"],
    labels: Int[Array, "B M"],
    *,
    objective: ObjectiveSection,
) -> Int[Array, "B M"]:
    """Draw one token per slot from softmax(logits / temperature), without a gradient.

    `disallow_correct` excludes the original token.
    """
    key = divided_key(key)
    logits = jax.lax.stop_gradient(logits) / objective.temperature
    if objective.disallow_correct:
        vocabulary = jnp.arange(logits.shape[-1])
        logits = jnp.where(vocabulary == labels[..., None], -1e9, logits)
    if objective.release_gumbel:
        uniform = jax.random.uniform(key, logits.shape)
        noise = -jnp.log(-jnp.log(uniform + 1e-9) + 1e-9)
        return jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)
    return _sample_by_inverse_cdf(key, logits)


def adds_up_blocks(objective: ObjectiveSection) -> bool:
    """Return whether `sample_tokens` sums blocks of its logits exactly as they are passed in."""
    as_they_are = objective.temperature == 1.0 and not objective.disallow_correct
    return as_they_are and not objective.release_gumbel


def _sample_by_inverse_cdf(key: Array, logits: Float[Array, "B M V"]) -> Int[Array, "B M"]:
    """Sample by inverse CDF, with one uniform number per slot.

    The search has two levels, blocks and entries of a block. Gumbel sampling would draw B * M * V
    random numbers, which costs more than the generator itself.
    """
    points = jax.random.uniform(key, logits.shape[:-1])
    return jax.lax.platform_dependent(
        logits, points, tpu=_search_by_products, default=_search_by_slices
    )


def _search_by_slices(
    logits: Float[Array, "B M V"], points: Float[Array, "B M"]
) -> Int[Array, "B M"]:
    """Search by slicing the padded vocabulary into blocks."""
    weights = weigh(logits)
    weights = jnp.pad(weights, ((0, 0), (0, 0), (0, -weights.shape[-1] % BLOCK)))
    weights = weights.reshape(*weights.shape[:-1], -1, BLOCK)

    def cut(chosen):
        return jnp.take_along_axis(weights, chosen[..., None, None], axis=-2)[..., 0, :]

    return _search(weights.sum(axis=-1), cut, points, logits.shape[-1])


def _search_by_products(
    logits: Float[Array, "B M V"], points: Float[Array, "B M"]
) -> Int[Array, "B M"]:
    """Search by products with 0/1 tables, which read the logits and write only sums.

    On a TPU, slices at a different offset for each row would need a loop over rows.
    """
    entry = jnp.arange(logits.shape[-1])

    def cut(chosen):
        is_inside = entry // BLOCK == chosen[..., None]
        inside = jnp.where(is_inside, weigh(logits), 0.0)
        places = entry % BLOCK
        return add_up_marked(inside, places[:, None] == jnp.arange(BLOCK))

    return _search(add_up_blocks(weigh(logits)), cut, points, logits.shape[-1])


def _search(
    sums: Float[Array, "B M N"],
    cut: Callable[[Int[Array, "B M"]], Float[Array, "B M W"]],
    points: Float[Array, "B M"],
    size: int,
) -> Int[Array, "B M"]:
    """Find the entry where the cumulative weight exceeds `points` times the total.

    Args:
      sums: Weight of each block.
      cut: Block index -> weights inside the block.
      points: Uniform numbers in [0, 1].
      size: Vocabulary size.
    """
    ends = jnp.cumsum(sums, axis=-1)
    place = points * ends[..., -1]
    # Rounding can put the point at the very end: stay in a block with positive weight.
    reached = jnp.argmax(ends >= ends[..., -1:], axis=-1)
    chosen = jnp.minimum((ends <= place[..., None]).sum(axis=-1), reached)
    inside = cut(chosen)
    within = jnp.cumsum(inside, axis=-1)

    def pick(values):
        return jnp.take_along_axis(values, chosen[..., None], axis=-1)[..., 0]

    # Relative to the block, since its sum and the sum of its entries may round differently.
    share = (place - (pick(ends) - pick(sums))) / pick(sums)
    # Stay in an entry with positive weight too.
    last = inside.shape[-1] - 1 - jnp.argmax(inside[..., ::-1] > 0, axis=-1)
    rest = share * within[..., -1]
    offset = jnp.minimum((within <= rest[..., None]).sum(axis=-1), last)
    return jnp.minimum(chosen * BLOCK + offset, size - 1).astype(jnp.int32)
