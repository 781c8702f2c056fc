"""Pre-training within the budgets of the BabyLM challenge: 10M or 100M words of text, read at most
ten times.

    python -m convbert_jax.main --config=configs/babylm.py:strict_small \\
        --config.data.source='text:babylm/*.train.txt'

The variant is BUDGET, BUDGET,OBJECTIVE or BUDGET,OBJECTIVE,MODEL:

strict_small   10M words, ten epochs; a checkpoint and a Hugging Face folder every 10M words read
strict         100M words, ten epochs; every 100M words read
mlm            masked words (default); rtd: replaced tokens; mlm_rtd: 80% of the steps masked words,
               then replaced tokens
convbert       ConvBERT-small (default); bert: its attention alone; modern: modern.py:17m; short:
               the same with gated short convolutions

Your text sets the number of words: ten epochs of less text are fewer steps. Learning rates are not
tuned for these budgets. Scores on BLiMP: python -m convbert_jax.minimal_pairs.
"""

from configs import modern, small
from convbert_jax.config.fields import check_choice

# budget -> words between two checkpoints, vocabulary, batch size
BUDGETS = {"strict_small": ("10M words", 16_384, 128), "strict": ("100M words", 30_522, 256)}
OBJECTIVES = ("mlm", "rtd", "mlm_rtd")
MODELS = ("convbert", "bert", "modern", "short")


def get_config(variant: str = "strict_small"):
    parts = variant.split(",")
    budget, objective, model = [*parts, *("", "mlm", "convbert")[len(parts) :]][:3]
    check_choice("variant", budget, tuple(BUDGETS))
    check_choice("variant", objective, OBJECTIVES)
    check_choice("variant", model if len(parts) <= 3 else variant, MODELS)
    if model in ("modern", "short"):
        config = modern.get_config("17m" if model == "modern" else "17m,short")
    else:
        config = small.get_config()
    config.unlock()
    if model == "bert":
        config.model.mixer = "attention"
    config.name = f"babylm-{budget}-{objective}-{model}"
    config.variant = variant
    config.recipe = "masked_lm" if objective == "mlm" else "replaced_token"
    every, config.tokenizer.vocab_size, config.train.batch_size = BUDGETS[budget]
    config.data.source = ""
    config.data.length = 128
    config.train.steps = "10 epochs"
    config.train.eval_every = "10%"
    config.checkpoint.every = config.checkpoint.huggingface_every = every
    config.optimizer.warmup_steps = "5%"
    config.optimizer.learning_rate = 1e-3
    if objective == "mlm_rtd":
        config.objective.masked_lm_steps = "80%"
    return config.lock()
