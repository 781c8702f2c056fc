"""Shared code of the fine-tuning configs. The variant is TASK or TASK,paper."""

from convbert_jax.config import to_config_dict
from convbert_jax.config.fields import check_choice

VARIANTS = ("default", "paper")


def start(name: str, variant: str, tasks):
    """Returns a ConfigDict for fine-tuning, and the task of `variant`.

    Args:
      name: name of the config file; the run is called NAME-TASK.
      variant: TASK, TASK,paper or paper (for the first of `tasks`).

    Raises:
      ConfigError: the task or the variant is unknown.
    """
    parts = [part for part in variant.split(",") if part]
    recipe = parts.pop() if parts and parts[-1] in VARIANTS else "default"
    task = ",".join(parts) or tasks[0]
    check_choice("variant", task, tasks)
    config = to_config_dict()
    config.recipe = "finetune"
    config.name = f"{name}-{task}" if recipe == "default" else f"{name}-{task}-{recipe}"
    config.variant = recipe
    config.checkpoint.keep = 1
    if recipe == "paper":
        _follow_release(config)
    return config, task


def _follow_release(config) -> None:
    """Sets the fine-tuning recipe of the official ConvBERT code.

    The comments in `convbert_jax/config/` describe each field. Equal by default: layer-wise decay
    0.8, weight decay 0.01 (also of embeddings), clipping at 1, dropout 0.1, batch size 32, length
    128, epochs per task, learning rate 3e-4 (small, medium-small) or 1e-4 (base). Not reproduced:
    on a TPU, each core clips its own gradient; which tasks were trained on TPUs is not published.
    """
    config.compute_dtype = "float32"
    config.optimizer.bias_correction = False
    config.optimizer.decay_during_warmup = True
    config.finetune.sum_loss = True
    config.finetune.release_warmup = True
    config.finetune.release_batches = True
    config.finetune.buckets = ()
    config.finetune.swap_pairs = True
    config.finetune.head = "first_token"
    config.finetune.seeds = 1
