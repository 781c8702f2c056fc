"""Lower and upper bounds of every number in a config.

A lower bound is the smallest meaningful value. An upper bound is far beyond practical values; it
turns a typing error into a message instead of an out-of-memory or 32-bit overflow error during a
run.
"""

import dataclasses
from typing import Any

from convbert_jax.config.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Range:
    """An interval from `low` to `high`, closed or open at each end; for tuples, of each item."""

    low: float
    high: float
    with_low: bool = True
    with_high: bool = True
    note: str = ""  # meaning of a special value

    def __contains__(self, value: float) -> bool:
        """Returns whether `value` is inside; False for NaN."""
        above = self.low <= value if self.with_low else self.low < value
        return above and (value <= self.high if self.with_high else value < self.high)

    def __str__(self) -> str:
        low = f"{'at least' if self.with_low else 'above'} {_spell(self.low)}"
        high = f"{'at most' if self.with_high else 'below'} {_spell(self.high)}"
        return f"{low} and {high}{self.note and f' ({self.note})'}"


_INT32 = 2**31 - 1  # steps and positions are counted in 32 bits on the device
_SIZE = 2**20  # of an axis: rows, tokens, devices

_COUNT = Range(1, _INT32)
_HEADS = Range(1, 1_024)
_HEADS_OR_MODEL = Range(0, 1_024, note="0 is the value of config.model")
_WIDTH = Range(1, 2**18)
_LENGTH = Range(8, _SIZE, note="[CLS], [SEP] and some text")
_BATCH = Range(1, _SIZE)
_SHARE = Range(0.0, 1.0)
_SHARE_BELOW_1 = Range(0.0, 1.0, with_high=False)
_SHARE_ABOVE_0 = Range(0.0, 1.0, with_low=False)
_RATE = Range(0.0, 1e3, with_low=False)
_EPSILON = Range(1e-30, 1.0)  # smaller values may underflow to 0 in float32
_WEIGHT = Range(0.0, 1e6)
_TEMPERATURE = Range(1e-4, 1e4)
_SCALE = Range(1e-6, 1e9)
_AXIS = Range(-1, _SIZE, note="-1 is all remaining devices")

