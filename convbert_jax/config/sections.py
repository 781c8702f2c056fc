"""The sections of a pre-training config: every field that a user sets, with its default.

"Release:" marks fields where the official ConvBERT code does something that a reader of the paper
would not expect; the `paper` variant of each config sets them to the behavior of that code. The
type `Changeable` marks fields that may change when a run is resumed, see `changes.py`. The sections
of fine-tuning are in `finetuning.py`.
"""

import dataclasses
from typing import Literal

from convbert_jax.config.changes import Changeable, ChangeableInPretraining

REMAT_POLICIES = ("none", "dots", "full")
INITIALIZERS = ("release", "huggingface")
TEXT_FORMATS = ("auto", "blank_lines", "lines", "jsonl", "wikiextractor", "file", "csv", "tsv")
TOKENIZERS = ("sentencepiece", "wordpiece", "pieces")
NORMALIZATIONS = ("auto", "nfkc", "nfc", "identity")
AutoBool = bool | Literal["auto"]
TRACKERS = ("", "wandb", "mlflow")
GRADIENT_DTYPES = ("float32", "bfloat16")
OPTIMIZERS = ("adamw", "adafactor", "muon")
SCHEDULES = ("linear", "cosine", "inverse_sqrt", "constant")
SENTENCE_PAIRS = ("none", "next", "order")
# Recipe -> metrics of an evaluation. release_* needs objective.release_metrics, pair_* needs
# objective.sentence_pairs, encoder_* needs objective.masked_lm_steps, word_* is not available with
# WordPiece.
_OF_MASKED_LM = ("mlm_loss", "mlm_accuracy", "loss")
_OF_WRITING = ("loss", "token_loss", "token_accuracy", "perplexity")
HELDOUT_METRICS = {
    "masked_lm": (*_OF_MASKED_LM, "pair_loss", "pair_accuracy"),
    "replaced_token": (
        *_OF_MASKED_LM,
        *("sampled_accuracy", "replaced_rate", "discriminator_loss", "discriminator_accuracy"),
        *("discriminator_precision", "discriminator_recall", "discriminator_auc"),
        *("release_discriminator_loss", "release_auc"),
        *("encoder_mlm_loss", "encoder_mlm_accuracy"),
    ),
    "causal_lm": (*_OF_WRITING, "word_perplexity"),
    **dict.fromkeys(
        ("span_corruption", "translation", "summarization", "text_to_text"), _OF_WRITING
    ),
}


@dataclasses.dataclass(frozen=True)
class StageSection:
    """A group of identical layers, one element of config.model.stages.

    The fields mean the same as in `ModelSection`. A field that is missing, 0 or empty is taken from
    config.model; `mixer_fields` only if the mixer is the one of config.model. A stage that sets
    `mixer_fields` must set `mixer` too.
    """

    layers: int = 1
    heads: int = 0
    head_ratio: int = 0
    mixer: str = ""
    mixer_fields: tuple[str, ...] = ()
    kernel_size: int = 0
    dilation: int = 0
    ffn_size: int = 0
    ffn_groups: int = 0


