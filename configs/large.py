"""ConvBERT at the large size (323M parameters, 342M trained with its generator).

No ConvBERT of this size was published or trained here. The sizes and the recipe are those
of ELECTRA-large (Clark et al. 2020, table 6, 400K steps), with the mixed block by the rule of
ConvBERT-base: half of the heads, nine taps, feed-forward without groups. 419 G tokens. For the
corpus see small.py.

    python -m convbert_jax.main --config=configs/large.py
    python -m convbert_jax.main --config=configs/large.py --mode=plan --topology=v5e:8x8
"""

from configs import variants


def get_config(variant: str = "default"):
    config = variants.start("large", variant)
    config.model.layers = 24
    config.model.hidden_size = 1_024
    config.model.embedding_size = 1_024
    config.model.heads = 16
    config.model.ffn_size = 4_096
    config.model.scan_unroll = 24
    config.generator.size = 0.25
    config.generator.scan_unroll = 24
    config.objective.mask_fraction = 0.25
    config.data.source = "hub:wikimedia/wikipedia/20231101.en/*.parquet"
    config.data.length = 512
    config.optimizer.learning_rate = 2e-4
    config.train.steps = 400_000
    config.train.batch_size = 2_048
    return variants.finish(config)
