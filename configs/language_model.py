"""Causal language models with any causal mixer (Wu et al. 2019).

tiny: for a CPU, no published counterpart. lm: size of the official code's `lm`, 6 layers, pre-norm.
The published model for the Billion Word benchmark (perplexity 26.67 for `dynamic`) is wider and has
17 layers and an adaptive softmax, which is not implemented.

    python -m convbert_jax.main --config=configs/language_model.py:tiny,dynamic \\
        --config.data.source='text:FOLDER/*.txt'
"""

from configs import written

_SIZES = ("tiny", "lm")


def get_config(variant: str = "tiny,dynamic"):
    config, size = written.start("causal_lm", variant, _SIZES)
    config.model.norm = "pre"
    config.optimizer.schedule = "cosine"
    config.optimizer.beta2 = 0.98
    if size == "tiny":
        config.model.dropout = 0.1
        config.tokenizer.vocab_size = 8_000
        config.data.length = 128
        config.optimizer.learning_rate = 2e-3
        config.optimizer.warmup_steps = 200
        config.train.steps = 3_000
        config.train.batch_size = 32
        config.train.eval_every = 500
        config.train.eval_rows = 512
        config.checkpoint.every = 500
    else:
        config.data.source = "hub:wikimedia/wikipedia/20231101.en/*.parquet"
        config.data.length = 512
        config.optimizer.learning_rate = 1e-3
        config.train.steps = 100_000
        config.train.batch_size = 128
    return config.lock()
