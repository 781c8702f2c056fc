"""A ConvBERT that learns something visible in minutes on two CPU cores; for first runs, tests and
teaching.

Reproduces nothing published. Corpus: the docstrings of the standard library and the installed
packages, which every machine has; name yours with --config.data.source=text:FOLDER/*.txt. 1.4M
parameters, rows of 64 tokens.

    python -m convbert_jax.main --config=configs/tiny.py
    python -m convbert_jax.main --config=configs/tiny.py:paper      # the release in every quirk
"""

from configs import variants


def get_config(variant: str = "default"):
    config = variants.start("tiny", variant)
    config.model.layers = 4
    config.model.hidden_size = 128
    config.model.embedding_size = 128
    config.model.heads = 4
    config.model.ffn_size = 512
    config.model.positions = 128
    config.generator.size = 0.5
    config.generator.layers = 0.5
    config.tokenizer.vocab_size = 4_096
    config.data.source = "docstrings"
    config.data.length = 64
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 100
    config.train.steps = 700
    config.train.batch_size = 32
    config.train.log_every = 20
    config.train.eval_every = 100
    config.train.eval_rows = 512
    config.checkpoint.every = 100
    return variants.finish(config)
