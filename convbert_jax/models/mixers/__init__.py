"""Token mixers: what can stand where a Transformer layer has its self-attention.

One file each: a specification (`config/mixers.py` says what it must have) and the Flax module that
it makes, called as mixer(x [B, L, C], segment_ids [B, L], key, capture) -> [B, L, C]: with a key it
drops out, and to a `capture` (capture.py) that is not None it offers what it saw. Made causal, for
a decoder, it also goes on one position at a time: `start` and `step`. The names are in
`config.mixers.MIXERS`.
"""

from convbert_jax.config import EncoderConfig
from convbert_jax.interfaces.placement import Rules


def sharding_rules(encoder: EncoderConfig) -> Rules:
    """How the parameters of an encoder's mixers may be divided, to stand before `sharding.RULES`;
    those of its generator too, whose stages have the same mixers.
    """
    return tuple(
        (rf"(^|/)stages/{i}/mixer/{pattern}$", split)
        for i, stage in enumerate(encoder.stages)
        for pattern, split in stage.layer.mixer.RULES
    )
