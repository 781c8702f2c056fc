"""Pre-training of ConvBERT-base from random weights on one accelerator in 24 hours, then GLUE:
the setting of Cramming (Geiping and Goldstein 2022, arXiv 2212.14034), which reports a GLUE mean of
78.6 for a BERT of this size. Not run with this package.

    python -m convbert_jax.main --mode=prepare --config=configs/cramming.py:day
    python -m convbert_jax.main --config=configs/cramming.py:day --workdir=runs/day

The variant is day or day,OBJECTIVE: mlm, masked words as in the paper (default); rtd, replaced
tokens. The first start measures the speed and sets the number of steps (docs/howto/budget.md). The
paper excludes the preparation of the corpus and the fine-tuning from the budget.

From the paper and its code: pre-norm, no dropout, no biases, 25% masked words, rows of 128 tokens,
clipping at 0.5, a learning rate that rises to 1e-3 and falls linearly. Differences: ConvBERT's
mixer, the peak after a tenth of the steps, 1,536 rows in each step. Learning rates are not tuned
here. With less memory, raise --config.train.accumulation. For the corpus see small.py.
"""

from configs import base
from convbert_jax.config.fields import check_choice

VARIANTS = ("day", "day,mlm", "day,rtd")


def get_config(variant: str = "day"):
    check_choice("variant", variant, VARIANTS)
    config = base.get_config()
    config.unlock()
    config.name = f"cramming-{variant.replace(',', '-')}"
    config.variant = variant
    config.model.norm = "pre"
    config.model.biases = False
    config.model.dropout = config.model.attention_dropout = 0.0
    config.data.length = 128
    config.train.steps = "24 hours"
    config.train.batch_size = 1_536
    config.train.accumulation = 4
    config.train.eval_every = config.checkpoint.every = "5%"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = "10%"
    config.optimizer.beta2 = 0.98
    config.optimizer.clip_norm = 0.5
    if variant == "day,rtd":
        config.optimizer.learning_rate = 5e-4
    else:
        config.recipe = "masked_lm"
        config.objective.mask_fraction = 0.25
        config.objective.mask_token_fraction = 0.8
        config.objective.random_token_fraction = 0.1
    return config.lock()
