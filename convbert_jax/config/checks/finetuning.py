"""Validation of fine-tuning configs before any long work starts."""

import re

from convbert_jax.config.checks.rules import check, check_choice, check_encoding
from convbert_jax.config.errors import ConfigError
from convbert_jax.config.finetuning import HEADS, KINDS, VECTORIZE
from convbert_jax.config.run import Config

# kind of task -> supported heads, the default first
HEADS_OF_KIND = {
    "classification": ("sequence", "first_and_mean", "first_token"),
    "regression": ("sequence", "first_and_mean", "first_token"),
    "tagging": ("token",),
    "span": ("span", "span_beam"),
}


def check_finetuning(config: Config) -> None:
    """Raises ConfigError for the first invalid field."""
    f, outputs = config.finetune, config.outputs
    check(
        not config.distillation.teacher,
        "is for pre-training; in fine-tuning set config.finetune.distill_from.",
        field="config.distillation.teacher",
        value=config.distillation.teacher,
    )
    check(
        not config.train.tracker,
        "is for pre-training; fine-tuning writes WORKDIR/results.jsonl and report.html. Unset it.",
        field="config.train.tracker",
        value=config.train.tracker,
    )
    check_encoding("task.encoding", config.task.encoding)
    check(
        re.fullmatch(r"[\w. -]+", config.task.name) is not None,
        "must be a valid folder name; use letters, digits, - and _.",
        field="config.task.name",
        value=config.task.name,
    )
    check_choice("outputs.kind", outputs.kind, KINDS)
    check(
        len(outputs.columns) in (0, outputs.texts),
        f"must name as many columns as config.outputs.texts={outputs.texts}.",
        field="config.outputs.columns",
        value=",".join(outputs.columns),
    )
    check_choice("finetune.head", f.head, HEADS)
    check_choice("finetune.vectorize_seeds", f.vectorize_seeds, VECTORIZE)
    check(
        config.seed + f.seeds <= 2**32,
        f"and config.finetune.seeds={f.seeds} exceed the largest seed, 2**32 - 1; lower the seed.",
        field="config.seed",
        value=config.seed,
    )
    for name in ("learning_rates", "epochs", "buckets"):
        values = getattr(f, name)
        check(
            len(set(values)) == len(values),
            "contains a value twice; remove one.",
            field=f"config.finetune.{name}",
            value=values,
        )
    check(
        len(set(f.tasks)) == len(f.tasks),
        "contains a task twice; remove one.",
        field="config.finetune.tasks",
        value=f.tasks,
    )


def choose_head(head: str, kind: str, task: str, reads_whole_row: bool) -> str:
    """Resolves `config.finetune.head` for a kind of task.

    Args:
      reads_whole_row: whether [CLS] sees all tokens, `EncoderConfig.reads_whole_row`.

    Raises:
      ConfigError: this kind of task does not support the head.
    """
    allowed = HEADS_OF_KIND[kind]
    if head == "auto":
        whole = reads_whole_row or "first_and_mean" not in allowed
        return allowed[0] if whole else "first_and_mean"
    if head not in allowed:
        raise ConfigError(
            f"does not support the task {task} ({kind}); set it to auto or {' or '.join(allowed)}.",
            field="config.finetune.head",
            value=head,
        )
    return head
