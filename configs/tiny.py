"""A ConvBERT for first runs, tests and teaching, which trains in minutes on two CPU cores.

No published counterpart. 1.4M parameters, rows of 64 tokens. Corpus: docstrings of the standard
library and the installed packages, which need no download; for yours set
--config.data.source=text:FOLDER/*.txt.

    python -m convbert_jax.main --config=configs/tiny.py
    python -m convbert_jax.main --config=configs/tiny.py:paper  # all quirks of the official code
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
    # On a CPU, unrolled layers are faster.
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
    """Sets what trains best within minutes, at equal steps (benchmarks/notes/objectives.md).

    Not compared for long runs.
    """
    config.optimizer.method = "muon"
    config.optimizer.learning_rate = 4e-3
    # Each text is seen once or twice, so overfitting is not a problem.
    config.model.dropout = 0.0
    config.model.attention_dropout = 0.0
    # More masking provides more targets per step, and a weaker generator stays behind longer, which
    # the discriminator needs early in training.
    config.objective.mask_fraction = 0.25
    config.generator.layers = 0.25
