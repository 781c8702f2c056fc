"""What the text after the colon of --config selects: `default`, or `paper` for the release in "
"every quirk."""

from convbert_jax.config import to_config_dict
from convbert_jax.config.rules import check_choice

VARIANTS = ("default", "paper")


def start(name: str, variant: str):
    """A ConfigDict with all defaults for the run `name`, ready for its sizes; see `finish`.

    Raises:
      ConfigError: the variant is unknown.
    """
    check_choice("variant", variant, VARIANTS)
    config = to_config_dict()
    config.name = name if variant == "default" else f"{name}-{variant}"
    config.variant = variant
    return config


def finish(config):
    """Applies the variant last, so that it sees the sizes."""
    if config.variant == "paper":
        _follow_release(config)
    return config.lock()


def _follow_release(config) -> None:
    """Every quirk of the official ConvBERT code that changes numbers.

    Each line is one field of `convbert_jax/config/sections.py`, where a comment says what the
    release does.
    Not here because the default does the same: initializers, generator sizes and heads, 85% [MASK]
    / 15% unchanged, loss weights 1 and 50, epsilon 1e-6 and decay of embedding tables.
    """
    config.model.mask_convolution = False
    config.objective.sample_with_replacement = True
    config.objective.average_duplicate_ids = True
    config.objective.prediction_multiple = 1
    config.objective.release_gumbel = True
    config.objective.release_metrics = True
    config.optimizer.bias_correction = False
    config.optimizer.decay_during_warmup = True
    config.data.layout = "electra"
    config.data.release_builder_bug = True
    config.data.shuffle_documents = True
    config.data.release_shuffle = True
    config.tokenizer.kind = "wordpiece"
