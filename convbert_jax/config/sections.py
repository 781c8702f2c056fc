"""The sections of a config: every field that a user sets, with its default.

Fields marked "Release:" are the places where the official ConvBERT code does something that a
reader of the paper would not expect; the `paper` variant of each config sets them to the release's
behavior. What a run that has begun may still change is `Changeable`, see `changes.py`. Fine-tuning
has sections of its own, in `finetuning.py`.
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
# What an evaluation measures, by recipe; release_* only with objective.release_metrics, pair_* only
# with objective.sentence_pairs, encoder_* only with objective.masked_lm_steps, word_* not of
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
    """Some layers of an encoder whose layers are not all the same; fields as in `ModelSection`.

    What is left out, or 0 or empty, is as config.model has it, `mixer_fields` where the mixer is
    that of config.model too; those of a stage stand only together with its `mixer`.
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
    """The network that is kept: the discriminator, or the one of a masked language model."""

    layers: int = 12
    hidden_size: int = 256
    embedding_size: int = 128  # a dense projection follows if this differs from hidden_size
    heads: int = 4  # nominal heads; head width = hidden_size // heads
    # gamma of mixed and bottleneck; the others have all heads, and refuse any but 1 and 2
    head_ratio: int = 2
    # mixed (ConvBERT): heads // head_ratio heads of attention, as many of convolution.
    # attention (BERT, ELECTRA): heads of attention. bottleneck (ConvBERT's ablation, "noconv" in
    # the official code): heads // head_ratio heads of attention and nothing beside them.
    # Convolution alone: span_dynamic (ConvBERT's), dynamic and light (DynamicConv, LightConv),
    # dilated, separable. Or one of your own, PACKAGE.MODULE:CLASS, see config/mixers.py.
    mixer: str = "mixed"
    # NAME=VALUE of what only this mixer has. mixed: filters=span_dynamic | dynamic | light,
    # own_value=true (false: the paper's formula), convolution_share=0.5 of the heads. dynamic,
    # light, dilated: glu=true.
    mixer_fields: tuple[str, ...] = ()
    kernel_size: int = 9  # taps of a mixer that convolves
    dilation: int = 1  # positions from one tap of dilated to the next
    # the same two, one number for each layer, as 3,7,15,31 of LightConv and 1,2,4,8 of dilated;
    # layers in a row with equal numbers are a stage. (): all layers have the one above.
    kernel_sizes: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    ffn_size: int = 1024
    ffn_groups: int = 1
    # layers that differ, in order, as '[{"layers": 4, "mixer": "attention"}, {"layers": 8}]'; a
    # stage has the fields of StageSection. (): all layers are the same.
    stages: tuple[StageSection, ...] = ()
    positions: int = 512  # rows of the learned position table, the longest input
    types: int = 2  # rows of the segment-type table
    dropout: float = 0.1  # in steps of 1/256, as all rates of dropout
    attention_dropout: float = 0.1  # of attention maps, and of the filters of dynamic and light
    # auto: the fastest per platform, and the log says which; cudnn and splash have no attention
    # dropout. One that is named never gives way to another.
    attention: Changeable[str] = "auto"  # auto | xla | pallas_tpu | cudnn (GPU) | splash (TPU)
    # the same, of the span's convolution and of its key's:
    convolution: Changeable[str] = "auto"  # auto | xla | pallas_tpu | pallas_gpu | reference
    layer_norm_epsilon: float = 1e-12
    # True: no convolution tap reads padding or another document. Release: the convolution branch
    # never sees the mask, so outputs depend on how much padding follows; needed for parity with
    # published weights.
    mask_convolution: bool = True
    # release: truncated normal, depthwise 1/kernel_size, Glorot for the embedding projection and
    # the last dense of the discriminator head. huggingface: normal(initializer_range) everywhere,
    # which starts the key convolution 5 times smaller.
    initializers: str = "release"
    initializer_range: float = 0.02
    # none | dots (keep matmul outputs) | full (keep layer inputs only): memory against speed
    remat: Changeable[str] = "none"
    # layers per scan iteration: 1, or as many as there are, which compiles longer and runs faster;
    # a part of them costs a TPU more than either, by its compiler's model. A mesh of several CPUs
    # always takes all: XLA mixes up what its loops send.
    scan_unroll: Changeable[int] = 1


