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
from collections.abc import Callable

from convbert_jax.config import Config, EmbeddingsConfig, EncoderConfig, LayerConfig
from convbert_jax.config.network import CANON_TAPS
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
    return _FORWARD[config.recipe](config, convention == "paper")


def _forward_masked_lm(config: Config, paper: bool) -> float:
    total = _embed_and_encode(config, paper) + _predict_words(config, paper)
    if config.objective.sentence_pairs != "none":  # one vector per row
        hidden = config.encoder.hidden_size
        total += 2 * hidden * (hidden + 2) / config.data.length
    return total


def _forward_replaced_token(config: Config, paper: bool) -> float:
    length, hidden = config.data.length, config.encoder.hidden_size
    encoder, words = _embed_and_encode(config, paper), _predict_words(config, paper)
    discriminator = encoder + 2 * hidden**2 + 2 * hidden + paper * (1 + PaperFlops.GELU) * hidden
    if first := config.objective.masked_lm_steps:
        discriminator += (encoder + words - discriminator) * first / config.train.steps
    kind = config.generator.kind
    if kind == "uniform":
        return discriminator
    if kind == "shared":
        return discriminator + encoder + words
    embeddings = (
        config.embeddings if config.generator.tie_embeddings else config.generator_embeddings
    )
    return (
        discriminator
        + _encoder(config.generator_encoder, length, paper)
        + _embed(embeddings, length, paper)
        + _predict(config, config.generator_encoder.hidden_size, embeddings, paper)
    )


def _embed_and_encode(config: Config, paper: bool) -> float:
    length = config.data.length
    return _encoder(config.encoder, length, paper) + _embed(config.embeddings, length, paper)


def _predict_words(config: Config, paper: bool) -> float:
    return _predict(config, config.encoder.hidden_size, config.embeddings, paper)


def _without_paper(forward: Callable[[Config], float]) -> Callable[[Config, bool], float]:
    """Returns `forward` with a second argument, `paper`, which must be False."""

    def check(config: Config, paper: bool) -> float:
        if paper:
            raise ValueError(
                f"The convention 'paper' is not defined for config.recipe='{config.recipe}'. Use "
                "'model'."
            )
        return forward(config)

    return check


def _forward_causal_lm(config: Config) -> float:
    model = config.language_model
    words = 2 * model.decoder.hidden_size * model.tokens.vocab_size
    layers = (_layer_products(layer, config.data.length) for layer in model.decoder.layers)
    return sum(layers) + words


def _forward_span_corruption(config: Config) -> float:
    counts = count_spans(config)
    return pair_forward_flops(config, counts.source, counts.target) / config.data.length


def _forward_pairs(config: Config) -> float:
    longest = config.parallel.max_length
    return pair_forward_flops(config, longest, longest) / longest


# config.recipe -> function of (config, whether to count by the convention "paper")
_FORWARD = {
    "replaced_token": _forward_replaced_token,
    "masked_lm": _forward_masked_lm,
    "causal_lm": _without_paper(_forward_causal_lm),
    "span_corruption": _without_paper(_forward_span_corruption),
    **dict.fromkeys(
        ("translation", "summarization", "text_to_text", "embedding"),
        _without_paper(_forward_pairs),
    ),
}


def teacher_flops_per_token(
    config: Config, encoder: EncoderConfig, embeddings: EmbeddingsConfig, head: str
) -> float:
    """Computes a teacher's forward FLOPs per token of a row (model convention).

    Args:
      config: config of the student.
      encoder: encoder of the teacher.
      embeddings: embeddings of the teacher.
      head: its head, "mlm_head" or "rtd_head"; "" if its logits are not used.
    """
    total, hidden = _encoder(encoder, config.data.length, paper=False), encoder.hidden_size
    heads = {
        "": 0.0,
        "mlm_head": _predict(config, hidden, embeddings, paper=False),
        "rtd_head": 2 * hidden**2 + 2 * hidden,
    }
    return total + heads[head]


def pair_forward_flops(config: Config, source: int, target: int) -> float:
    """Computes the forward FLOPs of one pair of texts (model convention).

    An encoder-decoder reads the source and predicts the target; an encoder reads both, and hard
    negatives of the length of targets.

    Causal attention counts as much as bidirectional attention, because the products are computed in
    full and then masked.

    Args:
      source: number of source tokens.
      target: number of target tokens.
    """
    if not config.spec.generates:
        others = config.spec.pair_format(config).texts - 1
        lengths = (source, *(target,) * others)
        return sum(n * _encoder(config.encoder, n, paper=False) for n in lengths)
    model = config.encoder_decoder
    hidden = model.decoder.hidden_size
    encoder = sum(_layer_products(layer, source) for layer in model.encoder.layers)
    decoder = sum(_layer_products(layer, target) for layer in model.decoder.layers)
    # Cross-attention: queries and output, keys and values, then both attention products.
    reading = target * 2 * 2 * hidden**2 + source * 2 * 2 * hidden**2
    reading += 2 * 2 * source * target * hidden
    words = 2 * hidden * model.target.vocab_size
    return source * encoder + target * (decoder + words) + model.decoder.depth * reading


def training_flops_per_token(config: Config, convention: str = "model") -> float:
    """Computes forward and backward FLOPs per token of a row."""
    passes = 3 if convention == "model" else 2
    return passes * forward_flops_per_token(config, convention)


def training_flops(config: Config, convention: str = "model") -> float:
    """Computes the FLOPs of the whole run."""
    parts = zip(config.phase_configs, config.phase_lengths, strict=True)
    return sum(
        steps * of_phase.train.batch_size * of_phase.data.length
        * training_flops_per_token(of_phase, convention)
        for of_phase, steps in parts
    )  # fmt: skip


def _encoder(encoder: EncoderConfig, length: int, paper: bool) -> float:
    total = 0.0
    if encoder.embedding_size != encoder.hidden_size:
        total += (2 * encoder.embedding_size + paper) * encoder.hidden_size
    for layer in encoder.layers:
        total += _layer_products(layer, length)
        if paper:
            total += _layer_elementwise(layer, length)
    return total


def _layer_products(layer: LayerConfig, length: int) -> float:
    products = 2 + layer.gated
    feed_forward = products * 2 * layer.hidden_size * layer.ffn_size // layer.ffn_groups
    return layer.mixer.products(layer.hidden_size, length) + feed_forward


def _layer_elementwise(layer: LayerConfig, length: int) -> float:
    """Counts biases, norms, dropout, residuals, canon and the mixer's elementwise operations."""
    around = 2 * (1 + PaperFlops.DROPOUT + 1 + PaperFlops.LAYER_NORM) * layer.hidden_size
    around += (1 + PaperFlops.GELU) * layer.ffn_size
    convolved = sum(sum(widths.values()) for widths in layer.canon_widths.values())
    around += (2 * CANON_TAPS + 1) * convolved  # products, sums and the residual
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
