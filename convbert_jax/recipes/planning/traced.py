"""Abstract task and batches of a run, without vocabulary and data."""

import types

import jax
import jax.numpy as jnp
import numpy as np

from convbert_jax.analysis import flops
from convbert_jax.config import Config
from convbert_jax.interfaces.special_ids import SpecialIds, sentinel_names
from convbert_jax.objectives import span_corruption
from convbert_jax.recipes import prepared, tasks, teaching
from convbert_jax.training.task import Task


def make_batch(config: Config, shards: int = 1) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the batch of one step, int32 [rows, length]; for pairs the longest.

    Args:
      shards: the number of rows of pairs is a multiple of this times config.train.accumulation.
    """
    if config.reads_pairs:
        length = config.parallel.max_length
        unit = shards * config.train.accumulation
        count = max(1, config.parallel.batch_tokens // length // unit) * unit
        rows = jax.ShapeDtypeStruct((count, length), jnp.int32)
        names = ("tokens", "segment_ids", "labels", "source", "source_ids")
        return dict.fromkeys(names, rows)
    rows = jax.ShapeDtypeStruct((config.train.batch_size, config.data.length), jnp.int32)
    batch = dict.fromkeys(("tokens", "segment_ids", "type_ids"), rows)
    if config.data.layout == "pairs":
        batch["pair_label"] = jax.ShapeDtypeStruct(rows.shape[:1], jnp.int32)
    return batch


def make_task(
    config: Config,
    device: jax.Device,
    teacher: teaching.Teacher | None = None,
    *,
    shards: int = 1,
) -> Task:
    """Builds the task of a config without a vocabulary.

    Uses default ids of special tokens and assumes that every token begins a word.

    Args:
      shards: see `make_batch`.
    """
    size = config.tokenizer.vocab_size
    spans = config.recipe == "span_corruption"
    names = sentinel_names(span_corruption.count_spans(config).spans if spans else 0)
    extra = {name: size - 1 - number for number, name in enumerate(names)}
    effort = None
    if config.reads_pairs:
        rows, length = make_batch(config, shards)["tokens"].shape
        work = 3 * rows * flops.pair_forward_flops(config, length, length)
        effort = prepared.Effort(2 * rows * length, work)
    return tasks.build_task(
        config,
        SpecialIds(pad=0, unknown=1, cls=2, sep=3, mask=4, extra=extra),
        device,
        teacher,
        tokenizer=types.SimpleNamespace(begins_word=np.ones(size, bool)),
        effort=effort,
    )