@dataclasses.dataclass(frozen=True)
class ModelSection:
    """The main network: the discriminator, or the encoder of a masked language model."""

    layers: int = 12
    hidden_size: int = 256
    embedding_size: int = 128  # a dense projection follows if this differs from hidden_size
    heads: int = 4  # nominal heads; head width = hidden_size // heads
    # gamma in the paper; used by mixed and bottleneck. Other mixers use all heads and accept only
    # 1 and 2
    head_ratio: int = 2
    # mixed (ConvBERT): heads // head_ratio attention heads and as many convolution heads.
    # attention (BERT, ELECTRA): attention heads. bottleneck (an ablation of ConvBERT, "noconv" in
    # the official code): only heads // head_ratio attention heads. Convolution only: span_dynamic
    # (ConvBERT's), dynamic and light (DynamicConv, LightConv), dilated, separable. Or a custom
    # mixer, PACKAGE.MODULE:CLASS, see config/mixers.py.
    mixer: str = "mixed"
    # NAME=VALUE of mixer-specific fields. mixed: filters=span_dynamic | dynamic | light,
    # own_value=true (false: the paper's formula), convolution_share=0.5 of the heads. dynamic,
    # light, dilated: glu=true.
    mixer_fields: tuple[str, ...] = ()
    kernel_size: int = 9  # taps of the convolution
    dilation: int = 1  # positions between two taps of the mixer dilated
    # kernel_size and dilation of each layer, as 3,7,15,31 (LightConv) or 1,2,4,8 (dilated);
    # consecutive layers with equal numbers form a stage. (): all layers use the field above.
    kernel_sizes: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    ffn_size: int = 1024
    ffn_groups: int = 1
    # groups of layers that differ, in order, as '[{"layers": 4, "mixer": "attention"}, {"layers":
    # 8}]'; fields as in StageSection. (): all layers are the same.
    stages: tuple[StageSection, ...] = ()
    positions: int = 512  # rows of the learned position table, the longest input
    types: int = 2  # rows of the segment-type table
    dropout: float = 0.1  # rounded to multiples of 1/256, as all dropout rates
    attention_dropout: float = 0.1  # of attention maps, and of the filters of dynamic and light
    # auto: the fastest per platform, which is logged; cudnn and splash do not support attention
    # dropout. A named implementation is never replaced by another.
    attention: Changeable[str] = "auto"  # auto | xla | pallas_tpu | cudnn (GPU) | splash (TPU)
    # implementation of the span-based convolution and of its key convolution, as for attention:
    convolution: Changeable[str] = "auto"  # auto | xla | pallas_tpu | pallas_gpu | reference
    layer_norm_epsilon: float = 1e-12
    # True: convolution taps do not read padding or other documents. Release: the convolution branch
    # ignores the mask, so outputs depend on the amount of padding; needed for parity with published
    # weights.
    mask_convolution: bool = True
    # release: truncated normal, depthwise 1/kernel_size, Glorot for the embedding projection and
    # the last dense layer of the discriminator head. huggingface: normal(initializer_range)
    # everywhere, which makes the initial key convolution 5 times smaller.
    initializers: str = "release"
    initializer_range: float = 0.02
    # none | dots (keep matmul outputs) | full (keep layer inputs only): less memory, more compute
    remat: Changeable[str] = "none"
    # layers per scan iteration: 1, or all layers, which compiles longer and runs faster; by the
    # cost model of the TPU compiler, values in between are slower than both. A mesh of several CPUs
    # always unrolls all layers, because XLA confuses collectives in loops there.
    scan_unroll: Changeable[int] = 1


@dataclasses.dataclass(frozen=True)
class GeneratorSection:
    """The small masked language model that proposes replacements (ELECTRA §3)."""

    # separate | shared (the encoder itself with an MLM head) | uniform (random tokens)
    kind: str = "separate"
    size: float = 0.25  # width of hidden layer, feed-forward and heads relative to the encoder
    layers: float = 1.0  # depth relative to the encoder, of each stage of model.stages
    # share embeddings (words, positions, types, layer norm) between both networks
    tie_embeddings: bool = True
    # With tied embeddings: only the generator's MLM loss trains the shared table; the encoder adds
    # a table that starts at zero to the shared one without its gradient (DeBERTaV3 §3.3; here also
    # positions, types and layer norm). The sum is exported and fine-tuned.
    disentangle_embeddings: bool = False
    # Release: where fewer heads than head_ratio remain (the small generator: 1), it uses 1
    # attention + 1 convolution head of full width, so 128 channels are projected to a hidden size
    # of 64; Hugging Face's format cannot store this. False: both share the width.
    release_heads: bool = True
    # As config.model.scan_unroll, for the generator only. All layers: on a TPU the layers' outputs
    # for the backward pass need not be stacked, which saves a fifth of a step of `small` and 6% of
    # `base` by the compiler's cost model; compiling takes twice as long.
    scan_unroll: Changeable[int] = 1


