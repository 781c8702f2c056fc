"""Models that write text: encoder-decoders and language models.

sections.py  what a user sets, beside config.model
network.py   what the model code is built from, and how it follows from the sections
sizes.py     named sizes, published ones and small ones
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
