"""The sections of a config that fine-tuning adds; a data set of one's own is in `own_task.py`.

`config.model` is not asked: sizes and vocabulary are those of `config.init_from`. Of
`config.optimizer` everything counts but the learning rate and the warm-up, which are here. Fields
marked "Release:" are as in `sections.py`.
"""

import dataclasses

from convbert_jax.config.changes import Changeable

KINDS = ("classification", "regression", "tagging", "span")
HEADS = ("auto", "sequence", "first_and_mean", "first_token", "token", "span", "span_beam")
VECTORIZE = ("auto", "true", "false")


@dataclasses.dataclass(frozen=True)
class FinetuneSection:
    """How an encoder is fine-tuned: the same for every task of a run."""

    # names: those of data/tasks/glue.py, "squad_v1", "squad_v2", or "own", that of config.task
    tasks: Changeable[tuple[str, ...]] = ()
    # folder of the task's original files, or a TFDS folder; see data/tasks/glue.py
    data: Changeable[str] = ""
    # weights are random, only sizes and vocabulary are those of init_from: what pre-training is
    # worth
    from_scratch: bool = False
    # of the weights' encoder so many first ones; 0 is all. The last layers of a discriminator know
    # of their token whether it was put in, and little else (Rep et al. 2024)
    layers: int = 0
    # auto: sequence for classification and regression, token for tagging, span for answers.
    # sequence: dense, GELU, dense on [CLS], as ConvBertForSequenceClassification has it, so that
    # an exported folder loads there. first_and_mean: the same on [CLS] beside the mean of all
    # tokens, which auto takes where no layer reads the whole row: a convolution shows [CLS] the
    # beginning of a text alone. Release: first_token, one dense (Glorot) on [CLS], and span_beam,
    # whose ends depend on the start.
    head: str = "auto"
    # tokens of a row, special ones counted; longer texts lose the end of the longer one of a pair,
    # and the log says how many did
    length: int = 128
    # shorter lengths that rows are padded to, each compiled once. Release: none. Of no use to
    # weights whose convolution reads padding, so that these get none.
    buckets: tuple[int, ...] = (16, 32, 64, 96, 128, 192, 256, 384)
    batch_size: int = 32
    eval_batch_size: Changeable[int] = 128
    # peak; several are a search, of all pairs with `epochs`, chosen by the median dev score. (): by
    # the width of the encoder, 5e-5 from 1,024 channels on, 1e-4 from 768 (base), 3e-4 from 256
    # (small), as published, below them 1e-3
    learning_rates: tuple[float, ...] = ()
    epochs: tuple[float, ...] = ()  # (): the task's own, 3; RTE and STS-B 10, SQuAD 2
    seeds: Changeable[int] = 5  # runs of each setting, with config.seed, config.seed + 1, ...
    # runs of one setting train at once, as one program: auto (where it is faster) | true | false
    vectorize_seeds: Changeable[str] = "auto"
    show_best: Changeable[bool] = False  # the best seed too, which nobody should report alone
    # from one checkpoint of a run that is under way to the next, 0 is none: what a kill may cost
    checkpoint_minutes: Changeable[float] = 10.0
    # keeps the weights of every run: TASK/seed-N is a run's folder
    save_models: Changeable[bool] = True
    train_rows: int = 0  # of the training set, drawn by config.seed; 0 is all
    warmup_fraction: float = 0.1  # of the steps, whole ones
    # Release: of the steps, not rounded: the warm-up of 257 steps ends at 25.7, not at 25.
    release_warmup: bool = False
    dropout: float = 0.1  # of encoder and head
    # the rate of layer i of n is the peak times this to the power of n + 1 - i, of the embeddings
    # to n + 2; the head has the peak
    layer_decay: float = 0.8
    # Release: the loss is the sum over the batch, so that almost every gradient is clipped. False:
    # the mean.
    sum_loss: bool = False
    # Release: the training set is filled up with empty rows to whole batches, shuffled once and
    # then read through a buffer of 100 rows. False: every epoch in a new order, no empty rows but
    # in its last batch.
    release_batches: bool = False
    # Release: tasks whose two texts have no order (MRPC, STS-B) train on both orders
    swap_pairs: bool = False
    # folder of a fine-tuned run or of Hugging Face whose outputs are the targets, "" is none
    distill_from: str = ""
    distill_temperature: float = 2.0
    distill_weight: float = 1.0  # of the teacher's part of the loss; the labels have the rest
    # SQuAD
    query_length: int = 64  # tokens of a question that are kept
    stride: int = 128  # tokens from one window on a context to the next
    answer_length: int = 30  # tokens, at most
    n_best: int = 20
    beam: int = 20  # starts, and ends for each (span_beam)


@dataclasses.dataclass(frozen=True)
class OutputsSection:
    """What the outputs of a fine-tuned model mean; fine-tuning writes it, no user does."""

    task: str = ""
    kind: str = "classification"  # classification | regression | tagging | span
    head: str = "sequence"  # as config.finetune.head, resolved
    labels: tuple[str, ...] = ("0", "1")  # names, by index of the logit; of regression: one
    scale: float = 1.0  # of regression: a prediction is the output times this
    texts: int = 1  # of an example: 1 or 2
    columns: tuple[str, ...] = ()  # what the files that it learned from call the texts; (): unknown
