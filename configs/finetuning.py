"""What the configs of fine-tuning share: the text after the colon is TASK, or TASK,paper."""

from convbert_jax.config import to_config_dict
from convbert_jax.config.checks.rules import check_choice

VARIANTS = ("default", "paper")


def start(name: str, variant: str, tasks):
    """(a ConfigDict for fine-tuning, the task that `variant` names).

    Args:
      name: of the config file; the run is NAME-TASK.
      variant: TASK, TASK,paper or paper, which is the first of `tasks`.

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
    """Fine-tuning of the official ConvBERT code, each line a field with its comment in
    `convbert_jax/config/`.

    Not here because the default does the same: layer-wise decay 0.8, weight decay 0.01 (embeddings
    too), clipping at 1, dropout 0.1, batch 32, length 128, epochs by task, a learning rate of 3e-4
    (small, medium-small) or 1e-4 (base). Left out: a TPU of several cores would clip the gradient
    of each on its own; which tasks, if any, ran on one is not known.
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
