"""T5-style span corruption: pre-trains encoder-decoders with convolutions or attention (Tay et al.
2021, "Are Pre-trained Convolutions Better than Pre-trained Transformers?"). text_to_text.py
fine-tunes the result.

tiny: for a CPU, no published counterpart. t5_base: the published size and recipe: 12 + 12 layers of
768 channels, kernel size 7, 15% in spans of 3, Adafactor, 524,288 steps of 128 x 512 tokens (34 G)
of C4. The official code differs from the paper (kernel size 9, one more dense layer per block); no
fields reproduce this.

    python -m convbert_jax.main --config=configs/span_corruption.py:tiny,light \\
        --config.data.source='text:FOLDER/*.txt'
"""

from configs import written

_SIZES = ("tiny", "t5_base")


def get_config(variant: str = "tiny,dynamic"):
    config, size = written.start("span_corruption", variant, _SIZES)
    config.optimizer.schedule = "inverse_sqrt"
    if size == "tiny":
        config.model.dropout = 0.1
        config.tokenizer.vocab_size = 8_000
        config.tokenizer.sentinels = 32
        config.data.length = 128
        config.optimizer.learning_rate = 2e-3
        config.optimizer.warmup_steps = 500
        config.train.steps = 5_000
        config.train.batch_size = 32
        config.train.eval_every = 500
        config.train.eval_rows = 512
        config.checkpoint.every = 500
    else:
        config.tokenizer.vocab_size = 32_128
        config.tokenizer.sentinels = 100
        config.data.source = "datasets:allenai/c4/en"
        config.data.length = 512
        config.optimizer.method = "adafactor"
        config.optimizer.learning_rate = 1e-2
        config.optimizer.weight_decay = 0.0
        config.optimizer.clip_norm = 0.0
        config.train.steps = 524_288
    return config.lock()