@dataclasses.dataclass(frozen=True)
class ObjectiveSection:
    """Masking, sampling and loss weights."""

    mask_fraction: float = 0.15  # of the tokens without padding, [CLS] and [SEP] included
    # Masked slots per row are rounded up to a multiple of this and padded with weight 0. Release: 1
    # (19 slots at length 128).
    prediction_multiple: int = 8
    # Release: positions are sampled with replacement; duplicates count twice in the MLM loss.
    sample_with_replacement: bool = False
    # Release: a position that was sampled twice receives the floor of the mean of both sampled ids,
    # an arbitrary token.
    average_duplicate_ids: bool = False
    # Mean span length of recipe span_corruption; spans cover mask_fraction of a row. T5: 3
    mean_span: float = 3.0
    # Generative models: this share of the target probability is spread over the vocabulary
    # (Szegedy et al. 2016). Transformer and LightConv: 0.1
    label_smoothing: float = 0.0
    # Fraction of the masked positions that become [MASK], and that become a random token; the rest
    # is unchanged. ELECTRA and the official ConvBERT code: 0.85 and 0; BERT: 0.8 and 0.1.
    mask_token_fraction: float = 0.85
    random_token_fraction: float = 0.0
    # For recipe masked_lm with data.layout="pairs": none | next (BERT: does the second text follow
    # the first, or is it from another document?) | order (ALBERT: are two neighbors in order?).
    # Adds a pooler and two logits on [CLS]; the loss is added to the MLM loss.
    sentence_pairs: str = "none"
    # For recipe replaced_token: during the first masked_lm_steps steps the discriminator's encoder
    # is trained with an MLM head on the generator's inputs, at weight 1 in addition to the
    # generator's loss; replaced token detection starts afterwards. The generator trains in all
    # steps. The MLM head is kept in checkpoints, frozen after the switch and not exported; the
    # discriminator head trains from the switch on. 0: replaced token detection in all steps.
    masked_lm_steps: int = 0
    temperature: float = 1.0  # of the generator's samples
    disallow_correct: bool = False  # never sample the original token
    # Release: Gumbel noise for every vocabulary entry, with 1e-9 inside both logarithms. False:
    # inverse transform sampling with one uniform number per slot; same distribution, less compute.
    release_gumbel: bool = False
    generator_weight: float = 1.0
    discriminator_weight: float = 50.0
    # Release: AUC counts every padding position as a correct answer, and the discriminator's loss
    # is the mean over rows of each row's mean, regardless of row length. True adds both as
    # release_auc and release_discriminator_loss.
    release_metrics: bool = False


@dataclasses.dataclass(frozen=True)
class DistillationSection:
    """Distillation from a teacher during pre-training, in addition to the objective: weighted loss
    terms of DistilBERT (Sanh et al., 2019, §2) and TinyBERT (Jiao et al., 2020, §3.1); weight 0
    disables a term. docs/family/distillation.md has the formulas.
    """

    # a run's folder, a Hugging Face folder or a TensorFlow 1 checkpoint; the student uses its
    # vocabulary. "" is off. It may be moved: a resumed run identifies the teacher by its weights.
    teacher: Changeable[str] = ""
    # Initialize a new run with the teacher's embeddings, heads and the layers that `layers` selects
    # ("last" selects as "uniform"); widths and mixers must be equal.
    initialize: bool = False
    # Teacher layer for each student layer: last (compares only the last layers) | uniform (every
    # second or third, up to the last) | top (the last ones) | bottom (the first ones)
    layers: str = "last"
    # Weight of the student's own loss: masked words, or replaced tokens (of the discriminator; the
    # generator has no teacher). logits_weight has the same unit, the other weights do not.
    labels_weight: float = 1.0
    logits_weight: float = 1.0
    temperature: float = 2.0  # of both distributions
    hidden_weight: float = 0.0
    # cosine (DistilBERT) | mse (TinyBERT); with a learned projection if the widths differ
    hidden: str = "cosine"
    attention_weight: float = 0.0
    # maps (KL divergence of the maps averaged over heads, for any mixers and numbers of heads) |
    # scores (TinyBERT: squared distance of each head's scores before softmax; needs equal heads)
    attention: str = "maps"
    embeddings_weight: float = 0.0  # squared distance (TinyBERT), projected as the hidden states
    # Widths of the teacher, written by the run; do not set them.
    teacher_hidden_size: int = 0
    teacher_embedding_size: int = 0


@dataclasses.dataclass(frozen=True)
class TokenizerSection:
    """Subword vocabulary: trained on the corpus, or read from `path`."""

    # sentencepiece | wordpiece | pieces (texts are already tokenized, with blanks between pieces)
    kind: str = "sentencepiece"
    vocab_size: int = 30_522
    # vocab.txt, tokenizer.json, SentencePiece .model or .pieces; "" trains one. May be moved later
    path: ChangeableInPretraining[str] = ""
    # auto | true | false. auto: as in the file; a trained one lower-cases text unless the corpus is
    # Turkish or Azeri or the model generates text
    lowercase: AutoBool = "auto"
    strip_accents: AutoBool = "auto"  # auto | true | false. auto: as in the file; else false
    # Unicode form of a trained sentencepiece: nfkc | nfc, which keeps full-width punctuation and
    # "²" | identity | auto: nfc for models that generate text, nfkc for encoders
    normalization: str = "auto"
    algorithm: str = "unigram"  # of SentencePiece: unigram | bpe
    max_word_chars: int = 200  # longer words become [UNK] (wordpiece); transformers: 100
    train_megabytes: int = 30  # of text to train on, sampled evenly from the corpus
    max_unknown_rate: float = 0.02  # error if a larger fraction of the corpus' characters is [UNK]
    sentinels: int = 0  # sentinel ids of a trained vocabulary ([SPAN_0], …; T5: 100)


