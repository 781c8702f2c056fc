"""ConvBERT-base (106M parameters, 116M trained with its generator).

Published for this size after 1M steps on OpenWebText: GLUE test mean 84.9, SQuAD 1.1 dev 84.7 /
90.9 EM / F1 (ConvBERT tables 3 and 4); the 86.4 of the abstract is for 4M steps. 32.8 G tokens,
1.9e19 FLOPs. For the corpus see small.py. On one v5e chip, --config.train.accumulation=4 is a fifth
faster by the cost model of the TPU compiler.

    python -m convbert_jax.main --config=configs/base.py
    python -m convbert_jax.main --config=configs/base.py:paper --config.tokenizer.path=vocab.txt
    python -m convbert_jax.main --config=configs/base.py:bert --config.tokenizer.path=vocab.txt
"""

from configs import variants


def get_config(variant: str = "default"):
    config = variants.start("base", variant)
    config.model.layers = 12
    config.model.hidden_size = 768
    config.model.embedding_size = 768
    config.model.heads = 12
    config.model.ffn_size = 3_072
    config.model.scan_unroll = 12
    config.generator.size = 1 / 3
    config.generator.scan_unroll = 12
    config.data.source = "hub:wikimedia/wikipedia/20231101.en/*.parquet"
    config.optimizer.learning_rate = 1e-4 if variant == "bert" else 2e-4
    config.optimizer.release_replicas = 8 if variant == "paper" else 1
    config.train.batch_size = 256
    return variants.finish(config)
