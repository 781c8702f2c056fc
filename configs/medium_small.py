"""ConvBERT-medium-small (17M parameters: 384 wide, 8 heads of 48, feed-forward in two groups).

Published for this size after 1M steps on OpenWebText: GLUE test mean 79.7, SQuAD 1.1 dev 79.4 /
86.0 EM / F1 (ConvBERT tables 3 and 4). 16.4 G tokens, 1.6e18 FLOPs. For the corpus see small.py.

    python -m convbert_jax.main --config=configs/medium_small.py
    python -m convbert_jax.main --config=configs/medium_small.py:paper \\
        --config.tokenizer.path=vocab.txt
"""

from configs import variants


def get_config(variant: str = "default"):
    config = variants.start("medium_small", variant)
    config.model.layers = 12
    config.model.hidden_size = 384
    config.model.embedding_size = 128
    config.model.heads = 8
    config.model.ffn_size = 1_536
    config.model.ffn_groups = 2
    config.model.scan_unroll = 12
    config.generator.size = 0.25
    config.generator.scan_unroll = 12
    config.data.source = "hub:wikimedia/wikipedia/20231101.en/*.parquet"
    config.optimizer.learning_rate = 5e-4
    config.train.batch_size = 128
    return variants.finish(config)
