"""Language models: each token from those before it, by a decoder of any mixer (Wu et al. 2019).

tiny: for a CPU, reproduces nothing published. lm: the shape of the release's `lm`, 6 layers,
pre-norm; the published model of the Billion Word benchmark (perplexity 26.67 for `dynamic`) is
wider, 17 layers, with an adaptive softmax, which is not here.

    python -m convbert_jax.main --config=configs/language_model.py:tiny,dynamic \\
        --config.data.source='text:FOLDER/*.txt'
"""

from configs import written

_SIZES = ("tiny", "lm")


def get_config(variant: str = "tiny,dynamic"):
    config, size = written.start("causal_lm", variant, _SIZES)
    config.sequence.norm = "pre"
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