@dataclasses.dataclass(frozen=True)
class GeneratorSection:
    """The small masked language model that proposes replacements (ELECTRA §3)."""

    # separate | shared (the encoder itself with an MLM head) | uniform (random tokens)
    kind: str = "separate"
    size: float = 0.25  # width of hidden layer, feed-forward and heads relative to the encoder
    layers: float = 1.0  # depth relative to the encoder, of each stage of model.stages
    # one embedding table (words, positions, types, layer norm) for both networks
    tie_embeddings: bool = True
    # Of tied embeddings: the table is the generator's alone, which masked words train; the encoder
    # reads it as it is, without a gradient, plus one of its own that starts at zero (DeBERTaV3
    # §3.3; here of positions, types and layer norm too). Exported and fine-tuned is the sum.
    disentangle_embeddings: bool = False
    # Release: where fewer heads than head_ratio remain (the small generator: 1), it uses 1
    # attention + 1 convolution head of full width, so 128 channels go into a hidden size of 64.
    # False: both share the width (this can be stored in Hugging Face's format, the other cannot).
    release_heads: bool = True
    # As config.model.scan_unroll, of the generator alone. All its layers: a TPU then need not keep
    # stacks of what each of them leaves to the backward pass, by its compiler's model a fifth of a
    # step of `small` and 6% of `base`; compiling takes twice as long.
    scan_unroll: Changeable[int] = 1


@dataclasses.dataclass(frozen=True)
class ObjectiveSection:
    """Masking, sampling and the weights of the losses."""

    mask_fraction: float = 0.15  # of the real tokens, [CLS] and [SEP] counted
    # Slots per row are rounded up to this multiple and filled with zero weight. Release: 1 (19
    # slots at length 128).
    prediction_multiple: int = 8
    # Release: positions are drawn with replacement, so some are drawn twice and count twice in the
    # MLM loss.
    sample_with_replacement: bool = False
    # Release: where a position was drawn twice, the floor of the mean of both sampled ids, an
    # arbitrary token, is put in.
    average_duplicate_ids: bool = False
    # Of recipe span_corruption, whose spans are mask_fraction of a row: their mean length. T5: 3
    mean_span: float = 3.0
    # Of models that write text: so much of the target's probability is divided over all words
    # (Szegedy et al. 2016). Transformer and LightConv: 0.1
    label_smoothing: float = 0.0
    # Of the chosen positions so many become [MASK], so many a random token, the rest stays
    # unchanged. ELECTRA and the release: 0.85 and 0; BERT: 0.8 and 0.1.
    mask_token_fraction: float = 0.85
    random_token_fraction: float = 0.0
    # Of recipe masked_lm, with data.layout="pairs": none | next (BERT: does the second text follow
    # the first, or is it of another document?) | order (ALBERT: are two neighbors in their order?).
    # A pooler and two logits on [CLS]; its loss is added to that of the masked words.
    sentence_pairs: str = "none"
    # Of recipe replaced_token: in so many first steps the discriminator's encoder predicts masked
    # words itself, from the rows that the generator sees, with a head of its own and a weight of 1
    # beside the generator's loss; replaced tokens begin with the step after them. The generator
    # learns in all steps. The head is kept in checkpoints, learns no more after the switch, and is
    # not exported; that of the discriminator learns from the switch on. 0: replaced tokens alone.
    masked_lm_steps: int = 0
    temperature: float = 1.0  # of the generator's samples
    disallow_correct: bool = False  # never sample the original token
    # Release: Gumbel noise for every vocabulary entry, with 1e-9 inside both logarithms. False: one
    # uniform number per slot through the cumulative distribution, the same samples for less work.
    release_gumbel: bool = False
    generator_weight: float = 1.0
    discriminator_weight: float = 50.0
    # Release: AUC counts every padding position as a correct answer, and the discriminator's loss
    # is the mean over rows of each row's mean, however short; adds both, as release_auc and
    # release_discriminator_loss.
    release_metrics: bool = False


