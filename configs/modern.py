"""Encoders with the block of ModernBERT (Warner et al. 2024): rotary positions, gated units,
pre-norm, no biases, and local attention in two of three layers.

17m, 32m, 68m, 150m, 400m: the shapes of Ettin (Weller et al. 2025); 150m is also ModernBERT-base
and 400m ModernBERT-large. Parameters with the masked-LM head and a vocabulary of 50,368: 16.9M,
32.1M, 68.5M, 149.7M and 395.9M. short_350m: the shape of LFM2-350M (arXiv 2511.23404), 354.5M
parameters without the head: ten gated short convolutions and six layers of global attention with
grouped keys and QK-norm, all of which see both sides here. tiny: for a CPU.

The objective is ModernBERT's, masked words with a rate of 30%; for replaced-token detection set
--config.recipe=replaced_token.

    python -m convbert_jax.main --config=configs/modern.py:tiny
    python -m convbert_jax.main --config=configs/modern.py:150m --config.data.source=FILES
    python -m convbert_jax.main --config=configs/modern.py:150m,mixed --config.data.source=FILES

SIZE,MIXER replaces the attention by another mixer with the same block around it, for example mixed
(ConvBERT) or short (LFM2). SIZE,canon keeps the attention and adds Canon layers at all four
positions. These have no published counterpart. Differences from the published
training: AdamW in place of StableAdamW, a linear schedule, one phase at 1,024 tokens, your corpus.
"""

import itertools

from convbert_jax.config import to_config_dict
from convbert_jax.config.fields import check_choice
from convbert_jax.config.mixers import MIXERS

# size -> layers, hidden size, heads, feed-forward size, learning rate
SIZES = {
    "tiny": (4, 128, 4, 192, 2e-3),
    "17m": (7, 256, 4, 384, 3e-3),
    "32m": (10, 384, 6, 576, 3e-3),
    "68m": (19, 512, 8, 768, 3e-3),
    "150m": (22, 768, 12, 1_152, 8e-4),
    "400m": (28, 1_024, 16, 2_624, 5e-4),
    "short_350m": (16, 1_024, 16, 4_608, 5e-4),
}
_ATTENTION_OF_SHORT = (2, 5, 8, 10, 12, 14)  # layers with attention in LFM2-350M


def get_config(variant: str = "tiny"):
    size, _, mixer = variant.partition(",")
    check_choice("variant", variant if size == "short_350m" else size, tuple(SIZES))
    if mixer and ":" not in mixer:  # not a custom mixer
        check_choice("variant", mixer, (*MIXERS, "canon"))
    config = to_config_dict()
    config.name = f"modern-{variant.replace(',', '-').rpartition(':')[2]}"
    config.variant = variant
    config.recipe = "masked_lm"
    m = config.model
    m.layers, m.hidden_size, m.heads, m.ffn_size, rate = SIZES[size]
    m.embedding_size = m.hidden_size
    m.scan_unroll = m.layers
    m.mixer = mixer if mixer not in ("", "canon") else "attention"
    m.canon = "ABCD" if mixer == "canon" else ""
    m.kernel_size = 3 if m.mixer == "short" else 9
    m.activation = "geglu"
    m.norm = "pre"
    m.biases = False
    m.position_embedding = "rotary"
    m.rotary_base = 160_000.0
    m.positions = 8_192
    m.types = 0
    m.window = 64
    m.dropout = m.attention_dropout = 0.0
    m.layer_norm_epsilon = 1e-5
    config.objective.mask_fraction = 0.3
    config.objective.mask_token_fraction = 0.8
    config.objective.random_token_fraction = 0.1
    config.optimizer.learning_rate = rate
    config.optimizer.beta2 = 0.98
    if size == "tiny":
        _fit_to_a_cpu(config)
    else:
        config.data.source = "hub:wikimedia/wikipedia/20231101.en/*.parquet"
        config.tokenizer.vocab_size = 50_368
        config.data.length = 1_024
        config.train.steps = 100_000
        config.train.batch_size = 256
    if size == "short_350m":
        _follow_lfm2(config)
    return config.lock()


def _follow_lfm2(config) -> None:
    m = config.model
    m.kernel_size = 3
    m.activation = "swiglu"
    m.normalization = "rms"
    m.embedding_norm = False
    m.qk_norm = True
    m.key_value_heads = 8
    m.window = 0
    m.rotary_base = 1e6
    layers = ("attention" if n in _ATTENTION_OF_SHORT else "short" for n in range(m.layers))
    m.stages = tuple(
        {"layers": len(list(equal)), "mixer": mixer} for mixer, equal in itertools.groupby(layers)
    )
    config.tokenizer.vocab_size = 65_536


def _fit_to_a_cpu(config) -> None:
    config.model.positions = 512
    config.model.window = 16
    config.tokenizer.vocab_size = 4_096
    config.data.source = "docstrings"
    config.data.length = 64
    config.optimizer.warmup_steps = 100
    config.train.steps = 800
    config.train.batch_size = 32
    config.train.log_every = 20
    config.train.eval_every = 200
    config.train.eval_rows = 512
    config.checkpoint.every = 200
