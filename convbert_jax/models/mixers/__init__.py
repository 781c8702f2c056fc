"""Token mixers: the layers that can replace the self-attention of a Transformer layer.

Each file has a specification (see `config/mixers.py` for its interface) and the Flax module that it
makes: mixer(x [B, L, C], segment_ids [B, L], key, capture) -> [B, L, C]. `key` enables dropout;
a `capture` (`layers.Capture`) that is not None receives activations. A causal mixer, for decoders,
also decodes one position at a time with `start` and `step`. Names are in `config.mixers.MIXERS`.
"""
