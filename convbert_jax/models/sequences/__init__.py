"""Encoder-decoders and decoder-only language models, built from the mixers of `models/mixers/`.

Each has two equivalent forms: whole rows for training, one position at a time for decoding.
"""

from flax import nnx

from convbert_jax.config import Config
from convbert_jax.config.sequences import EncoderDecoderConfig, LanguageModelConfig
from convbert_jax.config.sequences.sections import OF_PAIRS
from convbert_jax.interfaces.placement import Rules
from convbert_jax.models.mixers.attention import Attention
from convbert_jax.models.sequences.networks import EncoderDecoder, LanguageModel


def make_encoder_decoder(config: Config, rngs: nnx.Rngs) -> EncoderDecoder:
    return EncoderDecoder(config.encoder_decoder, rngs)


def make_language_model(config: Config, rngs: nnx.Rngs) -> LanguageModel:
    return LanguageModel(config.language_model, rngs)


# config.recipe -> function that makes the model
MODELS = {
    "causal_lm": make_language_model,
    **dict.fromkeys(("span_corruption", *OF_PAIRS), make_encoder_decoder),
}


def sharding_rules(config: EncoderDecoderConfig | LanguageModelConfig) -> Rules:
    """Return partition rules of the mixers and the cross-attention; put before `sharding.RULES`."""
    parts = [("decoder", config.decoder.stages)]
    if isinstance(config, EncoderDecoderConfig):
        parts.append(("encoder", config.encoder.stages))
    rules = [
        (rf"(^|/){part}/stages/{i}/mixer/{pattern}$", split)
        for part, stages in parts
        for i, stage in enumerate(stages)
        for pattern, split in stage.layer.mixer.RULES
    ]
    of_source = [
        (rf"(^|/)stages/[^/]+/source/{pattern}$", split) for pattern, split in Attention.RULES
    ]
    return (*rules, *of_source)
