"""Sections of pre-training: objective, distillation, optimizer, phases, loop, checkpoints, mesh.

"Release:" marks fields where the official ConvBERT code does something that a reader of the paper
would not expect; the `paper` variant of each config sets them to the behavior of that code.
"""

import dataclasses
from typing import Annotated, Literal

from convbert_jax.config.fields import (
    INT32,
    Changeable,
    ChangeableInPretraining,
    Count,
    CountOrAll,
    CountOrOff,
    Epsilon,
    Fraction,
    FractionBelow1,
    LearningRate,
    Length,
    LengthOrOff,
    MeshSize,
    Range,
    Size,
    SmallCount,
    Temperature,
    Weight,
)

LayerRule = Literal["last", "uniform", "top", "bottom"]
HiddenLoss = Literal["cosine", "mse"]
AttentionLoss = Literal["maps", "scores"]
# objective.pooling -> what a vector consists of: the state of [CLS], the mean over tokens
POOLINGS = {"mean": ("mean",), "cls": ("cls",), "first_and_mean": ("cls", "mean")}
OPTIMIZERS = ("adamw", "adafactor", "muon")
Schedule = Literal["linear", "cosine", "inverse_sqrt", "constant"]


@dataclasses.dataclass(frozen=True)
class ObjectiveSection:
    """Masking, sampling and loss weights."""

    # of the tokens without padding, [CLS] and [SEP] included
    mask_fraction: Annotated[float, Range(0.0, 1.0, with_low=False, with_high=False)] = 0.15
    # Masked slots per row are rounded up to a multiple of this and padded with weight 0. Release: 1
    # (19 slots at length 128).
    prediction_multiple: SmallCount = 8
    # Release: positions are sampled with replacement; duplicates count twice in the MLM loss.
    sample_with_replacement: bool = False
    # Release: a position that was sampled twice receives the floor of the mean of both sampled ids,
    # an arbitrary token.
    average_duplicate_ids: bool = False
    # Mean span length of recipe span_corruption; spans cover mask_fraction of a row. T5: 3
    mean_span: Annotated[float, Range(1.0, 1e4)] = 3.0
    # Generative models: this share of the target probability is spread over the vocabulary
    # (Szegedy et al. 2016). Transformer and LightConv: 0.1
    label_smoothing: FractionBelow1 = 0.0
    # Weight of (log sum exp(logits))^2 in the training loss over tokens, which keeps logits small
    # (Chowdhery et al. 2022: 1e-4). The logged training loss contains it
    z_loss: Weight = 0.0
    # Fraction of the masked positions that become [MASK], and that become a random token; the rest
    # is unchanged. ELECTRA and the official ConvBERT code: 0.85 and 0; BERT: 0.8 and 0.1.
    mask_token_fraction: Fraction = 0.85
    random_token_fraction: Fraction = 0.0
    # For recipe masked_lm with data.layout="pairs": none | next (BERT: does the second text follow
    # the first, or is it from another document?) | order (ALBERT: are two neighbors in order?).
    # Adds a pooler and two logits on [CLS]; the loss is added to the MLM loss.
    sentence_pairs: Literal["none", "next", "order"] = "none"
    # For recipe replaced_token: during the first masked_lm_steps steps the discriminator's encoder
    # is trained with an MLM head on the generator's inputs, at weight 1 in addition to the
    # generator's loss; replaced token detection starts afterwards. The generator trains in all
    # steps. The MLM head is kept in checkpoints, frozen after the switch and not exported; the
    # discriminator head trains from the switch on. 0: replaced token detection in all steps.
    masked_lm_steps: LengthOrOff = 0
    temperature: Temperature = 1.0  # of the generator's samples
    # For recipe embedding: vector of a text, the mean over its tokens, the state of [CLS], or both
    # one after the other
    pooling: Literal["mean", "cls", "first_and_mean"] = "mean"
    # For recipe embedding: divides the cosine similarities. SimCSE: 0.05; CLIP starts at 0.07
    contrastive_temperature: Temperature = 0.05
    # For recipe embedding: numbers of leading channels that are trained as vectors of their own, so
    # that vectors can be cut (Kusupati et al. 2022), for example 64,128. The loss is the mean over
    # these numbers and all channels
    matryoshka: Annotated[tuple[int, ...], Range(1, INT32)] = ()
    disallow_correct: bool = False  # never sample the original token
    # Release: Gumbel noise for every vocabulary entry, with 1e-9 inside both logarithms. False:
    # inverse transform sampling with one uniform number per slot; same distribution, less compute.
    release_gumbel: bool = False
    generator_weight: Weight = 1.0
    discriminator_weight: Weight = 50.0
    # Release: AUC counts every padding position as a correct answer, and the discriminator's loss
    # is the mean over rows of each row's mean, regardless of row length. True adds both as
    # release_auc and release_discriminator_loss.
    release_metrics: bool = False