BOUNDS = {
    "seed": Range(0, 2**32 - 1),
    "model.layers": _HEADS,
    "model.hidden_size": _WIDTH,
    "model.embedding_size": _WIDTH,
    "model.heads": _HEADS,
    "model.head_ratio": _HEADS,
    "model.kernel_size": _HEADS,
    "model.dilation": _HEADS,
    "model.kernel_sizes": _HEADS,
    "model.dilations": _HEADS,
    "model.ffn_size": _WIDTH,
    "model.ffn_groups": _HEADS,
    "model.positions": _BATCH,
    "model.types": _HEADS,
    "model.dropout": _SHARE_BELOW_1,
    "model.attention_dropout": _SHARE_BELOW_1,
    "model.layer_norm_epsilon": _EPSILON,
    "model.initializer_range": Range(0.0, 10.0, with_low=False),
    "model.scan_unroll": _HEADS,
    "generator.size": _SHARE_ABOVE_0,
    "generator.layers": _SHARE_ABOVE_0,
    "generator.scan_unroll": _HEADS,
    "objective.mask_fraction": Range(0.0, 1.0, with_low=False, with_high=False),
    "objective.prediction_multiple": _HEADS,
    "objective.mask_token_fraction": _SHARE,
    "objective.random_token_fraction": _SHARE,
    "objective.masked_lm_steps": Range(0, _INT32, note="0 is off"),
    "objective.mean_span": Range(1.0, 1e4),
    "objective.label_smoothing": _SHARE_BELOW_1,
    "objective.temperature": _TEMPERATURE,
    "objective.generator_weight": _WEIGHT,
    "objective.discriminator_weight": _WEIGHT,
    "distillation.labels_weight": _WEIGHT,
    "distillation.logits_weight": _WEIGHT,
    "distillation.temperature": _TEMPERATURE,
    "distillation.hidden_weight": _WEIGHT,
    "distillation.attention_weight": _WEIGHT,
    "distillation.embeddings_weight": _WEIGHT,
    "distillation.teacher_hidden_size": Range(0, _WIDTH.high, note="the teacher's"),
    "distillation.teacher_embedding_size": Range(0, _WIDTH.high, note="the teacher's"),
    "tokenizer.vocab_size": Range(17, 2**24, note="five ids are special tokens"),
    "tokenizer.max_word_chars": Range(1, 10_000),
    "tokenizer.train_megabytes": Range(1, 1_000_000),
    "tokenizer.max_unknown_rate": _SHARE,
    "tokenizer.sentinels": Range(0, 2**16),
    "data.heldout_fraction": _SHARE_BELOW_1,
    "data.length": _LENGTH,
    "data.workers": Range(0, 1_024, note="0 is one per core"),
    "data.prefetch": Range(1, 10_000),
    "sequence.decoder_layers": Range(0, 1_024, note="0 is as many as the encoder"),
    "sequence.decoder_kernel_sizes": _HEADS,
    "sequence.decoder_dilations": _HEADS,
    "sequence.activation_dropout": _SHARE_BELOW_1,
    "sequence.last_dropout": _SHARE_BELOW_1,
    "parallel.heldout_fraction": _SHARE_BELOW_1,
    "parallel.target_vocab_size": Range(0, 2**24, note="0 is tokenizer.vocab_size"),
    "parallel.max_length": Range(2, 2**14, note="a token and the end token"),
    "parallel.max_ratio": Range(0.0, 1e6, note="0 is any"),
    "parallel.sampling": _SHARE,
    "parallel.batch_tokens": Range(2, _INT32),
    "parallel.shapes": Range(1, 1_024),
    "parallel.length_multiple": Range(1, 1_024),
    "decoding.beam": Range(1, 1_024),
    "decoding.length_penalty": Range(0.0, 100.0),
    "decoding.length_ratio": Range(0.0, 1e3),
    "decoding.length_extra": Range(0, 2**14),
    "decoding.n_best": Range(1, 1_024),
    "decoding.temperature": _TEMPERATURE,
    "decoding.top_k": Range(0, _INT32, note="0 is all"),
    "decoding.top_p": _SHARE_ABOVE_0,
    "decoding.batch_tokens": Range(2, _INT32),
    "decoding.average": Range(1, 1_024),
    "optimizer.learning_rate": _RATE,
    "optimizer.warmup_steps": Range(0, _INT32),
    "optimizer.decay_to": _SHARE_BELOW_1,
    "optimizer.beta1": _SHARE_BELOW_1,
    "optimizer.beta2": _SHARE_BELOW_1,
    "optimizer.epsilon": _EPSILON,
    "optimizer.weight_decay": Range(0.0, 1e3),
    "optimizer.clip_norm": Range(0.0, 1e30, note="0 is off"),
    "optimizer.release_replicas": _BATCH,
    "train.steps": _COUNT,
    "train.batch_size": _BATCH,
    "train.accumulation": _BATCH,
    "train.log_every": _COUNT,
    "train.eval_every": _COUNT,
    "train.eval_rows": Range(0, _INT32, note="0 is all"),
    "train.spike": Range(0.0, 1e6, note="0 is off"),
    "train.rollbacks": Range(0, 1_000),
    "train.hang_seconds": Range(0, _INT32, note="0 is off"),
    "train.silence_seconds": Range(10, _INT32),
    "train.profile_start": Range(0, _INT32, note="0 is off"),
    "train.profile_steps": _COUNT,
    "checkpoint.every": _COUNT,
    "checkpoint.keep": _COUNT,
    "checkpoint.keep_every": Range(0, _INT32, note="0 is off"),
    "checkpoint.huggingface_every": Range(0, _INT32, note="0 is off"),
    "mesh.data": _AXIS,
    "mesh.fsdp": _AXIS,
    "mesh.tensor": _AXIS,
    "mesh.sequence": _AXIS,
    "finetune.layers": Range(0, 1_000, note="0 is all"),
    "finetune.length": _LENGTH,
    "finetune.buckets": _BATCH,
    "finetune.batch_size": _BATCH,
    "finetune.eval_batch_size": _BATCH,
    "finetune.learning_rates": _RATE,
    "finetune.epochs": Range(0.0, 1e6, with_low=False),
    "finetune.seeds": Range(1, 10_000),
    "finetune.checkpoint_minutes": Range(0.0, 1e6, note="0 is off"),
    "finetune.train_rows": Range(0, _INT32, note="0 is all"),
    "finetune.warmup_fraction": _SHARE_BELOW_1,
    "finetune.dropout": _SHARE_BELOW_1,
    "finetune.layer_decay": Range(0.0, 1.0, with_low=False, note="1 is off"),
    "finetune.distill_temperature": _TEMPERATURE,
    "finetune.distill_weight": _SHARE,
    "finetune.query_length": _BATCH,
    "finetune.stride": _BATCH,
    "finetune.answer_length": _BATCH,
    "finetune.n_best": Range(1, 10_000),
    "finetune.beam": Range(1, 10_000),
    "task.heldout_fraction": _SHARE_BELOW_1,
    "task.scale": _SCALE,
    "outputs.scale": _SCALE,
    "outputs.texts": Range(1, 2),
}


# Bounds of an entry of model.stages.
STAGE_BOUNDS = {
    "layers": _HEADS,
    "heads": _HEADS_OR_MODEL,
    "head_ratio": _HEADS_OR_MODEL,
    "kernel_size": _HEADS_OR_MODEL,
    "dilation": _HEADS_OR_MODEL,
    "ffn_size": Range(0, _WIDTH.high, note="0 is the value of config.model"),
    "ffn_groups": _HEADS_OR_MODEL,
}


def check_bounds(config: Any) -> None:
    """Raises ConfigError for the first number of a `Config` that is out of bounds."""
    for path, bounds in BOUNDS.items():
        section, _, field = path.rpartition(".")
        value = getattr(getattr(config, section) if section else config, field)
        for item in value if isinstance(value, tuple) else (value,):
            check_number(path, item, bounds)


def check_number(path: str, value: float, bounds: Range) -> None:
    """Raises ConfigError if the number in the field `path` is out of bounds."""
    if value not in bounds:
        raise ConfigError(f"must be {bounds}.", field=f"config.{path}", value=value)


def _spell(value: float) -> str:
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    return f"{value:,}" if abs(value) > 99_999 else str(value)