@dataclasses.dataclass(frozen=True)
class DistillationSection:
    """What the network that is kept learns of another one in pre-training, its teacher, besides its
    own objective: the terms of DistilBERT (Sanh et al., 2019, §2) and TinyBERT (Jiao et al., 2020,
    §3.1), each with a weight, 0 is none. docs/family/distillation.md has the formulas.
    """

    # a run's folder, a Hugging Face folder or a TensorFlow 1 checkpoint, whose vocabulary becomes
    # the student's; "" is none. It may be moved: a run that has begun knows it by its weights.
    teacher: Changeable[str] = ""
    # A new run starts from the teacher's embeddings, heads and layers, those of `layers` (of
    # "last": those of "uniform"), which must be as wide and of the same mixers.
    initialize: bool = False
    # Which layer of the teacher a layer of the student is compared with: last (the last ones alone)
    # | uniform (every second or third, up to the last) | top (its last ones) | bottom (its first)
    layers: str = "last"
    # Of the student's loss on labels: masked words, or replaced tokens (of the discriminator; the
    # generator has no teacher). logits_weight is in the same unit, the others are not.
    labels_weight: float = 1.0
    logits_weight: float = 1.0
    temperature: float = 2.0  # that both distributions are taken at
    hidden_weight: float = 0.0
    # cosine (DistilBERT) | mse (TinyBERT); a learned projection where the widths differ
    hidden: str = "cosine"
    attention_weight: float = 0.0
    # maps (divergence of the maps' means over heads, whatever mixers and heads there are) | scores
    # (TinyBERT: squared distance before the softmax, head by head, of as many heads)
    attention: str = "maps"
    embeddings_weight: float = 0.0  # squared distance (TinyBERT), projected as hidden states are
    # Of the teacher, which they follow; they are kept with the run, no user sets them.
    teacher_hidden_size: int = 0
    teacher_embedding_size: int = 0


@dataclasses.dataclass(frozen=True)
class TokenizerSection:
    """Subword vocabulary: trained on the corpus, or read from `path`."""

    # sentencepiece | wordpiece | pieces, with blanks between them in texts that were cut elsewhere
    kind: str = "sentencepiece"
    vocab_size: int = 30_522
    # vocab.txt, tokenizer.json, SentencePiece .model or .pieces; "" trains one. May be moved later
    path: ChangeableInPretraining[str] = ""
    # auto | true | false. auto: as the file; a trained one lower-cases text unless the corpus is
    # Turkish or Azeri or the model generates text
    lowercase: AutoBool = "auto"
    strip_accents: AutoBool = "auto"  # auto | true | false. auto: as the file; else false
    # Unicode form of a trained sentencepiece: nfkc | nfc, which keeps full-width punctuation and
    # "²" | identity | auto: nfc for models that generate text, nfkc for encoders
    normalization: str = "auto"
    algorithm: str = "unigram"  # of SentencePiece: unigram | bpe
    max_word_chars: int = 200  # longer words become [UNK] (wordpiece); transformers: 100
    train_megabytes: int = 30  # of text to train on, sampled evenly from the corpus
    max_unknown_rate: float = 0.02  # of the corpus' characters; more that are [UNK] is an error
    sentinels: int = 0  # ids of a trained vocabulary for removed spans ([SPAN_0], …; T5: 100)


