"""Contrastive fine-tuning of an encoder: vectors of texts that mean the same become similar.

    python -m convbert_jax.main --config=configs/embedding.py --config.init_from=runs/mine \\
        --config.parallel.source=csv:pairs.csv --config.parallel.columns=question,answer

Sizes and vocabulary are those of `init_from`, a run or a Hugging Face folder. The negatives of a
pair are the other pairs of its batch. Unsupervised SimCSE (Gao et al., 2021) pairs each text with
itself: --config.parallel.columns=text,text. Its settings for BERT base are batches of 64, learning
rate 3e-5, temperature 0.05, one epoch of 1M sentences and the vector of [CLS].
"""

from convbert_jax.config import to_config_dict


def get_config():
    config = to_config_dict()
    config.recipe = "embedding"
    config.name = "embedding"
    config.parallel.max_length = 128
    config.parallel.cut_sources = True
    config.parallel.batch_tokens = 8_192  # 64 pairs of 128 tokens, more of shorter ones
    config.parallel.shapes = 4
    config.optimizer.learning_rate = 3e-5
    config.optimizer.warmup_steps = 100
    config.train.steps = 1_000
    config.train.log_every = 50
    config.train.eval_every = 250
    config.checkpoint.every = 250
    return config.lock()
