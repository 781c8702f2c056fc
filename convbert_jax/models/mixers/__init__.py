"""Token mixers: the layers that can replace the self-attention of a Transformer layer.

Each file has a specification (see `config/mixers.py` for its interface) and the Flax module that it
makes: mixer(x [B, L, C], segment_ids [B, L], key, capture) -> [B, L, C]. `key` enables dropout;
a `capture` (capture.py) that is not None receives activations. A causal mixer, for decoders, also
decodes one position at a time with `start` and `step`. Names are in `config.mixers.MIXERS`.
"""

from convbert_jax.config import EncoderConfig
from convbert_jax.interfaces.placement import Rules


def sharding_rules(encoder: EncoderConfig) -> Rules:
    """Return the partition rules of an encoder's mixers; they go before `sharding.RULES`.

    They also fit the encoder's generator, whose stages have the same mixers.
    """
    return tuple(
        (rf"(^|/)stages/{i}/mixer/{pattern}$", split)
        for i, stage in enumerate(encoder.stages)
        for pattern, split in stage.layer.mixer.RULES
    )
