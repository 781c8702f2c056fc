"""Sections of fine-tuning; config.task is in `data.py`.

Fine-tuning ignores `config.model` and takes sizes and vocabulary from `config.init_from`. It uses
`config.optimizer` except for learning rate and warm-up, which are set here. "Release:" has the same
meaning as in `training.py`.
"""

import dataclasses
from typing import Annotated, Literal

from convbert_jax.config.errors import ConfigError
from convbert_jax.config.fields import (
    Changeable,
    CountOrAll,
    Fraction,
    FractionBelow1,
    Range,
    RowLength,
    Size,
    Temperature,
)

Kind = Literal["classification", "multilabel", "regression", "tagging", "span"]
Head = Literal["auto", "sequence", "first_and_mean", "first_token", "token", "span", "span_beam"]
# kind of task -> supported heads, the default first
HEADS_OF_KIND = {
    "classification": ("sequence", "first_and_mean", "first_token"),
    "multilabel": ("sequence", "first_and_mean", "first_token"),
    "regression": ("sequence", "first_and_mean", "first_token"),
    "tagging": ("token",),
    "span": ("span", "span_beam"),
}


@dataclasses.dataclass(frozen=True)
class FinetuneSection:
    """Fine-tuning of an encoder, with the same settings for every task of a run."""

    # task names of data/tasks/glue.py, "squad_v1", "squad_v2", or "own", described by config.task
    tasks: Changeable[tuple[str, ...]] = ()
    # folder of the task's original files, or a TFDS folder; see data/tasks/glue.py
    data: Changeable[str] = ""
    # random weights, with sizes and vocabulary of init_from, to measure the value of pre-training
    from_scratch: bool = False
    # use only the first layers of the encoder; 0 is all. The last layers of a discriminator encode
    # little besides whether their token was replaced (Rep et al. 2024)
    layers: Annotated[int, Range(0, 1_000, note="0 is all")] = 0
    # auto: sequence for classification and regression, token for tagging, span for answers.
    # sequence: dense, GELU, dense on [CLS], as ConvBertForSequenceClassification, which can load
    # an exported folder. first_and_mean: the same on [CLS] concatenated with the mean of all
    # tokens; auto selects it for encoders without global layers, where [CLS] sees only the
    # beginning of the text. Release: first_token, one dense layer (Glorot) on [CLS], and span_beam,
    # whose end logits depend on the start.
    head: Head = "auto"
    # maximum tokens of a row, including special tokens; truncation removes the end of the longer
    # text of a pair; the number of truncated rows is logged
    length: RowLength = 128
    # shorter lengths that rows are padded to, each compiled once. Release: none. Disabled for
    # weights whose convolution reads padding.
    buckets: Annotated[tuple[int, ...], Range(1, 2**20)] = (16, 32, 64, 96, 128, 192, 256, 384)
    batch_size: Size = 32
    eval_batch_size: Changeable[Size] = 128
    # peak; with several values, a grid search with `epochs` selects by median dev score. (): by
    # encoder width, as published: 5e-5 from 1,024 channels, 1e-4 from 768 (base), 3e-4 from 256
    # (small); below 256: 1e-3
    learning_rates: Annotated[tuple[float, ...], Range(0.0, 1e3, with_low=False)] = ()
    # (): default of the task, 3; RTE and STS-B 10, SQuAD 2
    epochs: Annotated[tuple[float, ...], Range(0.0, 1e6, with_low=False)] = ()
    # runs per setting, with config.seed, config.seed + 1, ...
    seeds: Changeable[Annotated[int, Range(1, 10_000)]] = 5
    # train all seeds of a setting in one program (vmap): auto (where it is faster) | true | false
    vectorize_seeds: Changeable[Literal["auto", "true", "false"]] = "auto"
    show_best: Changeable[bool] = False  # also print the best seed; do not report it alone
    # minutes between checkpoints of an unfinished run, the most that a kill loses; 0 is off
    checkpoint_minutes: Changeable[Annotated[float, Range(0.0, 1e6, note="0 is off")]] = 10.0
    # keep the weights of every run: TASK/seed-N is a run's folder
    save_models: Changeable[bool] = True
    train_rows: CountOrAll = 0  # training rows, sampled with config.seed; 0 is all
    warmup_fraction: FractionBelow1 = 0.1  # of the steps, rounded down
    # Release: the fraction is not rounded; the warm-up of 257 steps ends at 25.7, not at 25.
    release_warmup: bool = False
    dropout: FractionBelow1 = 0.1  # of encoder and head
    # the learning rate of layer i of n is the peak times layer_decay ** (n + 1 - i), of the
    # embeddings ** (n + 2); the head uses the peak
    layer_decay: Annotated[float, Range(0.0, 1.0, with_low=False, note="1 is off")] = 0.8
    # LoRA (Hu et al. 2021): rank of the trained factors; the weights of the encoder are constant
    # and the factors are added to them after training; 0 is off: train all parameters
    lora_rank: Annotated[int, Range(0, 4_096, note="0 is off")] = 0
    # the product of the factors is multiplied by lora_alpha / lora_rank
    lora_alpha: Annotated[float, Range(0.0, 1e6, with_low=False)] = 16.0
    # kernels with factors, by their path in a layer: mixer and feed_forward select all kernels of
    # their part, mixer/key, feed_forward/output and so on one. Query and value as in the paper.
    lora_targets: tuple[str, ...] = ("mixer/query", "mixer/value")
    # Release: the loss is the sum over the batch, so almost every gradient is clipped. False: the
    # mean.
    sum_loss: bool = False
    # Release: the training set is padded with empty rows to whole batches, shuffled once and then
    # read through a shuffle buffer of 100 rows. False: every epoch is reshuffled, and only its last
    # batch is padded.
    release_batches: bool = False
    # Release: tasks with two texts in no order (MRPC, STS-B) train on both orders
    swap_pairs: bool = False
    # teacher for distillation: a fine-tuned run or a Hugging Face folder, "" is off
    distill_from: str = ""
    distill_temperature: Temperature = 2.0
    # of the teacher loss; the label loss has weight 1 - distill_weight
    distill_weight: Fraction = 1.0
    # differential privacy (DP-SGD, docs/howto/privacy.md): the models are (epsilon, delta)-private
    # in single training rows; 0 is off
    privacy_epsilon: Annotated[float, Range(0.0, 1e3, note="0 is off")] = 0.0
    privacy_delta: Annotated[float, Range(0.0, 1.0, with_low=False, with_high=False)] = 1e-6
    # the gradient of a row is scaled down to this norm
    privacy_clip: Annotated[float, Range(0.0, 1e6, with_low=False)] = 1.0
    # SQuAD
    query_length: Size = 64  # maximum tokens of a question
    stride: Size = 128  # tokens between the starts of two windows of a context
    answer_length: Size = 30  # maximum tokens
    n_best: Annotated[int, Range(1, 10_000)] = 20
    # start positions, and end positions of each (span_beam)
    beam: Annotated[int, Range(1, 10_000)] = 20


@dataclasses.dataclass(frozen=True)
class OutputsSection:
    """Meaning of the outputs of a fine-tuned model. Written by fine-tuning; do not set it."""

    task: str = ""
    kind: Kind = "classification"  # classification | multilabel | regression | tagging | span
    head: str = "sequence"  # as config.finetune.head, resolved
    labels: tuple[str, ...] = ("0", "1")  # names, by index of the logit; regression: one
    # regression: a prediction is the output times this
    scale: Annotated[float, Range(1e-6, 1e9)] = 1.0
    texts: Annotated[int, Range(1, 2)] = 1  # texts per example: 1 or 2
    columns: tuple[str, ...] = ()  # text columns of the training files; (): unknown


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
