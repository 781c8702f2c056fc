"""Analytic FLOPs of training and peak FLOP/s of devices.

XLA's cost analysis cannot be used: it counts the body of a scan once, regardless of its length.

Two conventions:

model: matrix products only; [m, k] times [k, n] is 2mkn. The backward pass is twice the forward
  pass, embedding lookups are free, and the generator's output layer runs on the masked positions.
  This is the numerator of model FLOPs utilization (MFU) and excludes rematerialization.
paper: the numbers published for ELECTRA and ConvBERT. The backward pass equals the forward pass, a
  lookup is a product with a one-hot vector, elementwise operations count a few FLOPs each, and the
  output layer runs on 15.625% of the tokens (ELECTRA's counter, extended to the mixed block).

A mixer that is a plain `nnx.Module` does not define its FLOPs: sums with it are NaN, which is shown
as "unknown".
"""

import re

from convbert_jax.config import Config, EmbeddingsConfig, EncoderConfig, LayerConfig
from convbert_jax.config.network import DecoderConfig
from convbert_jax.models.layers import PaperFlops
from convbert_jax.objectives.span_corruption import count_spans

# Peak dense bfloat16 FLOP/s of a JAX device, by a substring of its `device_kind`; the longest match
# applies. TPU: Google Cloud's TPU documentation, peak compute per chip; a device is a chip, but
# half a chip on v2, v3 and 7x. GPU: NVIDIA's data sheets, without sparsity; float16 for V100 and
# T4, which have no bfloat16.
PEAK_FLOPS = {
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 1153.5e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "A100": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "T4": 65e12,
    "V100": 125e12,
}

_PAPER_PREDICTED = 0.15625  # share of tokens with outputs

CONVENTIONS = ("model", "paper")


def peak_flops(device_kind: str) -> float | None:
    """Returns the peak FLOP/s for a `jax.Device.device_kind`; None for CPUs and unknown kinds."""
    fitting = [  # whole words: L40 must not match L4, nor A1000 match A100
        name for name in PEAK_FLOPS if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", device_kind)
    ]
    return PEAK_FLOPS[max(fitting, key=len)] if fitting else None


def forward_flops_per_token(config: Config, convention: str = "model") -> float:
    """Computes the forward FLOPs of all networks of the recipe, per token of a row.

    With config.objective.masked_lm_steps, which starts with another head, it is the mean over
    steps.

    Raises:
      ValueError: the convention is unknown, or "paper" was requested for a generative model.
    """
    if convention not in CONVENTIONS:
        raise ValueError(f"Unknown convention {convention!r}; choose {' or '.join(CONVENTIONS)}.")
    paper = convention == "paper"
    length = config.data.length
    if config.writes_text:
        return _forward_flops_of_writing(config, paper)
    encoder = _encoder(config.encoder, length, paper) + _embed(config.embeddings, length, paper)
    if config.recipe == "masked_lm":
        hidden = config.encoder.hidden_size
        head = _predict(config, hidden, config.embeddings, paper)
        if config.objective.sentence_pairs != "none":  # one vector per row
            head += 2 * hidden * (hidden + 2) / length
        return encoder + head
    hidden = config.encoder.hidden_size
    discriminator = encoder + 2 * hidden**2 + 2 * hidden + paper * (1 + PaperFlops.GELU) * hidden
    if first := config.objective.masked_lm_steps:
        of_words = encoder + _predict(config, hidden, config.embeddings, paper)
        discriminator += (of_words - discriminator) * first / config.train.steps
    kind = config.generator.kind
    if kind == "uniform":
        return discriminator
    if kind == "shared":
        return discriminator + encoder + _predict(config, hidden, config.embeddings, paper)
    embeddings = (
        config.embeddings if config.generator.tie_embeddings else config.generator_embeddings
    )
    return (
        discriminator
        + _encoder(config.generator_encoder, length, paper)
        + _embed(embeddings, length, paper)
        + _predict(config, config.generator_encoder.hidden_size, embeddings, paper)
    )


def teacher_flops_per_token(
    config: Config, encoder: EncoderConfig, embeddings: EmbeddingsConfig
) -> float:
    """Computes a teacher's forward FLOPs per token of a row (model convention).

    Args:
      config: config of the student.
      encoder: encoder of the teacher.
      embeddings: embeddings of the teacher.
    """
    total, hidden = _encoder(encoder, config.data.length, paper=False), encoder.hidden_size
    if not config.distillation.logits_weight:
        return total
    if config.recipe == "masked_lm":
        return total + _predict(config, hidden, embeddings, paper=False)
    return total + 2 * hidden**2 + 2 * hidden