@dataclasses.dataclass(frozen=True)
class DataSection:
    """The corpus, and how it is converted to rows of `length` tokens."""

    # docstrings | text:GLOB | tfds:NAME or tfds:DIR | parquet:GLOB | hub:OWNER/NAME/FILE-GLOB
    # (parquet, text or jsonl files) | datasets:NAME[/CONFIG] or datasets:DIR
    source: str = "docstrings"
    # of text files: auto | blank_lines | lines | jsonl | wikiextractor | file (one document per
    # file) | csv | tsv (with a header)
    format: str = "auto"
    # column of csv, tsv, jsonl, parquet, TFDS and datasets; raw.text is the field text of raw
    text_field: str = "text"
    split: str = "train"  # of TFDS and datasets
    # separate corpus for evaluation; "" holds out documents of `source`
    validation_source: str = ""
    heldout_fraction: float = 0.01  # of the documents, selected by a hash of their text
    length: int = 128
    # packed (documents fill rows, separated by segment ids) | electra (example builder of the
    # official code) | pairs (two texts of whole sentences, for objective.sentence_pairs)
    layout: str = "packed"
    # Release: two conditions of the example builder are inverted, so that most examples have one
    # segment and some an empty first one. Only with layout="electra".
    release_builder_bug: bool = False
    # Release: documents are shuffled before they are packed into rows. False: rows follow the order
    # of the corpus.
    shuffle_documents: bool = False
    # Release: rows are distributed round-robin over 1000 files; the files are repeated, shuffled
    # and read four at a time through a shuffle buffer of 100 rows. False: each epoch is a random
    # permutation of all rows.
    release_shuffle: bool = False
    encoding: str = "utf-8"  # of text, csv, tsv and jsonl files, e.g. cp1252 or gbk
    # bytes that cannot be decoded: error | replace | skip (leave the document out)
    encoding_errors: str = "error"
    # folder of prepared shards, also in a bucket (gs://); "" is WORKDIR/data. Runs may share it
    directory: Changeable[str] = ""
    # local folder that shards of a bucket are copied to, on each machine; it is never cleaned up
    cache: Changeable[str] = "~/.cache/convbert_jax/shards"
    workers: Changeable[int] = 0  # processes that tokenize; 0 is one per core
    prefetch: Changeable[int] = 8  # batches read ahead


@dataclasses.dataclass(frozen=True)
class OptimizerSection:
    """AdamW with a linear schedule (model/optimization.py of the official code), or another."""

    # adamw | adafactor (Shazeer & Stern 2018: factored second moment, no momentum, update clipping,
    # parameter scaling, as in T5): at most half of AdamW's optimizer state | muon (Jordan et al.
    # 2024): orthogonalized momentum for the matrices of the layers, scaled to AdamW's update size
    # (Liu et al. 2025), adamw for other parameters; needs fewer tokens, stores one moment per
    # matrix, each step takes some percent longer | PACKAGE.MODULE:FUNCTION, a factory of an optax
    # optimizer (docs/plugins.md)
    method: str = "adamw"
    # Learning rate after warm-up: linear, to decay_to at the last step | cosine, a half cosine to
    # decay_to | inverse_sqrt, sqrt(warmup_steps / step) (Transformer, T5) | constant
    schedule: ChangeableInPretraining[str] = "linear"
    learning_rate: ChangeableInPretraining[float] = 3e-4  # peak
    warmup_steps: ChangeableInPretraining[int] = 10_000
    # learning rate at the last step, as a fraction of the peak
    decay_to: ChangeableInPretraining[float] = 0.0
    # Release: warm-up and decay factors are multiplied from step 0 on, so the peak stays slightly
    # below the nominal rate.
    decay_during_warmup: ChangeableInPretraining[bool] = False
    bias_correction: ChangeableInPretraining[bool] = True  # Release: Adam without it
    beta1: ChangeableInPretraining[float] = 0.9
    beta2: ChangeableInPretraining[float] = 0.999
    epsilon: ChangeableInPretraining[float] = 1e-6
    weight_decay: ChangeableInPretraining[float] = 0.01
    # Release: embedding tables are decayed; biases and layer norms never are
    decay_embeddings: ChangeableInPretraining[bool] = True
    clip_norm: ChangeableInPretraining[float] = 1.0  # global norm, before Adam; 0 is off
    # Release: base was trained on the 8 cores of a TPU v3-8. Each core normalizes the losses by its
    # own tokens and masked positions and clips its own gradient; Adam receives the sum of the eight
    # gradients. Here the parts run sequentially. 1: one batch, as on the single GPU of small and
    # medium-small. Cannot change later: it scales the gradient, but not Adam's stored moments.
    release_replicas: int = 1