@dataclasses.dataclass(frozen=True)
class DataSection:
    """The corpus and how it becomes rows of `length` tokens."""

    # docstrings | text:GLOB | tfds:NAME or tfds:DIR | parquet:GLOB | hub:OWNER/NAME/FILE-GLOB
    # (parquet, text or jsonl files) | datasets:NAME[/CONFIG] or datasets:DIR
    source: str = "docstrings"
    # of text files: auto | blank_lines | lines | jsonl | wikiextractor | file (each one document) |
    # csv | tsv (with a first line of names)
    format: str = "auto"
    # column of csv, tsv, jsonl, parquet, TFDS and datasets; raw.text is the field text of raw
    text_field: str = "text"
    split: str = "train"  # of TFDS and datasets
    # a corpus of its own for evaluation, of other files; "" holds out documents of `source`
    validation_source: str = ""
    heldout_fraction: float = 0.01  # of the documents, chosen by a hash of their text
    length: int = 128
    # packed (documents fill rows, isolated by segment ids) | electra (the release's example
    # builder) | pairs (two texts of whole sentences, for objective.sentence_pairs)
    layout: str = "packed"
    # Release: two conditions of its example builder are inverted, so that most examples have one
    # segment and some an empty first one. Only with layout="electra".
    release_builder_bug: bool = False
    # Release: documents are shuffled before they become rows. False: rows lie in the order of the
    # corpus.
    shuffle_documents: bool = False
    # Release: rows are dealt in turn to 1000 files; the files, repeated for ever, are shuffled and
    # four read in turn through a buffer of 100 rows. False: every row, any order, once an epoch.
    release_shuffle: bool = False
    encoding: str = "utf-8"  # of text, csv, tsv and jsonl files, e.g. cp1252 or gbk
    # text that is not of that encoding: error | replace | skip (leave the document out)
    encoding_errors: str = "error"
    # prepared shards, also in a bucket (gs://); "" is WORKDIR/data. Runs may share them
    directory: Changeable[str] = ""
    # where the shards of a bucket are copied to, which are read from a disk of each machine; kept
    # until you delete them
    cache: Changeable[str] = "~/.cache/convbert_jax/shards"
    workers: Changeable[int] = 0  # processes that tokenize; 0 is one per core
    prefetch: Changeable[int] = 8  # batches read ahead


@dataclasses.dataclass(frozen=True)
class OptimizerSection:
    """AdamW with a linear schedule (the release's model/optimization.py), or another."""

    # adamw | adafactor (Shazeer & Stern 2018: one moment, factored, no momentum; clipped by update
    # and scaled by parameter, as T5 has it): half the memory of AdamW's two moments and more |
    # muon (Jordan et al. 2024): the matrices of the layers move by their momentum with its singular
    # values made equal, scaled to AdamW's size (Liu et al. 2025), the rest as adamw has it. It
    # learns from fewer tokens; one moment of each matrix, some percent more work a step |
    # PACKAGE.MODULE:FUNCTION, a factory of optax or of your own (docs/plugins.md)
    method: str = "adamw"
    # Of the learning rate behind the warm-up: linear, to decay_to at the last step | cosine, the
    # same along half a cosine | inverse_sqrt, as sqrt(warmup_steps / step) (Transformer, T5) |
    # constant
    schedule: ChangeableInPretraining[str] = "linear"
    learning_rate: ChangeableInPretraining[float] = 3e-4  # peak
    warmup_steps: ChangeableInPretraining[int] = 10_000
    # learning rate at the last step, as a fraction of the peak
    decay_to: ChangeableInPretraining[float] = 0.0
    # Release: the decay runs during warm-up too and both multiply: the peak stays a little below
    # the nominal rate.
    decay_during_warmup: ChangeableInPretraining[bool] = False
    bias_correction: ChangeableInPretraining[bool] = True  # Release: Adam without it
    beta1: ChangeableInPretraining[float] = 0.9
    beta2: ChangeableInPretraining[float] = 0.999
    epsilon: ChangeableInPretraining[float] = 1e-6
    weight_decay: ChangeableInPretraining[float] = 0.01
    # Release: embedding tables are decayed; biases and layer norms never are
    decay_embeddings: ChangeableInPretraining[bool] = True
    clip_norm: ChangeableInPretraining[float] = 1.0  # global norm, before Adam; 0 is off
    # Release: base ran on the 8 cores of a TPU v3-8. Each divides the losses of its part of the
    # batch by the tokens and masked positions of that part and clips its own gradient; Adam gets
    # the sum of the eight. Here the parts are run one after another. 1: the batch is one, as on the
    # single GPU of small and medium-small. Fixed: the gradient is so many times larger, Adam's
    # moments are not.
    release_replicas: int = 1