def pair_forward_flops(config: Config, source: int, target: int) -> float:
    """Computes the forward FLOPs of an encoder-decoder for one row (model convention).

    Causal attention counts as much as bidirectional attention, because the products are computed in
    full and then masked.

    Args:
      source: number of source tokens.
      target: number of target tokens.
    """
    model = config.encoder_decoder
    hidden = model.decoder.hidden_size
    encoder = sum(
        stage.depth * _layer_products(stage.layer, source) for stage in model.encoder.stages
    )
    decoder = _decoder(model.decoder, target)
    # Cross-attention: queries and output, keys and values, then both attention products.
    reading = target * 2 * 2 * hidden**2 + source * 2 * 2 * hidden**2
    reading += 2 * 2 * source * target * hidden
    words = 2 * hidden * model.target.vocab_size
    return source * encoder + target * (decoder + words) + model.decoder.depth * reading


def _forward_flops_of_writing(config: Config, paper: bool) -> float:
    """Computes forward FLOPs of generative models per token; pairs have the maximum length."""
    if paper:
        raise ValueError(
            "The convention 'paper' is not defined for generative models. Use 'model'."
        )
    length = config.data.length
    if config.recipe == "causal_lm":
        model = config.language_model
        words = 2 * model.decoder.hidden_size * model.tokens.vocab_size
        return _decoder(model.decoder, length) + words
    if config.recipe == "span_corruption":
        counts = count_spans(config)
        return pair_forward_flops(config, counts.source, counts.target) / length
    longest = config.parallel.max_length
    return pair_forward_flops(config, longest, longest) / longest


def _decoder(decoder: DecoderConfig, length: int) -> float:
    return sum(stage.depth * _layer_products(stage.layer, length) for stage in decoder.stages)


def training_flops_per_token(config: Config, convention: str = "model") -> float:
    """Computes forward and backward FLOPs per token of a row."""
    passes = 3 if convention == "model" else 2
    return passes * forward_flops_per_token(config, convention)


def training_flops(config: Config, convention: str = "model") -> float:
    """Computes the FLOPs of the whole run."""
    tokens = config.train.steps * config.train.batch_size * config.data.length
    return tokens * training_flops_per_token(config, convention)


def _encoder(encoder: EncoderConfig, length: int, paper: bool) -> float:
    total = 0.0
    if encoder.embedding_size != encoder.hidden_size:
        total += (2 * encoder.embedding_size + paper) * encoder.hidden_size
    for stage in encoder.stages:
        layer = _layer_products(stage.layer, length)
        if paper:
            layer += _layer_elementwise(stage.layer, length)
        total += stage.depth * layer
    return total


def _layer_products(layer: LayerConfig, length: int) -> float:
    products = 2 + layer.gated
    feed_forward = products * 2 * layer.hidden_size * layer.ffn_size // layer.ffn_groups
    return layer.mixer.products(layer.hidden_size, length) + feed_forward


def _layer_elementwise(layer: LayerConfig, length: int) -> float:
    """Counts biases, norms, dropout, residuals and the mixer's elementwise operations."""
    around = 2 * (1 + PaperFlops.DROPOUT + 1 + PaperFlops.LAYER_NORM) * layer.hidden_size
    around += (1 + PaperFlops.GELU) * layer.ffn_size
    return layer.mixer.elementwise(layer.hidden_size, length) + around


def _embed(embeddings: EmbeddingsConfig, length: int, paper: bool) -> float:
    if not paper:
        return 0.0
    lookups = embeddings.vocab_size + length + embeddings.types
    return (2 * lookups + 2 + PaperFlops.LAYER_NORM + PaperFlops.DROPOUT) * embeddings.size


def _predict(config: Config, hidden: int, embeddings: EmbeddingsConfig, paper: bool) -> float:
    """Computes FLOPs of the masked-language head, averaged over all tokens."""
    products = 2 * embeddings.size * (hidden + embeddings.vocab_size)
    if not paper:
        return products * config.max_predictions / config.data.length
    elementwise = (1 + PaperFlops.GELU + PaperFlops.LAYER_NORM) * embeddings.size
    elementwise += (PaperFlops.SOFTMAX + 2) * embeddings.vocab_size
    return (products + elementwise) * _PAPER_PREDICTED