@dataclasses.dataclass(frozen=True)
class TrainSection:
    """The training loop. `batch_size` is global: the same run on 1 or 256 chips."""

    steps: Changeable[int] = 1_000_000
    # fixed: the data position counts batches. Pairs use parallel.batch_tokens instead
    batch_size: int = 128
    accumulation: Changeable[int] = 1  # microbatches per step
    # float32 | bfloat16: dtype of the gradient all-reduce of matrices and tables in pre-training.
    # bfloat16 halves the bytes sent: each device sums its rows in float32 and rounds the sum, and
    # the all-reduce adds in bfloat16. One device never rounds. The official code uses float32
    gradient_dtype: Changeable[str] = "float32"
    log_every: Changeable[int] = 100
    eval_every: Changeable[int] = 5_000
    eval_rows: Changeable[int] = 8_192  # held-out rows per evaluation, 0 is all
    # compare generator accuracy, replaced rate and AUC with reference ranges
    warn_health: Changeable[bool] = True
    # a loss above this multiple of the median of the last 100 steps counts as not finite; 0: off
    spike: Changeable[float] = 0.0
    # how often the run may return to its last checkpoint and skip the batches since then after a
    # loss that is not finite; afterwards (default: at once) it stops
    rollbacks: Changeable[int] = 0
    # a run without progress for this time exits with code 75 and prints the thread stacks of all
    # processes; until the first step and in the first evaluation at least one hour. 0: off
    hang_seconds: Changeable[int] = 3_600
    # with several processes: if one is silent this long (stopped, or its host is gone), all exit
    # with code 75
    silence_seconds: Changeable[int] = 60
    # "" | wandb (Weights & Biases) | mlflow: also receives the metrics of metrics.jsonl; needs its
    # package, and is configured by its own variables, as WANDB_MODE=offline or MLFLOW_TRACKING_URI
    tracker: Changeable[str] = ""
    profile_start: Changeable[int] = 0  # first step of a profiler trace; 0 is off
    profile_steps: Changeable[int] = 3
    # compilation cache folder, "" is off; several hosts need a shared path. Not stored in
    # config.json: set it again to resume
    compile_cache: Changeable[str] = "~/.cache/convbert_jax/compile"


@dataclasses.dataclass(frozen=True)
class CheckpointSection:
    """Which checkpoints are saved, and when."""

    every: Changeable[int] = 5_000  # steps
    keep: Changeable[int] = 3  # newest checkpoints to keep
    keep_every: Changeable[int] = 0  # steps; these checkpoints are never deleted, 0 is off
    # "" keeps no best checkpoint. mlm_loss | mlm_accuracy | loss, and for replaced_token:
    # sampled_accuracy | replaced_rate | discriminator_loss, _accuracy, _precision, _recall or _auc;
    # with objective.release_metrics: release_discriminator_loss | release_auc; with
    # objective.sentence_pairs: pair_loss | pair_accuracy; with objective.masked_lm_steps:
    # encoder_mlm_loss | encoder_mlm_accuracy; for generative models: loss | token_loss |
    # token_accuracy | perplexity, and for causal_lm word_perplexity, except with WordPiece
    best_metric: Changeable[str] = ""
    best_mode: Changeable[str] = "max"  # max | min (for losses)
    # steps; writes a Hugging Face folder WORKDIR/huggingface/step-N, at step 0 too; 0 is off
    huggingface_every: Changeable[int] = 0


@dataclasses.dataclass(frozen=True)
class MeshSection:
    """Devices per mesh axis; -1 is all remaining devices. data replicates parameters, fsdp shards
    them, tensor splits heads and feed-forward channels, sequence splits the positions of a row.
    """

    data: Changeable[int] = -1
    fsdp: Changeable[int] = 1
    tensor: Changeable[int] = 1
    sequence: Changeable[int] = 1
