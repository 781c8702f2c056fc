"""Configs of generative models: encoder-decoders and language models.

sections.py  fields that a user sets, in addition to config.model
network.py   configs for the model code, derived from the sections
sizes.py     named model sizes, published and small
"""

from convbert_jax.config.sequences.network import (
    DecoderConfig,
    EncoderDecoderConfig,
    LanguageModelConfig,
    TokensConfig,
    derive_encoder_decoder,
    derive_language_model,
    idle_fields,
)
from convbert_jax.config.sequences.sections import SequenceSection
from convbert_jax.config.sequences.sizes import SIZES

__all__ = [
    "SIZES",
    "DecoderConfig",
    "EncoderDecoderConfig",
    "LanguageModelConfig",
    "SequenceSection",
    "TokensConfig",
    "derive_encoder_decoder",
    "derive_language_model",
    "idle_fields",
]