@dataclasses.dataclass(frozen=True)
class DistillationSection:
    """Distillation from a teacher during pre-training, in addition to the objective: weighted loss
    terms of DistilBERT (Sanh et al., 2019, §2) and TinyBERT (Jiao et al., 2020, §3.1); weight 0
    disables a term. docs/reference/distillation.md has the formulas.
    """

    # a run's folder, a Hugging Face folder or a TensorFlow 1 checkpoint; the student uses its
    # vocabulary. "" is off. It may be moved: a resumed run identifies the teacher by its weights.
    teacher: Changeable[str] = ""
    # Initialize a new run with the teacher's embeddings, heads and the layers that `layers` selects
    # ("last" selects as "uniform"); widths and mixers must be equal.
    initialize: bool = False
    # Teacher layer for each student layer: last (compares only the last layers) | uniform (every
    # second or third, up to the last) | top (the last ones) | bottom (the first ones)
    layers: LayerRule = "last"
    # Weight of the student's own loss: masked words, or replaced tokens (of the discriminator; the
    # generator has no teacher). logits_weight has the same unit, the other weights do not.
    labels_weight: Weight = 1.0
    logits_weight: Weight = 1.0
    temperature: Temperature = 2.0  # of both distributions
    hidden_weight: Weight = 0.0
    # cosine (DistilBERT) | mse (TinyBERT); with a learned projection if the widths differ
    hidden: HiddenLoss = "cosine"
    attention_weight: Weight = 0.0
    # maps (KL divergence of the maps averaged over heads, for any mixers and numbers of heads) |
    # scores (TinyBERT: squared distance of each head's scores before softmax; needs equal heads)
    attention: AttentionLoss = "maps"
    embeddings_weight: Weight = 0.0  # squared distance (TinyBERT), projected as the hidden states
    # Widths of the teacher, written by the run; do not set them.
    teacher_hidden_size: Annotated[int, Range(0, 2**18, note="the teacher's")] = 0
    teacher_embedding_size: Annotated[int, Range(0, 2**18, note="the teacher's")] = 0


@dataclasses.dataclass(frozen=True)
class OptimizerSection:
    """AdamW with a linear schedule (model/optimization.py of the official code), or another."""

    # adamw | adafactor (Shazeer & Stern 2018: factored second moment, no momentum, update clipping,
    # parameter scaling, as in T5): at most half of AdamW's optimizer state | muon (Jordan et al.
    # 2024): orthogonalized momentum for the matrices of the layers, scaled to AdamW's update size
    # (Liu et al. 2025), adamw for other parameters; needs fewer tokens, stores one moment per
    # matrix, each step takes some percent longer | PACKAGE.MODULE:FUNCTION, a factory of an optax
    # optimizer (docs/howto/own_optimizer.md)
    method: str = "adamw"
    # Learning rate after warm-up: linear, to decay_to at the last step | cosine, a half cosine to
    # decay_to | inverse_sqrt, sqrt(warmup_steps / step) (Transformer, T5) | constant
    schedule: ChangeableInPretraining[Schedule] = "linear"
    learning_rate: ChangeableInPretraining[LearningRate] = 3e-4  # peak
    warmup_steps: ChangeableInPretraining[LengthOrOff] = 10_000
    # learning rate at the last step, as a fraction of the peak
    decay_to: ChangeableInPretraining[FractionBelow1] = 0.0
    # Release: warm-up and decay factors are multiplied from step 0 on, so the peak stays slightly
    # below the nominal rate.
    decay_during_warmup: ChangeableInPretraining[bool] = False
    bias_correction: ChangeableInPretraining[bool] = True  # Release: Adam without it
    beta1: ChangeableInPretraining[FractionBelow1] = 0.9
    beta2: ChangeableInPretraining[FractionBelow1] = 0.999
    epsilon: ChangeableInPretraining[Epsilon] = 1e-6
    weight_decay: ChangeableInPretraining[Annotated[float, Range(0.0, 1e3)]] = 0.01
    # Release: embedding tables are decayed; biases and layer norms never are
    decay_embeddings: ChangeableInPretraining[bool] = True
    # global norm, before Adam; 0 is off
    clip_norm: ChangeableInPretraining[Annotated[float, Range(0.0, 1e30, note="0 is off")]] = 1.0
    # Release: base was trained on the 8 cores of a TPU v3-8. Each core normalizes the losses by its
    # own tokens and masked positions and clips its own gradient; Adam receives the sum of the eight
    # gradients. Here the parts run sequentially. 1: one batch, as on the single GPU of small and
    # medium-small. Cannot change later: it scales the gradient, but not Adam's stored moments.
    release_replicas: Size = 1


