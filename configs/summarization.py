"""Abstractive summarization (Wu et al. 2019, whose CNN/DailyMail model of 87M parameters has
ROUGE-1 39.84 for `dynamic`, on 400 tokens of the document).

Documents are truncated to config.parallel.max_length tokens.
tiny: for a CPU, no published counterpart. wmt_en_de_big: size of the published model.

    python -m convbert_jax.main --config=configs/summarization.py:tiny,dynamic \\
        --config.parallel.source=jsonl:train.jsonl --config.parallel.columns=document,summary
"""

from configs import written

_SIZES = ("tiny", "wmt_en_de_big")


def get_config(variant: str = "tiny,dynamic"):
    config, size = written.start("summarization", variant, _SIZES)
    tiny = size == "tiny"
    config.tokenizer.vocab_size = 8_000 if tiny else 30_000
    config.objective.label_smoothing = 0.1
    config.parallel.max_length = 512
    config.parallel.cut_sources = True
    config.parallel.batch_tokens = 4_096 if tiny else 65_536
    config.parallel.shapes = 4 if tiny else 8
    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 500 if tiny else 10_000
    config.optimizer.beta2 = 0.98
    config.train.steps = 4_000 if tiny else 30_000
    config.train.eval_every = 500 if tiny else 5_000
    config.checkpoint.every = 500
    config.decoding.length_ratio = 0.0
    config.decoding.length_extra = 140
    return config.lock()
