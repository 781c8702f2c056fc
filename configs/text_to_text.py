"""Text-to-text tasks for encoder-decoders: the target is a text, a label name or a logical form.

Starts from span corruption (span_corruption.py) or from scratch (Tay et al. 2021; T5). tiny: for a
CPU, no published counterpart. t5_base: T5's fine-tuning, Adafactor at a constant rate of 0.001.

    python -m convbert_jax.main --config=configs/text_to_text.py:tiny,light \\
        --config.init_from=runs/span-corruption-tiny-light --config.parallel.source=tsv:train.tsv \\
        --config.parallel.validation_source=tsv:dev.tsv
"""

from configs import written

_SIZES = ("tiny", "t5_base")


def get_config(variant: str = "tiny,dynamic"):
    config, size = written.start("text_to_text", variant, _SIZES)
    config.parallel.max_length = 512
    config.parallel.batch_tokens = 4_096
    config.decoding.method = "greedy"
    config.decoding.length_ratio = 0.0
    config.decoding.length_extra = 512
    if size == "tiny":
        config.model.dropout = 0.1
        config.tokenizer.vocab_size = 8_000
        config.parallel.shapes = 4
        config.optimizer.learning_rate = 1e-3
        config.optimizer.warmup_steps = 200
        config.train.steps = 3_000
        config.train.eval_every = 500
        config.checkpoint.every = 500
    else:
        # T5 uses dropout in all these places.
        config.model.activation_dropout = config.model.dropout
        config.model.last_dropout = config.model.dropout
        config.tokenizer.vocab_size = 32_128
        config.optimizer.method = "adafactor"
        config.optimizer.schedule = "constant"
        config.optimizer.learning_rate = 1e-3
        config.optimizer.warmup_steps = 0
        config.optimizer.weight_decay = 0.0
        config.optimizer.clip_norm = 0.0
        config.parallel.batch_tokens = 65_536
        config.train.steps = 50_000
    return config.lock()