@dataclasses.dataclass(frozen=True)
class TrainSection:
    """The loop. `batch_size` is global: the same run on 1 or 256 chips."""

    steps: Changeable[int] = 1_000_000
    # fixed: the position in the data counts batches. Not of pairs, which have parallel.batch_tokens
    batch_size: int = 128
    accumulation: Changeable[int] = 1  # microbatches per step
    # float32 | bfloat16: in which gradients of matrices and tables cross between the devices that
    # divide rows, in pre-training. bfloat16 is half the bytes; what a device adds up of its own
    # rows stays float32 and is rounded before it is sent, as is what the network adds up. Where
    # rows are on one device nothing is rounded. The release computes, and sends, float32
    gradient_dtype: Changeable[str] = "float32"
    log_every: Changeable[int] = 100
    eval_every: Changeable[int] = 5_000
    eval_rows: Changeable[int] = 8_192  # held-out rows per evaluation, 0 is all
    # compare generator accuracy, replaced rate and AUC with reference bands
    warn_health: Changeable[bool] = True
    # a loss above so many times the median of the last 100 steps is as bad as one that is not
    # finite; 0: none is
    spike: Changeable[float] = 0.0
    # times that the run may go back to its last checkpoint and past the batches since when a step
    # is bad; then, and by default, it ends
    rollbacks: Changeable[int] = 0
    # a run of which nothing moves so long, or until its first step and in its first evaluation an
    # hour if that is longer, ends with exit code 75 and the stacks of its threads, of all
    # processes; 0 is never
    hang_seconds: Changeable[int] = 3_600
    # a process of several that gives no sign of life so long, as one that is stopped or whose host
    # is gone, ends all with exit code 75
    silence_seconds: Changeable[int] = 60
    # "" | wandb (Weights & Biases) | mlflow: hears the numbers of metrics.jsonl too, where its own
    # variables say, as WANDB_MODE=offline and MLFLOW_TRACKING_URI; needs its package
    tracker: Changeable[str] = ""
    profile_start: Changeable[int] = 0  # first step of a profiler trace; 0 is never
    profile_steps: Changeable[int] = 3
    # folder of compiled programs, "" is off; several hosts need one shared path. Not kept in
    # config.json: name it again to resume
    compile_cache: Changeable[str] = "~/.cache/convbert_jax/compile"


@dataclasses.dataclass(frozen=True)
class CheckpointSection:
    """What is kept of a run, and when."""

    every: Changeable[int] = 5_000  # steps
    keep: Changeable[int] = 3  # newest kept
    keep_every: Changeable[int] = 0  # steps; these are kept for good, 0 is none
    # "" keeps no best. mlm_loss | mlm_accuracy | loss, and of replaced_token: sampled_accuracy |
    # replaced_rate | discriminator_loss, _accuracy, _precision, _recall or _auc, and the two of
    # objective.release_metrics: release_discriminator_loss | release_auc; of
    # objective.sentence_pairs: pair_loss | pair_accuracy; of objective.masked_lm_steps:
    # encoder_mlm_loss | encoder_mlm_accuracy; of models that write text: loss | token_loss |
    # token_accuracy | perplexity, and of causal_lm word_perplexity, but of WordPiece
    best_metric: Changeable[str] = ""
    best_mode: Changeable[str] = "max"  # max | min, which a loss needs
    # steps; writes a Hugging Face folder WORKDIR/huggingface/step-N, at step 0 too; 0 is never
    huggingface_every: Changeable[int] = 0


@dataclasses.dataclass(frozen=True)
class MeshSection:
    """Devices by axis, -1 is all that are left: data copies parameters, fsdp shards them, tensor
    splits heads and feed-forward channels, sequence the positions of long rows.
    """

    data: Changeable[int] = -1
    fsdp: Changeable[int] = 1
    tensor: Changeable[int] = 1
    sequence: Changeable[int] = 1