@dataclasses.dataclass(frozen=True)
class PhaseSection:
    """One phase of a run; 0 and () keep the value of the config. One optimizer state throughout."""

    name: str = ""
    # as train.steps: "8B tokens"; or a share of it, "80%", in all phases
    length: Length = "100%"
    # Learning rate after warm-up: constant | linear or 1-sqrt, from the rate of the phase to
    # optimizer.decay_to at its end
    schedule: Literal["constant", "linear", "1-sqrt"] = "constant"
    # at the begin of the phase
    learning_rate: Annotated[float, Range(0.0, 1e3, note="0 is optimizer.learning_rate")] = 0.0
    weights: Annotated[tuple[float, ...], Range(0.0, 1.0)] = ()  # of the sources of data.mixture
    row_length: Annotated[int, Range(0, 2**20, note="0 is data.length")] = 0
    batch_size: Annotated[int, Range(0, 2**20, note="0 is train.batch_size")] = 0
    mask_fraction: Annotated[
        float, Range(0.0, 1.0, with_high=False, note="0 is objective.mask_fraction")
    ] = 0.0
    rotary_base: Annotated[float, Range(0.0, 1e9, note="0 is model.rotary_base")] = 0.0


@dataclasses.dataclass(frozen=True)
class TrainSection:
    """The training loop. `batch_size` is global: the same run on 1 or 256 chips."""

    # This and all other numbers of steps can be lengths: "100M words", "50M tokens" (positions of
    # rows), "3 epochs"; this one also "24 hours" or "90 minutes", the others also a share of this
    # one, "10%" (docs/howto/budget.md). A run stores the steps
    steps: Changeable[Length] = 1_000_000
    # fixed: the data position counts batches. Pairs use parallel.batch_tokens instead
    batch_size: Size = 128
    accumulation: Changeable[Size] = 1  # microbatches per step
    # float32 | bfloat16: dtype of the gradient all-reduce of matrices and tables in pre-training.
    # bfloat16 halves the bytes sent: each device sums its rows in float32 and rounds the sum, and
    # the all-reduce adds in bfloat16. One device never rounds. The official code uses float32
    gradient_dtype: Changeable[Literal["float32", "bfloat16"]] = "float32"
    log_every: Changeable[Length] = 100
    eval_every: Changeable[Length] = 5_000
    eval_rows: Changeable[CountOrAll] = 8_192  # held-out rows per evaluation, 0 is all
    # compare generator accuracy, replaced rate and AUC with reference ranges
    warn_health: Changeable[bool] = True
    # a loss above this multiple of the median of the last 100 steps counts as not finite; 0: off
    spike: Changeable[Annotated[float, Range(0.0, 1e6, note="0 is off")]] = 0.0
    # how often the run may return to its last checkpoint and skip the batches since then after a
    # loss that is not finite; afterwards (default: at once) it stops
    rollbacks: Changeable[Annotated[int, Range(0, 1_000)]] = 0
    # a run without progress for this time exits with code 75 and prints the thread stacks of all
    # processes; until the first step and in the first evaluation at least one hour. 0: off
    hang_seconds: Changeable[CountOrOff] = 3_600
    # with several processes: if one is silent this long (stopped, or its host is gone), all exit
    # with code 75
    silence_seconds: Changeable[Annotated[int, Range(10, INT32)]] = 60
    # "" | wandb (Weights & Biases) | mlflow: also receives the metrics of metrics.jsonl; needs its
    # package, and is configured by its own variables, as WANDB_MODE=offline or MLFLOW_TRACKING_URI
    tracker: Changeable[Literal["", "wandb", "mlflow"]] = ""
    profile_start: Changeable[CountOrOff] = 0  # first step of a profiler trace; 0 is off
    profile_steps: Changeable[Count] = 3
    # compilation cache folder, "" is off; several hosts need a shared path. Not stored in
    # config.json: set it again to resume
    compile_cache: Changeable[str] = "~/.cache/convbert_jax/compile"


@dataclasses.dataclass(frozen=True)
class CheckpointSection:
    """Which checkpoints are saved, and when."""

    every: Changeable[Length] = 5_000  # steps
    keep: Changeable[Count] = 3  # newest checkpoints to keep
    keep_every: Changeable[LengthOrOff] = 0  # steps; these checkpoints are never deleted, 0 is off
    # "" keeps no best checkpoint. mlm_loss | mlm_accuracy | loss, and for replaced_token:
    # sampled_accuracy | replaced_rate | discriminator_loss, _accuracy, _precision, _recall or _auc;
    # with objective.release_metrics: release_discriminator_loss | release_auc; with
    # objective.sentence_pairs: pair_loss | pair_accuracy; with objective.masked_lm_steps:
    # encoder_mlm_loss | encoder_mlm_accuracy; for generative models: loss | token_loss |
    # token_accuracy | perplexity, and for causal_lm word_perplexity, except with WordPiece
    best_metric: Changeable[str] = ""
    best_mode: Changeable[Literal["max", "min"]] = "max"  # max | min (for losses)
    # steps; writes a Hugging Face folder WORKDIR/huggingface/step-N, at step 0 too; 0 is off
    huggingface_every: Changeable[LengthOrOff] = 0


@dataclasses.dataclass(frozen=True)
class MeshSection:
    """Devices per mesh axis; -1 is all remaining devices. data replicates parameters, fsdp shards
    them, tensor splits heads and feed-forward channels, sequence splits the positions of a row.
    """

    data: Changeable[MeshSize] = -1
    fsdp: Changeable[MeshSize] = 1
    tensor: Changeable[MeshSize] = 1
    sequence: Changeable[MeshSize] = 1
