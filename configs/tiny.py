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
    # A CPU, which this is for, is a seventh faster with the layers one after the other.
    config.model.scan_unroll = 4
    config.generator.size = 0.5
    config.generator.layers = 0.5
    config.tokenizer.vocab_size = 4_096
    config.data.source = "docstrings"
    config.data.length = 64
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 100
    config.train.steps = 800
    config.train.batch_size = 32
    config.train.log_every = 20
    config.train.eval_every = 200
    config.train.eval_rows = 512
    config.checkpoint.every = 200
    if variant not in ("paper", "bert"):
        _learn_soon(config)
    return variants.finish(config)


def _learn_soon(config) -> None:
    """What learns most within minutes, by experiments at equal steps (benchmarks/RESULTS.md, 16).

    Of no use to whoever has days, as far as is known: nobody has compared them there.
    """
    config.optimizer.method = "muon"
    config.optimizer.learning_rate = 4e-3
    # Each text is read once or twice, too seldom to be learned by heart.
    config.model.dropout = 0.0
    config.model.attention_dropout = 0.0
    # More is masked, so that there is more to predict and to find in a step; and the generator is
    # slower to become better than a discriminator that has seen little.
    config.objective.mask_fraction = 0.25
    config.generator.layers = 0.25
